"""Threads of servers that stand at an event, and those that nobody has woken.

An event is notified when its condition has changed, under the job's lock: see [Note: one wake for
one waiter] in pserver/membership/waits.py.  So a thread that stands where its condition holds, and
whose event was not notified since it stands there, has missed a wake-up.  That does not depend on
how fast anything is; a trial that is merely slow has no such thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pserver.membership import waits
from pserver.membership.waits import WaitEvent, Waits

HOUR = 3600.0  # no wait is helped on by the net
BETWEEN_SECONDS = 1.0  # two looks: who is about to notify has done it by then


@dataclass(slots=True, eq=False)
class Stand:
    """One thread that stands.

    Attributes:
        done: what it waits for.
        notified: its event was, since it stands there.
    """

    waits: Waits
    event: WaitEvent
    done: Callable[[], bool]
    notified: bool = False

    def __str__(self) -> str:
        return self.done.__qualname__.replace(".<locals>", "")

    @property
    def missed(self) -> bool:
        """Whether it could go on, and nobody has told it.  The caller holds the job's lock."""
        if self.notified or not self.event.condition._waiters:  # type: ignore[attr-defined]
            return False
        try:
            return self.done()
        except Exception:  # it waits for what has failed
            return True


class Standing:
    """The threads that stand, while :meth:`watched` lasts."""

    def __init__(self) -> None:
        self._stands: list[Stand] = []  # each is added and removed under its job's lock
        self._own = threading.local()

    @contextmanager
    def watched(self) -> Iterator[Standing]:
        """Watches all waits of this process, and takes the net from under them."""
        wait, stand, notify = Waits.wait, Waits._stand, WaitEvent.notify
        before = waits.WAKE_SECONDS

        def watched_wait(own: Waits, event: WaitEvent, done: Any, *more: Any, **named: Any) -> Any:
            deadline = named.get("deadline", more[1] if len(more) > 1 else math.inf)
            outer = getattr(self._own, "done", None)  # of a wait in which this one is made
            self._own.done = done if deadline == math.inf else None
            try:
                return wait(own, event, done, *more, **named)
            finally:
                self._own.done = outer

        def watched_stand(own: Waits, event: WaitEvent, seconds: float) -> bool:
            done = self._own.done
            mine = Stand(own, event, done or (lambda: False))
            self._stands.append(mine)
            try:
                return stand(own, event, seconds)
            finally:
                self._stands.remove(mine)

        def watched_notify(event: WaitEvent, *most: Any) -> None:
            for each in list(self._stands):
                each.notified = each.notified or each.event is event
            notify(event, *most)

        Waits.wait, Waits._stand = watched_wait, watched_stand  # type: ignore[method-assign]
        WaitEvent.notify = watched_notify  # type: ignore[method-assign]
        waits.WAKE_SECONDS = HOUR
        try:
            yield self
        finally:
            Waits.wait, Waits._stand, WaitEvent.notify = wait, stand, notify  # type: ignore[method-assign]
            waits.WAKE_SECONDS = before

    def missed(self) -> str:
        """The event of a thread that has missed a wake-up; "": none has."""
        found = self._look()
        if found:
            time.sleep(BETWEEN_SECONDS)
            later = self._look()
            found = [each for each in found if each in later]
        return str(found[0]) if found else ""

    def _look(self) -> list[Stand]:
        found = []
        for each in list(self._stands):
            with each.waits.lock:
                if each in self._stands and each.missed:
                    found.append(each)
        return found
