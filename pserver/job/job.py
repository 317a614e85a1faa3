"""The one job that a server has at a time: from the first Join to the last Leave.

Every control call and every stream of every trainer ends in a method of :class:`Job`, in a thread
of the caller.  ``lifecycle.py`` draws the job's states and says what its lock guards.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.errors import (
    FingerprintMismatch,
    Refused,
    Unprepared,
)
from pserver.job import held_values
from pserver.job.background_saves import BackgroundSaves
from pserver.job.decisions import Decisions, Link, Links, process_of
from pserver.job.installed_program import InstalledProgram, check_memory, check_parts, check_program
from pserver.job.job_identity import JobIdentity, choose_transport
from pserver.job.job_trace import JobTrace
from pserver.job.joint_calls import JointCalls
from pserver.job.lifecycle import JobState
from pserver.job.membership import Member, Membership
from pserver.job.outcome import Outcome
from pserver.job.program_parts import ProgramParts
from pserver.job.recorder import Recorder
from pserver.job.reports import wait_statuses
from pserver.job.status_report import (
    lane_statuses,
    observed,
    program_status,
    reload_status,
    save_status,
    trainer_statuses,
)
from pserver.memory.resident import resident_bytes
from pserver.onlookers import look_again
from pserver.running_clock import RUNNING
from pserver.transport.memory import ByteCounters
from pserver.undone import or_undone
from transpiler.ir.graph import Storage
from transpiler.plan.plan import Deployment
from transpiler.program import Program
from transpiler.program_pb2 import Program as ProgramMessage


class Job(JointCalls):
    """A server's job: its trainers, its installed program, and the control calls that change them.

    Any thread may call it.  Methods named like a call of protos/pserver/wire.proto answer that
    call.  See [Note: the job's lock] in lifecycle.py.

    Args:
        config: the server's.
        transports: the transports that the server listens on, by name, with the port of each.
        clock: seconds that never go back.
        links: connects the servers of a job of several; None: each decides by itself.

    Attributes:
        lifecycle: the job's state, its failure and its lock.
        program: what the present job has installed; None before that.
        traffic: payload bytes of the present job's frames, by name on the wire.
        received, sent: payload bytes of all frames since the server's start, by transport.
        tracing: what a trace has of this server.
        saves: those that are written while the job goes on.
    """

    def __init__(
        self,
        config: ServerConfig,
        transports: Mapping[str, int],
        clock: Callable[[], float] = RUNNING,
        links: Links | None = None,
    ) -> None:
        super().__init__(config, transports, clock)
        self.links = links
        self.tracing = JobTrace()
        self.received = Counter[str]()
        self.sent = Counter[str]()
        self.saves = BackgroundSaves(self.condition, self.log, clock)
        self._started = clock()
        self._preset: tuple[Program, Storage] | None = None
        self.recorders: list[Recorder] = []
        self._left: tuple[InstalledProgram | None, Membership] = None, self._members
        self._reset()

    # ---- beginning and ending ----

    def _reset(self) -> None:
        """Back to EMPTY (or to the program that was given at start-up)."""
        self.lifecycle.empty()
        if self.config.once:  # for who asks what the one job has left
            self._left = self.program, self._members
        self.traffic = ByteCounters(self.has)
        if self.program is not None:
            self._end_log(self.program)
            self.reload = None  # this job is over
        self._identity = JobIdentity()
        self._members = Membership(1, self._clock(), clock=self._clock)
        self._parts = ProgramParts(self.config.limits)
        self.tracing.forget()
        look_again(self)
        if self._preset is not None:
            self._serve(*self._preset)

    @property
    def fingerprint(self) -> str:
        """Of the present job's plan; "" before there is one."""
        return self._identity.fingerprint

    @property
    def run(self) -> str:
        """Names this run of the present job, for metrics; "" before trainer 0 has joined.

        Takes no lock: log lines have it, and threads log while they hold the job's.
        """
        return self._members.run

    @property
    def server_index(self) -> int:
        """This server's place in the present job."""
        return self._identity.server_index

    def has(self, name: str) -> bool:
        """Whether the present job has something of this name on the wire."""
        return self.program is not None and self.program.has(name)

    def preset(self, program: Program, values: Storage) -> None:
        """Installs a program without a trainer: from a file, or in a script whose role is
        PSERVER.

        Raises:
            Refused: the program is none that a server runs, or a value is missing.
        """
        with self.condition:
            self._preset = (program, values)
            self._serve(program, values)

    def keep(self, values: Storage) -> None:
        """Puts what the job has left into ``values``, on a server that ends with its first job;
        nothing where none has begun.
        """
        with self.condition:
            begun = self._members.by_trainer
            program, members = (self.program, self._members) if begun else self._left
        if program is not None:
            held_values.take(values, program, members)

    def _serve(self, program: Program, values: Storage) -> None:
        plan, server_index = check_program(program)
        held_values.check_values(program, values)
        self._identity = JobIdentity.of_plan(plan, server_index)
        self._members = Membership(
            plan.trainers, self._clock(), None, self.config.min_trainers, self._clock
        )
        self._begin_log(self._installed_program(program))
        assert self.program is not None, "which has begun"
        held_values.give(values, self.program, self._members)
        self.program.record_values()
        self.lifecycle.state = JobState.SERVING

    def _installed_program(self, program: Program) -> InstalledProgram:
        limits, scratch, spans = self.config.limits, self.config.data_dir, self.tracing.spans
        parts = self._members, self.lifecycle, self._decisions(program)
        return InstalledProgram(program, *parts, limits, scratch, spans)

    def _decisions(self, program: Program) -> Decisions:
        deployment = program.deployment
        assert deployment is not None and deployment.server_index is not None, "a pserver program"
        plan = deployment.plan
        linked = plan.servers > 1 and self.links is not None
        return Decisions(
            *((plan.servers, deployment.server_index) if linked else (1, 0)),
            [lane.kind.waits_for_all for lane in plan.lanes],
            self._members,
            self._lose,
            self.lifecycle,
            awaits=self.config.await_servers and plan.outlives_servers,
            returned=None if self.reload is None else self._stands,
        )

    # ---- installing ----

    def install(self, request: wire.InstallRequest) -> wire.InstallReply:
        """Takes trainer 0's program; its values follow on the stream.

        Raises:
            Refused: not trainer 0, not the time for it, an op that is not on the allow-list, an
                argument of a wrong type.
            FingerprintMismatch: the program was made for another plan than the one it joined with.
            PServerError: what has ended the job meanwhile.
        """
        if self._has_installed(request):
            return wire.InstallReply()
        reload = self._check_installs(request)
        message: ProgramMessage | None = request.program
        if request.parts:
            with self.condition:
                message = self._parts.add(request)
        if message is None:  # more parts will come
            return wire.InstallReply()
        check_parts(message, self.config.limits)
        try:
            program = Program.from_proto(message)
        except ValueError as error:
            raise Refused(f"the program is refused: {error}") from error
        deployment = program.deployment
        if deployment is None or deployment.plan.fingerprint() != self._identity.fingerprint:
            raise FingerprintMismatch(
                "the program was made for another plan than the one that trainer 0 joined with"
            )
        # checking and making it may take long: not under the lock
        _, server_index = check_program(program)
        check_memory(program, self.config.limits)
        self._identity = replace(self._identity, server_index=server_index)
        installed = self._installed_program(program)
        if self._members.least and not installed.outlives_trainers:
            raise Refused(
                f"min_trainers={self._members.least}: expected a job that does without a trainer, "
                "as trainers join later and the others do not wait for them; this one stops where "
                "one is lost (lost_trainer='stop', for instance): give it a fixed number"
            )
        if reload is not None and not self._read_save(reload, installed):
            return wire.InstallReply()
        # a call that came twice may end twice, and values may have arrived since the first time
        with self.condition:
            if self.program is None:
                self._begin_log(installed)
            if reload is not None:
                self._goes_on_as_it_was(installed)
        return wire.InstallReply()

    def _begin_log(self, installed: InstalledProgram) -> None:
        """From here on steps are decided.  The caller holds the job's lock."""
        self.program = installed
        with or_undone(partial(self._end_log, installed)):
            if self.reload is None:  # one that comes back records what it loads
                self._record(installed)
            self._write_ahead(installed)
            deployment, decisions = installed.program.deployment, installed.decisions
            if self.links is not None and deployment is not None and deployment.plan.servers > 1:
                decisions.connect(partial(self._linked, self.links, deployment, decisions))
            for member in self._members.joined():
                installed.decisions.join(process_of(member), ())

    def _end_log(self, installed: InstalledProgram) -> None:
        """Nothing is decided, or written down, any more, whatever of it fails to end."""
        self.program = None
        with ExitStack() as stack:
            stack.callback(self._write_nothing)
            stack.callback(installed.recording.close)
            stack.callback(installed.decisions.close)

    def _linked(self, links: Links, deployment: Deployment, decisions: Decisions) -> Link:
        # a program that was kept in a file may name servers of another day
        return links.connect(deployment, decisions, self._coordinator or deployment.endpoints[0])

    def loaded(self, member: Member) -> Outcome:
        """All values that trainer 0 wanted to send have arrived (COMMIT with step 0): from here on
        they count.  Where it was preempted, the least of the others sends them.

        Raises:
            Refused: another trainer has sent them.
        """
        with self.condition:
            self.check_loads(member, "values")
            installed = self.installed()
            slices = installed.slices
            slices.loaded()
            installed.discard_snapshots()
        if installed.recording.on:
            with installed.quiesce.paused():
                installed.record_values()
        with self.condition:
            if self.lifecycle.state is JobState.INSTALLING:
                self.lifecycle.state = JobState.SERVING
                self._parts = ProgramParts(self.config.limits)  # no part comes again
                count = len(slices.values)
                held = f"{count} slice{'' if count == 1 else 's'}, {slices.bytes_held} bytes"
                self.log.say("installed", f"installed: {held}", logging.INFO)
            self.lifecycle.wake_all()
            return Outcome(installed.version, 0)

    def check_lane(self, lane: int) -> None:
        """Returns if the plan has such a lane, as the manifest tells it.

        Raises:
            Refused: it has not.
        """
        if self.program is not None:
            self.program.lane(lane)
        elif lane >= self._identity.lanes:
            raise Refused(f"expected a lane below {self._identity.lanes}, got {lane}")

    # ---- files, tables, status, shutting down ----

    def shrink(self, request: wire.ShrinkRequest) -> wire.ShrinkReply:
        """Applies time decay to tables and drops rows, on all servers at one place in the job's
        log: the call ends when one trainer has made it on all of them.
        """
        member, installed = self.member(request.session), self.installed()
        installed.check_tables(request.tables)
        if not (math.isfinite(request.days) and request.days >= 0):
            raise Refused(f"shrink: days: expected a finite number from 0 on, got {request.days}")
        if not math.isfinite(request.threshold):
            raise Refused(f"shrink: threshold: expected a finite number, got {request.threshold}")
        threshold = request.threshold if request.HasField("threshold") else None
        shrink = partial(installed.shrink, request.tables, request.days, threshold, request.number)
        removed = installed.calls.carry_out(
            member, "shrink", request.number, lambda record: shrink()
        )
        return wire.ShrinkReply(removed=removed)

    def status(self, request: wire.StatusRequest) -> wire.StatusReply:
        """What an operator sees."""
        with self.condition:
            reply = wire.StatusReply(
                state=self.lifecycle.word,
                fingerprint=self._identity.fingerprint,
                uptime_seconds=self._clock() - self._started,
                bytes_in=self.received.total(),
                bytes_out=self.sent.total(),
                transports=sorted(self.transports),
                failure=str(self.failure or ""),
                trainers=trainer_statuses(self._members, self._clock(), self.config),
                lanes=() if self.program is None else lane_statuses(self.program),
                events=self.lifecycle.events.all(),
                time=time.time(),
                memory_bytes=resident_bytes(),
                server_index=self.server_index,
                trainers_expected=self._members.expected,
                run=self.run,
                waits=self._waits(),
            )
            if (save := self.saves.present) is not None:
                reply.save.CopyFrom(save_status(save))
            reload_status(reply, self.program, self.reload)
            if self.failure is not None:
                reply.failed_seconds = self._clock() - self.lifecycle.failed_at
                reply.kept_seconds = self.kept_seconds
            installed = self.program
        if installed is not None:  # outside the lock: tables take their own
            reply.MergeFrom(program_status(installed))
            if request.variables:
                self.traffic.report(installed.plan, reply)
        return reply

    def _waits(self) -> list[wire.WaitStatus]:
        """The waits of all trainers, as server 0 knows them.  The caller holds the job's lock."""
        if self.program is None or not self.program.decisions.decides:
            return []
        self.program.rings.look()
        return wait_statuses(self._members.waits.waits(), self._members.waits.now)

    def observe(self, request: wire.ObserveRequest) -> wire.ObserveReply:
        """Begins, goes on with or ends reading what the job holds, of a running or a failed one.

        Raises:
            Unprepared: nothing is held here, or not all of it yet.
            Refused: the observer has no transport in common with the server, or is not known.
            Busy: too many observers read already.
        """
        with self.condition:
            begins = not request.session
            if begins:
                if self.lifecycle.state is JobState.INSTALLING or self.program is None:
                    raise Unprepared("the server holds nothing: no job has been installed here")
                transport = choose_transport(request, self.transports)
                self.observations.check_room(self.config.limits.observers)
                observation = self.observations.begin(self.program, self._clock())
            else:
                transport = ""
                observation = self.observations.of_session(request.session, self._clock())
            if request.end:
                self.observations.end(observation)
                return wire.ObserveReply()
        observation.set_pause(request.pause)
        reply = observed(observation.installed, self._members)
        reply.session, reply.fingerprint = observation.session, self._identity.fingerprint
        reply.heartbeat_timeout_seconds = self.config.heartbeat_timeout_seconds
        reply.failure = str(self.failure or "")
        if begins:
            reply.transport, reply.data_port = transport, self.transports[transport]
            reply.program.CopyFrom(observation.installed.program.to_proto())
        return reply

    def trace(self, request: wire.TraceRequest) -> wire.TraceReply:
        """Begins or ends a trace, takes a trainer's spans or gives them."""
        trainer = self.member(request.session).trainer
        return self.tracing.answer(trainer, self._identity.server_index, self.run, request)

    def follow(self, request: wire.FollowRequest) -> wire.FollowReply:
        """Gives another server of the job the session of its link, where this one coordinates it.

        Raises:
            FingerprintMismatch: it runs another program.
            Refused: the plan has no such server, or it has no transport in common with this one.
        """
        session = "" if self.links is None else self.links.follow(request)
        if not session:
            return wire.FollowReply()
        transport = choose_transport(request, self.transports)
        return wire.FollowReply(
            ready=True,
            session=session,
            transport=transport,
            data_port=self.transports[transport],
            heartbeat_timeout_seconds=self.config.heartbeat_timeout_seconds,
        )

    def drain(self, request: wire.DrainRequest) -> wire.DrainReply:
        """Takes no new trainers and no new steps; every trainer is told."""
        self.shut_down()
        return wire.DrainReply()
