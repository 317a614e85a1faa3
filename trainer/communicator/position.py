"""Where a trainer's script is, for one that joins late; and, on that one, where the others are.

See [Note: where the others are] in pserver/job/script_position.py.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pserver.client.client import Client, Told
from pserver.errors import PServerError
from trainer.communicator.lane import LaneSender
from trainer.communicator.roll import Roll
from transpiler.files import bounded_json
from transpiler.plan.plan import Plan

MOST = 2**18  # characters of a position

log = logging.getLogger(__name__)


class Position:
    """One trainer's side of the questions where the job is.

    The script's thread calls it; but for :meth:`asked`, which the heartbeat's does.

    Args:
        client: of server 0.
        roll: which trainers are there.
        plan: of the job.
        lanes: this trainer's side of its lanes.
        closed: those of them whose step is under way; it changes.

    Attributes:
        parts: what a position says: by name, what gives it, as JSON can hold it.
        quiet: nobody is told now where the script is.
        settled: whether the script is where its part says.
        taken: by name, what is told that part of the others' position; None: they could not say.
    """

    def __init__(
        self,
        client: Client,
        roll: Roll,
        plan: Plan,
        lanes: Sequence[LaneSender],
        closed: Collection[int],
    ) -> None:
        self._client, self._roll = client, roll
        self._plan, self._lanes, self._closed = plan, lanes, closed
        client.asked = self.asked
        self.settled: Callable[[], bool] = lambda: True
        self.quiet = False
        self.parts: dict[str, Callable[[], Any]] = {}
        self.taken: dict[str, Callable[[Any], None]] = {}
        self._asked = self._answered = 0  # numbers of questions
        self._lock = threading.Lock()  # guards the one below; while it is held no wait ends
        self._waits = 0  # how many waits the script's thread is in, one in another

    # ---- for others ----

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the script's thread waits: another one may say where it is."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, in the middle of a wait, the script's thread does something."""
        with self._lock:
            self._waits -= 1
        try:
            yield
        finally:
            with self._lock:
                self._waits += 1

    def asked(self, number: int) -> None:
        """Another trainer asks; answers if the script's thread waits now."""
        self._asked = max(self._asked, number)
        with self._lock:
            if not self._waits or self._answered >= number or not self._known:
                return
            told, step = self._said(), self.step
        # a heartbeat does not wait for another call
        threading.Thread(
            target=self._answer, args=(number, told, step), name="position", daemon=True
        ).start()

    def answer(self) -> None:
        """The script is about to close a step: answers what was asked."""
        if self._asked > self._answered and self._known:
            self._answer(self._asked, self._said(), self.step)

    @property
    def step(self) -> int:
        """That the position is just before: the one under way, or the next one, of the first lane
        whose steps need all trainers; 0: there is no such lane.
        """
        for index, lane in enumerate(self._plan.lanes):
            if lane.kind.merges_gradients:
                return self._lanes[index].step + (0 if index in self._closed else 1)
        return 0

    @property
    def _known(self) -> bool:
        return not (self.late or self.quiet) and self.settled()

    def _answer(self, number: int, told: Told, step: int) -> None:
        with suppress(PServerError):  # the job has failed, and says so elsewhere
            if self._client.positions.answer(number, told, step):
                self._answered = max(self._answered, number)

    def _said(self) -> Told:
        """This trainer's position, as text."""
        text = json.dumps({name: part() for name, part in self.parts.items()})
        if len(text) <= MOST:
            return Told(text)
        why = f"expected up to {MOST} characters of it, got {len(text)}"
        log.warning(
            "a trainer has joined, and cannot be told where the script is: %s; its schedulers and "
            "passes begin anew",
            why,
        )
        return Told("", why)

    # ---- on the one that joins ----

    @property
    def late(self) -> bool:
        """Whether this trainer has joined late, and does not know yet where the others are."""
        return self._client.late

    def find(self) -> None:
        """On a trainer that has joined late: waits until it knows where the others are.  Nothing
        afterwards, nor on any other trainer.

        Raises:
            PServerError: the job has failed.
        """
        if not self.late:
            return
        told = self._client.positions.ask(lambda: f"trainer {self._roll.first}")
        self._client.late = False
        if told.problem:
            log.warning(
                "this trainer joins a job under way, and cannot be told where its script is: %s; "
                "its schedulers and its passes over the data begin anew",
                told.problem,
            )
        position: Mapping[str, Any] = bounded_json.loads(told.position) if told.position else {}
        for name, take in self.taken.items():
            take(position.get(name))
