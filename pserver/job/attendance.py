"""Who takes part in a server's job: announced, joined, finished, or left.

:class:`Attendance` is the part of a :class:`~pserver.job.job.Job` that answers Announce, Heartbeat,
Finish, Leave and Reset, and that the clock ticks; joining.py answers Join.
"""

from __future__ import annotations

import logging
import time

from pserver import wire_pb2 as wire
from pserver.errors import Busy, Draining, JobFailed, TrainerLost
from pserver.job import reports
from pserver.job.decisions import process_of
from pserver.job.job_identity import check_names, check_trainer
from pserver.job.joining import Joining
from pserver.job.lifecycle import JobState
from pserver.job.membership import Member, MemberState
from pserver.job.wait_table import Kind
from pserver.onlookers import onlooker

ANNOUNCED_FOR_EACH = 4  # processes of each number: those that have ended unseen, too
FINISH_SECONDS = 1.0  # the longest that Finish waits


class Attendance(Joining):
    """Who takes part in a job.  Any thread may call it."""

    def reset(self, request: wire.ResetRequest) -> wire.ResetReply:
        """Drops what a failed job has left.

        Raises:
            Busy: a job runs.
        """
        with self.condition:
            state = self.lifecycle.word
            if self._members.joined():
                names = ", ".join(str(member.trainer) for member in self._members.joined())
                raise Busy(
                    f"a job runs here, with trainer {names}: end its trainers first, and reset "
                    "when they have gone"
                )
            if self.lifecycle.state is JobState.FAILED or self._members.by_trainer:
                self.log.say("reset", "reset: what the job has left is dropped", logging.INFO)
                self._reset()
            self.lifecycle.wake_all()
            return wire.ResetReply(state=state)

    # ---- coming and leaving ----

    def announce(self, request: wire.AnnounceRequest) -> wire.AnnounceReply:
        """A trainer has started, and will join; or it says why it will not.

        Raises:
            Draining: the server is shutting down: the trainer need not wait for it.
            Refused: a number or a name is beyond a limit.
        """
        trainer, incarnation = request.trainer_id, request.incarnation
        limits = self.config.limits
        check_names([incarnation], limits)
        check_trainer(trainer, limits)
        with self.condition:
            if self.lifecycle.draining:
                self._announcements.joined(trainer, incarnation)
                raise Draining("the server is shutting down")
            if request.failure:
                reason = limits.short(request.failure)
                self._announcements.failed(trainer, incarnation, reason, self._clock())
                member = self._members.by_trainer.get(trainer)
                if member is not None and member.incarnation == incarnation:
                    # it does not know that it has joined
                    self._end_membership(member, reason)
                elif member is None and not incarnation and trainer in self._members.away:
                    self._silent(
                        self._members.away[trainer], f"trainer {trainer} has ended: {reason}"
                    )
                elif member is not None and not incarnation:
                    self._ended(member, reason)
                    if request.unreplaced and self._members.kept.pop(trainer, None) is not None:
                        self._say_empty(trainer, "again")
            elif request.joined:
                self._announcements.joined(trainer, incarnation)
            elif not any(member.incarnation == incarnation for member in self._members.joined()):
                most = ANNOUNCED_FOR_EACH * limits.trainers
                if self._announcements.heard(trainer, incarnation, self._clock(), most):
                    self.log.say(f"way {trainer}", f"trainer {trainer} is on its way", logging.INFO)
            timeout = self.config.heartbeat_timeout_seconds
            return wire.AnnounceReply(heartbeat_timeout_seconds=timeout)

    def _ended(self, member: Member, reason: str) -> None:
        """Who has started a trainer says that its process has ended: it is lost, unless it has said
        itself that it leaves; one that has said that it takes no further step has done its part,
        and has left.  The caller holds the job's lock.
        """
        if member.state is MemberState.JOINED and member.finished:
            self._end_membership(member, "")
        elif member.state is MemberState.JOINED:
            doing = member.waiting or member.activity
            seen = f", last heard at {doing}" if doing else ""
            self._silent(process_of(member), f"trainer {member.trainer} has ended: {reason}{seen}")

    def heartbeat(self, request: wire.HeartbeatRequest) -> wire.HeartbeatReply:
        """A heartbeat; the reply says whether the job still runs."""
        with self.condition:
            member = self.member(request.session)
            self._hear_report(member, request)
            asked = 0 if self.program is None else self.program.position.asks(member)
            tells = self.program is not None and self.program.decisions.decides
            waits = self._members.waits.long(member.trainer) if tells else ()
            return reports.reply(self.failure, self._members, asked, waits)

    @onlooker("what trainers report")
    def _hear_report(self, member: Member, request: wire.HeartbeatRequest) -> None:
        member.activity, member.report = reports.kept(request, self.config.limits)
        member.pace.heard(member.report)

    def roll(self) -> wire.Roll:
        """Which trainers are there."""
        with self.condition:
            return reports.roll(self._members)

    def finish(self, request: wire.FinishRequest) -> wire.FinishReply:
        """A trainer takes no further step; it may wait up to a second until all have said so.

        Raises:
            PServerError: what has ended the job.
        """
        with self.condition:
            member, members = self.member(request.session), self._members
            if self.failure is not None:
                raise self.failure
            member.finished = True
            self._fewer_awaited()
            self.lifecycle.wake_all()
            end = time.monotonic() + (FINISH_SECONDS if request.wait else 0.0)
            waits = members.waits.held(
                member.trainer, Kind.END, "the job's end", members.unfinished
            )
            with waits as held:
                self.lifecycle.wait(self.lifecycle.changed, lambda: not members.unfinished(), end)
                held.over = not (request.wait and members.unfinished())
            missing = members.unfinished()
            if missing:
                self.lifecycle.check_running()
            return wire.FinishReply(over=not missing, missing=missing)

    def leave(self, request: wire.LeaveRequest) -> wire.LeaveReply:
        """A trainer leaves because it has done its part, or was preempted between two steps; or
        because it has failed, and then the job fails for all.
        """
        with self.condition:
            member = self.member(request.session)
            before = self.failure
            reason = self.config.limits.short(request.failure)
            if not reason and not request.success:
                reason = "it left without saying that it has finished"
            member.returns = request.returns and not reason
            if request.preempted and not reason:
                self._members.preempt(member, request.step)
            self._end_membership(member, reason)
            if before is None:
                return wire.LeaveReply()
            return wire.LeaveReply(failure=str(before), error=type(before).__name__)

    def _end_membership(self, member: Member, reason: str) -> None:
        """Takes no more part; with a reason the job fails.  The caller holds the job's lock."""
        if member.state is not MemberState.JOINED:
            return
        member.state = MemberState.LEFT
        self._members.waits.drop(member.trainer)
        level = logging.INFO if member.preempted_after is None else logging.WARNING
        self.log.say(f"left {member.trainer}", member.goodbye(reason), level)
        if reason:
            self.lifecycle.fail(JobFailed(f"trainer {member.trainer} ended the job: {reason}"))
        if self.program is not None:
            self.program.decisions.left(process_of(member), member.preempted_after)
        self._fewer_awaited()
        self._close_if_over()
        self.lifecycle.wake_all()

    def _fewer_awaited(self) -> None:
        if self.program is not None:
            self.program.decisions.changed()

    def member(self, session: str) -> Member:
        """The trainer that holds a session; the call counts as a heartbeat.

        Raises:
            Refused: no trainer holds it.
            TrainerLost: it was lost, and the job goes on without it.
        """
        with self.condition:
            member = self._members.of_session(session)
            if member.fenced and self.failure is None:
                raise TrainerLost(f"{member.fenced}; the job goes on without it")
            member.last_heard = self._clock()
            return member

    def now(self) -> float:
        """The job's clock, in seconds."""
        return self._clock()
