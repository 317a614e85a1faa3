"""The gatherings of a job's live trainers, on server 0: there they exchange their progress.

[Note: gatherings]  Trainers that average gradients among themselves do so in a group of certain
processes, so it ends when one of them is lost, and when another one joins.  Then all live trainers
gather, and from their texts each of them draws the same conclusions.  They come from wherever they
wait: from a step that needs the others, from a barrier, from the end of the job.

A barrier would need a name that all know, and a process that has just joined knows none.  So the
server counts: a gathering is over when all awaited trainers have arrived, and a trainer that
arrives after that is in the next one.  A trainer sends the number of its last one, so that a
repeated request is answered by the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.job.averaged_steps import AveragedSteps, Averages
from pserver.job.kept_texts import KeptTexts
from pserver.job_log.records import Process
from pserver.membership.decisions import process_of
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import (
    GATHERING,
    Member,
    Membership,
    MemberState,
    TrainerWait,
    roll,
    wait_until_done,
)
from pserver.membership.waits import WaitKind


@dataclass(frozen=True, slots=True)
class Arrival:
    """A trainer that has arrived.

    Attributes:
        member: which one.
        text: for the others.
        ends: it takes no further step.
        averages: how many there were, as far as it knows.
    """

    member: Member
    text: str
    ends: bool
    averages: Averages


@dataclass(frozen=True, slots=True)
class MeetingRound:
    """A completed gathering.

    Attributes:
        number: from 1.
        changes: of the members, until then.
        processes: that were in it.
        texts: theirs, by trainer.
    """

    number: int = 0
    changes: int = 0
    processes: frozenset[Process] = frozenset()
    texts: Mapping[int, str] = field(default_factory=dict)


class MeetingRounds:
    """The gatherings of one job; see [Note: gatherings].  Any thread may call it.

    Args:
        members: the job's trainers.
        job: for its lock and its end.
        averaged: counts what lost trainers have in averages only, or on servers only.
        texts: bounds the trainers' texts.

    Attributes:
        write: called with each that is over, as JSON can hold it, before any trainer receives it:
            an entry for :meth:`restore_entry`.  None: nothing is written down.
    """

    def __init__(
        self,
        members: Membership,
        job: Lifecycle,
        averaged: AveragedSteps | None = None,
        texts: KeptTexts | None = None,
    ) -> None:
        self._members, self._job, self._averaged = members, job, averaged
        self._texts = texts or KeptTexts()
        self.write: Callable[..., None] | None = None
        self._arrived: dict[str, Arrival] = {}  # by session, for the next one
        self._last = MeetingRound()  # a trainer of a later one knows of this one

    def join(self, member: Member, request: wire.BarrierRequest) -> wire.BarrierReply:
        """Adds a trainer, which waits for the others for a second.

        Raises:
            Refused: it reports more averages than there can be, or the trainers' texts take too
                much memory.
            PServerError: what ended the job meanwhile.
        """
        averages = Averages(request.averages, request.overflows)
        with self._job.condition:
            if not self._was_in(member, request.after):
                arrival = Arrival(member, request.text, request.ends, averages)
                self._drop(member.session)
                self._texts.add(member.trainer, "a gathering", request.text)
                self._arrived[member.session] = arrival
                self._job.condition.notify_all()
                end = time.monotonic() + timeouts.LONG_POLL_SECONDS

                def done() -> bool:
                    self._close_if_all()
                    return self._was_in(member, request.after) or time.monotonic() >= end

                what, missing = "the gathering of all trainers", self._missing
                wait = TrainerWait(member, GATHERING, what, done, deadline=end, missing=missing)
                waits = self._members.waits
                with waits.held(member.trainer, WaitKind.GATHERING, what, missing) as held:
                    wait_until_done(self._job, self._members, wait, missing)
                    held.over = self._was_in(member, request.after)
            said = roll(self._members)
            if not self._was_in(member, request.after):
                return wire.BarrierReply(roll=said)
            return wire.BarrierReply(
                passed=True,
                texts=dict(self._last.texts),
                roll=said,
                number=self._last.number,
                changes=self._last.changes,
            )

    def _was_in(self, member: Member, after: int) -> bool:
        return self._last.number > after and process_of(member) in self._last.processes

    def _drop(self, session: str) -> None:
        before = self._arrived.pop(session, None)
        if before is not None:
            self._texts.remove(before.member.trainer, "a gathering", before.text)

    def _there(self) -> list[Arrival]:
        """The trainers that have arrived, and are still live."""
        joined = MemberState.JOINED
        return [each for each in self._arrived.values() if each.member.state is joined]

    def _missing(self) -> list[int]:
        """The trainers that are awaited, and have not arrived."""
        there = self._there()
        needed = set(self._members.awaited())
        if not all(each.ends for each in there):
            needed |= self._members.reserved.keys() | self._members.arriving.keys()
        return sorted(needed - {each.member.trainer for each in there})

    def _close_if_all(self) -> None:
        if self._job.failure is not None:
            return  # whoever has failed is not awaited, but was not here
        if (there := self._there()) and not self._missing():
            processes = {process_of(each.member): each for each in there}
            self._last = MeetingRound(
                self._last.number + 1,
                self._members.changes,
                frozenset(processes),
                {each.member.trainer: each.text for each in there},
            )
            for session in list(self._arrived):
                self._drop(session)
            if self._averaged is not None:
                self._averaged.gathered({p: (e.member, e.averages) for p, e in processes.items()})
            if self.write is not None:
                self.write(*self.entries()[0])
            self._job.condition.notify_all()

    # ---- see [Note: a coordinator that comes back] in pserver/job_log/coordinator.py ----

    def entries(self) -> list[list[Any]]:
        """The entries for :meth:`restore_entry` of its replacement."""
        last = self._last
        processes = [astuple(each) for each in sorted(last.processes)]
        return [["gathering", last.number, last.changes, processes, list(last.texts.items())]]

    def restore_entry(
        self,
        kind: str,
        number: int,
        changes: int,
        processes: Sequence[Sequence[Any]],
        texts: Sequence[Sequence[Any]],
    ) -> None:
        """Restores another process's entries."""
        were = frozenset(Process(trainer, incarnation) for trainer, incarnation in processes)
        self._last = MeetingRound(number, changes, were, {trainer: text for trainer, text in texts})
