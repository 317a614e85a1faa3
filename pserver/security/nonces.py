"""A server's challenges: each is used once, within a short time.

[Note: challenges that nobody keeps]  A stranger may ask for as many challenges as he likes, so the
server keeps none of them.  A challenge says when it ends, and carries a code over that, made with a
key that only this server has and never tells.  What is kept is the challenges that were used, until
they end: only a holder of the job's secret can add one, and their number is bounded.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from pserver.errors import NotAllowed

NONCE_BYTES = 32
LASTING_SECONDS = 30.0  # from a challenge to the call that answers it
MOST_USED = 2**17  # calls that may be answered in that time
_RANDOM_BYTES, _CODE_BYTES = 8, 16
_BEGINNING = struct.Struct(f"<d{_RANDOM_BYTES}s")


class Stale(Exception):
    """A challenge has ended, or is another server's: whoever asks again gets another."""


class Nonces:
    """Makes challenges and takes them back.  Any thread may call it.

    See [Note: challenges that nobody keeps].

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(NONCE_BYTES)
        self._lock = threading.Lock()  # guards the one below
        self._used: OrderedDict[bytes, float] = OrderedDict()  # until when it would have lasted

    def make(self) -> bytes:
        """A new challenge."""
        end = self._clock() + LASTING_SECONDS
        beginning = _BEGINNING.pack(end, secrets.token_bytes(_RANDOM_BYTES))
        return beginning + self._code(beginning)

    def check(self, nonce: bytes) -> None:
        """Returns if the challenge is this server's own and has not ended.

        Raises:
            Stale: it is not, or it has.
        """
        beginning, code = nonce[: _BEGINNING.size], nonce[_BEGINNING.size :]
        if not hmac.compare_digest(self._code(beginning), code):
            raise Stale("the challenge is none of this server's: ask for another")
        if _BEGINNING.unpack(beginning)[0] < self._clock():
            raise Stale("the challenge has ended: ask for another")

    def use(self, nonce: bytes) -> None:
        """Uses up a challenge that has been checked, and answered well.

        Raises:
            NotAllowed: it was used before, or too many calls were made.
        """
        now = self._clock()
        with self._lock:
            while self._used and next(iter(self._used.values())) < now:
                self._used.popitem(last=False)
            if nonce in self._used:
                raise NotAllowed("expected a new challenge, got one that was used before")
            if len(self._used) >= MOST_USED:
                raise NotAllowed(
                    f"expected at most {MOST_USED} calls in {LASTING_SECONDS:g} s, got more"
                )
            self._used[nonce] = now + LASTING_SECONDS

    def _code(self, beginning: bytes) -> bytes:
        return hmac.new(self._key, beginning, hashlib.sha256).digest()[:_CODE_BYTES]
