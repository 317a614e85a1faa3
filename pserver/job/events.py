"""What has happened on a server: joins, losses, checkpoints, refusals; for who watches it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from pserver import wire_pb2 as wire
from pserver.onlookers import onlooker
from pserver.repeated_lines import WIDTH, LimitedLog

KEPT = 32  # of each kind: many of one kind do not push out another


class Events:
    """The last events of each kind.  Any thread may call it.  They outlive the job.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the next
        self._by_kind: dict[str, deque[wire.Event]] = {}

    @onlooker("the list of events")
    def add(self, kind: str, text: str) -> None:
        """Something has happened.

        Args:
            kind: one of a few words, none of which comes from a peer.
            text: a sentence, which is cut where it is long.
        """
        with self._lock:
            event = wire.Event(
                number=next(self._numbers), time=self._clock(), kind=kind, text=text[:WIDTH]
            )
            self._by_kind.setdefault(kind, deque(maxlen=KEPT)).append(event)

    def all(self) -> list[wire.Event]:
        """Those that are kept, in the order in which they happened."""
        with self._lock:
            kept = [event for events in self._by_kind.values() for event in events]
        return sorted(kept, key=lambda event: event.number)


class EventLog(LimitedLog):
    """Logs what happens, and keeps it as events.

    Args:
        log: where lines go.
        events: where events go.
    """

    def __init__(self, log: logging.Logger, events: Events) -> None:
        super().__init__(log)
        self._events = events

    def say(
        self,
        kind: str,
        text: str,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """See :class:`LimitedLog`; the first word of ``kind`` is the event's kind."""
        self._events.add(kind.partition(" ")[0], text)
        super().say(kind, text, level, error)
