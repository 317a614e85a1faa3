"""Who takes part in a server's job: announced, joined, finished, or left.

:class:`Attendance` is the part of a :class:`~pserver.job.job.Job` that answers Announce, Join,
Heartbeat, Finish, Leave and Reset, and that the clock ticks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from pserver import wire_pb2 as wire
from pserver.errors import (
    Busy,
    Draining,
    FingerprintMismatch,
    JobFailed,
    TrainerLost,
)
from pserver.job import job_files, reports
from pserver.job.blocking_waits import WAKE_SECONDS
from pserver.job.decisions import process_of
from pserver.job.endings import Endings
from pserver.job.job_identity import (
    JobIdentity,
    check_names,
    check_request,
    check_trainer,
    choose_transport,
)
from pserver.job.lifecycle import JobState
from pserver.job.membership import Member, Membership, MemberState
from pserver.job.reload import Reload
from pserver.job_log.records import Process

ANNOUNCED_FOR_EACH = 4  # processes of each number: those that have ended unseen, too
FINISH_SECONDS = 1.0  # the longest that Finish waits


class Attendance(Endings):
    """Who takes part in a job.  Any thread may call it."""

    # ---- after a failure: see [Note: kept values] in lifecycle.py ----

    @property
    def kept_seconds(self) -> float:
        """For how long a failed job's values are still kept from other jobs; 0: any may begin."""
        if self.lifecycle.state is not JobState.FAILED or self.program is None:
            return 0.0
        if not self.program.version:
            return 0.0
        since = self._clock() - self.lifecycle.failed_at
        return max(0.0, self.config.kept_failed_seconds - since)

    def _make_room(self, request: wire.JoinRequest) -> bool:
        """Whether a failed job has made way for the trainer that asks; False: it asks again later.

        Raises:
            Busy: the failed job's values are kept.
        """
        if self._members.joined():
            # members of the failed job leave, or are lost within the heartbeat timeout
            return False
        if request.fingerprint != self._identity.fingerprint and (left := self.kept_seconds):
            raise Busy(
                f"the server keeps the values of a job that has failed ({self.failure}), for "
                f"another {left:.0f} s: `pserver save ENDPOINTS PATH` writes them, `pserver reset "
                "ENDPOINTS` drops them"
            )
        self._reset()
        return True

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
            self.condition.notify_all()
            return wire.ResetReply(state=state)

    # ---- joining and leaving ----

    def join(self, request: wire.JoinRequest) -> wire.JoinReply:
        """A trainer joins, or is told to ask again later.

        Raises:
            Refused: another protocol version, a trainer number that the plan does not have, no
                transport in common.
            Busy: a running job has this trainer already, or a failed one's values are kept.
            FingerprintMismatch: the trainer runs another program; the message says in what it
                differs.
            Draining: the server is shutting down.
            TrainerLost: trainer 0, which would begin the job, has ended.
        """
        with self.condition:
            if self.lifecycle.draining:
                raise Draining("the server is shutting down")
            check_request(request, self.config.limits)
            if self.lifecycle.state is JobState.FAILED and not self._make_room(request):
                return wire.JoinReply(ready=False)
            if request.trainer_id == 0 and self._members.deserted:
                self._reset()
            if self.lifecycle.state is JobState.EMPTY:
                if request.trainer_id != 0 and self.reload is None:
                    self._check_trainer_0(request)
                    return wire.JoinReply(ready=False)
                self._begin(request)
            if self.reload is not None and not self.reload.done:
                return self._offer_to_reload(self.reload, request)
            member = self._member_of(request)
            if member is None:
                return wire.JoinReply(ready=False)
            lanes = self.program.lanes if self.program else ()
            return wire.JoinReply(
                ready=True,
                install=not request.trainer_id and self.lifecycle.state is JobState.INSTALLING,
                transport=member.transport,
                data_port=self.transports[member.transport],
                heartbeat_timeout_seconds=self.config.heartbeat_timeout_seconds,
                steps=[member.step(lane) for lane in range(len(lanes))],
                session=member.session,
                run=self._members.run,
                store=job_files.place_of(self.config.data_dir, self.config.store),
                awaits_servers=self.config.await_servers,
                late=bool(member.late),
                roll=reports.roll(self._members),
            )

    def _offer_to_reload(self, reload: Reload, request: wire.JoinRequest) -> wire.JoinReply:
        """A server that comes back takes its program from one of the trainers that ask."""
        self._identity.check(request, self._members.expected)
        self._coordinator = request.coordinator or self._coordinator
        timeout = self.config.heartbeat_timeout_seconds
        session = reload.asked(request.incarnation, self._clock(), timeout)
        return wire.JoinReply(ready=False, wants_program=bool(session), session=session)

    def _begin(self, request: wire.JoinRequest) -> None:
        identity = JobIdentity.of_request(request)
        began = self._announcements.first_heard(request.incarnation, self._clock())
        least = self.config.min_trainers
        self._members = Membership(identity.trainers, self._clock(), began, least)
        self._identity = identity
        self.lifecycle.begin()

    def _check_trainer_0(self, request: wire.JoinRequest) -> None:
        """Raises what has happened to trainer 0, if it will not come."""
        since = self._announcements.first_heard(request.incarnation, self._clock())
        if (lost := self._lost(0, since)) is not None:
            raise lost

    def _member_of(self, request: wire.JoinRequest) -> Member | None:
        """The trainer's member, new or known; None where it should ask again later."""
        trainer = request.trainer_id
        known = self._members.by_trainer.get(trainer)
        if (
            known is not None
            and known.incarnation == request.incarnation
            and known.state is MemberState.JOINED
        ):
            # it asks again because its first transport did not work
            known.transport = choose_transport(request, self.transports)
            return known
        other_job = known is not None or request.fingerprint != self._identity.fingerprint
        if self._members.ending and other_job:
            return None  # the next job begins when all have left
        process = Process(trainer, request.incarnation)
        if process in self._members.fenced:
            raise TrainerLost(f"trainer {trainer} was lost, and the job goes on without it")
        if known is not None and known.absent and self._goes_on:
            return None if known.steps_under_way else self._join_again(request)
        if known is not None and self.program is not None and not self.program.decisions.decides:
            return None  # server 0 has let it in, and the record of the other's loss is on its way
        if known is not None:
            raise Busy(
                f"trainer {trainer} takes part in the server's job already; start another server "
                "for a second job"
            )
        try:
            self._identity.check(request, self._members.expected)
        except FingerprintMismatch as error:
            self.log.say("refused", f"refused: {error}")
            raise
        if self.lifecycle.state is JobState.INSTALLING and trainer != 0:
            return None
        if self.reload is not None:
            return self._join_again(request)
        if self._members.least and self.program is not None and self._members.joined():
            return self._join_again(request)  # the others may be far already
        return self._add(request)

    @property
    def _goes_on(self) -> bool:
        """Whether the job goes on without a trainer, and lets another process take its place."""
        return self.failure is None and self.program is not None and self.program.outlives_trainers

    def _join_again(self, request: wire.JoinRequest) -> Member | None:
        """A trainer joins while others train: it begins at the step of the slowest one."""
        assert self.program is not None, "a trainer is lost alone where a program is installed"
        self._identity.check(request, self._members.expected)
        decisions, trainer = self.program.decisions, request.trainer_id
        process = Process(trainer, request.incarnation)
        if decisions.decides and process not in decisions.joined:
            until = self._clock() + self.config.start_timeout_seconds
            self._members.arriving[trainer] = until
            decisions.join(process, decisions.begins_at(self._members.joined()))
        steps = decisions.joined.get(process)
        if steps is None or not self.program.between_rounds:
            return None  # its values are to be those of the step at which it begins
        return self._add(request, steps)

    def _add(self, request: wire.JoinRequest, steps: Sequence[int] = ()) -> Member:
        trainer = request.trainer_id
        transport = choose_transport(request, self.transports)
        member = Member(trainer, request.incarnation, transport, self._clock())
        begun = self.program is not None and (not self._members.least or self.program.begun)
        self._members.add(member, steps, bool(steps) and begun)
        self._coordinator = request.coordinator or self._coordinator
        if self.program is not None:
            self.program.decisions.join(process_of(member), steps)
        self._announcements.joined(trainer, request.incarnation)
        self.log.say(
            f"joined {trainer}", f"trainer {trainer} joined over {transport}", logging.INFO
        )
        self.condition.notify_all()
        return member

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
        itself that it leaves or takes no further step.  The caller holds the job's lock.
        """
        if member.state is MemberState.JOINED and not member.finished:
            doing = member.waiting or member.activity
            seen = f", last seen at {doing}" if doing else ""
            self._silent(member, f"trainer {member.trainer} has ended: {reason}{seen}")

    def heartbeat(self, request: wire.HeartbeatRequest) -> wire.HeartbeatReply:
        """A heartbeat; the reply says whether the job still runs."""
        with self.condition:
            member = self.member(request.session)
            member.activity, member.report = reports.kept(request, self.config.limits)
            member.pace.heard(member.report)
            asked = 0 if self.program is None else self.program.position.asks(member)
            return reports.reply(self.failure, self._members, asked)

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
            self.condition.notify_all()
            end = time.monotonic() + (FINISH_SECONDS if request.wait else 0.0)
            while members.unfinished() and time.monotonic() < end:
                self.lifecycle.check_running()
                self.condition.wait(WAKE_SECONDS)
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
        level = logging.INFO if member.preempted_after is None else logging.WARNING
        self.log.say(f"left {member.trainer}", member.goodbye(reason), level)
        if reason:
            self.lifecycle.fail(JobFailed(f"trainer {member.trainer} ended the job: {reason}"))
        if self.program is not None:
            self.program.decisions.left(process_of(member))
        self._fewer_awaited()
        self._close_if_over()
        self.condition.notify_all()

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
