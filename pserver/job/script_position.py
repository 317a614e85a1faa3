"""The position of a job's script, for a trainer that has joined late.  Server 0 has it.

[Note: where the others are]  A trainer that joins a running job has the job's values, and its
script begins with the first line.  So it asks for the others' position: the states of their
schedulers, their passes over the data, the joint calls that they have made.  Trainers report it
only when one asks.  The server passes the question on, in the answers to heartbeats, to the first
trainer that knows it; that one answers before it closes its next step, or from another thread while
its script waits in a step, at a barrier or at the job's end.

Where steps need all trainers, the answer has to describe the script just before the first step that
needs the asking trainer.  An answer about a step without a record does: the question came after the
joining, and from then on every record includes the new trainer.  An answer about a decided step is
refused, and given anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership
from pserver.membership.waits import WaitKind

MOST = 2**20  # characters of a position


class PositionQuestions:
    """The questions about the script's position, and the last answer.  Any thread may call it.

    Args:
        members: the job's trainers.
        job: for its lock and its end.
        undecided: whether a trainer's step of the lane that needs all of them has no record.
    """

    def __init__(
        self, members: Membership, job: Lifecycle, undecided: Callable[[Member, int], bool]
    ) -> None:
        self._members, self._job, self._undecided = members, job, undecided
        self._asked = self._answered = 0  # numbers of questions
        self._answer = wire.PositionReply()

    def position(self, member: Member, request: wire.PositionRequest) -> wire.PositionReply:
        """Takes a question, or an answer.

        Raises:
            Refused: the position is too long, or answers a question that no trainer has asked.
            PServerError: what has ended the job.
        """
        with self._job.condition:
            if request.number > self._asked:
                raise Refused(f"expected a question up to {self._asked}, got {request.number}")
            if request.answers:
                return self._take(member, request)
            return self._ask(member, request.number)

    def asks(self, member: Member) -> int:
        """The number of the question that this trainer is to answer; 0: none.  The caller
        holds the job's lock.
        """
        open_ = self._asked > self._answered
        return self._asked if open_ and member.trainer == self._who_knows() else 0

    def _who_knows(self) -> int | None:
        """The first trainer among those that know their position."""
        return self._members.first_of(lambda member: not member.late or member.placed)

    def _ask(self, member: Member, number: int) -> wire.PositionReply:
        if not number:
            if self._asked == self._answered:
                self._asked += 1
            number = self._asked
        end = time.monotonic() + timeouts.LONG_POLL_SECONDS

        def missing() -> list[int]:
            return [] if (first := self._who_knows()) is None else [first]

        what = "where the others are"
        with self._members.waits.held(member.trainer, WaitKind.POSITION, what, missing) as held:
            self._job.wait(
                self._job.changed, lambda: self._answered >= number or not missing(), end
            )
            held.over = self._answered >= number or not missing()
        if self._answered >= number:
            return self._told(member, self._answer, number)
        if not missing():  # all that knew have gone
            problem = "no live trainer knows the position"
            return self._told(member, wire.PositionReply(problem=problem), number)
        return wire.PositionReply(number=number)

    def _told(self, member: Member, answer: wire.PositionReply, number: int) -> wire.PositionReply:
        member.placed = True
        self._job.condition.notify_all()  # barriers wait for it from here on
        return wire.PositionReply(
            number=number, ready=True, position=answer.position, problem=answer.problem
        )

    def _take(self, member: Member, request: wire.PositionRequest) -> wire.PositionReply:
        if len(request.position) > MOST:
            raise Refused(
                f"expected a position of up to {MOST} characters, got {len(request.position)}"
            )
        if request.number > self._answered:
            if request.step and not self._undecided(member, request.step):
                return wire.PositionReply(number=request.number)
            self._answered = request.number
            self._answer = wire.PositionReply(
                position=request.position, problem=request.problem[:MOST]
            )
            self._job.condition.notify_all()
        return wire.PositionReply(number=request.number, ready=True)
