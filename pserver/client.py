"""A trainer's connection to one server: its control calls, its tensor stream, its heartbeat.

Three threads serve a connection, so that tensors leave while the script computes and arrive while it waits for another server::

    outbox      sends queued frames, in order
    inbox       receives frames: values to where they belong, answers to whoever waits for them
    heartbeat   tells the server that this process lives, and hears whether the job does

[Note: silence]  The heartbeat has a connection of its own.  A server that has not answered one for longer than the deadline is
lost: the stream is cancelled, and whoever waits for the connection gets :class:`~pserver.errors.ServerLost`.  A server that
answers, but whose job has failed, says so, and whoever waits gets what it says.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from pserver import codec
from pserver.carriers import CARRIERS
from pserver.config import split_endpoint
from pserver.control import ControlClient
from pserver.errors import CorruptFrame, PServerError, ServerLost, TimedOut, Unreachable, from_wire
from pserver.stream import Buffer, Stream
from pserver.wire_pb2 import (
    BarrierRequest,
    Commit,
    Done,
    Frame,
    HeartbeatRequest,
    Hello,
    InstallRequest,
    JoinReply,
    JoinRequest,
    Kind,
    LeaveRequest,
    Part,
)
from transpiler.program import Program

log = logging.getLogger(__name__)

PROTOCOL = 1
POLL_SECONDS = 0.1  # between two questions whether the server is ready
PATIENCE_SECONDS = 3.0  # a wait that lasts longer says for whom, once


@dataclass(frozen=True, slots=True)
class Identity:
    """What a trainer says of itself on joining: ``manifest`` is the plan's, ``incarnation`` new for each start of the process."""

    trainer_id: int
    incarnation: str
    fingerprint: str
    manifest: Mapping[str, str]
    carriers: Sequence[str]


class Client:
    """One trainer's connection to one server.

    Args:
        endpoint: the server's control endpoint, HOST:PORT.
        index: of the server in the plan.
        identity: the trainer.
        deadline_seconds: the longest silence of the server that is not yet a loss.
        start_deadline_seconds: how long to wait for the server to come up and to be installed.
        landing: where the values of a variable go, as ``codec.scatter`` wants it; called in the inbox thread.
    """

    def __init__(
        self,
        endpoint: str,
        index: int,
        identity: Identity,
        deadline_seconds: float,
        start_deadline_seconds: float,
        landing: Callable[[Part], torch.Tensor],
    ) -> None:
        self.endpoint = endpoint
        self.index = index
        self.carrier = ""
        self.bytes_out = 0
        self.bytes_in = 0
        self._identity = identity
        self._deadline = deadline_seconds
        self._start_deadline = start_deadline_seconds
        self._landing = landing
        self._control = ControlClient(endpoint, deadline_seconds)
        self._stream: Stream | None = None
        self._outgoing: queue.SimpleQueue[tuple[Frame, Sequence[Buffer]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _waiting and failure; nothing blocks under it
        self._waiting: Future[Done] | None = None
        self._norms: Future[Mapping[str, float]] | None = None
        self.failure: PServerError | None = None
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._session = ""
        self.activity = ""

    def __str__(self) -> str:
        return f"server {self.index} at {self.endpoint}"

    # ---- joining and leaving -------------------------------------------------------------------------------------

    def join(self) -> JoinReply:
        """Joins the server's job and opens the stream; waits until the server is up and installed.

        Raises:
            Unreachable: the server does not answer within the start-up deadline.
            TimedOut: it answers, but trainer 0 has not installed it by then.
            Refused: it said no; see the subclasses.
        """
        self._control.wait_ready(self._start_deadline)
        reply = self._admitted()
        self._session, self.carrier = reply.session, reply.carrier
        self._deadline = reply.deadline_seconds or self._deadline
        host, _ = split_endpoint(self.endpoint)
        self._stream = CARRIERS[reply.carrier].connect(host, reply.data_port, deadline_seconds=self._deadline)
        self._stream.send(Frame(kind=Kind.HELLO, hello=Hello(session=self._session, trainer_id=self._identity.trainer_id)))
        for target in (self._send_queued, self._receive_all, self._beat):
            thread = threading.Thread(target=target, name=f"{target.__name__} {self.endpoint}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return reply

    def _admitted(self) -> JoinReply:
        request = JoinRequest(
            protocol=PROTOCOL,
            trainer_id=self._identity.trainer_id,
            incarnation=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            manifest=dict(self._identity.manifest),
            carriers=list(self._identity.carriers),
            server_index=self.index,
        )
        began, said = time.monotonic(), False
        while not (reply := self._control.join(request)).ready:
            waited = time.monotonic() - began
            if waited > self._start_deadline:
                raise TimedOut(f"{self} is up, but trainer 0 has not started its job there within {waited:.0f} s")
            if waited > PATIENCE_SECONDS and not said:
                said = True
                log.warning("waiting for trainer 0 to install %s (or for the job there to end)", self)
            time.sleep(POLL_SECONDS)
        return reply

    def install(self, program: Program) -> None:
        """Gives the server its program."""
        self._control.install(InstallRequest(session=self._session, program=program.to_proto()))

    def barrier(self, name: str) -> None:
        """Waits until every trainer of the job that has not left has come to the barrier of this name."""
        while not self._control.barrier(BarrierRequest(session=self._session, name=name)).passed:
            self.check()

    def leave(self, failure: str = "") -> None:
        """Says goodbye, or why this trainer cannot go on, and ends the threads; never raises."""
        self._closing.set()
        if self._stream is not None and not failure and self.failure is None:
            self._outgoing.put((Frame(kind=Kind.BYE), ()))
        self._outgoing.put(None)
        if self._threads:
            self._threads[0].join(timeout=2.0)
        try:
            if self._session:
                self._control.leave(LeaveRequest(session=self._session, failure=failure))
        except PServerError as error:
            log.warning("could not say goodbye to %s: %s", self, error)
        if self._stream is not None and not failure:
            self._stream.close()
        for thread in self._threads[1:]:
            thread.join(timeout=0 if failure else 2.0)
        if self._stream is not None and self._threads[1].is_alive():  # the server does not end its side: it may be gone
            self._stream.cancel()
        self._control.close()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def post(self, kind: Kind, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Queues tensors to be sent; their memory stays as it is until the answer to the step has come."""
        for header, payload in codec.frames(kind, step, tensors):
            self._outgoing.put((header, payload))

    def expect(self) -> Future[Done]:
        """The answer to what is asked next: a DONE, or the failure that came instead.  One at a time."""
        with self._lock:
            self._waiting, self._norms = Future(), Future()
            if self.failure is not None:
                self._waiting.set_exception(self.failure)
                self._norms.set_exception(self.failure)
            return self._waiting

    @property
    def norms(self) -> Future[Mapping[str, float]]:
        """This server's part of the squared norms in the step under way, where norms clip on servers."""
        assert self._norms is not None, "expect() comes first"
        return self._norms

    def commit(self, step: int, commit: Commit) -> None:
        """Queues the end of a step."""
        self._outgoing.put((Frame(kind=Kind.COMMIT, step=step, commit=commit), ()))

    def scale(self, step: int, coefficients: Mapping[str, float]) -> None:
        """Queues the answer to the norms."""
        self._outgoing.put((Frame(kind=Kind.SCALE, step=step, commit=Commit(scale=dict(coefficients))), ()))

    def pull(self, names: Iterable[str], step: int) -> None:
        """Queues a request for values; none named means every slice that the server holds."""
        self._outgoing.put((Frame(kind=Kind.PULL, step=step, parts=[Part(name=name) for name in names]), ()))

    def check(self) -> None:
        """Raises what ended the connection, if something did."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: PServerError) -> None:
        """Ends the connection: whoever waits for it, or asks next, gets the error.  The first error stays."""
        with self._lock:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure = error
            for future in (self._waiting, self._norms):
                if future is not None and not future.done():
                    future.set_exception(error)
        if self._stream is not None:
            self._stream.cancel()

    # ---- the three threads ---------------------------------------------------------------------------------------

    def _send_queued(self) -> None:
        assert self._stream is not None
        try:
            while (item := self._outgoing.get()) is not None:
                header, payload = item
                self._stream.send(header, payload)
                self.bytes_out += sum(memoryview(buffer).nbytes for buffer in payload)
        except PServerError as error:
            self._broken(error)

    def _receive_all(self) -> None:
        assert self._stream is not None
        try:
            while (received := self._stream.receive()) is not None:
                self._take(*received)
            raise Unreachable("the stream ended")
        except PServerError as error:
            self._broken(error)
        except Exception as error:
            log.exception("receiving from %s", self)
            self.fail(CorruptFrame(f"{self}: {type(error).__name__}: {error}"))

    def _broken(self, error: PServerError) -> None:
        """A broken stream is how a server's end is first seen; what the job says about it, if it still can, says more."""
        if not isinstance(error, Unreachable):
            self.fail(error)
            return
        if self._closing.is_set() or self.failure is not None:
            return
        try:
            reply = self._control.heartbeat(HeartbeatRequest(session=self._session), timeout=2.0)
            if reply.failure:
                self.fail(from_wire(reply.error, reply.failure))
                return
        except PServerError:
            pass
        self.fail(ServerLost(f"{self}: {error}"))

    def _take(self, header: Frame, payload: memoryview) -> None:
        self.bytes_in += payload.nbytes
        if header.kind == Kind.VALUE:
            codec.scatter(header, payload, self._landing)
        elif header.kind == Kind.DONE:
            self._resolve(self._waiting, header.done)
        elif header.kind == Kind.NORMS:
            self._resolve(self._norms, dict(header.norms.squared))
        elif header.kind == Kind.FAILURE:
            self.fail(from_wire(header.failure.error, f"{self}: {header.failure.message}"))
        elif header.kind == Kind.DRAIN:
            self.fail(ServerLost(f"{self} is shutting down"))
        else:
            raise CorruptFrame(f"{self}: expected VALUE, DONE, NORMS, FAILURE or DRAIN, got kind {header.kind}")

    def _resolve(self, future: Future | None, result: object) -> None:  # type: ignore[type-arg]  # of whichever kind
        with self._lock:
            if future is None or future.done():
                raise CorruptFrame(f"{self}: an answer that nobody waits for")
            future.set_result(result)

    def _beat(self) -> None:
        """See [Note: silence]."""
        interval = min(1.0, self._deadline / 5)
        answered = time.monotonic()
        while not self._closing.wait(interval):
            try:
                reply = self._control.heartbeat(
                    HeartbeatRequest(session=self._session, activity=self.activity), timeout=max(interval, 1.0)
                )
            except PServerError as error:
                silence = time.monotonic() - answered
                if silence > self._deadline:
                    self.fail(ServerLost(f"{self} has not answered for {silence:.1f} s (deadline {self._deadline:g} s): {error}"))
                    return
                continue
            answered = time.monotonic()
            if reply.failure:
                self.fail(from_wire(reply.error, f"{self}: {reply.failure}"))
                return
