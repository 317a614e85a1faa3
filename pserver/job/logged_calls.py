"""The control calls that have a place in the job's log: the moment of a save, a shrink.

::

    a trainer's call ---> ready --all servers are--> in the log --its turn--> carried out
                            |
                            `--withdrawn, or its trainer is lost--> given up

[Note: a call's turn]  What such a call reads or changes depends on steps, so it has a place among
them that is the same on all servers: steps whose records stand before it are applied, and steps
behind it wait.  The thread that brings a call waits for its turn and carries it out.  [Note: calls
in the log] in pserver/job_log/coordinator.py says when it gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pserver.errors import JobFailed, PServerError, Refused, TrainerLost
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member
from pserver.job.quiesce import Quiesce
from pserver.job_log.records import Call, Process
from pserver.undone import or_undone

MOST_AHEAD = 2**20  # numbers that a trainer may pass over: of calls that have failed before

T = TypeVar("T")


class Lane(Protocol):
    """A lane, as far as calls concern it."""

    def has_applied(self, record: int) -> bool:
        """Whether each decided step is applied whose record stands before this one."""


@dataclass(slots=True, eq=False)
class LoggedCall:
    """One call on this server.

    Attributes:
        record: its number in the log; 0: it is not there.
        given_up: why it never will be.
        done: it has been carried out, or has failed.
        result, failure: what came of it.
    """

    call: Call
    record: int = 0
    given_up: PServerError | None = None
    done: bool = False
    result: Any = None
    failure: BaseException | None = None


class LoggedCalls:
    """Carries out calls, each once and at its place.  See [Note: a call's turn].

    Any thread may call it; methods without a wait are called under the job's lock.

    Args:
        job: for its lock and its end.
        quiesce: keeps the steps behind a call from beginning.
        lanes: whose steps come before.
        ready: tells the coordinator that this server is ready for a call.
    """

    def __init__(
        self,
        job: Lifecycle,
        quiesce: Quiesce,
        lanes: Sequence[Lane],
        ready: Callable[[Call], None],
    ) -> None:
        self._job, self._quiesce, self._lanes, self._ready = job, quiesce, lanes, ready
        self._calls: dict[tuple[Process, str], LoggedCall] = {}  # the last of each kind
        self._logged: dict[tuple[Process, str], int] = {}  # its number in the log

    def carry_out(
        self, member: Member, kind: str, number: int, run: Callable[[int], T]
    ) -> T | None:
        """Carries out a call when its turn comes; a call that comes twice, once.

        Args:
            member: the trainer that calls.
            number: of its calls of this kind, from 1.
            run: does it; is given the number of the call's record.

        Returns:
            What ``run`` did; None where the call was in the log before this server came back.

        Raises:
            Refused: a later call of this kind has come, or this one was withdrawn; or the number is
                that of no call of this trainer's.
            TrainerLost: the trainer was lost before the call was in the log.
            PServerError: what ended the job meanwhile; and what ``run`` raises.
        """
        process = Process(member.trainer, member.incarnation)
        with self._job.lock:
            self._job.check_running()
            present, logged = self._present(process, kind, number)
            if present is None and number == logged:
                return None
            own = present or LoggedCall(Call(process, kind, number))
            with nullcontext() if present else or_undone(partial(self._never_runs, own)):
                if present is None:
                    self._calls[process, kind] = own
                    self._ready(own.call)  # it may be in the log when this returns
                self._wait(own, lambda: own.done if present else self._is_due(own))
        if present is None:
            self._run(own, run)
        if own.failure is not None:
            raise own.failure
        result: T = own.result
        return result

    def withdraw(self, member: Member, kind: str, number: int) -> None:
        """Another server cannot carry out a call: it is given up, unless it is in the log.  It may
        come after that.

        Raises:
            Refused: the number is that of no call of this trainer's.
        """
        key = process, _ = Process(member.trainer, member.incarnation), kind
        own, last = self._calls.get(key), self._last(process, kind)
        if number > last:
            self._expect(kind, number, last)
            self._calls[key] = own = LoggedCall(Call(process, kind, number))
        if own is not None and own.call.number == number:
            self._give_up(own, Refused(f"the {kind} with number {number} was withdrawn"))

    def drop(self, member: Member) -> None:
        """A trainer is lost: what is not in the log never will be."""
        for own in list(self._calls.values()):
            if own.call.process == Process(member.trainer, member.incarnation):
                self._give_up(own, TrainerLost(member.fenced))

    def logged(self, call: Call, record: int) -> None:
        """The record of a call stands."""
        self._logged[call.process, call.kind] = call.number
        own = self._calls.get((call.process, call.kind))
        if own is not None and own.call == call and own.given_up is None:
            own.record = record
            self._quiesce.hold_behind(record)
            self._quiesce.rested.tell()

    def stands(self, process: Process, calls: Mapping[str, int]) -> None:
        """On a server that comes back: the calls of a process that are in the log."""
        self._logged.update({(process, kind): number for kind, number in calls.items()})

    @property
    def waiting(self) -> list[Call]:
        """Those that this server is ready for, and that are not in the log."""
        waits = (each for each in self._calls.values() if not each.record and not each.given_up)
        return [each.call for each in waits]

    def _present(self, process: Process, kind: str, number: int) -> tuple[LoggedCall | None, int]:
        """The same call, if it has come before; and the number of the last one in the log."""
        own, last = self._calls.get((process, kind)), self._last(process, kind)
        self._expect(kind, number, last)
        present = own if own is not None and own.call.number == number else None
        return present, self._logged.get((process, kind), 0)

    def _last(self, process: Process, kind: str) -> int:
        """The number of the last call of a kind, in the log or not."""
        own = self._calls.get((process, kind))
        return max(self._logged.get((process, kind), 0), 0 if own is None else own.call.number)

    def _expect(self, kind: str, number: int, last: int) -> None:
        """A number far ahead would make all that follow it older ones."""
        if not max(last, 1) <= number <= last + MOST_AHEAD:
            raise Refused(f"expected the number of a new {kind} or of the last one, got {number}")

    def _is_due(self, own: LoggedCall) -> bool:
        first = bool(own.record) and self._quiesce.held_behind == own.record
        return first and all(lane.has_applied(own.record) for lane in self._lanes)

    def _wait(self, own: LoggedCall, done: Callable[[], bool]) -> None:
        def check() -> None:
            if own.given_up is not None:
                raise own.given_up
            self._job.check_running()

        self._job.waits.wait(self._quiesce.rested, done, check=check)

    def _never_runs(self, own: LoggedCall) -> None:
        """The thread that was to carry it out has failed before its turn: nobody waits for it."""
        if own.record:
            self._quiesce.let_go(own.record)
        text = f"the {own.call.kind} with number {own.call.number} failed before its turn"
        own.given_up = own.given_up or JobFailed(text)
        self._quiesce.rested.tell()

    def _run(self, own: LoggedCall, run: Callable[[int], Any]) -> None:
        try:
            own.result = run(own.record)
        except BaseException as error:
            own.failure = error
        with self._job.lock:
            own.done = True
            self._quiesce.let_go(own.record)
            self._quiesce.rested.tell()

    def _give_up(self, own: LoggedCall, error: PServerError) -> None:
        if not own.record and own.given_up is None:
            own.given_up = error
            self._quiesce.rested.tell()
