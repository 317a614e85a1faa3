"""What a process has said and done, until somebody fetches it."""

from __future__ import annotations

import threading
from collections import deque

from pserver.ray.news import Ended, News

MOST_KEPT = 20_000  # lines that nobody has fetched
MOST_BYTES = 32_768  # of lines in one answer: Ray gives answers of up to 100 KB inline


class SpokenLines:
    """The news of one process.  Any thread may call it.

    Example::

        spoken = SpokenLines()
        spoken.say("loss 0.5")
        spoken.news(1.0)  # News(lines=("loss 0.5",), ...)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._lines = deque[str]()
        self._left_out = 0
        self._endpoint = ""
        self._told_endpoint = False
        self._ended: Ended | None = None

    def say(self, line: str) -> None:
        """A line of the process."""
        with self._changed:
            if len(self._lines) >= MOST_KEPT:
                self._lines.popleft()
                self._left_out += 1
            self._lines.append(line)
            self._changed.notify_all()

    def ready(self, endpoint: str) -> None:
        """The server listens there."""
        with self._changed:
            self._endpoint = endpoint
            self._changed.notify_all()

    def end(self, ended: Ended) -> None:
        """The process has ended; it has said what it had to say."""
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def wait_for_end(self, seconds: float) -> bool:
        """Whether the process has ended; waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended is not None, seconds)

    def news(self, seconds: float) -> News:
        """What nobody has fetched yet; waits until there is something, or the time is over.

        That the process has ended is said once all of its lines are fetched.
        """
        with self._changed:
            self._changed.wait_for(self._is_news, seconds)
            lines, size = list[str](), 0
            while self._lines and size < MOST_BYTES:
                lines.append(self._lines.popleft()[:MOST_BYTES])
                size += len(lines[-1].encode())
            left_out, self._left_out = self._left_out, 0
            self._told_endpoint = bool(self._endpoint)
            ended = None if self._lines else self._ended
            return News(tuple(lines), left_out, self._endpoint, ended)

    def _is_news(self) -> bool:
        new_endpoint = bool(self._endpoint) and not self._told_endpoint
        return bool(self._lines) or new_endpoint or self._ended is not None
