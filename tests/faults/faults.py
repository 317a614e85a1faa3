"""Faults of the network, in streams and calls, at named points or at random; and loads of saves."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import grpc
from google.protobuf.message import Message

from pserver.client import client
from pserver.client.client import Client
from pserver.config import split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError, Unreachable
from pserver.security.access import OPEN, Access
from pserver.security.keys import Keys
from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import MISSED, Buffer, Handler, Land, Listener, Stream
from pserver.wire_pb2 import Frame, Kind, LoadRequest

# ---- loads ----
#
# Loads of saves, server by server, as a checkpoint's reader asks for them.


def load(client: Client, path: str, seconds: float) -> None:
    """Has a server read what servers of its place have written.

    Args:
        path: below the server's directory.
        seconds: for its answer.

    Raises:
        PServerError: it cannot.
    """
    client._control.load(LoadRequest(session=client._reply.session, path=path), seconds)


# ---- rpc faults ----
#
# Injects faults of the network into control calls: Join, Leave, Barrier and the others.
#
# Only tests and the history checker use it, together with :mod:`tests.faults.faults`, which injects
# faults into streams.
#
# ===========  ====================================================
# action       what happens to a call
# ===========  ====================================================
# lost         the request does not arrive
# unanswered   the server acts on it, and its reply is lost
# twice        it arrives twice; the caller gets the first reply
# slow         it arrives later
# ===========  ====================================================


CALL_ACTIONS = ("lost", "unanswered", "twice", "slow")
SLOW_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class CallPoint:
    """One fault at a named point.

    Attributes:
        action: what happens.
        call: to which call: "Join", ...
        occurrence: to which of them: counts such calls from 1, of all trainers.
    """

    action: str
    call: str
    occurrence: int = 1


class CallInjector:
    """Decides what happens to each control call.  Any thread may ask.

    Args:
        points: faults at named points.
        seed: of the random faults: the same seed decides the same for the n-th call of a kind to a
            server.
        rate: the part of the calls that get a random fault.
        names: port -> the server's name.

    Attributes:
        done: how often each fault happened, by (action, "call", name of the call).
    """

    def __init__(
        self,
        points: Sequence[CallPoint] = (),
        seed: object = 0,
        rate: float = 0.0,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.names = dict(names or {})
        self.done: Counter[tuple[str, str, str]] = Counter()
        self._points = list(points)
        self._calls: Counter[str] = Counter()
        self._draws: dict[tuple[str, str], random.Random] = {}
        self._seed, self._rate = seed, rate
        self._lock = threading.Lock()  # guards all of the above

    def decide(self, call: str, server: str) -> str:
        """What happens to a call: an action, or "" for nothing."""
        with self._lock:
            self._calls[call] += 1
            named = (
                point.action
                for point in self._points
                if (point.call, point.occurrence) == (call, self._calls[call])
            )
            action = next(named, "") or self._random(call, server)
            if action:
                self.done[action, "call", call] += 1
            return action

    def _random(self, call: str, server: str) -> str:
        draw = self._draws.setdefault(
            (call, server), random.Random(f"{self._seed} {call} {server}")
        )
        return draw.choice(CALL_ACTIONS) if draw.random() < self._rate else ""


class Lost(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The error of a call that did not arrive, or whose reply did not."""

    def code(self) -> grpc.StatusCode:
        """The status of a call whose connection breaks."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """The text of the status."""
        return "the connection broke"

    def trailing_metadata(self) -> tuple[()]:
        """Nothing: the server has not answered."""
        return ()


class FaultyControl(ControlClient):
    """A control client whose calls may get lost.

    Args:
        injector: decides what happens to each call.
        endpoint, timeout_seconds, name, access: as ControlClient has them.
    """

    def __init__(
        self,
        injector: CallInjector,
        endpoint: str,
        timeout_seconds: float,
        name: str = "",
        access: Access = OPEN,
    ) -> None:
        super().__init__(endpoint, timeout_seconds, name, access)
        self._injector = injector
        self._server = injector.names.get(split_endpoint(endpoint)[1], endpoint)

    def _ask(self, channel: grpc.Channel, name: str, request: Message, timeout: float) -> Message:
        action = self._injector.decide(name, self._server)
        if action == "lost":
            raise Lost
        if action == "slow":
            time.sleep(SLOW_SECONDS)
        reply = super()._ask(channel, name, request, timeout)
        if action == "unanswered":
            raise Lost
        if action == "twice":
            with suppress(grpc.RpcError):
                super()._ask(channel, name, request, timeout)
        return reply


@contextmanager
def faulty_calls(injector: CallInjector) -> Iterator[CallInjector]:
    """While it lasts, the control calls of trainers that this process starts are faulty."""
    before = vars(client)["ControlClient"]
    vars(client)["ControlClient"] = partial(FaultyControl, injector)
    try:
        yield injector
    finally:
        vars(client)["ControlClient"] = before


# ---- stream faults ----
#
# Injects faults of the network into the streams between a trainer and its servers, at named points
# or at random.
#
# Only tests and the history checker use it.  It works at the connecting end, through which both
# directions pass::
#
#   with injected(Injector(points=[Point("drop", "in", Kind.DONE, step=2)]), "tcp"):
#       ...                        # the first DONE of step 2 is lost; the trainer asks again
#
# ==========  ================================================================================
# action      what happens to a frame
# ==========  ================================================================================
# drop        it is lost
# duplicate   it arrives twice
# delay       it arrives later, and so do the frames behind it
# reorder     it arrives after the next one
# reset       the connection breaks, for both ends, and the frame is lost
# late        the trainer sees the connection break; all that it had sent on it, and this
#             frame, reaches the server later, a second time, when another stream may have
#             replaced this one
# ==========  ================================================================================


ACTIONS = ("drop", "duplicate", "delay", "reorder", "reset", "late")
DELAY_SECONDS = 0.004
# before late frames arrive one of these passes, and again before their connection ends
LATE_SECONDS = (0.0, 0.002, 0.02)
FAULTLESS_FROM = 5  # a lane's streams from this number on get no faults, so that every trial ends

FrameMessage = tuple[Frame, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Point:
    """One fault at a named point: what happens, and to which frame.  None fits every frame.

    Attributes:
        action: what happens.
        direction: "out" (to the server) or "in".
        kind, step: of the frame.
        trainer, lane, server: of the stream.
        occurrence: counts the frames that fit, over all streams, from 1; a request that is sent
            again counts again.
        tables: whether the stream is the one on which rows are looked up.
    """

    action: str
    direction: str
    kind: Kind | None = None
    step: int | None = None
    trainer: int | None = None
    lane: int | None = None
    server: str | None = None
    occurrence: int = 1
    tables: bool | None = None

    def fits(self, direction: str, header: Frame, place: Place) -> bool:
        """Whether this frame is the kind of frame that the point names."""
        pairs = (
            (self.kind, header.kind),
            (self.step, header.step),
            (self.trainer, place.trainer),
            (self.lane, place.lane),
            (self.server, place.server),
            (self.tables, place.tables),
        )
        return direction == self.direction and all(
            mine is None or mine == its for mine, its in pairs
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A stream: the server's name, and the fields of its HELLO.

    Attributes:
        trainer: of the link of server k to server 0 it is -1 - k.
    """

    server: str
    trainer: int = 0
    lane: int = 0
    stream: int = 0
    tables: bool = False


class Injector:
    """Decides what happens to each frame.  Any thread may ask.

    Args:
        points: faults at named points.
        seed: of the random faults: the same seed decides the same for the same frames of the same
            streams.
        rate: the part of the frames that get a random fault.
        names: port -> the server's name, so that decisions do not depend on ports.

    Attributes:
        done: how often each fault happened, by (action, direction, kind).
    """

    def __init__(
        self,
        points: Sequence[Point] = (),
        seed: object = 0,
        rate: float = 0.0,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.names = dict(names or {})
        self.done: Counter[tuple[str, str, str]] = Counter()
        self._points = list(points)
        self._seen = [0] * len(self._points)
        self._seed, self._rate = seed, rate
        self._draws: dict[tuple[Place, str, bool], random.Random] = {}
        self._lock = threading.Lock()  # guards all of the above

    def decide(self, direction: str, header: Frame, place: Place) -> str:
        """What happens to a frame: an action, or "" for nothing."""
        with self._lock:
            action = self._named(direction, header, place) or self._random(direction, header, place)
            if action:
                self.done[action, direction, Kind.Name(header.kind)] += 1
            return action

    def _named(self, direction: str, header: Frame, place: Place) -> str:
        action = ""
        for index, point in enumerate(self._points):
            if point.fits(direction, header, place):
                self._seen[index] += 1
                if self._seen[index] == point.occurrence:
                    action = point.action
        return action

    def _random(self, direction: str, header: Frame, place: Place) -> str:
        if not self._rate or place.stream >= FAULTLESS_FROM:
            return ""
        # how many PROBEs there are depends on time: they draw from a generator of their own
        timed = header.kind == Kind.PROBE
        key = (place, direction, timed)
        draw = self._draws.setdefault(key, random.Random(f"{self._seed} {key}"))
        return draw.choice(ACTIONS) if draw.random() < self._rate else ""


class Partitions(Injector):
    """Faults of frames, and links that carry nothing for a while."""

    cut: frozenset[tuple[str, int]] = frozenset()  # server, trainer

    def decide(self, direction: str, header: Frame, place: Place) -> str:
        """See :class:`Injector`."""
        if (place.server, place.trainer) in self.cut:
            self.done["severed", direction, Kind.Name(header.kind)] += 1
            return "reset"
        return super().decide(direction, header, place)

    def sever(self, server: int, trainer: int, seconds: float) -> None:
        """For so long nothing passes between a server and a trainer."""
        pair = (f"server {server}", trainer)
        self.cut |= {pair}

        def heal() -> None:
            self.cut -= {pair}

        timer = threading.Timer(seconds, heal)
        timer.daemon = True
        timer.start()


class FaultyStream:
    """The connecting end of a stream, with faults.

    A thread of its own receives, so that the stream can break for the trainer alone.

    Args:
        stream: the one below.
        injector: decides what happens to each frame.
        server: the server's name.
    """

    def __init__(self, stream: Stream, injector: Injector, server: str) -> None:
        self.transport, self.peer, self.bearer = stream.transport, stream.peer, stream.bearer
        self.offer = stream.offer
        self._stream, self._injector = stream, injector
        self._place = Place(server)
        self._sent: list[FrameMessage] = []  # to be sent again by "late"
        # by direction: a frame that waits until the next one has passed
        self._held: dict[str, FrameMessage | None] = {"out": None, "in": None}
        self._broken = ""
        self._lingers = False  # broken for the trainer, and not yet for the server
        self._arrived: queue.SimpleQueue[FrameMessage | None | PServerError] = queue.SimpleQueue()
        self._pump = threading.Thread(target=self._pump_in, name=f"faults {self.peer}", daemon=True)

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        message = (_copy(header), b"".join(payload))
        if header.kind == Kind.HELLO:
            hello = header.hello
            who = -1 - hello.server_index if hello.follower else hello.trainer_id
            self._place = Place(self._place.server, who, hello.lane, hello.stream, hello.tables)
            if self._pump.ident is None:  # with keys there are two of them
                self._pump.start()
        self._sent.append(message)
        for each in self._after("out", message):
            self._check()
            self._stream.send(_copy(each[0]), [each[1]] if each[1] else ())
        self._check()

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        arrived = self._arrived.get()
        if isinstance(arrived, PServerError):
            self._arrived.put(arrived)
            raise arrived
        if arrived is None:
            return None
        return arrived[0], MISSED if arrived[1] is MISSED else memoryview(arrived[1])

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.admit()

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.close()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._break("was cancelled")
        if not self._lingers:
            self._stream.cancel()

    def _check(self) -> None:
        if self._broken:
            raise Unreachable(f"{self.peer}: the stream {self._broken}")

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._arrived.put(Unreachable(f"{self.peer}: the stream {self._broken}"))

    def _after(self, direction: str, message: FrameMessage) -> list[FrameMessage]:
        """The frames that pass in place of this one."""
        action = self._injector.decide(direction, message[0], self._place)
        held, self._held[direction] = self._held[direction], None
        if action == "reorder" and held is None:
            self._held[direction] = message
            return []
        if action == "delay":
            time.sleep(DELAY_SECONDS)
        if action in ("reset", "late"):
            self._end(action)
            return []
        after = {"drop": [], "duplicate": [message, message]}.get(action, [message])
        return after if held is None else [*after, held]

    def _end(self, action: str) -> None:
        if self._broken:
            return
        self._lingers = action == "late"
        self._break(f"broke ({action})")
        if self._lingers:
            threading.Thread(target=self._linger, name=f"late {self.peer}", daemon=True).start()
        else:
            self._stream.cancel()

    def _linger(self) -> None:
        """Sends again all that had been sent, and the last frame for the first time; then ends the
        connection for the server, too.
        """
        seconds = random.Random(str(self._place)).choice(LATE_SECONDS)
        time.sleep(seconds)
        with suppress(PServerError):
            for header, payload in list(self._sent[1:]):
                self._stream.send(_copy(header), [payload] if payload else ())
            time.sleep(seconds + 0.01)
        self._stream.cancel()

    def _pump_in(self) -> None:
        try:
            while (received := self._stream.receive()) is not None:
                missed = received[1] is MISSED
                payload = received[1] if missed else bytes(received[1])
                for each in self._after("in", (received[0], payload)):
                    self._arrived.put(each)
            self._arrived.put(None)
        except PServerError as error:
            self._arrived.put(error)


def _copy(header: Frame) -> Frame:
    return Frame.FromString(header.SerializeToString())


class FaultyTransport:
    """A transport whose connecting ends inject faults."""

    def __init__(self, transport: Transport, injector: Injector) -> None:
        self._transport, self._injector = transport, injector

    def listen(self, handle: Handler, host: str = "127.0.0.1", port: int = 0) -> Listener:
        """See :class:`pserver.transport.registry.Transport`."""
        return self._transport.listen(handle, host, port)

    def connect(
        self, host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None
    ) -> Stream:
        """See :class:`pserver.transport.registry.Transport`."""
        stream = self._transport.connect(host, port, timeout_seconds=timeout_seconds, keys=keys)
        return FaultyStream(stream, self._injector, self._injector.names.get(port, str(port)))


@contextmanager
def injected(injector: Injector, *transports: str) -> Iterator[Injector]:
    """While it lasts, the streams that this process opens over these transports are faulty.

    Args:
        injector: decides what happens to each frame.
        transports: names; none means all.
    """
    before = {name: TRANSPORTS[name] for name in transports or TRANSPORTS}
    TRANSPORTS.update(
        {name: FaultyTransport(transport, injector) for name, transport in before.items()}
    )
    try:
        yield injector
    finally:
        TRANSPORTS.update(before)
