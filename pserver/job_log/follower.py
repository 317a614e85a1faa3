"""A server's link to the coordinator of its job, server 0: the end that dials.

::

    ASKING --Follow: "ready"--> OPEN --the stream breaks--> REOPENING --a stream opens--> OPEN
       |                          |                             |
       |--refused                 |--refused, BYE, DRAIN        |--refused
       `--start-up timeout        `--heartbeat timeout          `--heartbeat timeout
       v                          v                             v
      LOST                       LOST                          LOST           any --close--> CLOSED

Two threads: one asks, opens streams and receives; the other sends PROBE a few times a second, and
breaks a stream on which nothing arrives.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from pserver.config import (
    HEARTBEAT_TIMEOUT_SECONDS,
    PREFERRED_TRANSPORTS,
    START_TIMEOUT_SECONDS,
    split_endpoint,
)
from pserver.control.control_client import ControlClient
from pserver.errors import (
    CorruptFrame,
    Draining,
    GarbledStream,
    JobFailed,
    PServerError,
    ServerLost,
    TimedOut,
    UnknownSession,
    Unreachable,
    from_wire,
)
from pserver.job_log.link import LinkEnd
from pserver.polling import poll
from pserver.running_clock import RUNNING
from pserver.security.access import Access
from pserver.side_business import SideBusiness
from pserver.timeouts import Timeouts
from pserver.transport.registry import TRANSPORTS, suited
from pserver.transport.stream import SequencedStream, greet
from pserver.wire_pb2 import FollowReply, FollowRequest, Frame, Hello, Kind

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.1  # between two tries to open a stream again
POLL_SECONDS = 0.1  # between two questions whether the coordinator is ready
GOODBYE_SECONDS = 1.0  # for the coordinator to hear the last messages
MOST_GARBLED = 5  # streams in a row that brought bytes which are no frame


class FollowerLink:
    """The link of server ``server_index`` to server 0.  Any thread may send.

    It returns at once; messages wait until the coordinator is up.

    Example::

        link = FollowerLink(endpoint, 1, plan.fingerprint(), access, follower.record, job.fail)
        link.send(staged)
        ...
        link.close()

    Args:
        endpoint: the coordinator's control endpoint, HOST:PORT.
        server_index: of this server in the plan, from 1.
        fingerprint: of the plan.
        access: what this server proves, and asks of the coordinator: its own.
        received: called with each message of the coordinator, once and in order, in one thread.
        lost: called once, where the link has ended and :meth:`close` was not called: no answer
            arrives for the heartbeat timeout, or the coordinator refuses this server, or is
            shutting down.  Nothing is received afterwards.  It waits for ``received``: neither may
            wait for the other.
        last: of a server that follows again: the number of the last record that it has.
        returns: another process may take the coordinator's place: then this link is lost at once.
        transports: that the link may take, the preferred one first.
        heartbeat_timeout_seconds: the coordinator's own number replaces it.
        start_timeout_seconds: for the coordinator to come up and to begin the same job.

    Attributes:
        transport: that the link has taken; "" before that.
        reconnects: streams that were opened in place of a broken one.
    """

    def __init__(
        self,
        endpoint: str,
        server_index: int,
        fingerprint: str,
        access: Access,
        received: Callable[[bytes], None],
        lost: Callable[[PServerError], None],
        *,
        last: int | None = None,
        returns: bool = False,
        transports: Sequence[str] = PREFERRED_TRANSPORTS,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.transport, self.reconnects = "", 0
        self._endpoint, self._access, self._lost = endpoint, access, lost
        self._name = f"the coordinator at {endpoint}"
        self._timeouts = Timeouts(heartbeat_timeout_seconds)
        self._start_timeout = start_timeout_seconds
        self._request = FollowRequest(
            server_index=server_index,
            fingerprint=fingerprint,
            incarnation=secrets.token_hex(8),
            transports=suited(transports, split_endpoint(endpoint)[0]),
            last=last,
        )
        self._reply = FollowReply()
        self._returns, self._said = returns, ""
        self._received = received
        self._end = LinkEnd(Kind.STAGED, self._hand_out)
        self._opened = 0  # streams
        self._opened_at = 0.0  # the last one
        self._warned = 0.0  # of the silence since then
        self._garbled = 0  # in a row
        self._over = threading.Event()  # closed, or lost
        self._ending = threading.Lock()  # for the first that ends the link; nothing blocks under it
        self._threads = [
            threading.Thread(target=target, name=f"{name} {endpoint}", daemon=True)
            for name, target in (("follows", self._follow), ("link beats", self._beat))
        ]
        self._threads[0].start()

    def send(self, message: bytes) -> None:
        """Sends a message, which arrives once and in order.  It does not wait for the coordinator.

        After the link's end it does nothing.

        Raises:
            ValueError: the message has more than 2 MB.
        """
        if not self._over.is_set():
            self._end.send(message)

    def close(self) -> None:
        """Ends the link, and returns at once: the caller may hold a lock that ``received`` takes.

        Where a stream is open a thread of the link waits until the coordinator has heard all
        messages, for a second at most, and says BYE.  A message that arrives later is dropped.

        Harmless when called twice, or in a thread of the link.
        """
        if self._claim() and self._threads[1].ident is None:
            self._end.end()

    def _claim(self) -> bool:
        """Whether the caller is the first to end the link."""
        with self._ending:
            first = not self._over.is_set()
            self._over.set()
            return first

    def _lose(self, error: PServerError) -> None:
        if self._claim():
            self._end.end()
            self._end.wait_handed_out()
            self._lost(error)

    def _hand_out(self, message: bytes) -> None:
        if not self._over.is_set():
            self._received(message)

    # ---- the thread that asks, opens and receives ----

    def _follow(self) -> None:
        try:
            self._reply = self._ask()
            self.transport = self._reply.transport
            timeout = self._reply.heartbeat_timeout_seconds or self._timeouts.lost
            self._timeouts = Timeouts(timeout)
            self._end.last_heard = RUNNING()
            self._threads[1].start()
            while not self._over.is_set():
                self._serve_stream()
        except PServerError as error:
            self._lose(error)
        except Exception as error:
            log.exception("the link to %s", self._name)
            self._lose(JobFailed(f"{self._name}: {type(error).__name__}: {error}"))

    def _ask(self) -> FollowReply:
        """Asks the coordinator until it has begun this job; returns its answer."""
        control = ControlClient(self._endpoint, self._timeouts.lost, self._name, self._access)
        try:
            control.wait_ready(self._start_timeout, self._check_open)
            text = f"waiting for {self._name} to begin the job"
            for _ in poll(log, lambda: text, self._start_timeout, POLL_SECONDS):
                if (reply := control.follow(self._request)).ready:
                    return reply
                self._check_open()
        finally:
            control.close()
        raise TimedOut(
            f"{self._name} is up, but has not begun this job within {self._start_timeout:g} s"
        )

    def _check_open(self) -> None:
        if self._over.is_set():
            raise Unreachable("the link was closed")

    def _serve_stream(self) -> None:
        """Serves one stream, from its opening until it breaks."""
        opened = False
        try:
            stream = self._open()
            opened = True
            self._receive(stream)
        except (Unreachable, GarbledStream) as error:
            garbled = isinstance(error, GarbledStream)
            self._garbled = self._garbled + 1 if garbled else 0
            if self._garbled > MOST_GARBLED:
                raise CorruptFrame(str(error)) from error
            if not self._over.is_set() and str(error) != self._said:
                self._said = str(error)  # once, however often it is tried
                log.warning("%s: opening a stream again: %s", self._name, error)
        if opened:
            self._said = ""
        elif not self._over.wait(RETRY_SECONDS) and self._returns:
            self._check_coordinator()

    def _check_coordinator(self) -> None:
        """Returns unless another process has taken the coordinator's place.

        Raises:
            ServerLost: one has.
        """
        control = ControlClient(self._endpoint, self._timeouts.link_beat, self._name, self._access)
        try:
            reply = control.follow(self._request)
        except (Unreachable, TimedOut):
            return
        finally:
            control.close()
        if not reply.ready or reply.session != self._reply.session:
            raise ServerLost(f"{self._name} is another process now")

    def _open(self) -> SequencedStream:
        host, _ = split_endpoint(self._endpoint)
        self._opened += 1
        stream = SequencedStream(
            TRANSPORTS[self.transport].connect(
                host,
                self._reply.data_port,
                timeout_seconds=self._timeouts.connection,
                keys=self._access.keys,
            )
        )
        hello = Hello(
            session=self._reply.session,
            stream=self._opened,
            follower=True,
            server_index=self._request.server_index,
            fingerprint=self._request.fingerprint,
        )
        greet(stream, hello, self._access, self._endpoint, self._timeouts.connection)
        self._opened_at = RUNNING()
        try:
            self._end.attach(stream, self._opened)
        except Unreachable:
            stream.cancel()
            raise
        self.reconnects = self._opened - 1
        return stream

    def _receive(self, stream: SequencedStream) -> None:
        try:
            while (header := self._end.next_frame(stream)) is not None:
                self._garbled = 0
                if header.kind == Kind.FAILURE:
                    failure = header.failure
                    error = from_wire(failure.error, f"{self._name}: {failure.message}")
                    if isinstance(error, UnknownSession):  # another process has the place
                        raise ServerLost(str(error))
                    raise error
                if header.kind in (Kind.BYE, Kind.DRAIN):
                    raise _going(self._name, header)
                if header.kind not in (Kind.RECORD, Kind.PROBE):
                    raise GarbledStream(f"expected RECORD, PROBE or BYE, got kind {header.kind}")
                self._end.receive(stream, header)
            raise Unreachable(f"{self._name}: the stream ended")
        finally:
            self._end.detach(stream)
            stream.cancel()

    # ---- the other thread ----

    def _beat(self) -> None:
        with RUNNING.ticking():
            looking = SideBusiness(f"the link to {self._name}")
            while not self._over.wait(self._timeouts.link_beat):
                looking.do(self._look)
        if self._end.wait_heard(GOODBYE_SECONDS):  # closed: after a loss nothing is open
            self._end.say_bye()
            self._threads[0].join(GOODBYE_SECONDS)  # until the coordinator has ended its side
        self._end.end()

    def _look(self) -> None:
        """Loses a silent coordinator; before that it has a stream opened again."""
        now, heard = RUNNING(), self._end.last_heard
        if now - heard > self._timeouts.lost:
            self._lose(ServerLost(f"{self._name} has not been heard for {self._timeouts.lost:g} s"))
        elif now - max(heard, self._opened_at) > self._timeouts.connection:
            if heard != self._warned:  # once in a silence
                log.warning("%s: nothing has arrived for %.1f s", self._name, now - heard)
            self._warned = heard
            self._end.cancel()
        else:
            self._end.probe()


def _going(name: str, header: Frame) -> PServerError:
    if header.kind == Kind.DRAIN:
        return Draining(f"{name} is shutting down")
    return Draining(f"{name} has ended the link")
