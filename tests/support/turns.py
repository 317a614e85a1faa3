"""The threads of a job, of which one runs at a time: each until it waits, and in the order in which
they began.  So what a job does is the same in every run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from pserver.membership.waits import WaitEvent, Waits
from tests.support.load import scaled

SECONDS = 20.0  # the longest for which a thread runs until it waits or ends


class Turn(threading.Thread):
    """One call, in a thread of its own.

    Args:
        call: what it does.
        ended: called with the result, or with what the call raised; by the thread that lets this
            one go on.
        stood: called with the line that a wait would log, where the call begins to wait; "": it
            has none.
    """

    def __init__(
        self, call: Callable[[], Any], ended: Callable[[Any], None], stood: Callable[[str], None]
    ) -> None:
        super().__init__(daemon=True)
        self._call, self._ended, self._stood = call, ended, stood
        self._rests = threading.Semaphore(0)
        self._standing: threading.Condition | None = None
        self._result: Any = None
        self.got_on = self.over = False

    def run(self) -> None:
        """Makes the call."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._result = error
        self.over = self.got_on = True
        self._rests.release()

    def go_on(self) -> bool:
        """Runs until the call waits again, or ends; returns whether it has got any further."""
        self.got_on, condition = False, self._standing
        if condition is None:
            self.start()
        else:
            with condition:
                self._standing = None
                condition.notify_all()
        assert self._rests.acquire(timeout=scaled(SECONDS)), "a thread neither waits nor ends"
        if self.over:
            self._ended(self._result)
        return self.got_on

    def stand(self, condition: threading.Condition) -> None:
        """Lets the others run; the caller is this thread, and holds the condition's lock."""
        self._standing = condition
        self._rests.release()
        condition.wait_for(lambda: self._standing is None, scaled(10 * SECONDS))

    def said(self, for_whom: Callable[[], str] | None) -> None:
        """Says that the call begins to wait."""
        self._stood("" if for_whom is None else for_whom())


class Turns:
    """The calls that are under way."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def begin(
        self, call: Callable[[], Any], ended: Callable[[Any], None], stood: Callable[[str], None]
    ) -> None:
        """Begins a call; it has ended, or waits, when this returns."""
        turn = Turn(call, ended, stood)
        self._turns.append(turn)
        turn.go_on()
        self.settle()

    def settle(self) -> None:
        """Lets the calls go on, in the order in which they began, until all wait."""
        while self._turns:
            self._turns = [each for each in self._turns if not each.over]
            if not any([each.go_on() for each in self._turns]):
                return


class WaitsInTurn(Waits):
    """Waits that look again when :class:`Turns` says so.  No time passes in them: one with a
    deadline is over at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(self.lock)

    def wait(
        self,
        event: WaitEvent,
        done: Callable[[], bool],
        for_whom: Callable[[], str] | None = None,
        deadline: float = math.inf,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """See :meth:`Waits.wait`."""
        turn, first = threading.current_thread(), True
        if not isinstance(turn, Turn):
            return super().wait(event, done, for_whom, deadline, check)
        while not done():
            check()
            if deadline < math.inf:
                return False
            if first:
                turn.said(for_whom)
            first = False
            turn.stand(self._condition)
        turn.got_on = True
        return True
