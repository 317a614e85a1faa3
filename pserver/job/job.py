"""The one job that a server has at a time: from the first Join to the last Leave.

::

    EMPTY --trainer 0 joins--> INSTALLING --its values have arrived--> SERVING --all have left--> EMPTY
                                    `--------------- failure ------------> FAILED --all are gone--> EMPTY

Every control call and every stream of every trainer ends in a method of :class:`Job`, in a thread
of its caller's.

[Note: the job's lock]  ``changed`` (a condition over a re-entrant lock) guards the bookkeeping of
this file, ``membership.py``, ``blocking_waits.py``, ``installed_program.py`` and ``lane.py``: state, members,
rounds.  It is held for bookkeeping only: never while tensors are merged, updated or copied, and
never while anything is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

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
from pserver.job.installed_program import InstalledProgram
from pserver.job.lane import Outcome
from pserver.job.membership import Member, Membership, State
from pserver.job.status_report import held_report, shrink, trainer_reports
from pserver.transport.byte_counters import ByteCounters
from transpiler.ir.graph import Storage
from transpiler.plan.plan import differences
from transpiler.program import Program
from transpiler.verify.untrusted_program import check_server_program

PROTOCOL = 1

log = logging.getLogger(__name__)


class Job:
    """See the module's docstring.

    Args:
        config: the server's.
        transports: that the server listens on, by name, with the port of each.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        config: ServerConfig,
        transports: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.transports = dict(transports)
        self.ended = threading.Event()  # a job has ended here, by leaving or by failure
        self.failure: PServerError | None = None  # of the present job, or of the last one
        self.bytes_in = 0
        self.bytes_out = 0
        self._clock = clock
        self._started = clock()
        self.changed = threading.Condition(threading.RLock())
        self._preset: tuple[Program, Storage] | None = None
        self._draining = False
        self._reset()

    def _reset(self) -> None:
        """Back to EMPTY (or to the program that was given at start-up)."""
        self.state = "empty"
        self.traffic = ByteCounters()
        self.installation: InstalledProgram | None = None
        self._server_index = 0
        self._manifest: Mapping[str, str] = {}
        self._fingerprint = ""
        self._members = Membership(1, self._clock())
        if self._preset is not None:
            self._serve(*self._preset)

    # ---- the life of a job ----

    def preset(self, program: Program, values: Storage) -> None:
        """Installs a program without a trainer: from a file, or in a script whose role is
        PSERVER.
        """
        with self.changed:
            self._preset = (program, values)
            self._serve(program, values)

    def _serve(self, program: Program, values: Storage) -> None:
        self._members = Membership(
            program.deployment.plan.trainers if program.deployment else 1, self._clock()
        )
        installation = self.installation = self._made(program)
        installation.begin_with(values)
        self._manifest, self._fingerprint = (
            installation.plan.manifest(),
            installation.plan.fingerprint(),
        )
        self.state = "serving"

    def _made(self, program: Program) -> InstalledProgram:
        """An installation of a program, after all checks."""
        if program.deployment is None or program.deployment.server_index is None:
            raise Refused(
                "expected a pserver program with its deployment, got a single-node or a trainer "
                "program"
            )
        try:
            check_server_program(program)
        except ValueError as error:
            raise Refused(f"the program is refused: {error}") from error
        self._server_index = program.deployment.server_index
        return InstalledProgram(
            program.deployment.plan, program, self._members, self, self.config.data_dir
        )

    def join(self, request: wire.JoinRequest) -> wire.JoinReply:
        """A trainer comes.  See protos/pserver/wire.proto for the order of calls.

        Raises:
            Refused: another protocol version, a trainer number that the plan does not have, no
                transport in common.
            Busy: a running job has this trainer already.
            FingerprintMismatch: the trainer runs another program; the message says in what it
                differs.
        """
        with self.changed:
            if self._draining:
                raise Draining("the server is shutting down")
            if request.protocol != PROTOCOL:
                raise Refused(
                    f"expected protocol version {PROTOCOL}, got {request.protocol}: install one "
                    "version everywhere"
                )
            if self.state == "failed" or (request.trainer_id == 0 and self._deserted()):
                if self._members.joined():
                    # those of the failed job leave, or are lost within the deadline
                    return wire.JoinReply(ready=False)
                self._reset()
            if self.state == "empty":
                if request.trainer_id != 0:
                    return wire.JoinReply(ready=False)
                self._begin(request)
            member = self._admit(request)
            if member is None:
                return wire.JoinReply(ready=False)
            return wire.JoinReply(
                ready=True,
                install=request.trainer_id == 0 and self.state == "installing",
                transport=member.transport,
                data_port=self.transports[member.transport],
                heartbeat_timeout_seconds=self.config.heartbeat_timeout_seconds,
                steps=[member.step(lane) for lane in range(len(self.installation.lanes))]
                if self.installation
                else [],
                session=member.session,
            )

    def _deserted(self) -> bool:
        """A job whose present trainers have all left, but not all expected ones ever came."""
        return bool(self._members.by_trainer) and not self._members.joined()

    def _begin(self, request: wire.JoinRequest) -> None:
        try:
            trainers = int(request.manifest["trainers"])
        except (KeyError, ValueError):
            raise Refused("the manifest does not say the number of trainers") from None
        self._manifest, self._fingerprint = dict(request.manifest), request.fingerprint
        self._members = Membership(trainers, self._clock())
        self._server_index = request.server_index
        self.failure = None
        self.ended.clear()
        self.state = "installing"

    def _admit(self, request: wire.JoinRequest) -> Member | None:
        """The member, new or known; None where it should ask again later."""
        trainer = request.trainer_id
        known = self._members.by_trainer.get(trainer)
        if (
            known is not None
            and known.incarnation == request.incarnation
            and known.state is State.JOINED
        ):
            # it asks again where the first choice did not work
            known.transport = self._transport(request)
            return known
        if any(member.state is State.LEFT for member in self._members.by_trainer.values()) and (
            known is not None or request.fingerprint != self._fingerprint
        ):
            return None  # the present job is ending; a new one begins when everybody has left
        if known is not None:
            raise Busy(
                f"trainer {trainer} takes part in the server's job already; start another server "
                "for a second job"
            )
        if request.fingerprint != self._fingerprint:
            if trainer == 0:
                raise Busy(
                    "the server has a job with another program; start another server for a second "
                    "job"
                )
            other = differences(request.manifest, self._manifest, "trainer 0")
            log.warning("refused trainer %d, which runs another program: %s", trainer, other)
            raise FingerprintMismatch(
                f"trainer {trainer} runs another program than trainer 0: {other}"
            )
        if trainer >= self._members.expected:
            raise Refused(
                f"expected a trainer number below {self._members.expected}, got {trainer}"
            )
        if request.server_index != self._server_index:
            raise Refused(
                f"this server holds part {self._server_index} of the program, trainer {trainer} "
                "takes it for part "
                f"{request.server_index}: give every process the endpoints in the same order"
            )
        if self.state == "installing" and trainer != 0:
            return None
        transport = self._transport(request)
        member = Member(trainer, request.incarnation, transport, self._clock())
        self._members.add(member)
        log.info("trainer %d joined over %s", trainer, transport)
        self.changed.notify_all()
        return member

    def _transport(self, request: wire.JoinRequest) -> str:
        transport = next((name for name in request.transports if name in self.transports), None)
        if transport is None:
            raise Refused(
                f"no transport in common: the server has {sorted(self.transports)}, the trainer "
                f"{list(request.transports)}"
            )
        return transport

    def install(self, request: wire.InstallRequest) -> wire.InstallReply:
        """Takes trainer 0's program; its values follow on the stream.

        Raises:
            Refused: not trainer 0, not the time for it, an op that is not on the allow-list, an
                argument of a wrong type.
            FingerprintMismatch: the program was made for another plan than the one it joined with.
        """
        member = self.member(request.session)
        if member.trainer != 0 or self.state != "installing":
            raise Refused("only trainer 0 installs, and only a server that is not yet installed")
        try:
            program = Program.from_proto(request.program)
        except ValueError as error:
            raise Refused(f"the program is refused: {error}") from error
        if program.deployment is None or program.deployment.plan.fingerprint() != self._fingerprint:
            raise FingerprintMismatch(
                "the program was made for another plan than the one that trainer 0 joined with"
            )
        installation = self._made(program)  # checking and making may take long: not under the lock
        # a call that came twice may end twice, and values may have arrived since the first time
        with self.changed:
            self.installation = self.installation or installation
        return wire.InstallReply()

    def loaded(self, member: Member) -> Outcome:
        """All values that trainer 0 wanted to send have arrived (COMMIT with step 0): they count
        from here on.
        """
        if member.trainer != 0:
            raise Refused(f"only trainer 0 loads values, and this is trainer {member.trainer}")
        with self.changed:
            table = self.installed().table
            table.loaded()
            self.installed().forget()
            if self.state == "installing":
                self.state = "serving"
                log.info("installed: %d slices, %d bytes", len(table.values), table.bytes_held)
            self.changed.notify_all()
            return Outcome(self.installed().version, 0)

    def installed(self) -> InstalledProgram:
        """What the present job has installed.

        Raises:
            Unprepared: no program has been installed.
        """
        if self.installation is None:
            raise Unprepared("the server has not been installed yet")
        return self.installation

    def heartbeat(self, request: wire.HeartbeatRequest) -> wire.HeartbeatReply:
        """A sign of life; the reply says whether the job still stands."""
        with self.changed:
            member = self.member(request.session)
            member.activity = request.activity
            if self.failure is None:
                return wire.HeartbeatReply()
            return wire.HeartbeatReply(failure=str(self.failure), error=type(self.failure).__name__)

    def leave(self, request: wire.LeaveRequest) -> wire.LeaveReply:
        """A trainer goes, having finished, or because it failed: then the job fails for
        everybody.
        """
        with self.changed:
            member = self.member(request.session)
            if member.state is not State.JOINED:
                return wire.LeaveReply()
            member.state = State.LEFT
            log.info(
                "trainer %d left%s",
                member.trainer,
                f": {request.failure}" if request.failure else "",
            )
            if request.failure:
                self.fail(JobFailed(f"trainer {member.trainer} ended the job: {request.failure}"))
            self._close_if_over()
            self.changed.notify_all()
            return wire.LeaveReply()

    def _close_if_over(self) -> None:
        gone = not self._members.joined()
        if (self.failure is not None and gone) or self._members.over:
            if self.failure is None:
                log.info(
                    "the job is done after %d updates",
                    self.installation.version if self.installation else 0,
                )
                self._reset()
            self.ended.set()

    def fail(self, error: PServerError) -> None:
        """Ends the job for everybody: whoever waits, or asks next, is told why."""
        with self.changed:
            if self.failure is None and self.state not in ("empty",):
                self.failure = error
                self.state = "failed"
                log.error("the job failed: %s", error)
            self.changed.notify_all()

    def tick(self) -> None:
        """Looks for trainers that have fallen silent.

        Called a few times a second by the server's main loop.
        """
        with self.changed:
            now, deadline = self._clock(), self.config.heartbeat_timeout_seconds
            for member in self._members.silent(now, deadline):
                member.state = State.LOST
                waiting = (
                    f", last seen at {member.waiting or member.activity}"
                    if member.waiting or member.activity
                    else ""
                )
                self.fail(
                    TrainerLost(
                        f"trainer {member.trainer} has shown no heartbeat for "
                        f"{now - member.heard:.1f} s "
                        f"(deadline {deadline:g} s){waiting}"
                    )
                )
                self._close_if_over()
            late = self._members.missing(now, self.config.start_timeout_seconds)
            if late and self._members.joined():
                names = ", ".join(map(str, late))
                self.fail(
                    TrainerLost(
                        f"trainer {names} has not joined within "
                        f"{self.config.start_timeout_seconds:g} s"
                    )
                )
            elif late and self._deserted():
                log.warning(
                    "the job ends: trainer %s never joined, and the others have left",
                    ", ".join(map(str, late)),
                )
                self._reset()
                self.ended.set()

    # ---- for steps and streams ----

    def member(self, session: str) -> Member:
        """The trainer that holds a session; the call counts as a sign of life.

        Raises:
            Refused: nobody holds it.
        """
        with self.changed:
            member = self._members.of_session(session)
            member.heard = self._clock()
            return member

    def now(self) -> float:
        """The job's clock, in seconds."""
        return self._clock()

    def check_standing(self) -> None:
        """Raises what ended the job, if something did."""
        if self.failure is not None:
            raise self.failure
        if self._draining:
            raise Draining("the server is shutting down")

    def barrier(self, request: wire.BarrierRequest) -> wire.BarrierReply:
        """Waits up to a second until every trainer that has not left has come to the barrier of
        this name.
        """
        return wire.BarrierReply(
            passed=self.installed().barrier(self.member(request.session), request.name, 1.0)
        )

    def rendezvous(self, request: wire.RendezvousRequest) -> wire.RendezvousReply:
        """Where trainers meet: trainer 0 says it, the others ask."""
        return wire.RendezvousReply(
            address=self.installed().rendezvous(self.member(request.session), request.address)
        )

    # ---- operators ----

    def save(self, request: wire.SaveRequest) -> wire.SaveReply:
        """Writes everything held here, atomically, below the server's data directory."""
        self.member(request.session)
        path = job_files.save(
            job_files.directory(self.config.data_dir, request.path, self._server_index),
            self.installed(),
            self._members,
        )
        return wire.SaveReply(file=str(path), bytes=self.installed().table.bytes_held)

    def load(self, request: wire.LoadRequest) -> wire.LoadReply:
        """Reads what :meth:`save` wrote, for the same plan."""
        self.member(request.session)
        path = job_files.load(
            job_files.directory(self.config.data_dir, request.path, self._server_index),
            self.installed(),
            self._members,
        )
        return wire.LoadReply(file=str(path), bytes=self.installed().table.bytes_held)

    def shrink(self, request: wire.ShrinkRequest) -> wire.ShrinkReply:
        """Days pass for the tables' rows.  Asked once by one trainer, while nobody steps."""
        self.member(request.session)
        return shrink(self.installed(), request)

    def status(self, request: wire.StatusRequest) -> wire.StatusReply:
        """What an operator sees."""
        with self.changed:
            reply = wire.StatusReply(
                state="draining" if self._draining else self.state,
                fingerprint=self._fingerprint,
                uptime_seconds=self._clock() - self._started,
                bytes_in=self.bytes_in,
                bytes_out=self.bytes_out,
                transports=sorted(self.transports),
                failure=str(self.failure or ""),
                trainers=trainer_reports(self._members, self._clock()),
            )
            installed = self.installation
        if installed is not None:  # its tables take their own locks
            reply.MergeFrom(held_report(installed))
            if request.variables:
                self.traffic.report(installed.plan, reply)
        return reply

    def drain(self, request: wire.DrainRequest) -> wire.DrainReply:
        """Takes no new trainers and no new steps; whoever waits is told."""
        self.close()
        return wire.DrainReply()

    def close(self) -> None:
        """The server is shutting down."""
        with self.changed:
            self._draining = True
            self.changed.notify_all()
            self.ended.set()

    @property
    def busy(self) -> bool:
        """Whether trainers take part in a job now."""
        return bool(self._members.joined())
