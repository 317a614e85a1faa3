"""A trainer's stream of frames to one server: one request at a time, sent again after a broken
connection.

Two threads serve it, so that tensors leave while the script computes and arrive while it
waits for another server::

    outbox      sends queued frames, in order
    inbox       receives frames: copies values to their destinations, resolves replies

A frame of up to ``DIRECT_BYTES`` is sent by the thread that asks, if nothing is queued before it:
waking the outbox takes longer.  So are rows and ids up to ``WAITED_BYTES``, as that thread has
nothing to compute before the answer; of rows up to ``LAST_BYTES`` where no other server waits for
theirs.

[Note: sending again]  A request (a step, a pull, a load, ...) is a run of frames that ends in one
reply, DONE.  Until the reply has arrived the channel keeps the frames (references, no copies).
When the stream breaks, the inbox opens another, says HELLO and queues the same frames again: the
server applies a step once, however often it comes, and answers it again.  Streams are numbered:
frames queued for an earlier one are not sent twice, and the server stops listening to it.  While a
request is unanswered the outbox sends PROBE from time to time; the next frame that arrives reveals
a loss (:mod:`pserver.transport.stream`).  If streams keep breaking for the heartbeat timeout, with
nothing received in between, the server is lost.

A connection can also die without an error: what is sent is lost, and nothing arrives.  A server
that is alive is never silent for long: it answers PROBE, and while it works on a request it says
PROBE itself, each second.  So where nothing has arrived for a quarter of the heartbeat timeout (of
the first unanswered PROBE, or of a send that does not end) the stream is given up as if it had
broken (:meth:`RetryingStream.end_if_silent`).  On a slow link an answer may take longer than that,
behind what is still on its way: for the same request the patience doubles each time, and PROBE goes
first on the new stream, so that its answer tells a slow link from a dead one.

[Note: withdrawn]  Ctrl-C may interrupt the thread that asks anywhere: within a frame, between two
of a request, in the wait for the reply.  The next request then finds one without an answer, whose
frames would be taken for its own, and its answer too.  So another stream takes the place of the
present one before it begins: the server forgets what came without a COMMIT, and nothing that it
sends on a replaced stream arrives.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pserver import timeouts
from pserver.client.replies import MissedValues, Reply
from pserver.errors import (
    CorruptFrame,
    GarbledStream,
    PServerError,
    ServerLost,
    TrainerLost,
    UnknownSession,
    Unreachable,
    from_wire,
)
from pserver.onlookers import onlooker
from pserver.running_clock import RUNNING
from pserver.telemetry.trace import SPANS, Fact, now
from pserver.timeouts import Timeouts
from pserver.transport import frames
from pserver.transport.memory import ZONE_BYTES
from pserver.transport.stream import MISSED, Buffer, Stream, bytes_of
from pserver.wire_pb2 import Done, Failure, Frame, Kind, Part

# ---- awaited ----
#
# What a trainer waits for in one request.


@dataclass(frozen=True, slots=True)
class PendingReply:
    """The parts of one request that are awaited.

    Attributes:
        reply: the server's, or the failure that came instead.
        norms: this server's part of the squared norms, where norms clip on servers.
        sent: the request's COMMIT has left; or the request has failed.
    """

    reply: Future[Reply] = field(default_factory=Future)
    norms: Future[Mapping[str, float]] = field(default_factory=Future)
    sent: Future[None] = field(default_factory=Future)

    def fail(self, error: PServerError) -> None:
        """Fails the parts that have not arrived."""
        for future in (self.reply, self.norms):
            if not future.done():
                future.set_exception(error)
        if not self.sent.done():
            self.sent.set_result(None)


# ---- silence ----
#
# How long a peer has been silent on a stream on which it should be heard.
#
# See [Note: sending again] in :mod:`pserver.client.stream`.


class StreamSilence:
    """The silence of one stream, and of those that take its place.  Any thread may call it.

    Args:
        patience_seconds: how long a silence may last; for the same request it doubles each time.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._first = patience_seconds
        self._lock = threading.Lock()  # guards all below
        self._patience = patience_seconds
        self._heard = 0.0  # when a frame arrived
        self._sending: float | None = None  # since when a frame is being sent
        self._probed: float | None = None  # the first PROBE after which nothing has arrived
        self._ended = False  # the present stream, because of its silence

    def sends(self, probe: bool) -> None:
        """Notes that a frame is being sent, until :meth:`sent`."""
        with self._lock:
            self._sending = RUNNING()
            if probe and self._probed is None:
                self._probed = self._sending

    def sent(self) -> None:
        """Notes that no frame is being sent any more."""
        with self._lock:
            self._sending = None

    def received(self) -> None:
        """Notes that a frame has arrived."""
        with self._lock:
            self._heard, self._probed = RUNNING(), None

    def answered(self) -> None:
        """The request is over."""
        with self._lock:
            self._patience = self._first

    def overdue(self) -> float:
        """The seconds of a silence that has lasted too long, once for a stream; else 0."""
        with self._lock:
            since = [at for at in (self._sending, self._probed) if at is not None]
            if not since or self._ended:
                return 0.0
            seconds = RUNNING() - max(min(since), self._heard)
            if seconds <= self._patience:
                return 0.0
            self._ended, self._patience = True, 2 * self._patience
            return seconds

    def begin_again(self) -> bool:
        """Begins anew with a stream that replaces the one before.

        Returns:
            Whether that one was silent.
        """
        with self._lock:
            ended, self._ended, self._probed = self._ended, False, None
            return ended


# ---- request times ----
#
# The spans of one request of a channel: how long its parts took.


class RequestTimes:
    """The times at which a request of one channel began, was complete, and was answered.

    A step becomes three spans, one behind the other::

        push    from its first gradient until its commit leaves
        wait    until the first new value arrives, or the answer without values
        pull    until all have arrived

    Any other request is one span, of the name that is given.

    Args:
        track: of the channel: "to server 0, lane 1".
        facts: the server, and the lane, where it is one's.

    Attributes:
        name: of a request that is no step.
    """

    def __init__(self, track: str, facts: dict[str, Fact]) -> None:
        self.name = "request"
        self._track, self._facts = track, facts
        self._began = now()
        self._committed = self._arrived = 0.0

    @onlooker("the trace")
    def committed(self, step: int) -> None:
        """The request is a step, and its commit leaves."""
        self._facts = {**self._facts, "step": step}
        self._committed = now()

    @onlooker("the trace")
    def arrives(self) -> None:
        """A value arrives."""
        self._arrived = self._arrived or now()

    @onlooker("the trace")
    def answered(self, reply: Future[Reply]) -> None:
        """The request is over."""
        ended, add = now(), SPANS.add
        if not SPANS.on:
            return
        if not self._committed:
            add(self.name, self._began, ended, self._track, **self._facts)
            return
        arrived = max(self._arrived, self._committed) if self._arrived else ended
        add("push", self._began, self._committed, self._track, **self._facts)
        add("wait", self._committed, arrived, self._track, **self._facts)
        if arrived < ended:
            add("pull", arrived, ended, self._track, **self._facts)


# ---- retrying stream ----


log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2  # between two tries to open a stream again
MAX_CORRUPT = 5  # streams of one request
DIRECT_BYTES = frames.EAGER_BYTES
WAITED_BYTES, LAST_BYTES = 2**18, 2**20

NamedTensors = Iterable[tuple[str, torch.Tensor]]  # contiguous, in main memory
# ``destination(name, blank)`` is the contiguous CPU tensor that a variable's value is copied into;
# ``blank()`` makes a new one of the shape and dtype that the server announced
Destination = Callable[[str, Callable[[], torch.Tensor]], torch.Tensor]


def dropped(name: str, blank: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The destination of values that no request asked for."""
    return blank()


def arrived_in(
    arrived: dict[str, torch.Tensor], name: str, blank: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The destination of values in new tensors, by name; of a name that is there already, its
    tensor.
    """
    if name not in arrived:
        arrived[name] = blank()
    return arrived[name]


Outgoing = tuple[Frame, Sequence[Buffer]]


class RetryingStream:
    """One request at a time to one server, over a stream that is opened again when it breaks.

    One thread makes requests.  :meth:`fail` and :meth:`close` may come from any thread.

    Args:
        open_stream: connects and says HELLO, with the stream's number.
        timeout_seconds: how long a broken stream may stay broken.
        name: for messages: "server 0 at HOST:PORT".
        awaits_seconds: for how long, beyond its silence, a server that may come back is awaited.
        lost_while_away: explains an unknown session by this trainer's own pause, if it had one.

    Attributes:
        bytes_out, bytes_in: of payload, since the start.
        reconnects: streams that were opened in place of a broken one.
        failure: what ended the channel, if something did.
    """

    _times: RequestTimes | None = None  # of the request under way, where it is traced

    def __init__(
        self,
        open_stream: Callable[[int], Stream],
        timeout_seconds: float,
        name: str,
        awaits_seconds: float = 0.0,
        lost_while_away: Callable[[PServerError], TrainerLost | None] = lambda error: None,
    ) -> None:
        self.bytes_out = self.bytes_in = self.reconnects = 0
        self.failure: PServerError | None = None
        self._open_stream, self._name = open_stream, name
        self._timeout_seconds, self._awaits_seconds = timeout_seconds, awaits_seconds
        self._lost_while_away = lost_while_away
        # since when, and how often, streams broke with nothing received
        self._breaking: tuple[float, int] | None = None
        self._opened = 1  # streams that were tried
        self._missed = MissedValues()
        self._corrupt = 0  # streams of this request that brought bytes that are no frame
        self._probe_seconds = timeouts.PROBE_SECONDS  # until the next PROBE
        self._silence = StreamSilence(Timeouts(timeout_seconds).stream)
        self._lock = threading.Lock()  # guards the nine below; nothing blocks under it
        self._changed = threading.Condition(self._lock)  # the stream, or the channel has ended
        self._leaving = 0  # frames that are queued, or that the outbox is sending
        self._stream = open_stream(self._opened)
        self._number = self._opened  # of that stream
        self._withdrawn = 0  # the stream that brought a request which was withdrawn
        self._requests, self._closing = 0, False
        self._request: list[Outgoing] = []
        self._destination: Destination = dropped
        self._awaited = PendingReply()
        self._packer = self._empty_packer()  # of the thread that asks
        self._outgoing: queue.SimpleQueue[tuple[int, Outgoing] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{target.__name__} {name}", daemon=True)
            for target in (self._outbox, self._inbox)
        ]
        for thread in self._threads:
            thread.start()

    # ---- requests ----

    def begin(self, destination: Destination = dropped) -> Future[Reply]:
        """Begins a request.  Where the one before has no answer, it was interrupted, and is
        withdrawn first; see [Note: withdrawn].

        Args:
            destination: of the values in the reply; called in the inbox thread, and kept until the
                reply has come.

        Returns:
            The server's reply, or the failure that came instead.
        """
        self.withdraw()
        self._packer = self._empty_packer()
        self._probe_seconds = timeouts.PROBE_SECONDS
        with self._lock:
            self._requests += 1
            self._request, self._awaited = [], PendingReply()
            self._destination = destination
            if self.failure is not None or self._closing:
                self._end_request()
            return self._awaited.reply

    def withdraw(self) -> None:
        """Withdraws the request under way, if there is one; waits for another stream.

        See [Note: withdrawn].
        """
        with self._lock:
            if self._request and not self._awaited.reply.done():
                self._withdrawn = self._number
                self._awaited.fail(Unreachable(f"{self._name}: the request was withdrawn"))
            stream = self._stream if self._withdrawn == self._number else None
        if stream is None:
            return
        stream.cancel()
        with self._lock:
            while self._withdrawn == self._number and self.failure is None and not self._closing:
                self._changed.wait()

    @property
    def norms(self) -> Future[Mapping[str, float]]:
        """This server's part of the squared norms in the step under way, where norms clip on
        servers.
        """
        return self._awaited.norms

    @property
    def sent(self) -> Future[None]:
        """Done when the COMMIT of the request under way has left, or the request has failed."""
        return self._awaited.sent

    def _post(self, kind: Kind, step: int, tensors: NamedTensors) -> None:
        """Queues tensors to be sent, small ones together."""
        for frame in self._packer.add(kind, step, tensors):
            self._queue(frame, DIRECT_BYTES)

    def _empty_packer(self) -> frames.Packer:
        # over shared memory, what has a zone goes there alone
        alone = frames.ALONE_BYTES if self._stream.offer is None else ZONE_BYTES
        return frames.Packer(alone_bytes=alone, busy=self._busy)

    def _busy(self) -> bool:
        """Whether frames are leaving, by the outbox."""
        return self._leaving > 0  # without the lock: a frame may be larger than it need be

    def _post_all(
        self, kind: Kind, step: int, tensors: NamedTensors, direct_bytes: int = WAITED_BYTES
    ) -> None:
        """Queues tensors that are all there: in as few frames as hold them."""
        self._flush()
        for frame in frames.frames(kind, step, tensors):
            self._queue(frame, direct_bytes)

    def _put(self, frame: Outgoing) -> None:
        """Queues a frame behind the small tensors that still wait for others."""
        self._flush()
        self._queue(frame, DIRECT_BYTES)

    def _flush(self) -> None:
        """Queues the small tensors that still wait for others."""
        for frame in self._packer.flush():
            self._queue(frame, DIRECT_BYTES)

    def _queue(self, frame: Outgoing, direct_bytes: int) -> None:
        small = bytes_of(frame[1]) <= direct_bytes
        with self._lock:
            frame[0].request = self._requests
            self._request.append(frame)
            number, direct = self._number, small and not self._leaving
            if not direct:
                self._put_out(frame)
        if direct:
            self._send(number, frame)

    def _put_out(self, frame: Outgoing) -> None:
        """Hands a frame to the outbox.  The caller holds the lock."""
        self._leaving += 1
        self._outgoing.put((self._number, frame))

    # ---- the end ----

    def fail(self, error: PServerError) -> None:
        """Ends the channel: the present request and every later one fail with the error.

        The first error stays.
        """
        with self._lock:
            if self.failure is not None or self._closing:
                return
            self.failure = error
            self._changed.notify_all()
            self._end_request()
            stream = self._stream
        stream.cancel()

    def close(self, abruptly: bool = False) -> None:
        """Says BYE and ends the threads; ``abruptly`` breaks the stream.

        A request that is still unanswered fails.
        """
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            abruptly = abruptly or self.failure is not None
            if not abruptly:
                self._put_out((Frame(kind=Kind.BYE), ()))
            self._outgoing.put(None)
        if not abruptly:
            self._threads[0].join(2.0)
        (self._stream.cancel if abruptly else self._stream.close)()
        for thread in self._threads:  # one that dials a dead server has no tensor in its hands
            thread.join(0.2 if abruptly else 2.0)
        self._stream.cancel()  # a server that does not end its side may be gone
        with self._lock:
            self._end_request()

    def _end_request(self) -> None:
        """Fails the unanswered parts of the present request.  The caller holds the lock."""
        closed = Unreachable(f"{self._name}: this trainer has closed the connection")
        self._awaited.fail(self.failure or closed)

    def end_if_silent(self) -> None:
        """Breaks the stream if an answer is overdue; called from time to time.

        See [Note: sending again].
        """
        with self._lock:
            stream, waiting = self._stream, bool(self._request) and not self._awaited.reply.done()
        if waiting and (seconds := self._silence.overdue()):
            log.warning("%s: nothing has arrived on a stream for %.1f s", self._name, seconds)
            stream.cancel()

    def renew(self) -> None:
        """Breaks the stream: the server has come back, and does not know it."""
        self._silence.received()
        self._stream.cancel()

    # ---- the two threads ----

    def _outbox(self) -> None:
        while (item := self._next()) is not None:
            self._send(*item)
            with self._lock:
                self._leaving -= 1
            del item  # while nothing is to be sent, no tensor is held

    def _send(self, number: int, frame: Outgoing) -> None:
        """Sends a frame, unless another stream has taken the place of its own."""
        header, payload = frame
        with self._lock:
            stream, stale = self._stream, number != self._number
        try:
            if not stale:
                self._silence.sends(probe=header.kind == Kind.PROBE)
                try:
                    stream.send(header, payload)
                finally:
                    self._silence.sent()
                self.bytes_out += bytes_of(payload)
                if header.kind == Kind.COMMIT and header.request == self._requests:
                    self._resolve(self._awaited.sent, None)
        except Unreachable:
            pass  # the inbox sees it too, and opens another stream
        except OSError as error:  # of this system, which may lack something for a while
            log.warning("%s: %s", self._name, error)
            stream.cancel()
        except PServerError as error:
            self.fail(error)

    def _next(self) -> tuple[int, Outgoing] | None:
        """The next frame; a PROBE where none comes for some time and the request is unanswered;
        None at the end.
        """
        while True:
            try:
                item = self._outgoing.get(timeout=self._probe_seconds)
            except queue.Empty:
                with self._lock:
                    if self._request and not self._awaited.reply.done():
                        most = timeouts.MOST_PROBE_SECONDS
                        self._probe_seconds = min(2 * self._probe_seconds, most)
                        self._leaving += 1
                        return self._number, (Frame(kind=Kind.PROBE), ())
            else:
                self._probe_seconds = timeouts.PROBE_SECONDS
                return item

    def _inbox(self) -> None:
        while not self._closing and self.failure is None:
            try:
                self._receive()
                raise Unreachable(f"{self._name}: the stream ended")
            except Unreachable as error:
                if self._closing or self.failure is not None or not self._reopen(error):
                    return
            except PServerError as error:
                self.fail(error)
            except Exception as error:
                log.exception("receiving from %s", self._name)
                self.fail(CorruptFrame(f"{self._name}: {type(error).__name__}: {error}"))

    def _receive(self) -> None:
        while (received := self._next_frame()) is not None:
            header, payload = received
            self._breaking = None
            self._silence.received()
            self.bytes_in += frames.received_bytes(header, payload)
            if payload is MISSED:
                self._missed.add(header)
            elif header.kind == Kind.VALUE:
                self._note_arrival()
                frames.scatter(header, payload, self._destination_of)
            elif header.kind == Kind.DONE:
                self._answered(header.done)
            elif header.kind == Kind.NORMS:
                self._resolve(self._awaited.norms, dict(header.norms.squared))
            elif header.kind == Kind.DRAIN:
                self.fail(ServerLost(f"{self._name} is shutting down"))
            elif header.kind not in (Kind.PROBE, Kind.FAILURE):
                raise CorruptFrame(
                    f"{self._name}: expected VALUE, DONE, NORMS, FAILURE, DRAIN or PROBE, got "
                    f"kind {header.kind}"
                )

    def _note_arrival(self) -> None:
        if self._times is not None:
            self._times.arrives()

    def _next_frame(self) -> tuple[Frame, memoryview] | None:
        """The next frame.  Bytes that are not a frame, here or at the server, break the stream and
        not the job, a few times; more of them are not a network's accident.
        """
        try:
            received = self._stream.receive(self._land)
            if received is not None and received[0].kind == Kind.FAILURE:
                error = _final(received[0].failure, self._name, self._awaits_seconds > 0)
                self.fail(self._explained(error))
            return received
        except CorruptFrame as error:
            self._corrupt += 1
            if self._corrupt > MAX_CORRUPT:
                raise
            raise Unreachable(f"received bytes that are not a frame: {error}") from error

    def _explained(self, error: PServerError) -> PServerError:
        """The error; for an unknown session this trainer's own pause, if that is the cause."""
        lost = self._lost_while_away(error) if isinstance(error, UnknownSession) else None
        return lost or error

    def _land(self, header: Frame, payload_bytes: int) -> list[memoryview] | None:
        """Gives the destinations to which values are read."""
        if header.kind != Kind.VALUE:
            return None
        self._note_arrival()
        return frames.land(header, payload_bytes, self._destination_of)

    def _destination_of(self, part: Part) -> torch.Tensor:
        return self._destination(part.name, partial(frames.blank, part))

    def _answered(self, done: Done) -> None:
        """The request is over: its frames are not sent again, and their tensors may be freed; not
        before values that were missed have come.
        """
        whole = self._missed.end(done)
        if whole is None:
            with self._lock:
                self._put_out((self._missed.ask(self._requests), ()))
            return
        reply = Reply.from_message(whole)
        with self._lock:
            self._request, self._destination = [], dropped
        self._silence.answered()
        self._corrupt = 0
        self._resolve(self._awaited.reply, reply)

    def _resolve(self, future: Future[Any], result: object) -> None:
        """Sets a result, once: the reply to a repeated request may arrive twice."""
        with self._lock:
            if not future.done():
                future.set_result(result)

    def _reopen(self, reason: Unreachable) -> bool:
        """Opens a stream in place of the broken one and sends the request again.

        See [Note: sending again].
        """
        self._stream.cancel()
        withdrawn = self._withdrawn == self._number  # by this end: that is no break
        while not self._closing and self.failure is None:
            since, times = self._breaking or (RUNNING(), 0)
            self._breaking = since, times + 1
            if RUNNING() - since > self._timeout_seconds + self._awaits_seconds:
                self.fail(
                    ServerLost(
                        f"{self._name}: streams have broken for {self._timeout_seconds:g} s: "
                        f"{reason}"
                    )
                )
            elif times:
                time.sleep(RETRY_SECONDS)
            try:
                self._opened += 1
                stream = self._open_stream(self._opened)
            except Unreachable as error:
                reason = error
            except PServerError as error:
                self.fail(self._explained(error))
            else:
                if withdrawn:
                    self._breaking = None
                else:
                    log.warning("%s: opened a stream again (%s)", self._name, reason)
                return self._take(stream)
        return False

    def _take(self, stream: Stream) -> bool:
        """Takes a stream as the channel's, and sends an unanswered request again on it; False where
        the channel has ended.
        """
        with self._lock:
            ended = self._closing or self.failure is not None
            if not ended:
                self._stream, self._number = stream, self._opened
                self._changed.notify_all()
                self._missed.forget()
                self.reconnects += 1
                if self._silence.begin_again():
                    self._put_out((Frame(kind=Kind.PROBE), ()))
                for frame in self._request if not self._awaited.reply.done() else ():
                    self._put_out(frame)
        if ended:
            stream.cancel()
        return not ended


def _final(failure: Failure, name: str, awaited: bool) -> PServerError:
    """The error that a server has sent, if the channel ends with it.

    Args:
        failure: as it came.
        name: of the server.
        awaited: it may come back.

    Raises:
        GarbledStream, Unreachable: only the stream does.
    """
    error = from_wire(failure.error, f"{name}: {failure.message}")
    if isinstance(error, GarbledStream):
        raise error
    if isinstance(error, UnknownSession) and awaited:
        raise Unreachable(str(error))  # it has come back, and is joined again
    return error
