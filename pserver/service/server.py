"""The process of one parameter server: its transports, its job, signals, and a graceful end.

::

    bind control port --> listen on the transports --> ready line --> tick, tick, ...
                                                                            |
                          exit <-- drain <-- SIGTERM, SIGINT, Drain, or the end of the job (once)

[Note: draining]  In this order, within the grace: health checks report it; the job takes no new
trainer and no new step; waiting trainers are notified; answers under way are sent to their end;
each stream gets a DRAIN frame; streams that are still open are cancelled; a save that is being
written is waited for; the control service ends last, so that trainers can still ask for the reason
and leave.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType

import torch

from pserver import timeouts
from pserver.config import ServerConfig, is_loopback, metrics_place, split_endpoint
from pserver.control.control_server import ControlServer
from pserver.errors import Draining, PServerError, UnknownSession
from pserver.job import job_files
from pserver.job.job import Job
from pserver.job_log.follower import FollowerLink
from pserver.job_log.leader import CoordinatorLinks
from pserver.membership.decisions import Decisions, Link
from pserver.running_clock import RUNNING
from pserver.security.access import Access
from pserver.service.handler import DrainingStreams, handle
from pserver.service.server_metrics import ServerMetrics
from pserver.service.streams import WorkingStreams
from pserver.telemetry.logs import JSON_LINES, announce
from pserver.telemetry.memory import keep_memory
from pserver.telemetry.metrics import Exposition
from pserver.transport import shm, tcp
from pserver.transport.endpoint import spell
from pserver.transport.grpc_stream import Exchanges
from pserver.transport.stream import Listener, SequencedStream, Stream
from pserver.wire_pb2 import FollowRequest, Hello
from transpiler.ir.graph import Storage
from transpiler.plan.plan import Deployment
from transpiler.program import Program

# ---- server links ----
#
# A server's link to the other servers of its job: server 0 accepts, the others dial.


class Followers:
    """The coordinator's end for one job: its messages go to all other servers."""

    def __init__(self, links: CoordinatorLinks) -> None:
        self._links = links

    def send(self, data: bytes) -> None:
        """Sends a message to all of them; returns at once."""
        self._links.broadcast(data)

    def close(self) -> None:
        """Ends the links: the job is over."""
        self._links.close()


class ServerLinks:
    """Connects the servers of each job that this one has.  Any thread may call it.

    Args:
        config: for the timeouts.
        access: what this server proves to another, and asks of it.
    """

    def __init__(self, config: ServerConfig, access: Access) -> None:
        self._config, self._access = config, access
        self._links: CoordinatorLinks | None = None

    def connect(self, deployment: Deployment, decisions: Decisions, coordinator: str) -> Link:
        """Begins the links of a job: server 0 expects the others from now on; another one dials
        server 0.

        Args:
            deployment: of a job of several servers.
            decisions: receives messages, and the end of a link.
            coordinator: server 0's control endpoint.
        """
        config, plan, index = self._config, deployment.plan, deployment.server_index
        assert index is not None, "a server's deployment"
        timeout = config.heartbeat_timeout_seconds
        if index == 0:

            def joined(server: int, last: int | None) -> None:
                decisions.server_returned(server, partial(links.send, server), last)

            links = self._links = CoordinatorLinks(
                decisions.received,
                decisions.server_lost,
                joined=joined,
                heartbeat_timeout_seconds=timeout,
            )
            links.expect(plan.fingerprint(), plan.servers, bool(decisions.away))
            return Followers(links)
        return FollowerLink(
            coordinator,
            index,
            plan.fingerprint(),
            self._access,
            partial(decisions.received, 0),
            decisions.cut,
            last=decisions.last if decisions.resumes else None,
            returns=decisions.awaits,
            heartbeat_timeout_seconds=timeout,
            start_timeout_seconds=config.start_timeout_seconds,
        )

    def follow(self, request: FollowRequest) -> str:
        """The session of a server that wants to follow; "" while there is no job to follow.

        Raises:
            FingerprintMismatch: it runs another program.
            Refused: the plan has no such server that follows.
        """
        return "" if self._links is None else self._links.follow(request)

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        """Serves a following server's stream until it ends.

        Raises:
            UnknownSession: this server coordinates no job.
            PServerError: the error that the peer is to be sent.
        """
        if self._links is None:
            raise UnknownSession("this server coordinates no job now")
        self._links.serve(stream, hello)

    def tick(self) -> None:
        """Loses silent servers; the server's clock calls it a few times a second."""
        if self._links is not None:
            self._links.tick()


# ---- server ----


log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
IDLE_GRACE_SECONDS = 0.5  # without a live trainer
AWAITED_GRACE_SECONDS = 1.5  # where trainers announce themselves, each second: they learn of it
GOODBYE_SECONDS = 2.0  # for trainers to leave, when their streams have ended


class Server:
    """One parameter server in this process, with threads of its own.

    ``pserver serve`` runs one; scripts whose role is PSERVER and tests start their own.  It is a
    context manager that starts and stops the server::

        with Server(ServerConfig(endpoint="127.0.0.1:0")) as server:
            print(server.endpoint)  # 127.0.0.1:40123

    Args:
        config: see :class:`~pserver.config.ServerConfig`.  Only :func:`serve` and
            :func:`serve_job` end after the first job (``once``), and set ``threads``.
        program: a pserver program whose storage holds its values, so that the server does not wait
            for trainer 0.  None: the server reads ``config.program``, or trainer 0 installs one.

    Attributes:
        endpoint: HOST:PORT of the control service, from :meth:`start` on.
        job: the server's job, from :meth:`start` on.
    """

    def __init__(self, config: ServerConfig, program: Program | None = None) -> None:
        self.config = config
        self.endpoint = ""
        self.job: Job
        self._program = program
        self._stopping = threading.Event()
        self._streams = DrainingStreams(self._serve_stream, config.limits)
        self._transports: list[Listener | Exchanges] = []
        self._metrics: Exposition | None = None
        self._ready = threading.Event()
        self._working = WorkingStreams()
        self._clock = threading.Thread(target=self._tick, name="pserver clock", daemon=True)
        self._probes = threading.Thread(
            target=self._working.probe_until, args=(self._stopping,), name="probes", daemon=True
        )

    def start(self) -> str:
        """Starts to serve.

        Returns:
            HOST:PORT of the control service.

        Raises:
            OSError: it cannot listen there, or cannot read ``config.program``.
            ValueError, Refused: the program is not one that a server runs; or the token file is not
                an operator's.
        """
        warm_up()
        program = self._program
        if program is None and self.config.program is not None:
            program = Program.load(self.config.program)
        if self.config.data_dir is not None or self.config.store is not None:
            job_files.check_place(self.config.data_dir, self.config.store)
        if self.config.record_log is not None:
            job_files.check_folder("record_log", self.config.record_log)
        host, port = split_endpoint(self.config.endpoint)
        access = self._access = Access.of(self.config.token_file, self.config.keys, "server")
        limits, insecure = self.config.limits, self.config.insecure
        self._control = ControlServer(host, port, access, limits, insecure)
        self.endpoint = spell(host, self._control.port)
        try:
            self._open(host, program)
        except BaseException:
            self._close_transports(0.0)
            self._control.stop(0.0)
            raise
        if self.config.keys is None:
            _warn_if_open(host, self.endpoint)
        return self.endpoint

    def _open(self, host: str, program: Program | None) -> None:
        ports: dict[str, int] = {}
        exchanges = None
        # shared memory has no checksums: where all are asked for, it is not offered
        if self.config.transport in ("auto", "shm") and self.config.checksum != "on":
            self._offer_shared_memory(host, ports)
        if self.config.transport in ("auto", "tcp"):
            listener = tcp.listen(
                self._streams.handle,
                host,
                self.config.data_port,
                self.config.connections,
                self.config.checksum,
                keys=self._access.keys,
                limits=self.config.limits,
            )
            self._transports.append(listener)
            ports["tcp"] = listener.port
        if self.config.transport in ("auto", "grpc"):
            exchanges = Exchanges(self._streams.handle, self.config.limits, self.config.checksum)
            self._transports.append(exchanges)
            ports["grpc"] = self._control.port
        links = ServerLinks(self.config, self._access)
        self.job = Job(self.config, ports, links=links)
        if program is not None:
            self.job.preset(program, program.storage or Storage({}, None))
        self._ready.set()
        self._offer_metrics(host)
        self._control.start(self.job, exchanges)
        self._clock.start()
        self._probes.start()

    def _offer_metrics(self, host: str) -> None:
        config = self.config
        metrics = ServerMetrics(self.job, config.job, self._access.keys)
        JSON_LINES.labels = metrics.labels
        if config.metrics is not None:
            place = metrics_place("metrics", config.metrics, host, config.keys, config.insecure)
            self._metrics = Exposition(*place, metrics.page, self._access.keys)

    def _offer_shared_memory(self, host: str, ports: dict[str, int]) -> None:
        try:
            listener = shm.listen(self._streams.handle, host, limits=self.config.limits)
        except OSError as error:
            if self.config.transport != "auto":
                raise OSError(f"no shared memory: {error.strerror or error}") from error
            log.warning(
                "no shared memory here, trainers take another transport: %s",
                error.strerror or error,
            )
            return
        self._transports.append(listener)
        ports["shm"] = listener.port

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        """``"HOST:PORT (shm, tcp PORT, grpc, metrics PORT), with a key"``"""
        ports = {
            name: port
            for name, port in self.job.transports.items()
            if port != self._control.port and name != "shm"
        }
        transports = [
            f"{name} {ports[name]}" if name in ports else name for name in self.job.transports
        ]
        if self._metrics is not None:
            transports.append(f"metrics {self._metrics.port}")
        return f"{self.endpoint} ({', '.join(transports)}){self._openness()}"

    def _openness(self) -> str:
        """The callers that the server admits, for its readiness line."""
        if not self._control.guard.is_open:
            return ", with keys" if self._access.keys is not None else ", with a key"
        host, _ = split_endpoint(self.endpoint)
        return f", open to {'this host' if is_loopback(host) else 'the network'}"

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down, by a Drain call or by :meth:`stop`."""
        return self.job.lifecycle.draining

    @property
    def is_over(self) -> bool:
        """Whether the first job has ended, and a failed one's values are not kept any more."""
        return self.job.ended.is_set() and not self.job.kept_seconds

    def stop(self, grace_seconds: float = timeouts.DRAIN_SECONDS) -> None:
        """Drains and ends.  Harmless when called twice, or before :meth:`start`.

        See [Note: draining].

        Args:
            grace_seconds: how long answers, streams and trainers have to end by themselves.
        """
        if self._stopping.is_set() or not self._ready.is_set():
            return
        self._stopping.set()
        saved_by = time.monotonic() + grace_seconds
        if not self.job.busy:  # the streams of lost trainers say no BYE
            idle = AWAITED_GRACE_SECONDS if self.job.awaited else IDLE_GRACE_SECONDS
            grace_seconds = min(grace_seconds, idle)
        deadline = time.monotonic() + grace_seconds
        self._control.drain()
        self.job.shut_down()
        self._streams.drain(grace_seconds)
        self._close_transports(max(0.0, deadline - time.monotonic()))
        # the trainers have been told, and have yet to leave; one that was killed never does
        deadline = min(deadline, time.monotonic() + GOODBYE_SECONDS)
        while (self.job.busy or self.job.awaited) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.job.saves.wait(saved_by - time.monotonic()):
            log.warning("a save is not written, and what was saved before stays")
        if not self.job.end_recording(timeouts.DRAIN_SECONDS):
            log.error("the end of the recorded log is not written: a replay ends before it")
        self._control.stop(1.0)
        self._clock.join()

    def _close_transports(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        for transport in self._transports:
            transport.close(max(0.0, deadline - time.monotonic()))
        if self._metrics is not None:
            self._metrics.close()

    def _serve_stream(self, stream: Stream) -> None:
        self._ready.wait(timeouts.DRAIN_SECONDS)  # a peer may find the port before the job exists
        handle(stream, self.job, self._working, self._control.guard)

    def _tick(self) -> None:
        with RUNNING.ticking():
            pause = RUNNING.last_pause
            while not self._stopping.wait(TICK_SECONDS):
                try:
                    if RUNNING.last_pause != pause:
                        pause = RUNNING.last_pause
                        self.job.paused()
                    self.job.tick()
                    self._streams.end_late()
                    self._control.end_late()
                    if self._access.keys is not None:
                        self._streams.end_revoked(self._access.keys.revoked)
                except Exception:
                    log.exception("the server's clock thread failed")


def warm_up() -> None:
    """Makes an optimizer: a process's first one imports torch's compiler, which takes seconds on a
    busy machine, and should not happen during Install.
    """
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


def serve(config: ServerConfig, program: Program | None = None) -> int:
    """Runs one server until SIGTERM, SIGINT, a Drain call, or (with ``config.once``) the end of its
    first job.

    Prints one line when it is ready.  A second signal ends the process at once.

    Returns:
        the exit status: 0; with ``config.once`` only where the job has succeeded, and otherwise 1,
        or 128 and the number of the signal that came before the job was done.

    Raises:
        OSError, ValueError, PServerError: it could not start; one sentence.
    """
    served = _serve(config, program)
    try:
        if config.once:
            served.check()
    except PServerError as error:
        print(f"pserver: the job failed: {error}", file=sys.stderr, flush=True)
        return 1
    except SystemExit as error:
        assert isinstance(error.code, int), "a signal's status"
        return error.code
    return 0


def serve_job(config: ServerConfig, program: Program | None = None) -> None:
    """Runs one server for one job, as a script does whose role is PSERVER.

    Args:
        config: with ``once``.
        program: with its storage, which has the server's last values at the end, also where this
            raises.

    Raises:
        PServerError: the job has failed; this is what ended it.
        SystemExit: SIGTERM or SIGINT came before the job was done: 128 and the signal's number.
        OSError, ValueError: the server could not start; one sentence.
    """
    _serve(config, program).check()


@dataclass(frozen=True, slots=True)
class _Served:
    """The end of a server.

    Attributes:
        succeeded: its last job is done.
        failure: of its last job.
        signal: that asked it to end; 0: none.
    """

    succeeded: bool
    failure: PServerError | None
    signal: int

    def check(self) -> None:
        """Raises unless the job has succeeded."""
        if self.succeeded:
            return
        if self.failure is not None and not isinstance(self.failure, Draining):
            raise self.failure
        if self.signal:
            name = signal.Signals(self.signal).name
            print(f"pserver: {name} came before the job was done", file=sys.stderr, flush=True)
            raise SystemExit(128 + self.signal)
        raise self.failure or Draining("the server was told to end before its job was done")


def _serve(config: ServerConfig, program: Program | None) -> _Served:
    keep_memory(shared=True)
    _allow_descriptors()
    if config.threads:
        torch.set_num_threads(config.threads)
    asked = _StopSignal()
    with _signals(asked), Server(config, program) as server:
        announce(__name__, f"pserver ready at {server}", endpoint=server.endpoint)
        while not (
            asked.event.wait(TICK_SECONDS) or server.draining or (config.once and server.is_over)
        ):
            pass
        lifecycle = server.job.lifecycle
        succeeded = lifecycle.succeeded
    if program is not None and program.storage is not None:
        server.job.keep(program.storage)
    return _Served(succeeded, lifecycle.last_failure, asked.number)


def _allow_descriptors() -> None:
    """Raises the limit of open connections to the system's maximum for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system with a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


class _StopSignal:
    """The signal that has asked the server to end, if any."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number = 0


@contextmanager
def _signals(asked: _StopSignal) -> Iterator[None]:
    """Notes SIGTERM and SIGINT in ``asked`` while the block runs; a second one ends the process.

    Only the main thread can arrange this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        asked.number = number
        asked.event.set()
        log.info("%s: draining; send it again to end at once", signal.Signals(number).name)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, first) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn_if_open(host: str, endpoint: str) -> None:
    if not is_loopback(host):
        log.warning(
            "%s is open to the network, without encryption: anyone who reaches it can read and "
            "change models",
            endpoint,
        )
