"""What one process has done, and when, by its own clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pserver.onlookers import look_again, onlooker

MOST_SPANS = 50_000  # of a process, in one trace
Fact = str | int | float


class Span(NamedTuple):
    """Something that began and ended.

    Attributes:
        name: what it was: "push".
        began, ended: in seconds of :func:`now`.
        track: the line that it is drawn on; spans of one track lie side by side or within one
            another.
        facts: of which step, lane, trainer, ... it was.
    """

    name: str
    began: float
    ended: float
    track: str
    facts: dict[str, Fact]


class Spans:
    """The spans of one process.  Any thread may add to them.

    ::

        began = now() if spans.on else 0.0
        ...
        if began:
            spans.add("lookup", began, now(), rows=12)

    Attributes:
        on: whether somebody wants spans.  Whoever would add one asks this first.
        watcher: called after each step with its optimizer, or with None after that of a program;
            None: nobody counts them.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self.on = False
        self.watcher: Callable[[object], None] | None = None
        self._most = most
        self._spans: list[Span] = []
        self._dropped = 0
        self._names: dict[int, str] = {}  # of threads, by their idents

    def begin(self) -> None:
        """Forgets what was noted, and notes from here on."""
        self._spans, self._dropped = [], 0
        look_again(self)
        self.on = True

    def end(self) -> None:
        """Notes nothing more."""
        self.on = False

    @onlooker("the trace", end=lambda spans: spans.end())
    def add(self, name: str, began: float, ended: float, track: str = "", /, **facts: Fact) -> None:
        """Notes a span; where there are too many, only that it was dropped.

        Args:
            name, began, ended, facts: see :class:`Span`.
            track: "": the present thread's.
        """
        if len(self._spans) < self._most:
            self._spans.append(Span(name, began, ended, track or self.track(), facts))
        else:
            self._dropped += 1

    def taken(self) -> tuple[list[Span], int]:
        """What was noted since the begin, which is forgotten here, and how many spans were
        dropped.
        """
        spans, self._spans = self._spans, []
        return spans, self._dropped

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """While it lasts this thread's track has that name."""
        own = threading.get_ident()
        self._names[own] = name
        try:
            yield
        finally:
            del self._names[own]

    def track(self) -> str:
        """The present thread's."""
        known = self._names.get(threading.get_ident())
        if known is not None:
            return known
        thread = threading.current_thread()
        return "script" if thread is threading.main_thread() else thread.name


SPANS = Spans()
"""Those of a trainer: a process has one job at a time.  A server has its own, one for each of its
jobs: a test may have both in one process.
"""


def now() -> float:
    """Seconds of this process's clock, which never goes back."""
    return time.perf_counter()


def clock_ns() -> int:
    """The same clock, as processes tell it one another."""
    return time.perf_counter_ns()
