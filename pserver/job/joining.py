"""How trainers come into a server's job: its first ones, and those that take a place while others
train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pserver import wire_pb2 as wire
from pserver.errors import Busy, Draining, FingerprintMismatch, PartialPlan, Refused, TrainerLost
from pserver.job import job_files, reports
from pserver.job.decisions import process_of
from pserver.job.endings import Endings
from pserver.job.job_identity import JobIdentity, check_request, choose_transport
from pserver.job.lifecycle import JobState
from pserver.job.membership import Member, Membership, MemberState
from pserver.job.reload import Reload
from pserver.job.wait_table import Kind
from pserver.job_log.records import Process
from pserver.undone import or_undone


class Joining(Endings):
    """How trainers come into a job.  Any thread may call it."""

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

    # ---- joining ----

    def join(self, request: wire.JoinRequest) -> wire.JoinReply:
        """A trainer joins, or is told to ask again later.

        Raises:
            Refused: another protocol version, a trainer number that the plan does not have, no
                transport in common; or it comes late, to trainers that let nobody in.
            Busy: a running job has this trainer already, or a failed one's values are kept.
            FingerprintMismatch: the trainer runs another program; the message says in what it
                differs.
            PartialPlan: likewise; it may become the job's, with further optimizers.
            Draining: the server is shutting down.
            TrainerLost: trainer 0, which would begin the job, has ended.
        """
        undo: Callable[[], None] = lambda: None  # noqa: E731
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
                undo = self._reset
            if self.reload is not None and not self.reload.done:
                return self._offer_to_reload(self.reload, request)
            with or_undone(undo):  # what nobody has joined has not begun
                member = self._member_of(request)
            if member is None:
                process = Process(request.trainer_id, request.incarnation)
                held = process in self._members.held
                by = self._held_by(request.trainer_id) if held else []
                return wire.JoinReply(ready=False, held=held, held_by=by)
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
        self._identity.check(request, self._members.expected, late=True)
        self._coordinator = request.coordinator or self._coordinator
        timeout = self.config.heartbeat_timeout_seconds
        session = reload.asked(request.incarnation, self._clock(), timeout)
        return wire.JoinReply(ready=False, wants_program=bool(session), session=session)

    def _begin(self, request: wire.JoinRequest) -> None:
        identity = JobIdentity.of_request(request)
        began = self._announcements.first_heard(request.incarnation, self._clock())
        least = self.config.min_trainers
        self._members = Membership(identity.trainers, self._clock(), began, least, self._clock)
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
        if known is None and self._members.away.get(trainer, process) != process:
            return None  # until it is back, or lost
        if known is not None and known.absent and self._goes_on:
            return None if known.steps_under_way else self._join_again(request)
        if known is not None and self.program is not None and not self.program.decisions.decides:
            return None  # server 0 has let it in, and the record of the other's loss is on its way
        if known is not None:
            raise Busy(
                f"trainer {trainer} takes part in the server's job already; start another server "
                "for a second job"
            )
        under_way = self.program is not None and bool(self._members.joined())
        late = bool(self._members.least) and under_way  # the others may be far already
        try:
            self._identity.check(request, self._members.expected, late)
        except PartialPlan:
            raise  # it asks again when its script has made its other optimizers
        except FingerprintMismatch as error:
            self.log.say("refused", f"refused: {error}")
            raise
        if self.lifecycle.state is JobState.INSTALLING and trainer != 0:
            return None
        if self.reload is not None:
            return self._join_again(request)
        if late:
            return self._join_again(request)
        return self._add(request)

    @property
    def _goes_on(self) -> bool:
        """Whether the job goes on without a trainer, and lets another process take its place."""
        return self.failure is None and self.program is not None and self.program.outlives_trainers

    def _join_again(self, request: wire.JoinRequest) -> Member | None:
        """A trainer joins while others train: it begins at the step of the slowest one."""
        assert self.program is not None, "a trainer is lost alone where a program is installed"
        self._identity.check(request, self._members.expected, late=True)
        if not self.program.plan.lets_in_late:
            raise Refused(
                f"trainer {request.trainer_id} comes late: trainers that take the steps of several "
                "optimizers together let nobody in while they train"
            )
        decisions, trainer = self.program.decisions, request.trainer_id
        process = Process(trainer, request.incarnation)
        if decisions.decides and process not in decisions.joined:
            if not self._let_in(process):
                return None
            until = self._clock() + self.config.start_timeout_seconds
            self._members.arriving[trainer] = until
            decisions.join(process, decisions.begins_at(self._members))
        steps = decisions.joined.get(process)
        if steps is None or not self.program.between_rounds:
            return None  # its values are to be those of the step at which it begins
        return self._add(request, steps)

    def _let_in(self, process: Process) -> bool:
        """Whether a process can step together with the others now; it waits, however long it
        takes, where they divide the samples of its number among themselves.  Nobody is let in when
        all others have finished: they may be leaving the other servers already.
        """
        assert self.program is not None, "others train"
        if not self._members.unfinished():
            return False
        admitted = self.program.leases.let_in(process.trainer, self.program.lanes[0].unapplied)
        if admitted:
            self._members.held.discard(process)
            return True
        missing = partial(self._held_by, process.trainer)
        with self._members.waits.held(process.trainer, Kind.JOIN, "the end of a pass", missing):
            pass  # it asks again soon
        if process not in self._members.held:
            self._members.held.add(process)
            text = "the others divide its samples of this epoch; it steps with them after that"
            self.log.say(f"held {process.trainer}", f"trainer {process.trainer} waits: {text}")
        return False

    def _held_by(self, trainer: int) -> list[int]:
        """The trainers that divide the samples of this number among themselves."""
        return [each for each in self._members.unfinished() if each != trainer]

    def _add(self, request: wire.JoinRequest, steps: Sequence[int] = ()) -> Member:
        trainer = request.trainer_id
        transport = choose_transport(request, self.transports)
        member = Member(trainer, request.incarnation, transport, self._clock())
        begun = self.program is not None and (not self._members.least or self.program.begun)
        again = self._members.away.get(trainer) == process_of(member)
        self._members.add(member, steps, bool(steps) and begun and not again)
        self._coordinator = request.coordinator or self._coordinator
        if self.program is not None:
            self.program.decisions.join(process_of(member), steps)
        self._announcements.joined(trainer, request.incarnation)
        self.log.say(
            f"joined {trainer}", f"trainer {trainer} joined over {transport}", logging.INFO
        )
        self.lifecycle.wake_all()
        return member
