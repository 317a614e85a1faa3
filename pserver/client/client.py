"""A trainer's connection to one server: its control calls, a channel of tensors for each lane, its
heartbeat.

[Note: silence]  The heartbeat has a connection and a thread of its own.  A server that has not
answered one for longer than the deadline is lost: its channels are ended, and whoever waits for
them gets :class:`~pserver.errors.ServerLost`.  A server that answers, but whose job has failed,
says so, and whoever waits gets what it says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from pserver.client.channel import Channel
from pserver.config import split_endpoint
from pserver.control import ControlClient
from pserver.errors import PServerError, ServerLost, TimedOut, Unreachable, from_wire
from pserver.polling import poll
from pserver.transport.byte_counters import ByteCounters
from pserver.transport.registry import TRANSPORTS, suited
from pserver.transport.sequenced import SequencedStream
from pserver.transport.stream import Stream
from pserver.wire_pb2 import (
    BarrierRequest,
    Frame,
    HeartbeatRequest,
    Hello,
    InstallRequest,
    JoinReply,
    JoinRequest,
    Kind,
    LeaveRequest,
    Part,
    RendezvousRequest,
    ShrinkRequest,
    StatusReply,
)
from transpiler.program import Program

log = logging.getLogger(__name__)

PROTOCOL = 1
POLL_SECONDS = 0.1  # between two questions whether the server is ready

Landing = Callable[[Part], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a trainer says of itself on joining: ``manifest`` is the plan's, ``incarnation`` new for
    each start of the process.
    """

    trainer_id: int
    incarnation: str
    fingerprint: str
    manifest: Mapping[str, str]
    transports: Sequence[str]


class Client:
    """One trainer's connection to one server.

    Args:
        endpoint: the server's control endpoint, HOST:PORT.
        index: of the server in the plan.
        identity: the trainer.
        heartbeat_timeout_seconds: the longest silence of the server that is not yet a loss, until the server
            tells its own.
        start_timeout_seconds: how long to wait for the server to come up and to be installed.
        landings: for each lane, where the values of a variable go; called in the channels' threads.
        tables: likewise for arrays of tables, where the plan has some.

    Attributes:
        channels: one for each lane, from :meth:`join` on.
        tables: that on which rows are read and loaded, if any.
        meanwhile: called while it waits to be let in; raises what should end the wait.
        activity: what the trainer does, for ``pserver status``.
        traffic: payload bytes by name on the wire.
    """

    def __init__(
        self,
        endpoint: str,
        index: int,
        identity: Identity,
        heartbeat_timeout_seconds: float,
        start_timeout_seconds: float,
        landings: Sequence[Landing],
        tables: Landing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.index = index
        self.transport = ""
        self.activity = ""
        self.channels: list[Channel] = []
        self.traffic = ByteCounters()
        self.tables: Channel | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._identity = identity
        self._transports = suited(identity.transports, split_endpoint(endpoint)[0])
        self._deadline = heartbeat_timeout_seconds
        self._start_deadline = start_timeout_seconds
        self._landings = landings
        self._tables = tables
        self._control = ControlClient(endpoint, heartbeat_timeout_seconds)
        self._reply = JoinReply()
        self._shrinks = 0  # calls
        self._closing = threading.Event()
        self._heartbeat = threading.Thread(
            target=self._beat, name=f"heartbeat {endpoint}", daemon=True
        )

    def __str__(self) -> str:
        return f"server {self.index} at {self.endpoint}"

    # ---- joining and leaving ----

    def join(self) -> JoinReply:
        """Joins the server's job and opens a stream for each lane; waits until the server is up and
        installed.

        Raises:
            Unreachable: the server does not answer within the start-up deadline.
            TimedOut: it answers, but trainer 0 has not installed it by then.
            Refused: it said no; see the subclasses.
        """
        self._control.wait_ready(self._start_deadline)
        self._reply = self._admitted()
        self.transport = self._reply.transport
        self._deadline = self._reply.heartbeat_timeout_seconds or self._deadline
        self._heartbeat.start()
        for lane, landing in enumerate(self._landings):
            self.channels.append(
                Channel(partial(self._open, lane, False), landing, self._deadline, str(self))
            )
        if self._tables is not None:
            self.tables = Channel(
                partial(self._open, 0, True), self._tables, self._deadline, str(self)
            )
        return self._reply

    @property
    def every_channel(self) -> list[Channel]:
        """Those of the lanes, and that of the tables."""
        return self.channels if self.tables is None else [*self.channels, self.tables]

    def _open(self, lane: int, tables: bool, number: int) -> Stream:
        """The stream of that number of a lane, or of the tables, after HELLO."""
        try:
            stream = SequencedStream(self._connect(), self.traffic)
        except Unreachable as error:
            if len(self.channels) == len(self._landings) or len(self._transports) == 1:
                raise
            # still joining: the same again without what did not work
            self._transports.remove(self.transport)
            self._reply = self._admitted()
            log.warning(
                "%s: %s; taking %s instead of %s",
                self,
                error,
                self._reply.transport,
                self.transport,
            )
            self.transport = self._reply.transport
            return self._open(lane, tables, number)
        hello = Hello(
            session=self._reply.session,
            trainer_id=self._identity.trainer_id,
            lane=lane,
            stream=number,
            tables=tables,
        )
        # it has broken already: whoever receives from it sees that, and opens another
        with suppress(Unreachable):
            stream.send(Frame(kind=Kind.HELLO, hello=hello))
        return stream

    def _connect(self) -> Stream:
        host, _ = split_endpoint(self.endpoint)
        return TRANSPORTS[self.transport].connect(
            host, self._reply.data_port, timeout_seconds=self._deadline
        )

    def _admitted(self) -> JoinReply:
        request = JoinRequest(
            protocol=PROTOCOL,
            trainer_id=self._identity.trainer_id,
            incarnation=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            manifest=dict(self._identity.manifest),
            transports=self._transports,
            server_index=self.index,
        )
        text = f"waiting for trainer 0 to install {self} (or for the job there to end)"
        for _ in poll(log, lambda: text, self._start_deadline, POLL_SECONDS):
            if (reply := self._control.join(request)).ready:
                return reply
            self.meanwhile()
        raise TimedOut(
            f"{self} is up, but trainer 0 has not started its job there within "
            f"{self._start_deadline:.0f} s"
        )

    def install(self, program: Program) -> None:
        """Gives the server its program.

        Making its tables may take long: only silence, or the start-up deadline, ends this.
        """
        request = InstallRequest(session=self._reply.session, program=program.to_proto())
        try:
            self._control.install(request, timeout=self._start_deadline)
        except PServerError:
            self.check()  # the heartbeat knows better why
            raise

    def rendezvous(self, address: str = "") -> str:
        """Says where trainers meet, or asks; "" while nobody has said it."""
        return self._control.rendezvous(
            RendezvousRequest(session=self._reply.session, address=address)
        ).address

    def shrink(self, days: float, threshold: float | None, tables: Sequence[str]) -> dict[str, int]:
        """Days pass for the server's rows; how many went, by table."""
        self._shrinks += 1
        session, number = self._reply.session, self._shrinks
        request = ShrinkRequest(
            session=session, days=days, threshold=threshold, tables=tables, number=number
        )
        return dict(self._control.shrink(request).removed)

    def status(self) -> StatusReply:
        """How the server is."""
        return self._control.status()

    def barrier(self, name: str) -> None:
        """Waits until every trainer of the job that has not left has come to the barrier of this
        name.
        """
        while not self._control.barrier(
            BarrierRequest(session=self._reply.session, name=name)
        ).passed:
            self.check()

    def check(self) -> None:
        """Raises what ended the connection, if something did."""
        for channel in self.every_channel:
            if channel.failure is not None:
                raise channel.failure

    def leave(self, failure: str = "") -> None:
        """Says goodbye, or why this trainer cannot go on, and ends the threads; never raises, once
        is enough.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        for channel in self.every_channel:
            channel.close(abruptly=bool(failure))
        try:
            if self._reply.session:
                self._control.leave(LeaveRequest(session=self._reply.session, failure=failure))
        except PServerError as error:
            log.warning("could not say goodbye to %s: %s", self, error)
        self._control.close()

    # ---- the heartbeat ----

    def _beat(self) -> None:
        """See [Note: silence]."""
        interval = min(1.0, self._deadline / 5)
        answered = time.monotonic()
        while not self._closing.wait(interval):
            request = HeartbeatRequest(session=self._reply.session, activity=self.activity)
            try:
                reply = self._control.heartbeat(request, timeout=max(interval, 1.0))
            except PServerError as error:
                silence = time.monotonic() - answered
                if silence > self._deadline:
                    self._fail(
                        ServerLost(
                            f"{self} has not answered for {silence:.1f} s (deadline "
                            f"{self._deadline:g} s): {error}"
                        )
                    )
                    self._control.close()  # and with it whatever call waits for the server
                    return
                continue
            answered = time.monotonic()
            if reply.failure:
                self._fail(from_wire(reply.error, f"{self}: {reply.failure}"))
                return

    def _fail(self, error: PServerError) -> None:
        for channel in self.every_channel:
            channel.fail(error)
