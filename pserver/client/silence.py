"""How long a peer has been silent on a stream on which it should be heard.

See [Note: sending again] in :mod:`pserver.client.retrying_stream`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pserver.errors import PServerError, TrainerLost
from pserver.running_clock import RUNNING


def lost_while_away(
    server: str, since: float, timeout: float, error: PServerError
) -> TrainerLost | None:
    """The error of a trainer that was lost because it did not run for longer than the heartbeat
    timeout; None where it ran.

    Args:
        server: "server 1 at HOST:PORT".
        since: when the server was heard last, by the system's clock.
        timeout: the heartbeat timeout in seconds.
        error: the server's present answer, or that it gives none.
    """
    seconds = RUNNING.away_since(since)
    if seconds <= timeout:
        return None
    return TrainerLost(
        f"this trainer did not run for {seconds:.1f} s (it was stopped, or its host was), longer "
        f"than the heartbeat timeout of {timeout:g} s: the job has gone on, or ended, without it; "
        f"{server} now: {error}"
    )


class Silence:
    """The silence of one stream, and of those that take its place.  Any thread may call it.

    Args:
        patience_seconds: how long a silence may last; for the same request it doubles each time.

    Attributes:
        last_heard: when a frame arrived last, by the system's clock.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._first, self.last_heard = patience_seconds, time.monotonic()
        self._lock = threading.Lock()  # guards all below
        self._patience = patience_seconds
        self._heard = 0.0  # when a frame arrived
        self._sending: float | None = None  # since when a frame is being sent
        self._probed: float | None = None  # the first PROBE after which nothing has arrived
        self._ended = False  # the present stream, because of its silence

    @contextmanager
    def sending(self, probe: bool) -> Iterator[None]:
        """While it lasts a frame is being sent."""
        with self._lock:
            self._sending = RUNNING()
            if probe and self._probed is None:
                self._probed = self._sending
        try:
            yield
        finally:
            with self._lock:
                self._sending = None

    def heard(self) -> None:
        """A frame has arrived."""
        with self._lock:
            self._heard, self._probed, self.last_heard = RUNNING(), None, time.monotonic()

    def answered(self) -> None:
        """The request is over."""
        with self._lock:
            self._patience = self._first

    def overdue(self) -> float:
        """The seconds of a silence that has lasted too long, once for a stream; else 0."""
        with self._lock:
            since = [at for at in (self._sending, self._probed) if at is not None]
            if not since or self._ended:
                return 0.0
            seconds = RUNNING() - max(min(since), self._heard)
            if seconds <= self._patience:
                return 0.0
            self._ended, self._patience = True, 2 * self._patience
            return seconds

    def begin_again(self) -> bool:
        """Another stream takes the place of the one before.

        Returns:
            Whether that one was silent.
        """
        with self._lock:
            ended, self._ended, self._probed = self._ended, False, None
            return ended
