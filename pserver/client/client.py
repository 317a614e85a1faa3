"""A trainer's connection to one server: its control calls, a channel of tensors for each lane, its
heartbeat.

This room is the only owner of the protocol on a trainer's side: what it offers is said in tensors,
names, hyper-parameters, steps and :class:`~pserver.client.replies.Reply`, and no message leaves it.
The calls, in their order::

    join() -> Joined             opens a channel for each lane, and one for tables
    install(program)             trainer 0, where Joined.install says so; then:
        tables.load(rows)        the rows that tables begin with
        channels[0].load(values) last: every slice and state; from here on the server serves
    channels[0].pull([])         the job's values

    a step of a lane, on its channel:
        begin() -> Reply         a future of it; new values arrive before it
        push(step, gradients)    any number, in any order
        push_rows(step, table, gradient)
        assign(step, assignments)    where the script has written into parameters
        commit(step, hparams, absent)
        scale(step, coefficients)    where norms clip on servers, after ``norms``

    between steps, on channels[0]:   pull(names), load(values), checksums(names)
    at any time, on tables:          lookup(ids), scan(table, cursor), mark_saved(table), load(rows)
    at any time:                     barrier, rendezvous, agree, shrink, table_status, saves

    finish(), all_finished()     no further step; the trainers agree that the job is done
    leave()                      says BYE on every channel, then Leave
    tell(failure)                at any time: this trainer ends

A channel has one request at a time; what sends it again after a broken connection is
:mod:`pserver.client.retrying_stream`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pserver.client.agreed_end import all_finished
from pserver.client.channel import Channel
from pserver.client.explained import explained
from pserver.client.grouped_calls import POLL_SECONDS
from pserver.client.heartbeating import Heartbeating
from pserver.client.install_requests import install_requests
from pserver.client.replies import Absences, Joined, TableStatus, log_place_of
from pserver.client.report import Report
from pserver.client.retrying_stream import Destination
from pserver.client.server_return import ServerReturn
from pserver.config import split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import (
    PServerError,
    TimedOut,
    UnknownSession,
    Unreachable,
    from_wire,
)
from pserver.polling import poll
from pserver.running_clock import RUNNING
from pserver.security.access import OPEN, Access
from pserver.transport.memory import ByteCounters
from pserver.transport.registry import TRANSPORTS, suited
from pserver.transport.stream import SequencedStream, Stream, greet
from pserver.wire_pb2 import (
    FinishReply,
    FinishRequest,
    Hello,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    RendezvousReply,
    RendezvousRequest,
    ShrinkReply,
    ShrinkRequest,
)
from transpiler.program import Program

log = logging.getLogger(__name__)

PROTOCOL = 1
CONNECT_TRIES = 4  # that a heartbeat timeout has room for


@dataclass(frozen=True, slots=True)
class Identity:
    """What a trainer says of itself on joining.

    Attributes:
        incarnation: a random text, new for each start of the process.
        fingerprint, manifest: the plan's.
        transports: that the trainer can use, the preferred one first.
        coordinator: the control endpoint of server 0.
    """

    trainer_id: int
    incarnation: str
    fingerprint: str
    manifest: Mapping[str, str]
    transports: Sequence[str]
    coordinator: str = ""


class Client(Heartbeating):
    """One trainer's connection to one server.

    The script's thread calls it; the heartbeat's thread reads ``activity`` and fails the channels.

    Args:
        endpoint: the server's control endpoint, HOST:PORT.
        index: of the server in the plan.
        identity: the trainer.
        heartbeat_timeout_seconds: without an answer to a heartbeat for so long the server is lost;
            the server's own number replaces it on joining.
        start_timeout_seconds: how long to wait for the server to come up and to be installed.
        destinations: for each lane, where the values of a variable go; called in the channels'
            threads.
        table_destination: likewise for arrays of tables, where the plan has some.
        access: what is proved to the server, and asked of it.

    Attributes:
        channels: one for each lane, from :meth:`join` on.
        tables: the channel on which rows are read and loaded, if any.
        meanwhile: called while :meth:`join` waits; raises what should end the wait.
        activity: what the trainer does, for ``pserver status``.
        reported: called for each heartbeat: what the trainer says of its training.
        learn: called, in any thread, with what the server says of who is not there.
        asked: called, in the heartbeat's thread, with the number of a question where the job's
            script is, which this trainer is to answer.
        traffic: payload bytes by name on the wire.
        late: this trainer has joined others that train already, and does not know where they are.
    """

    def __init__(
        self,
        endpoint: str,
        index: int,
        identity: Identity,
        heartbeat_timeout_seconds: float,
        start_timeout_seconds: float,
        destinations: Sequence[Destination],
        table_destination: Destination | None = None,
        access: Access = OPEN,
    ) -> None:
        self.endpoint = endpoint
        self._program: Program | None = None
        self._access = access
        self.index = index
        self.transport = ""
        self.activity = ""
        self.reported: Callable[[], Report] = Report
        self.learn: Callable[[Absences], None] = lambda absences: None
        self.asked: Callable[[int], None] = lambda number: None
        self.channels: list[Channel] = []
        self.traffic = ByteCounters()
        self.tables: Channel | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._identity = identity
        self._transports = suited(identity.transports, split_endpoint(endpoint)[0])
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._start_timeout = start_timeout_seconds
        self._destinations = destinations
        self._table_destination = table_destination
        self._control = ControlClient(endpoint, heartbeat_timeout_seconds, str(self), access)
        self._reply = JoinReply()
        self._answered = 0.0
        self.late = self._joined = False  # every stream has been opened once
        self._shrinks = 0  # calls
        self._failure: PServerError | None = None  # what the heartbeat has found
        self._return = ServerReturn(str(self))
        self._closing = threading.Event()
        self._heartbeat = threading.Thread(
            target=self._beat, name=f"heartbeat {endpoint}", daemon=True
        )

    def __str__(self) -> str:
        return f"server {self.index} at {self.endpoint}"

    # ---- joining and leaving ----

    def join(self, program: Program | None = None) -> Joined:
        """Joins the server's job and opens a stream for each lane; waits until the server is up and
        installed.

        Args:
            program: of the server, where it may come back when it is lost, and asks for it; None:
                it does not.

        Returns:
            Whether this trainer is to install the server, and the steps that were applied.

        Raises:
            Unreachable: the server does not answer within the start-up timeout.
            TimedOut: it answers, but trainer 0 has not installed it by then.
            Refused: it said no; see the subclasses.
        """
        self._program = program
        self._control.wait_ready(self._start_timeout, lambda: self.meanwhile())
        self._reply = self._ask_to_join(self.meanwhile)
        self.transport = self._reply.transport
        timeout = self._reply.heartbeat_timeout_seconds or self._heartbeat_timeout
        self._heartbeat_timeout = timeout
        if self._reply.awaits_servers and self._program is not None:
            self._return.seconds = self._start_timeout
        self._heartbeat.start()
        said = timeout, str(self), self._return.seconds
        for lane, destination in enumerate(self._destinations):
            open_stream = partial(self._open, lane, False)
            self.channels.append(Channel(open_stream, destination, *said))
        if self._table_destination is not None:
            open_stream = partial(self._open, 0, True)
            self.tables = Channel(open_stream, self._table_destination, *said)
        self._joined, self.late = True, self._reply.late
        self.learn(Absences.of(self._reply.roll))
        return Joined.from_message(self._reply)

    @property
    def heartbeat_timeout_seconds(self) -> float:
        """The server's own, from :meth:`join` on."""
        return self._heartbeat_timeout

    @property
    def left(self) -> bool:
        """Whether this trainer has left the job."""
        return self._closing.is_set()

    @property
    def every_channel(self) -> list[Channel]:
        """The lanes' channels, and the tables'."""
        return self.channels if self.tables is None else [*self.channels, self.tables]

    def _open(self, lane: int, tables: bool, number: int) -> Stream:
        """The stream of that number of a lane, or of the tables, after HELLO."""
        stream = SequencedStream(
            self._connect() if self._joined else self._connect_joining(), self.traffic
        )
        own, session = self._identity.trainer_id, self._reply.session
        hello = Hello(session=session, trainer_id=own, lane=lane, stream=number, tables=tables)
        # it has broken already: the channel's inbox sees that, and opens another
        with suppress(Unreachable):
            greet(stream, hello, self._access, self.endpoint, self._heartbeat_timeout / 4)
        return stream

    def _connect(self) -> Stream:
        host, _ = split_endpoint(self.endpoint)
        return TRANSPORTS[self.transport].connect(
            host,
            self._reply.data_port,
            timeout_seconds=self._heartbeat_timeout / CONNECT_TRIES,
            keys=self._access.keys,
        )

    def _connect_joining(self) -> Stream:
        """A stream, tried again for the heartbeat timeout, and for as long as a server is awaited;
        over another transport at once where the trainer can use others.
        """
        text = f"waiting for {self} to open a stream over {self.transport}"
        broken = Unreachable(f"{self}: no stream over {self.transport}")
        seconds = self._heartbeat_timeout + self._return.seconds
        for _ in poll(log, lambda: text, seconds, POLL_SECONDS):
            try:
                return self._connect()
            except Unreachable as error:
                broken = error
            if len(self._transports) > 1:
                self._take_another_transport(broken)
            elif self.transport == "shm" and not self._return.seconds:  # no network may recover
                break
            else:
                self.check()
                self.meanwhile()
        raise broken

    def _take_another_transport(self, error: Unreachable) -> None:
        before = self.transport
        self._transports.remove(before)
        self._reply = self._ask_to_join(self.meanwhile)
        self.transport = self._reply.transport
        log.warning("%s: %s; taking %s instead of %s", self, error, self.transport, before)

    def _ask_to_join(self, meanwhile: Callable[[], None]) -> JoinReply:
        request = JoinRequest(
            protocol=PROTOCOL,
            trainer_id=self._identity.trainer_id,
            incarnation=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            manifest=dict(self._identity.manifest),
            transports=self._transports,
            server_index=self.index,
            coordinator=self._identity.coordinator,
        )
        text = f"waiting for trainer 0 to install {self} (or for the job there to end)"
        text = f"waiting for {self} to go on with the job" if self._joined else text
        end, reply = RUNNING() + self._start_timeout, JoinReply()

        def waiting() -> str:
            if not reply.held:
                return text
            others = ", ".join(map(str, reply.held_by))
            return (
                f"waiting for trainer {others} to come to the end of a pass: they divide this "
                "trainer's samples of it, and it steps with them after that"
            )

        for _ in poll(log, waiting, pause_seconds=POLL_SECONDS):
            if (reply := self._control.join(request)).ready:
                return reply
            if reply.held:  # however long that takes
                end = RUNNING() + self._start_timeout
            elif RUNNING() > end:
                break
            if reply.wants_program and self._program is not None:
                with suppress(UnknownSession):  # another process has taken the server's place
                    for part in install_requests(reply.session, self._program):
                        self._control.install(part, self._start_timeout, meanwhile)
            meanwhile()
        raise TimedOut(
            f"{self} is up, but trainer 0 has not started its job there within "
            f"{self._start_timeout:.0f} s"
        )

    def install(self, program: Program) -> None:
        """Gives the server its program.

        Making its tables may take long: only silence, or the start-up timeout, ends this.
        """
        with explained(self.check, self._lost_while_away):
            for request in install_requests(self._reply.session, program):
                self._control.install(request, self._start_timeout, self.check)

    def rendezvous(self, address: str = "") -> str:
        """Tells the other trainers an address, or asks for it.

        Args:
            address: trainer 0's; "" only asks.

        Returns:
            The address; "" while trainer 0 has not told it.
        """
        return self._met(RendezvousRequest(address=address))

    def agree(self, topic: str, text: str) -> str:
        """Says something about a topic; the first trainer to do so is right.

        Returns:
            What the first one said: ``text``, where that is this trainer.
        """
        return self._met(RendezvousRequest(address=text, topic=topic))

    def _met(self, request: RendezvousRequest) -> str:
        def ask(session: str) -> RendezvousReply:
            request.session = session
            return self._control.rendezvous(request)

        return self._asked(ask).address

    def shrink(self, days: float, threshold: float | None, tables: Sequence[str]) -> dict[str, int]:
        """Applies time decay to the server's rows, then drops those below the score threshold or
        past their TTL.  All servers do it at one place in the job's log, so it is called on all of
        them side by side.

        Returns:
            How many rows were dropped, by table.
        """
        self._shrinks += 1
        request = ShrinkRequest(days=days, threshold=threshold, tables=tables)
        request.number = self._shrinks

        def ask(session: str) -> ShrinkReply:
            request.session = session
            return self._control.shrink(request, meanwhile=self.check)

        return dict(self._asked(ask).removed)

    def table_status(self) -> list[TableStatus]:
        """What the server holds of each table now."""
        reply = self._asked(lambda session: self._control.status())
        return [TableStatus.from_message(table) for table in reply.tables]

    def log_place(self) -> dict[str, Any]:
        """As of which entry of its recorded log the server is; nothing where it records none."""
        return log_place_of(self._control.status().recording)

    def check(self) -> None:
        """Raises what ended the connection, if something did."""
        if (failure := self.failure) is not None:
            raise failure

    @property
    def failure(self) -> PServerError | None:
        """What ended the connection, if something did."""
        failures = (self._failure, *(channel.failure for channel in self.every_channel))
        return next((failure for failure in failures if failure is not None), None)

    def finish(self) -> None:
        """Says that this trainer takes no further step; the others then step without it.

        Raises:
            PServerError: what ended the job.
        """
        self._asked(lambda session: self._control.finish(FinishRequest(session=session)))

    def all_finished(self, ends: Callable[[], bool] = lambda: False) -> bool:
        """Waits until every trainer of the job has said so.

        Args:
            ends: asked while it waits, whether this trainer can wait no longer.

        Returns:
            Whether they have.

        Raises:
            PServerError: what ended the job.
        """

        def ask() -> FinishReply:
            return self._asked(
                lambda session: self._control.finish(FinishRequest(session=session, wait=True))
            )

        return all_finished(ask, str(self), self.check, ends)

    def tell(self, failure: str, timeout: float) -> None:
        """Says that this trainer ends, and why; and nothing else, so that any thread may call it,
        whatever the others are doing.

        Args:
            timeout: in seconds.
        """
        if session := self._reply.session:
            request = LeaveRequest(session=session, failure=failure)
            with suppress(PServerError):
                self._control.leave(request, timeout)

    def leave(
        self, failure: str = "", returns: bool = False, preempted_after: int | None = None
    ) -> PServerError | None:
        """Says goodbye, or why this trainer cannot go on, and ends the threads; never raises, once
        is enough.

        Args:
            returns: this trainer joins again, with another plan.
            preempted_after: its host takes it away, after this step of the script.

        Returns:
            What had ended the job before, if the server says so.
        """
        if self._closing.is_set():
            return None
        self._closing.set()
        for channel in self.every_channel:
            channel.close(abruptly=bool(failure))
        told = None
        try:
            if session := self._reply.session:
                request = LeaveRequest(session=session, failure=failure, returns=returns)
                request.success = not failure
                if preempted_after is not None:
                    request.preempted, request.step = True, preempted_after
                reply = self._goodbye(request)
                if reply.failure:
                    told = from_wire(reply.error, f"{self}: {reply.failure}")
        except PServerError as error:
            log.warning("could not say goodbye: %s", error)
        self._control.close()
        return told

    def _goodbye(self, request: LeaveRequest) -> LeaveReply:
        """Leaves a server.  One that is awaited, and is away when this trainer is preempted, would
        wait for it for the heartbeat timeout: so this trainer waits, as long, for that server.
        """
        end = RUNNING() + self._heartbeat_timeout

        def check_time() -> None:
            if RUNNING() > end:
                raise TimedOut(f"{self} has not come back")

        while True:
            try:
                return self._control.leave(request)
            except (Unreachable, TimedOut, UnknownSession) as error:
                if not (request.preempted and self._return.seconds):
                    raise
                check_time()
                if not isinstance(error, UnknownSession):
                    time.sleep(POLL_SECONDS)
                    continue
            reply = self._ask_to_join(check_time)  # it has come back
            if reply.install:  # it had heard this trainer, and its job is over
                return LeaveReply()
            request.session = reply.session
