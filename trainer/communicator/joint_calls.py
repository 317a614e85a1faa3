"""Joint calls of a job's trainers, and the position of a script for a trainer that joins late.

[Note: joint calls of a trainer that joins late]  Its script makes them from the first one on,
except those in iterations over ``fleet.shard`` that are over, which give no batch.  A call that the
others have made does not wait: it returns the texts that they exchanged then, if server 0 still has
them.  A call in which they wait now is made with them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pserver.client.client import Client, PositionAnswer
from pserver.errors import PServerError
from trainer.senders.live_trainers import LiveTrainers
from trainer.senders.pipeline import LaneSender
from transpiler.files import bounded_json
from transpiler.plan.plan import Plan

log = logging.getLogger(__name__)

# ---- position ----
#
# The position of a trainer's script, for a trainer that joins late; and, on that trainer, the
# position of the others.
#
# See [Note: where the others are] in pserver/job/meetings.py.


MOST = 2**18  # characters of a position


class PositionExchange:
    """One trainer's side of the questions for the job's position.

    The script's thread calls it, except :meth:`asked`, which the heartbeat's thread calls.

    Args:
        client: of server 0.
        live: which trainers are there.
        plan: of the job.
        lanes: this trainer's senders.
        closed: the lanes whose step is under way; the set changes.

    Attributes:
        parts: the parts of a position: by name, a function that gives the part, as JSON can hold
            it.
        quiet: no question for the position is answered now.
        settled: whether the script is where its parts say.
        restorers: by name, a function that receives that part of the others' position, or None
            if the part is unknown.
    """

    def __init__(
        self,
        client: Client,
        live: LiveTrainers,
        plan: Plan,
        lanes: Sequence[LaneSender],
        closed: Collection[int],
    ) -> None:
        self._client, self._live = client, live
        self._plan, self._lanes, self._closed = plan, lanes, closed
        client.asked = self.asked
        self.settled: Callable[[], bool] = lambda: True
        self.quiet = False
        self.parts: dict[str, Callable[[], Any]] = {}
        self.restorers: dict[str, Callable[[Any], None]] = {}
        self._asked = self._answered = 0  # numbers of questions
        self._lock = threading.Lock()  # guards _waits; while it is held no wait ends
        self._waits = 0  # how many waits the script's thread is in, one in another

    # ---- answers to others ----

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks a wait of the script's thread: another thread may then send the position."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks work of the script's thread in the middle of a wait."""
        with self._lock:
            self._waits -= 1
        try:
            yield
        finally:
            with self._lock:
                self._waits += 1

    def asked(self, number: int) -> None:
        """Notes another trainer's question, and answers it if the script's thread waits now."""
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
        """Answers a question before the script closes a step."""
        if self._asked > self._answered and self._known:
            self._answer(self._asked, self._said(), self.step)

    @property
    def step(self) -> int:
        """The step just after the position: the step under way, or the next one, of the first lane
        whose servers merge the gradients of all trainers; 0 without such a lane.
        """
        for index, lane in enumerate(self._plan.lanes):
            if lane.kind.merges_gradients:
                return self._lanes[index].step + (0 if index in self._closed else 1)
        return 0

    @property
    def _known(self) -> bool:
        return not (self.late or self.quiet) and self.settled()

    def _answer(self, number: int, told: PositionAnswer, step: int) -> None:
        with suppress(PServerError):  # the job has failed, and says so elsewhere
            if self._client.meetings.answer(number, told, step):
                self._answered = max(self._answered, number)

    def _said(self) -> PositionAnswer:
        """This trainer's position, as text."""
        text = json.dumps({name: part() for name, part in self.parts.items()})
        if len(text) <= MOST:
            return PositionAnswer(text)
        why = f"expected up to {MOST} characters of it, got {len(text)}"
        log.warning(
            "a trainer has joined, and cannot be told where the script is: %s; its schedulers and "
            "passes begin anew",
            why,
        )
        return PositionAnswer("", why)

    # ---- on a trainer that joins late ----

    @property
    def late(self) -> bool:
        """Whether this trainer has joined late, and does not know yet where the others are."""
        return self._client.late

    def find(self) -> None:
        """Waits, on a trainer that has joined late, until it knows where the others are.  Does
        nothing afterwards, and on any other trainer.

        Raises:
            PServerError: the job has failed.
        """
        if not self.late:
            return
        told = self._client.meetings.ask(lambda: f"trainer {self._live.leader}")
        self._client.late = False
        if told.problem:
            log.warning(
                "this trainer joins a job under way, and cannot be told where its script is: %s; "
                "its schedulers and its passes over the data begin anew",
                told.problem,
            )
        position: Mapping[str, Any] = bounded_json.loads(told.position) if told.position else {}
        for name, take in self.restorers.items():
            take(position.get(name))


# ---- joint calls ----
#
# The calls that all trainers of a job make together, counted alike on each of them.


class JointCalls:
    """One trainer's joint calls.  The script's thread makes them.

    Args:
        clients: the connections, by server.
        position: of this trainer, and, where it has joined late, of the others.

    Attributes:
        made: the number of calls that the script has made.
        past: whether the others had made this trainer's last call already when it joined.
        noticed: called after each call that was not past.
        meanwhile: called before the wait in a call, and every second of it: joins what the others
            may wait for.
        attend: likewise, also in calls that are not counted.
        replays: whether a script that joins late makes its calls from the first one on; otherwise
            it begins with the next one.
    """

    def __init__(self, clients: Sequence[Client], position: PositionExchange) -> None:
        self._clients, self._client, self._position = clients, clients[0], position
        self.made = 0
        self.past = False
        self.noticed: Callable[[], None] = lambda: None
        self.meanwhile: Callable[[], None] = lambda: None
        self.attend: Callable[[], None] = lambda: None
        self.replays = False
        self._under_way = ""  # the call that the script waits in
        self._theirs = 0  # calls that the others had made when this trainer joined
        self._awaited = ""  # the call that they waited in then
        position.parts["joint calls"] = self._plain
        position.restorers["joint calls"] = self._take

    def meet(self, name: str, text: str) -> dict[int, str]:
        """Waits at a counted barrier for every trainer that has not left.

        Returns:
            The trainers' texts, by trainer; trainers that sent none are left out.
        """
        self._position.find()
        self.made += 1
        numbered = f"{self.made}: {name}"
        self.past = self.made <= self._theirs
        if self.past:
            return self._client.meetings.barrier(numbered, text, self._check, past=True)
        self._under_way = numbered
        try:
            return self._wait(numbered, text)
        finally:
            self._under_way = ""
            self.noticed()

    def _check(self) -> None:
        """Raises what has ended the job."""
        for client in self._clients:
            client.check()

    def _wait(self, name: str, text: str) -> dict[int, str]:
        def check() -> None:
            self._check()
            self.attend()
            with self._position.working():
                self.meanwhile()

        with self._position.waiting():
            check()
            return self._client.meetings.barrier(name, text, check)

    def meet_apart(self, name: str, text: str) -> dict[int, str]:
        """Waits at a barrier that is not counted: its name alone identifies it.  Trainers arrive
        there from joint calls, and also from their waits for samples.

        Raises:
            PutOff: it is not held.
        """

        def check() -> None:
            self._check()
            self.attend()

        with self._position.waiting():
            return self._client.meetings.save(name, text, check)

    def skip(self, calls: int) -> None:
        """Skips the calls that the script does not make, in an iteration that is over."""
        self.made += calls

    def arrive(self) -> None:
        """Called when the script is where the others are; joins the call in which they wait, if the
        script has passed it without making it.
        """
        self.made = max(self.made, self._theirs)
        if self._awaited and self.made == self._theirs:
            self.made += 1
            self._wait(self._awaited, "")
        self._awaited = ""

    def _plain(self) -> dict[str, Any]:
        return {"made": self.made - bool(self._under_way), "under way": self._under_way}

    def _take(self, plain: Mapping[str, Any] | None) -> None:
        if plain is not None:
            self._theirs, self._awaited = plain["made"], plain["under way"]
        if not self.replays:
            self.made, self._awaited = self._theirs, ""


class Apart:
    """Barriers that are identified by a name of their own, not by the number of a call.

    Args:
        joint: the job's joint calls.
    """

    def __init__(self, joint: JointCalls) -> None:
        self._joint = joint

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """See :meth:`JointCalls.meet_apart`."""
        return self._joint.meet_apart(name, text)
