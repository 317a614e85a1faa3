"""The one job that a server has at a time: from the first Join to the last Leave.

Every control call and every stream of every trainer ends in a method of :class:`Job`, in a thread
of the caller.  ``membership/lifecycle.py`` draws the job's states and says what its lock guards.

[Note: what is lost]  A job whose servers wait for one another's return (``--await-servers``)
decides no steps while one is unreachable.  The one that comes back has the values of its last save.
Steps that were decided since are in the others, and are lost in it: they are counted by trainer,
and logged.  From there on each trainer's next step counts on all servers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from google.protobuf.message import DecodeError

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.checkpoint import manifest
from pserver.config import PROTOCOL, ServerConfig, split_endpoint
from pserver.errors import (
    Busy,
    Draining,
    FingerprintMismatch,
    JobFailed,
    PartialPlan,
    PServerError,
    Refused,
    TrainerLost,
    UnknownSession,
    Unprepared,
)
from pserver.job import job_files
from pserver.job.background_saves import BackgroundSaves
from pserver.job.coordination import Coordination
from pserver.job.job_trace import JobTrace
from pserver.job.program import (
    InstalledProgram,
    Observations,
    check_memory,
    check_parts,
    check_program,
    check_values,
    give_values,
    take_values,
)
from pserver.job.reload import Reload
from pserver.job.status import (
    lane_statuses,
    observed,
    program_status,
    reload_status,
    save_status,
    trainer_statuses,
)
from pserver.job_log.records import Applied, LogSnapshot, Loss, Process
from pserver.lane.recorder import Recorder
from pserver.limits import PART_BYTES, Limits
from pserver.membership import members
from pserver.membership.decisions import Decisions, Link, Links, process_of
from pserver.membership.lifecycle import EventLog, JobState, Lifecycle
from pserver.membership.members import (
    Announcements,
    Member,
    Membership,
    MemberState,
    bounded_report,
    heartbeat_reply,
    news,
    roll,
    wait_statuses,
)
from pserver.membership.waits import WaitKind
from pserver.membership.watermark import Outcome
from pserver.onlookers import look_again, onlooker
from pserver.running_clock import RUNNING
from pserver.storage.place import place_at
from pserver.telemetry.memory import resident_bytes
from pserver.telemetry.trace import now
from pserver.timeouts import Timeouts
from pserver.transport.memory import ByteCounters
from pserver.undone import or_undone
from transpiler.files.files import shown
from transpiler.ir.graph import Storage
from transpiler.plan.plan import Deployment, Plan, differences
from transpiler.program import Program
from transpiler.program_pb2 import Program as ProgramMessage

log = logging.getLogger(__name__)

ANNOUNCED_FOR_EACH = 4  # processes of each number: those that have ended unseen, too
SAVE = "save"  # the kind of such calls in the job's log


# ---- job identity ----
#
# What makes a trainer part of a server's job: the plan that it runs, and the server's place in it.
#
# Pure: nothing here locks, waits or reads a clock.


MOST_TRANSPORTS = 16  # that a trainer may name


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The plan that all trainers of a job run, and which of its servers this one is.

    Attributes:
        fingerprint: of the plan.
        manifest: the facts that the fingerprint covers, by key.
        server_index: counts the plan's servers from 0.
        of: the owner of the plan, for messages.
    """

    fingerprint: str = ""
    manifest: Mapping[str, str] = field(default_factory=dict)
    server_index: int = 0
    of: str = "trainer 0"

    @classmethod
    def of_request(cls, request: wire.JoinRequest) -> JobIdentity:
        """The job that trainer 0 begins by joining."""
        return cls(request.fingerprint, dict(request.manifest), request.server_index)

    @classmethod
    def of_plan(cls, plan: Plan, server_index: int) -> JobIdentity:
        """The job of a program that the server was given at its start."""
        return cls(plan.fingerprint(), plan.manifest(), server_index, "the server's program")

    @property
    def trainers(self) -> int:
        """The number of trainers in the plan.

        Raises:
            Refused: the manifest does not have it.
        """
        return number_in(self.manifest, "trainers")

    @property
    def lanes(self) -> int:
        """The number of lanes in the plan."""
        return _numbered("lane", self.manifest)

    def check(self, request: wire.JoinRequest, trainers: int, late: bool = False) -> None:
        """Returns if the trainer that asks runs this job.

        Args:
            trainers: how many the job has.
            late: the others have begun already.

        Raises:
            Busy: trainer 0 brings another program than it brought before.
            PartialPlan: it is late, and its program has fewer parameter groups than the job's.
            FingerprintMismatch: a trainer runs another program than trainer 0, or than the server
                was started with; the message says in what it differs.
            Refused: the plan has no such trainer, or places this server elsewhere.
        """
        trainer = request.trainer_id
        if request.fingerprint != self.fingerprint:
            other = differences(request.manifest, self.manifest, self.of)
            made, groups = (_numbered("group", m) for m in (request.manifest, self.manifest))
            if late and made < groups:
                raise PartialPlan(
                    f"trainer {trainer} joins late and has distributed {made} of the job's "
                    f"{groups} parameter groups; it can join when it has distributed all: make all "
                    f"optimizers before anything else of the job; now: {other}"
                )
            if trainer == 0 and self.of == "trainer 0":
                raise Busy(
                    "the server has a job with another program; start another server for a second "
                    "job"
                )
            raise FingerprintMismatch(
                f"trainer {trainer} runs another program than {self.of}: {other}"
            )
        if trainer >= trainers:
            raise Refused(f"expected a trainer number below {trainers}, got {trainer}")
        if request.server_index != self.server_index:
            raise Refused(
                f"this server holds part {self.server_index} of the program, but trainer {trainer} "
                f"expects part {request.server_index}: give every process the endpoints in the "
                "same order"
            )


def _numbered(kind: str, manifest: Mapping[str, str]) -> int:
    """The number of lanes or groups in a manifest."""
    keys = (key.partition(":")[0] for key in manifest if key.startswith(f"{kind} "))
    return len(set(keys))


def number_in(manifest: Mapping[str, str], key: str) -> int:
    """A number from a manifest.

    Raises:
        Refused: the manifest does not have it.
    """
    text = manifest.get(key, "")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise Refused(f"the manifest does not say the number of {key}: got {text[:20]!r}")
    return int(text)


def check_request(request: wire.JoinRequest, limits: Limits) -> None:
    """Returns if the trainer speaks this version of the protocol, and the server is large enough
    for its job.

    Raises:
        Refused: it speaks another one, or a part of its request is beyond a limit.
    """
    if request.protocol != PROTOCOL:
        raise Refused(
            f"expected protocol version {PROTOCOL}, got {request.protocol}: install one version "
            "everywhere"
        )
    names = request.incarnation, request.fingerprint, request.coordinator
    texts = (*names, *request.transports[:MOST_TRANSPORTS])
    check_names(texts, limits)
    try:
        split_endpoint(request.coordinator or "localhost:1")
    except ValueError as error:
        raise Refused(f"the coordinator's endpoint: {error}") from error
    if len(request.transports) > MOST_TRANSPORTS:
        count = len(request.transports)
        raise Refused(f"expected at most {MOST_TRANSPORTS} transports, got {count}")
    trainers = number_in(request.manifest, "trainers")
    if not 1 <= trainers <= limits.trainers:
        raise Refused(
            f"the job has {trainers} trainers, and this server takes 1 to {limits.trainers} "
            "(--max-trainers)"
        )


def check_names(names: Iterable[str], limits: Limits) -> None:
    """Returns if names are short enough to be kept.

    Raises:
        Refused: one is not.
    """
    for name in names:
        if len(name) > limits.name_bytes:
            raise Refused(
                f"expected names of up to {limits.name_bytes} characters, got one of {len(name)}: "
                f"{name[:40]!r} ..."
            )


def check_trainer(trainer: int, limits: Limits) -> None:
    """Returns if a job may have a trainer of this number.

    Raises:
        Refused: it may not.
    """
    if trainer >= limits.trainers:
        raise Refused(
            f"expected a trainer number below {limits.trainers} (--max-trainers), got {trainer}"
        )


def choose_transport(
    request: wire.JoinRequest | wire.ObserveRequest | wire.FollowRequest,
    offered: Mapping[str, int],
) -> str:
    """The first of the peer's transports that the server offers.

    Args:
        offered: the server's transports, by name, with the port of each.

    Raises:
        Refused: they have none in common.
    """
    transport = next((name for name in request.transports if name in offered), None)
    if transport is None:
        raise Refused(
            f"no transport in common: the server has {sorted(offered)}, the peer "
            f"{list(request.transports)}"
        )
    return transport


def _root(path: str) -> str:
    """The root below which everything must be that a server's save continues."""
    return place_at(path).path.rsplit("/", 2)[0]


def _said(path: str, lost: Mapping[int, Loss]) -> str:
    """The losses, as a sentence."""
    steps = sum(loss.steps for loss in lost.values())
    rows = sum(loss.rows for loss in lost.values())
    each = ", ".join(f"trainer {t}: {loss.steps}" for t, loss in sorted(lost.items()))
    return (
        f"goes on from {shown(path)}: {steps} decided steps since then are lost here ({each}), "
        f"with up to {rows} changes of rows"
    )


# ---- program parts ----
#
# A program that comes in parts: no message of the control port is longer than a few MB, as gRPC
# takes memory for all of a message before it can be checked.


class ProgramParts:
    """Collects the parts of one program.  The caller holds the job's lock.

    Args:
        limits: how long the program may be.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: dict[int, bytes] = {}

    def add(self, request: wire.InstallRequest) -> ProgramMessage | None:
        """Takes a part, which may arrive twice.

        Returns:
            The program, when all parts have arrived.

        Raises:
            Refused: it is no part of a program that this server takes.
        """
        most = -(-self._limits.program_bytes // PART_BYTES)
        if not request.number < request.parts <= most or len(request.part) > PART_BYTES:
            raise Refused(
                f"expected a program in up to {most} parts (--max-program) of up to {PART_BYTES} "
                f"bytes, got part {request.number} of {request.parts} of {len(request.part)} bytes"
            )
        self._parts[request.number] = request.part
        if not all(number in self._parts for number in range(request.parts)):
            return None
        try:
            return ProgramMessage.FromString(b"".join(self._parts[n] for n in range(request.parts)))
        except DecodeError as error:
            raise Refused(f"the parts do not form a program: {error}") from error


# ---- job ----


class Job:
    """A server's job: its trainers, its installed program, and the control calls that change them.

    Any thread may call it.  Methods named like a call of protos/pserver/wire.proto answer that
    call.  See [Note: the job's lock] in membership/lifecycle.py.

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
        tracing: this server's part of a trace.
        saves: those that are written while the job continues.
        observations: of those that read without joining.
        links: to the other servers of a job; None: each decides by itself.
        reload: of a server that was started again while its job continued; None: of any other.
        log: of events that peers cause.
    """

    _coordination: Coordination | None = None  # of the present job

    def __init__(
        self,
        config: ServerConfig,
        transports: Mapping[str, int],
        clock: Callable[[], float] = RUNNING,
        links: Links | None = None,
    ) -> None:
        self.config = config
        self.transports = dict(transports)
        self.lifecycle = Lifecycle(clock)
        self.condition = self.lifecycle.condition
        self.program: InstalledProgram | None = None
        self._clock = clock
        self._identity = JobIdentity()
        self._members = Membership(1, clock(), clock=clock)
        self._announcements = Announcements()
        self._coordinator = ""  # server 0's endpoint, as trainers name it
        self.reload = None if config.reload is None else Reload(config.reload)
        self.log = EventLog(log, self.lifecycle.events)
        self.observations = Observations()
        self.links = links  # to the other servers of a job; None: each decides by itself
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
        if self.config.once:  # for :meth:`keep`
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
        """The fingerprint of the present job's plan; "" before there is one."""
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
        """Copies the job's last values into ``values``, on a server that ends with its first job;
        nothing where none has begun.
        """
        with self.condition:
            begun = self._members.by_trainer
            program, members = (self.program, self._members) if begun else self._left
        if program is not None:
            take_values(values, program, members)

    def _serve(self, program: Program, values: Storage) -> None:
        plan, server_index = check_program(program)
        check_values(program, values)
        self._identity = JobIdentity.of_plan(plan, server_index)
        self._members = Membership(
            plan.trainers, self._clock(), None, self.config.min_trainers, self._clock
        )
        self._begin_log(self._installed_program(program))
        assert self.program is not None, "which has begun"
        give_values(values, self.program, self._members)
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
                f"min_trainers={self._members.least} needs an elastic job, and this one stops when "
                "a trainer is lost (as with lost_trainer='stop'). Give a fixed number of trainers."
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
        """Begins the job's log: steps are decided from now on.  The caller holds the job's lock."""
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
        """Ends the job's log: nothing more is decided or written, even where a part of it fails to
        end.
        """
        self.program = None
        with ExitStack() as stack:
            stack.callback(self._write_nothing)
            stack.callback(installed.recording.close)
            stack.callback(installed.decisions.close)

    def _linked(self, links: Links, deployment: Deployment, decisions: Decisions) -> Link:
        # a program that was kept in a file may name servers of another day
        return links.connect(deployment, decisions, self._coordinator or deployment.endpoints[0])

    def loaded(self, member: Member, anew: Iterable[str] = ()) -> Outcome:
        """Takes the values that trainer 0 has sent (COMMIT with step 0): from now on they count.
        Where it is absent, :attr:`Membership.first` sends them.

        Args:
            anew: slices whose optimizer states begin anew.

        Raises:
            Refused: another trainer has sent them.
            Unprepared: no such slice is updated here.
        """
        with self.condition:
            self.check_loads(member, "values")
            installed = self.installed()
            slices = installed.slices
            slices.loaded(anew)
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
                self.log.log("installed", f"holds {held} of the model", logging.INFO)
            else:
                installed.decisions.loaded()
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
        """The job's status, for an operator."""
        with self.condition:
            counts = None if self.program is None else self.program.steps.trainers
            reply = wire.StatusReply(
                state=self.lifecycle.word,
                fingerprint=self._identity.fingerprint,
                uptime_seconds=self._clock() - self._started,
                bytes_in=self.received.total(),
                bytes_out=self.sent.total(),
                transports=sorted(self.transports),
                failure=str(self.failure or ""),
                trainers=trainer_statuses(self._members, counts, self._clock(), self.config),
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
        """Begins, continues or ends an observer's reading of a running or a failed job.

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
        """Gives another server of the job the session of its link, where this one is its
        coordinator.

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
        """Takes no new trainers and no new steps; every trainer is notified."""
        self.shut_down()
        return wire.DrainReply()

    # ---- the end: silence, loss, failure, success, and a server that shuts down ----

    @property
    def ended(self) -> threading.Event:
        """Set when a job has ended here, because its trainers left or because it failed."""
        return self.lifecycle.ended

    @property
    def failure(self) -> PServerError | None:
        """The error that ended the present job; None while there is none."""
        return self.lifecycle.failure

    @property
    def awaited(self) -> bool:
        """Whether there are announced trainers that have not joined."""
        with self.condition:
            return self._announcements.any

    @property
    def busy(self) -> bool:
        """Whether a job has live trainers now."""
        return bool(self._members.joined())

    def _close_if_over(self) -> None:
        """Ends the job when its last trainer has gone.  The caller holds the job's lock."""
        if self.failure is not None and not self._members.joined():
            self.ended.set()
        elif self.failure is None and self._members.undone:
            self.lifecycle.fail(JobFailed("every trainer of the job was preempted"))
            self.ended.set()
        elif self.failure is None and self._members.over:
            if not self._members.returning:
                version = self.program.version if self.program else 0
                self.log.log("done", f"the job is done after {version} updates", logging.INFO)
                self.lifecycle.succeed()
                self.ended.set()
            self._reset()

    def tick(self) -> None:
        """Applies the heartbeat timeout and the start timeout.

        The server's clock thread calls it a few times a second.
        """
        with self.condition:
            now, timeout = self._clock(), self.config.heartbeat_timeout_seconds
            for member, text in self._members.silent(now, timeout):
                if member.finished or not self._members.unfinished():  # it has done its part
                    self.log.log(f"silent {member.trainer}", f"{text}, and had finished")
                    self._end_membership(member, "")
                else:
                    self._silent(process_of(member), text)
            for process in self._members.not_back(now, timeout):
                self._not_back(process, timeout)
            self._announcements.lose_silent(now, timeout)
            self.observations.lose_silent(now, timeout)
            self._expire(now)
            self._name_stragglers()
            if self._members.by_trainer and self.failure is None:
                self._check_missing(now)
            if self.program is not None and self.failure is None:
                self.program.decisions.tick(now, self.config.start_timeout_seconds)
                if self.program.decisions.decides:
                    self.program.rings.tick(Timeouts(timeout))
            if self._members.by_trainer:
                self._close_if_over()
        if self.links is not None:  # not under the job's lock
            self.links.tick()

    @onlooker("the watch for stragglers")
    def _name_stragglers(self) -> None:
        for trainer, text in news(self._members.joined(), self.config.straggler_factor):
            self.log.log(f"straggler {trainer}", text)

    def paused(self) -> None:
        """Notes that this process has not run for a while."""
        with self.condition:
            self._members.waits.paused()

    def check_loads(self, member: Member, what: str) -> None:
        """Returns if a trainer may replace shared values: only :attr:`Membership.first` may, which
        is trainer 0 unless that one is absent.

        Raises:
            Refused: it may not.
        """
        if member.trainer != (first := self._members.first):
            raise Refused(
                f"only trainer {first} loads {what}, and this is trainer {member.trainer}"
            )

    # ---- trainers that are lost: see [Note: the job's log] ----

    def _silent(self, process: Process, text: str) -> None:
        if self.program is None or self.failure is not None:
            self._lose(process, text)
        else:
            self.program.decisions.silent(process, text)

    def _not_back(self, process: Process, timeout: float) -> None:
        """Loses, on server 0, a trainer that has not come back to this server since it was started
        again.
        """
        if self.program is not None and self.program.decisions.decides and self.failure is None:
            text = f"{process} has not come back to server 0 within {timeout:g} s"
            self.program.decisions.silent(process, text)

    def _lose(self, process: Process, text: str) -> None:
        """Handles the loss of a trainer: of one whose loss is in the log; also where nothing is
        installed, or the job has failed.  The caller holds the job's lock.
        """
        member = self._members.fence(process, text)
        if member is None:
            return
        streams = [each.end_stream for each in member.watermarks.values()]
        installed = self.program
        for lane in () if installed is None else installed.lanes:
            lane.drop(member)
        if installed is not None:
            installed.calls.drop(member)
        if installed is not None and (partial := installed.count_partial(member)):
            text += f"; {partial} steps of it are decided in lanes of one mode, and not of another"
        goes_on = bool(self._members.joined() or self._members.away)
        if installed is None or not installed.outlives_trainers or not goes_on:
            self.lifecycle.lose(TrainerLost(text))
        else:
            self._go_on_without(member, text, installed.plan.keeps_places)
        for end in streams:
            if end is not None:
                end()
        self.lifecycle.wake_all()

    def _go_on_without(self, member: Member, text: str, keeps_place: bool) -> None:
        """Continues the job; where steps need all trainers, it may keep the lost one's place for
        another process.  See [Note: kept places] in membership/members.py.
        """
        there = {*self._members.away, *(each.trainer for each in self._members.joined())}
        left = ", ".join(map(str, sorted(there)))
        said = f"{text}; its decided steps count, and the job goes on with trainer {left}"
        if keeps_place and not (member.finished or member.leaving):
            seconds = self.config.start_timeout_seconds
            self._members.reserved[member.trainer] = self._clock() + seconds
            said += f", after up to {seconds:g} s in which another process may take its place"
        self.log.log(f"lost {member.trainer}", said)

    def _expire(self, now: float) -> None:
        """Gives up kept places whose time is over."""
        for trainer in self._members.expire(now):
            self._say_empty(trainer, f"within {self.config.start_timeout_seconds:g} s")

    def _say_empty(self, trainer: int, when: str) -> None:
        """Logs that a place is no longer kept, and looks for steps that are complete without it.
        The caller holds the job's lock.
        """
        text = f"no process takes trainer {trainer}'s place {when}: the job goes on without it"
        self.log.log(f"empty {trainer}", text)
        if self.program is not None:
            self.program.decisions.changed()
        self.lifecycle.wake_all()

    def _check_missing(self, now: float) -> None:
        """Fails the job if a trainer will not join any more."""
        for trainer in self._members.not_joined():
            if trainer in self._members.away:
                continue  # it has joined before this server came back: see _not_back
            if (lost := self._lost(trainer, self._members.began)) is not None:
                self.lifecycle.lose(lost)
        start = self.config.start_timeout_seconds
        names = ", ".join(map(str, self._members.missing(now, start)))
        if names:
            self.lifecycle.lose(TrainerLost(f"trainer {names} has not joined within {start:g} s"))

    def shut_down(self) -> None:
        """Takes no new trainers and no new steps; notifies every trainer, those that wait at once
        and the others by their heartbeats.
        """
        with self.condition:
            if self.busy and self._members.unfinished():
                self.lifecycle.fail(Draining("the server is shutting down"))
            self.lifecycle.drain()

    def _lost(self, trainer: int, since: float) -> TrainerLost | None:
        """See :meth:`Announcements.lost`."""
        timeout = self.config.heartbeat_timeout_seconds
        return self._announcements.lost(trainer, since, self._clock(), timeout)

    # ---- after a failure: see [Note: kept values] in membership/lifecycle.py ----

    @property
    def kept_seconds(self) -> float:
        """The seconds for which a failed job's values are still kept from other jobs; 0: any may
        begin.
        """
        if self.lifecycle.state is not JobState.FAILED or self.program is None:
            return 0.0
        if not self.program.version:
            return 0.0
        since = self._clock() - self.lifecycle.failed_at
        return max(0.0, self.config.kept_failed_seconds - since)

    def _make_room(self, request: wire.JoinRequest) -> bool:
        """Whether a failed job has made room for the trainer that asks; False: it asks again later.

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

    # ---- joining: the first trainers, and those that take a place while others train ----

    def join(self, request: wire.JoinRequest) -> wire.JoinReply:
        """Answers a trainer that joins; it may have to ask again later.

        Raises:
            Refused: another protocol version, a trainer number that the plan does not have, no
                transport in common; or the job has begun, and admits no trainer any more.
            Busy: a running job has this trainer already, or a failed one's values are kept.
            FingerprintMismatch: the trainer runs another program; the message says in what it
                differs.
            PartialPlan: likewise; it may become the job's, with further optimizers.
            Draining: the server is shutting down.
            TrainerLost: trainer 0, which would begin the job, has ended; or this trainer, which
                was preempted, has left.
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
            with or_undone(undo):  # a job without a trainer has not begun
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
                roll=members.roll(self._members),
            )

    def _offer_to_reload(self, reload: Reload, request: wire.JoinRequest) -> wire.JoinReply:
        """Asks one of the joining trainers for the program of a server that has come back."""
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
        """Raises an error if trainer 0 will not join."""
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
        same = known is not None and known.incarnation == request.incarnation
        if known is not None and same and known.preempted_after is not None:
            raise TrainerLost(f"trainer {trainer} was preempted, and has left the job")
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
                f"trainer {trainer} has already joined the server's job; start another server for "
                "a second job"
            )
        under_way = self.program is not None and bool(self._members.joined())
        late = bool(self._members.least) and under_way  # the others may be far already
        try:
            self._identity.check(request, self._members.expected, late)
        except PartialPlan:
            raise  # it asks again when its script has made its other optimizers
        except FingerprintMismatch as error:
            self.log.log("refused", f"refused: {error}")
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
        """Whether the job continues without a lost trainer, and lets another process take its
        place.
        """
        return self.failure is None and self.program is not None and self.program.outlives_trainers

    def _join_again(self, request: wire.JoinRequest) -> Member | None:
        """Admits a trainer while others train: it begins at the step of the slowest one."""
        assert self.program is not None, "a trainer is lost alone where a program is installed"
        self._identity.check(request, self._members.expected, late=True)
        if not self.program.plan.lets_in_late:
            raise Refused(
                f"trainer {request.trainer_id} cannot join: a job whose trainers step several "
                "optimizers together does not admit trainers after training has started"
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
        """Whether a process can step together with the others now.  It waits as long as they divide
        the samples of its number among themselves.  None is admitted when all others have finished:
        they may be leaving the other servers already.
        """
        assert self.program is not None, "others train"
        if not self._members.unfinished():
            return False
        admitted = self.program.leases.let_in(process.trainer, self.program.lanes[0].unapplied)
        if admitted:
            self._members.held.discard(process)
            return True
        missing = partial(self._held_by, process.trainer)
        with self._members.waits.held(process.trainer, WaitKind.JOIN, "the end of a pass", missing):
            pass  # it asks again soon
        if process not in self._members.held:
            self._members.held.add(process)
            text = "the others divide its samples of this epoch; it steps with them after that"
            self.log.log(f"held {process.trainer}", f"trainer {process.trainer} waits: {text}")
        return False

    def _held_by(self, trainer: int) -> list[int]:
        """The trainers that divide the samples of this number among themselves."""
        return [each for each in self._members.unfinished() if each != trainer]

    def _add(self, request: wire.JoinRequest, steps: Sequence[int] = ()) -> Member:
        trainer = request.trainer_id
        transport = choose_transport(request, self.transports)
        member = Member(trainer, request.incarnation, transport, self._clock())
        begun = self.program is not None and (
            not self._members.least or self.program.training_started
        )
        again = self._members.away.get(trainer) == process_of(member)
        self._members.add(member, steps, bool(steps) and begun and not again)
        self._coordinator = request.coordinator or self._coordinator
        if self.program is not None:
            self.program.decisions.join(process_of(member), steps)
        self._announcements.joined(trainer, request.incarnation)
        self.log.log(
            f"joined {trainer}", f"trainer {trainer} joined over {transport}", logging.INFO
        )
        self.lifecycle.wake_all()
        return member

    # ---- membership: Reset, Announce, Heartbeat, Finish, Leave, and the clock's tick ----

    def reset(self, request: wire.ResetRequest) -> wire.ResetReply:
        """Drops the values of a failed job.

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
                self.log.log("reset", "reset: what the job has left is dropped", logging.INFO)
                self._reset()
            self.lifecycle.wake_all()
            return wire.ResetReply(state=state)

    # ---- announcements and leaving ----

    def announce(self, request: wire.AnnounceRequest) -> wire.AnnounceReply:
        """Takes the announcement of a trainer that will join, or the reason why it will not.

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
                    if request.unreplaced and self._members.reserved.pop(trainer, None) is not None:
                        self._say_empty(trainer, "again")
            elif request.joined:
                self._announcements.joined(trainer, incarnation)
            elif not any(member.incarnation == incarnation for member in self._members.joined()):
                most = ANNOUNCED_FOR_EACH * limits.trainers
                if self._announcements.announce(trainer, incarnation, self._clock(), most):
                    said = f"trainer {trainer} is on its way"
                    self.log.log(f"starting {trainer}", said, logging.INFO)
            timeout = self.config.heartbeat_timeout_seconds
            return wire.AnnounceReply(heartbeat_timeout_seconds=timeout)

    def _ended(self, member: Member, reason: str) -> None:
        """Handles the end of a trainer's process, which its launcher reports: the trainer is lost,
        unless it has left; one that takes no further step has done its part, and counts as having
        left.  The caller holds the job's lock.
        """
        if member.state is MemberState.JOINED and member.finished:
            self._end_membership(member, "")
        elif member.state is MemberState.JOINED:
            doing = member.waiting or member.activity
            seen = f", last known activity: {doing}" if doing else ""
            self._silent(process_of(member), f"trainer {member.trainer} has ended: {reason}{seen}")

    def heartbeat(self, request: wire.HeartbeatRequest) -> wire.HeartbeatReply:
        """A heartbeat; the reply says whether the job still runs."""
        with self.condition:
            member = self.member(request.session)
            self._hear_report(member, request)
            asked = 0 if self.program is None else self.program.meetings.asks(member)
            tells = self.program is not None and self.program.decisions.decides
            waits = self._members.waits.long(member.trainer) if tells else ()
            return heartbeat_reply(self.failure, self._members, asked, waits)

    @onlooker("what trainers report")
    def _hear_report(self, member: Member, request: wire.HeartbeatRequest) -> None:
        member.activity, member.report = bounded_report(request, self.config.limits)
        member.pace.record(member.report)
        more = member.report.wrong_lines - member.wrong_lines
        if more > 0 and self.program is not None:
            member.wrong_lines += more
            self.program.steps.trainers.count(member.trainer, "wrong_lines", more)

    def roll(self) -> wire.Roll:
        """The roll of the trainers, for a reply."""
        with self.condition:
            return roll(self._members)

    def finish(self, request: wire.FinishRequest) -> wire.FinishReply:
        """Notes that a trainer takes no further step; it may wait up to a second until all have
        finished.

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
            end = time.monotonic() + (timeouts.LONG_POLL_SECONDS if request.wait else 0.0)
            waits = members.waits.held(
                member.trainer, WaitKind.END, "the job's end", members.unfinished
            )
            with waits as held:
                self.lifecycle.wait(self.lifecycle.changed, lambda: not members.unfinished(), end)
                held.over = not (request.wait and members.unfinished())
            missing = members.unfinished()
            if missing:
                self.lifecycle.check_running()
            return wire.FinishReply(over=not missing, missing=missing)

    def leave(self, request: wire.LeaveRequest) -> wire.LeaveReply:
        """Ends a trainer's membership: it has done its part, or was preempted between two steps; or
        it has failed, and then the job fails for all.
        """
        with self.condition:
            member = self.member(request.session)
            before = self.failure
            reason = self.config.limits.short(request.failure)
            if not reason and not request.success:
                reason = "it left without reporting that it had finished"
            member.returns = request.returns and not reason
            if request.preempted and not reason:
                self._members.preempt(member, request.step)
            self._end_membership(member, reason)
            if before is None:
                return wire.LeaveReply()
            return wire.LeaveReply(failure=str(before), error=type(before).__name__)

    def _end_membership(self, member: Member, reason: str) -> None:
        """Ends a membership; with a reason the job fails.  The caller holds the job's lock."""
        if member.state is not MemberState.JOINED:
            return
        member.state = MemberState.LEFT
        self._members.waits.drop(member.trainer)
        level = logging.INFO if member.preempted_after is None else logging.WARNING
        self.log.log(f"left {member.trainer}", member.goodbye(reason), level)
        if reason:
            self.lifecycle.fail(JobFailed(f"trainer {member.trainer} ended the job: {reason}"))
        if self.program is not None and self.failure is None:
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
            UnknownSession: no trainer holds it.
            TrainerLost: it was lost, and the job continues without it.
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

    # ---- files of the job: Save and Load ----

    def _record(self, installed: InstalledProgram) -> None:
        """Records the job's log, where the server's settings ask for it."""
        if self.config.record_log is not None:
            self.recorders = [each for each in self.recorders if not each.wait(0.0)]
            recorder = Recorder(self.config.record_log, self._identity.server_index, self.log)
            self.recorders.append(recorder)
            installed.recording.begin(recorder, installed.program.to_proto())

    def end_recording(self, seconds: float) -> bool:
        """Ends the recording; waits until all is written.

        Returns:
            Whether it is.
        """
        end = time.monotonic() + seconds
        for recorder in self.recorders:
            recorder.close()
        return all([each.wait(max(0.0, end - time.monotonic())) for each in self.recorders])

    def installed(self) -> InstalledProgram:
        """The present job's program.

        Raises:
            UnknownSession: this server has come back, and no trainer has joined it again.
            Unprepared: no program has been installed.
            PServerError: what has ended the job before one was.
        """
        if self.program is None and self.failure is not None:
            raise self.failure
        if self.program is None and self.reload is not None:
            raise UnknownSession("this server has come back, and knows no session yet: join first")
        if self.program is None:
            raise Unprepared("the server has not been installed yet")
        return self.program

    def save(self, request: wire.SaveRequest) -> wire.SaveReply:
        """Writes everything held here, atomically, below the server's data directory or store; or
        begins, reports or withdraws a save in the background.
        """
        member = self.member(request.session)
        installed = self.installed()
        if request.withdraw:
            with self.condition:
                installed.calls.withdraw(member, SAVE, request.number)
            return wire.SaveReply()
        path = self._directory(request.path)
        if request.background:
            return self._save_in_background(request, member, installed, path)
        if request.base or request.number:
            raise Refused("a save that has a number or a base is one in the background")
        began = now()
        try:
            job_files.save(path, installed, self._members)
        finally:
            installed.steps.saved(now() - began)
        self.lifecycle.events.add("saved", f"saved to {shown(path)}")
        return wire.SaveReply(file=shown(path), bytes=installed.slices.bytes_held, done=True)

    def _save_in_background(
        self, request: wire.SaveRequest, member: Member, installed: InstalledProgram, path: str
    ) -> wire.SaveReply:
        base = self._directory(request.base) if request.base else ""

        def begin() -> job_files.Saving:
            saving = job_files.Saving(path, installed, self._members, base, continues=True)
            with or_undone(saving.close):
                cut = installed.calls.carry_out(member, SAVE, request.number, saving.cut)
                if cut is None:
                    raise Refused("this save began before the server came back")
            return saving

        progress = self.saves.begin(
            request.session,
            request.number,
            path,
            begin,
            installed.steps.saved,
        )
        return wire.SaveReply(
            file=shown(path),
            bytes=progress.bytes,
            done=progress.done,
            failure=progress.failure,
            seconds=progress.seconds,
            pause_seconds=progress.pause_seconds,
            identity=progress.identity,
        )

    def load(self, request: wire.LoadRequest) -> wire.LoadReply:
        """Reads the files of :meth:`save`, for the same plan."""
        self.member(request.session)
        path, root = self._directory(request.path), self._root
        job_files.load(path, self.installed(), self._members, root)
        with self.condition:
            self.installed().decisions.loaded()
        self.lifecycle.events.add("loaded", f"loaded from {shown(path)}")
        return wire.LoadReply(file=shown(path), bytes=self.installed().slices.bytes_held)

    @property
    def _root(self) -> str:
        """The root of this server's files."""
        if self.config.store is not None:
            return self.config.store
        return str(Path(str(self.config.data_dir)).resolve())

    def _directory(self, path: str) -> str:
        index = self._identity.server_index
        return job_files.directory(self.config.data_dir, path, index, self.config.store)

    # ---- a server that was lost comes back: it reads a save, and follows server 0 again ----

    def _has_installed(self, request: wire.InstallRequest) -> bool:
        """Whether a call arrived late, at a server that has come back and serves by now."""
        return self.reload is not None and self.reload.done and self.reload.asks(request.session)

    def _check_installs(self, request: wire.InstallRequest) -> Reload | None:
        """Checks that a trainer may install; returns the reload of a server that comes back.

        Raises:
            Refused: another trainer, or it is not the time for it.
            PServerError: what has ended the job meanwhile.
        """
        reload = None if self.reload is None or self.reload.done else self.reload
        if reload is not None:
            reload.check(request.session)
        installs = reload is not None or self.member(request.session).trainer == 0
        if self.failure is not None:
            raise self.failure
        if not installs or self.lifecycle.state is not JobState.INSTALLING:
            raise Refused("only trainer 0 installs, and only a server that is not yet installed")
        return reload

    def _read_save(self, reload: Reload, installed: InstalledProgram) -> bool:
        """Restores a program's values from this server's save.

        Returns:
            Whether this was the first call.

        Raises:
            Refused, FingerprintMismatch: the save is of another program, or is torn; the server
                ends.
        """
        with self.condition:
            first, reload.began = not reload.began, True
            if first:
                self._record(installed)
        if not first:
            return False
        try:
            job_files.load(reload.path, installed, self._members, _root(reload.path))
            reload.read(manifest.read(place_at(reload.path)).meta)
        except PServerError as error:
            self._cannot(error)
        except Exception as error:  # it has begun, so no other trainer brings the program
            self._cannot(Refused(f"the save at {shown(reload.path)}: {error!r}"))
        return True

    def _write_ahead(self, installed: InstalledProgram) -> None:
        """Begins the file of server 0's own state, where it may come back; restores what the
        process before it has written.  The caller holds the job's lock.
        """
        decisions, path = installed.decisions, self.config.write_ahead_log
        if path is None or not (decisions.awaits and decisions.decides):
            return
        self._coordination = coordination = Coordination(path, installed, self.condition)
        if self.reload is not None:
            try:
                coordination.restore()
            except Exception as error:  # whatever it holds
                self._cannot(Refused(f"the log that server 0 has written: {error!r}"))
            decisions.came_back()
        coordination.begin()

    def _write_nothing(self) -> None:
        """The job is over."""
        if self._coordination is not None:
            self._coordination.close()
        self._coordination = None

    def _goes_on_as_it_was(self, installed: InstalledProgram) -> None:
        """Resumes a server that has come back: its link asks server 0 for the state of the log;
        server 0 itself has that from its own file.
        """
        decisions = installed.decisions
        if decisions.coordinator is not None and self.reload is not None and not self.reload.done:
            if self._coordination is None:
                self._cannot(Refused("server 0 has written no log from which it could come back"))
            self._stands(decisions.coordinator.snapshot(0))
        decisions.link()

    def _cannot(self, error: PServerError) -> NoReturn:
        """Ends a server that cannot come back."""
        self.lifecycle.fail(error)
        self.ended.set()
        raise error

    def _stands(self, snapshot: LogSnapshot) -> None:
        """Takes the state of the log from server 0: this server serves from now on.  The caller
        holds the job's lock.
        """
        reload, installed = self.reload, self.program
        assert reload is not None and installed is not None, "a server that comes back"
        if reload.lacks_load(snapshot):
            text = f"{shown(reload.path)} was saved before the job loaded other values"
            self.lifecycle.fail(Refused(f"{text}: the whole job goes on from a checkpoint"))
            self.ended.set()
            return
        found = reload.stands(snapshot)
        installed.lost = reload.lost
        installed.recording.stands(snapshot)
        for lane in installed.lanes:
            lane.record = snapshot.last
        self._take_part(snapshot)
        self.lifecycle.state = JobState.SERVING
        self.log.log("reloaded", _said(reload.path, found))
        self.lifecycle.wake_all()

    def _take_part(self, snapshot: LogSnapshot) -> None:
        """The trainers of the job, as server 0 knows them."""
        members, installed = self._members, self.program
        assert installed is not None, "it has begun its log"
        members.since = self._clock()
        members.changes = snapshot.last + len(snapshot.processes)  # more than any trainer has seen
        for each in snapshot.processes:
            process = each.process
            installed.calls.stands(process, each.calls)
            members.counted[process] = list(map(Applied, each.decided, each.rows))
            members.by_trainer.pop(process.trainer, None)  # an earlier process's place
            if each.lost:
                members.fence(process, each.lost)
                continue
            members.away[process.trainer] = process
            if each.left:
                members.leave(process, each.preempted_after)
            else:
                installed.decisions.joined[process] = each.decided

    # ---- calls of trainers about one another: meetings, samples ----

    def meet(self, request: wire.MeetRequest) -> wire.MeetReply:
        """Answers a trainer at the meeting place of the job's trainers; waits a second at most."""
        check_names([request.key], self.config.limits)
        return self.installed().meetings.meet(self.member(request.session), request)

    def lease(self, request: wire.LeaseRequest) -> wire.LeaseReply:
        """Gives a trainer samples to train on, and takes back those that it does not use."""
        check_names([request.epoch.loader, request.epoch.seed], self.config.limits)
        return self.installed().leases.lease(self.member(request.session), request)
