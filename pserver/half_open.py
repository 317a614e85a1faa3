"""Connections that have not completed their handshake, streams before
HELLO, calls before their message.

Any peer that reaches a port can begin as many of them as it likes.  So their number and their time
are bounded.  When the number is reached, a new one displaces an earlier one: a trainer's is over
within milliseconds, an old one is idle.  The displaced one belongs to the address that has the
most, so that a flood from one host displaces itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock


def address_of(peer: str) -> str:
    """The address of ``HOST:PORT``; another name of a peer as it is."""
    host, colon, port = peer.rpartition(":")
    return host if colon and port.isdecimal() else peer


@dataclass(frozen=True, slots=True)
class _Handshake:
    """One half-open connection, stream or call.

    Attributes:
        address: the peer's.
        since: when it began, in seconds of the clock.
        end: breaks it; blocks for an instant only, and may be called when it is over.
    """

    address: str
    since: float
    end: Callable[[], object]


class HalfOpen:
    """Bounds the number of half-open connections, streams or calls.  Any thread may call it.

    Args:
        limit: how many there may be at a time.
        seconds: how long each may last.
        clock: seconds that never go back.

    Attributes:
        ended: how many have been broken.
    """

    def __init__(
        self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended = 0
        self._limit, self._seconds, self._clock = limit, seconds, clock
        self._lock = Lock()  # guards all but the three above; nothing is ended under it
        self._begun: dict[int, _Handshake] = {}  # the oldest first
        self._next = 0

    def begin(self, address: str, end: Callable[[], object]) -> int:
        """Adds one; another one may have to end for it.

        Args:
            address: the peer's, without its port.
            end: breaks it, from any thread.

        Returns:
            Its number, for :meth:`over`.
        """
        with self._lock:
            displaced = self._displaced() if len(self._begun) >= self._limit else None
            number = self._next = self._next + 1
            self._begun[number] = _Handshake(address, self._clock(), end)
        if displaced is not None:
            self._end([displaced])
        return number

    def over(self, number: int) -> bool:
        """Removes one, which has identified itself or has ended.

        Returns:
            False where it had to end before.
        """
        with self._lock:
            return self._begun.pop(number, None) is not None

    def end_late(self) -> None:
        """Ends those that have lasted too long; called from time to time."""
        with self._lock:
            due = self._clock() - self._seconds
            late = [number for number, begun in self._begun.items() if begun.since <= due]
            ended = [self._begun.pop(number) for number in late]
        self._end(ended)

    def _displaced(self) -> _Handshake:
        """The oldest one of the address that has the most."""
        counts = Counter(begun.address for begun in self._begun.values())
        most = max(counts.values())
        number = next(n for n, begun in self._begun.items() if counts[begun.address] == most)
        return self._begun.pop(number)

    def _end(self, begun: list[_Handshake]) -> None:
        self.ended += len(begun)
        for each in begun:
            each.end()

    def __len__(self) -> int:
        with self._lock:
            return len(self._begun)
