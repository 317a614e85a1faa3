"""The one job that a server has at a time: from the first Join to the last Leave.

Every control call and every stream of every trainer ends in a method of :class:`Job`, in a thread
of the caller.  ``lifecycle.py`` draws the job's states and says what its lock guards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.errors import (
    Busy,
    Draining,
    FingerprintMismatch,
    JobFailed,
    PServerError,
    Refused,
    TrainerLost,
    Unprepared,
)
from pserver.job import job_files
from pserver.job.installed_program import InstalledProgram, check_program
from pserver.job.job_identity import JobIdentity, check_protocol, choose_transport
from pserver.job.lane_executor import Outcome
from pserver.job.lifecycle import JobState, Lifecycle
from pserver.job.membership import Member, Membership, MemberState
from pserver.job.status_report import program_status, trainer_statuses
from pserver.transport.byte_counters import ByteCounters
from transpiler.ir.graph import Storage
from transpiler.program import Program

log = logging.getLogger(__name__)


class Job:
    """A server's job: its trainers, its installed program, and the control calls that change them.

    Any thread may call it.  Methods named like a call of protos/pserver/wire.proto answer that
    call.  See [Note: the job's lock] in lifecycle.py.

    Args:
        config: the server's.
        transports: the transports that the server listens on, by name, with the port of each.
        clock: seconds that never go back.

    Attributes:
        lifecycle: the job's state, its failure and its lock.
        program: what the present job has installed; None before that.
        traffic: payload bytes of the present job's frames, by name on the wire.
        bytes_in, bytes_out: payload bytes of all frames since the server's start.
    """

    def __init__(
        self,
        config: ServerConfig,
        transports: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.transports = dict(transports)
        self.lifecycle = Lifecycle()
        self.condition = self.lifecycle.condition
        self.bytes_in = 0
        self.bytes_out = 0
        self._clock = clock
        self._started = clock()
        self._preset: tuple[Program, Storage] | None = None
        self._reset()

    # ---- beginning and ending ----

    def _reset(self) -> None:
        """Back to EMPTY (or to the program that was given at start-up)."""
        self.lifecycle.state = JobState.EMPTY
        self.traffic = ByteCounters()
        self.program: InstalledProgram | None = None
        self._identity = JobIdentity()
        self._members = Membership(1, self._clock())
        if self._preset is not None:
            self._serve(*self._preset)

    def preset(self, program: Program, values: Storage) -> None:
        """Installs a program without a trainer: from a file, or in a script whose role is
        PSERVER.

        Raises:
            Refused: the program is none that a server runs.
        """
        with self.condition:
            self._preset = (program, values)
            self._serve(program, values)

    def _serve(self, program: Program, values: Storage) -> None:
        plan, server_index = check_program(program)
        self._identity = JobIdentity.of_plan(plan, server_index)
        self._members = Membership(plan.trainers, self._clock())
        self.program = self._installed_program(program)
        self.program.load(values)
        self.lifecycle.state = JobState.SERVING

    def _installed_program(self, program: Program) -> InstalledProgram:
        return InstalledProgram(program, self._members, self.lifecycle, self.config.data_dir)

    def _close_if_over(self) -> None:
        """Ends the job when its last trainer has gone.  The caller holds the job's lock."""
        gone = not self._members.joined()
        if (self.failure is not None and gone) or self._members.over:
            if self.failure is None:
                version = self.program.version if self.program else 0
                log.info("the job is done after %d updates", version)
                self._reset()
            self.ended.set()

    def tick(self) -> None:
        """Applies the heartbeat timeout and the start timeout.

        The server's clock thread calls it a few times a second.
        """
        with self.condition:
            now, start = self._clock(), self.config.start_timeout_seconds
            for lost in self._members.lose_silent(now, self.config.heartbeat_timeout_seconds):
                self.lifecycle.fail(lost)
                self._close_if_over()
            missing = self._members.missing(now, start)
            names = ", ".join(map(str, missing))
            if missing and self._members.joined():
                self.lifecycle.fail(
                    TrainerLost(f"trainer {names} has not joined within {start:g} s")
                )
            elif missing and self._members.deserted:
                log.warning(
                    "the job ends: trainer %s never joined, and the others have left", names
                )
                self._reset()
                self.ended.set()

    @property
    def ended(self) -> threading.Event:
        """Set when a job has ended here, because its trainers left or because it failed."""
        return self.lifecycle.ended

    @property
    def failure(self) -> PServerError | None:
        """What ended the present job, or the last one; None while all is well."""
        return self.lifecycle.failure

    @property
    def busy(self) -> bool:
        """Whether trainers take part in a job now."""
        return bool(self._members.joined())

    # ---- joining and leaving ----

    def join(self, request: wire.JoinRequest) -> wire.JoinReply:
        """A trainer joins, or is told to ask again later.

        Raises:
            Refused: another protocol version, a trainer number that the plan does not have, no
                transport in common.
            Busy: a running job has this trainer already.
            FingerprintMismatch: the trainer runs another program; the message says in what it
                differs.
            Draining: the server is shutting down.
        """
        with self.condition:
            if self.lifecycle.draining:
                raise Draining("the server is shutting down")
            check_protocol(request)
            if self.lifecycle.state is JobState.FAILED or (
                request.trainer_id == 0 and self._members.deserted
            ):
                if self._members.joined():
                    # members of the failed job leave, or are lost within the heartbeat timeout
                    return wire.JoinReply(ready=False)
                self._reset()
            if self.lifecycle.state is JobState.EMPTY:
                if request.trainer_id != 0:
                    return wire.JoinReply(ready=False)
                self._begin(request)
            member = self._member_of(request)
            if member is None:
                return wire.JoinReply(ready=False)
            installing = self.lifecycle.state is JobState.INSTALLING
            lanes = self.program.lanes if self.program else ()
            return wire.JoinReply(
                ready=True,
                install=request.trainer_id == 0 and installing,
                transport=member.transport,
                data_port=self.transports[member.transport],
                heartbeat_timeout_seconds=self.config.heartbeat_timeout_seconds,
                steps=[member.step(lane) for lane in range(len(lanes))],
                session=member.session,
            )

    def _begin(self, request: wire.JoinRequest) -> None:
        identity = JobIdentity.of_request(request)
        self._members = Membership(identity.trainers, self._clock())
        self._identity = identity
        self.lifecycle.begin()

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
        if known is not None:
            raise Busy(
                f"trainer {trainer} takes part in the server's job already; start another server "
                "for a second job"
            )
        self._identity.check(request, self._members.expected)
        if self.lifecycle.state is JobState.INSTALLING and trainer != 0:
            return None
        transport = choose_transport(request, self.transports)
        member = Member(trainer, request.incarnation, transport, self._clock())
        self._members.add(member)
        log.info("trainer %d joined over %s", trainer, transport)
        self.condition.notify_all()
        return member

    def heartbeat(self, request: wire.HeartbeatRequest) -> wire.HeartbeatReply:
        """A heartbeat; the reply says whether the job still runs."""
        with self.condition:
            member = self.member(request.session)
            member.activity = request.activity
            if self.failure is None:
                return wire.HeartbeatReply()
            return wire.HeartbeatReply(failure=str(self.failure), error=type(self.failure).__name__)

    def leave(self, request: wire.LeaveRequest) -> wire.LeaveReply:
        """A trainer leaves because it has finished; or because it has failed, and then the job
        fails for all.
        """
        with self.condition:
            member = self.member(request.session)
            if member.state is not MemberState.JOINED:
                return wire.LeaveReply()
            member.state = MemberState.LEFT
            reason = f": {request.failure}" if request.failure else ""
            log.info("trainer %d left%s", member.trainer, reason)
            if request.failure:
                self.lifecycle.fail(JobFailed(f"trainer {member.trainer} ended the job{reason}"))
            self._close_if_over()
            self.condition.notify_all()
            return wire.LeaveReply()

    def leaves_after_step(self, member: Member) -> None:
        """A trainer's last step has come: from here on no other step and no barrier waits for
        it.
        """
        with self.condition:
            member.leaving = True
            self.condition.notify_all()

    def member(self, session: str) -> Member:
        """The trainer that holds a session; the call counts as a heartbeat.

        Raises:
            Refused: no trainer holds it.
        """
        with self.condition:
            member = self._members.of_session(session)
            member.last_heard = self._clock()
            return member

    def now(self) -> float:
        """The job's clock, in seconds."""
        return self._clock()

    # ---- installing ----

    def install(self, request: wire.InstallRequest) -> wire.InstallReply:
        """Takes trainer 0's program; its values follow on the stream.

        Raises:
            Refused: not trainer 0, not the time for it, an op that is not on the allow-list, an
                argument of a wrong type.
            FingerprintMismatch: the program was made for another plan than the one it joined with.
        """
        member = self.member(request.session)
        if member.trainer != 0 or self.lifecycle.state is not JobState.INSTALLING:
            raise Refused("only trainer 0 installs, and only a server that is not yet installed")
        try:
            program = Program.from_proto(request.program)
        except ValueError as error:
            raise Refused(f"the program is refused: {error}") from error
        deployment = program.deployment
        if deployment is None or deployment.plan.fingerprint() != self._identity.fingerprint:
            raise FingerprintMismatch(
                "the program was made for another plan than the one that trainer 0 joined with"
            )
        # checking and making it may take long: not under the lock
        _, server_index = check_program(program)
        self._identity = replace(self._identity, server_index=server_index)
        installed = self._installed_program(program)
        # a call that came twice may end twice, and values may have arrived since the first time
        with self.condition:
            self.program = self.program or installed
        return wire.InstallReply()

    def loaded(self, member: Member) -> Outcome:
        """All values that trainer 0 wanted to send have arrived (COMMIT with step 0): from here on
        they count.

        Raises:
            Refused: another trainer has sent them.
        """
        if member.trainer != 0:
            raise Refused(f"only trainer 0 loads values, and this is trainer {member.trainer}")
        with self.condition:
            installed = self.installed()
            slices = installed.slices
            slices.loaded()
            installed.discard_snapshots()
            if self.lifecycle.state is JobState.INSTALLING:
                self.lifecycle.state = JobState.SERVING
                log.info("installed: %d slices, %d bytes", len(slices.values), slices.bytes_held)
            self.condition.notify_all()
            return Outcome(installed.version, 0)

    def installed(self) -> InstalledProgram:
        """What the present job has installed.

        Raises:
            Unprepared: no program has been installed.
        """
        if self.program is None:
            raise Unprepared("the server has not been installed yet")
        return self.program

    # ---- trainers among themselves ----

    def barrier(self, request: wire.BarrierRequest) -> wire.BarrierReply:
        """Waits up to a second until every trainer that has not left has reached the barrier."""
        member = self.member(request.session)
        texts = self.installed().barrier(member, request.name, 1.0, request.text)
        return wire.BarrierReply(passed=texts is not None, texts=texts)

    def rendezvous(self, request: wire.RendezvousRequest) -> wire.RendezvousReply:
        """The address at which trainers meet: trainer 0 gives it, the others ask.  With a topic,
        what the first trainer said about it.
        """
        installed, member = self.installed(), self.member(request.session)
        if request.topic:
            return wire.RendezvousReply(address=installed.agree(request.topic, request.address))
        return wire.RendezvousReply(address=installed.rendezvous(member, request.address))

    # ---- files, tables, status, shutting down ----

    def save(self, request: wire.SaveRequest) -> wire.SaveReply:
        """Writes everything held here, atomically, below the server's data directory."""
        self.member(request.session)
        path = job_files.save(self._directory(request.path), self.installed(), self._members)
        return wire.SaveReply(file=str(path), bytes=self.installed().slices.bytes_held)

    def load(self, request: wire.LoadRequest) -> wire.LoadReply:
        """Reads what :meth:`save` wrote, for the same plan."""
        self.member(request.session)
        path = job_files.load(self._directory(request.path), self.installed(), self._members)
        return wire.LoadReply(file=str(path), bytes=self.installed().slices.bytes_held)

    def _directory(self, path: str) -> Path:
        return job_files.directory(self.config.data_dir, path, self._identity.server_index)

    def shrink(self, request: wire.ShrinkRequest) -> wire.ShrinkReply:
        """Applies time decay to tables and drops rows.  One trainer calls it, while none steps."""
        self.member(request.session)
        removed = self.installed().shrink(
            request.tables,
            request.days,
            request.threshold if request.HasField("threshold") else None,
            (request.session, request.number),
        )
        return wire.ShrinkReply(removed=removed)

    def status(self, request: wire.StatusRequest) -> wire.StatusReply:
        """What an operator sees."""
        with self.condition:
            reply = wire.StatusReply(
                state=self.lifecycle.word,
                fingerprint=self._identity.fingerprint,
                uptime_seconds=self._clock() - self._started,
                bytes_in=self.bytes_in,
                bytes_out=self.bytes_out,
                transports=sorted(self.transports),
                failure=str(self.failure or ""),
                trainers=trainer_statuses(self._members, self._clock()),
            )
            installed = self.program
        if installed is not None:  # outside the lock: tables take their own
            reply.MergeFrom(program_status(installed))
            if request.variables:
                self.traffic.report(installed.plan, reply)
        return reply

    def drain(self, request: wire.DrainRequest) -> wire.DrainReply:
        """Takes no new trainers and no new steps; every trainer that waits is told."""
        self.lifecycle.drain()
        return wire.DrainReply()
