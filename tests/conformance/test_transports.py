"""A transport's promises: what a stream carries, it carries whatever runs below it, and however it
ends, each end hears of it and nothing stays.

A new transport is one more of TRANSPORTS.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from queue import Queue
from threading import Event

import pytest

from pserver.errors import PServerError, Unreachable
from pserver.launcher.cluster import free_port
from pserver.transport import shm
from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import (
    FRAME_BYTES,
    LANDED,
    LIMIT_ITEMS,
    Listener,
    OpenStreams,
    Stream,
)
from pserver.transport.tcp import BUFFER_BYTES, GATHERED_BYTES, LANDING_BYTES
from pserver.wire_pb2 import BYE, GRADIENT, HELLO, PULL, VALUE, Frame, Part
from tests.support.cluster_keys import SecuredTransport
from tests.support.load import scaled
from tests.support.streams import (
    SECONDS,
    CheckedTransport,
    caught,
    echo,
    finish,
    listening,
    open_stream,
    send_until_blocked,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("no_thread_stays")
KINDS: dict[str, Transport] = {
    **TRANSPORTS,
    "tcp with keys": SecuredTransport(TRANSPORTS["tcp"]),
    "grpc with keys": SecuredTransport(TRANSPORTS["grpc"]),
    "tcp of three, checked": CheckedTransport(TRANSPORTS["tcp"], "on", connections=3),
    "grpc unchecked": CheckedTransport(TRANSPORTS["grpc"], "off"),
}
# around what transports treat in different ways
EDGES = (0, GATHERED_BYTES, BUFFER_BYTES, LANDING_BYTES, shm.INLINE_BYTES, shm.SLOT_BYTES)
SIZES = sorted({max(0, edge + more) for edge in EDGES for more in (-1, 0, 1)} | {2 * 2**21 + 3})


def only(*names: str) -> pytest.MarkDecorator:
    """A promise of the transports of these names."""
    kinds = [kind for kind in KINDS if kind.split()[0] in names]
    return pytest.mark.parametrize("kind", kinds, indirect=True)


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The name of each in turn."""
    return request.param


@pytest.fixture
def transport(kind: str) -> Transport:
    """Each in turn."""
    return KINDS[kind]


@pytest.fixture
def echoing(transport: Transport) -> Iterator[Listener]:
    """An accepting end that sends back what comes."""
    with listening(transport, echo) as listener:
        yield listener


def frame(step: int, size: int) -> tuple[Frame, bytes]:
    """A frame of that number, and its payload."""
    body = random.Random(step).randbytes(size)
    part = Part(name="w", dtype="uint8", shape=[size], size=size)
    return Frame(kind=GRADIENT, step=step, parts=[part]), body


def cut(body: memoryview, count: int) -> list[memoryview]:
    """So many buffers, one behind another; some may be empty."""
    size = len(body)
    cuts = sorted(random.Random(count).choices(range(size + 1), k=count - 1))
    return [body[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def within(seconds: float, call: Callable[[], object]) -> object:
    """Calls in a thread of its own; raises what it raises, and Empty when it takes longer."""
    result = caught(call).get(timeout=scaled(seconds))
    if isinstance(result, Exception):
        raise result
    return result


# ---- what a stream carries ----


def test_frames_arrive_whole_and_in_order(transport: Transport, echoing: Listener) -> None:
    """Of all sizes, with and without a payload, in one or many buffers of any kind, sent without a
    wait for answers: headers and bytes are those that left.
    """
    sent = [frame(step, size) for step, size in enumerate(SIZES * 2)]
    stream = open_stream(transport, echoing)

    def send_all() -> None:
        for (header, body), count in zip(sent, (1, 3, 2000) * len(sent), strict=False):
            pieces = cut(memoryview(body), count)
            stream.send(header, [bytearray(pieces[0]), b"", *pieces[1:]] if body else ())
        stream.close()

    sender = caught(send_all)
    for header, body in sent:
        got = stream.receive()
        assert got is not None and got[0] == header and got[1] == body
        assert got[1].contiguous and got[1].itemsize == 1
    assert stream.receive() is None and stream.receive() is None
    assert sender.get(timeout=SECONDS) is None


def test_many_small_frames_keep_their_order(transport: Transport, echoing: Listener) -> None:
    """More than a pipe holds at once."""
    count = 3 * LIMIT_ITEMS
    stream = open_stream(transport, echoing)

    def send_all() -> None:
        for step in range(count):
            stream.send(Frame(kind=VALUE, step=step), [step.to_bytes(4, "little")])
        stream.close()

    sender = caught(send_all)
    seen = []
    while (got := stream.receive()) is not None:
        seen.append((got[0].step, int.from_bytes(got[1], "little")))

    assert sender.get(timeout=SECONDS) is None
    assert seen == [(step, step) for step in range(count)]


def test_both_directions_carry_much_at_once(transport: Transport) -> None:
    """More than the largest frame in each: neither direction waits for the other."""
    body, count = bytes(range(256)) * 2**13, FRAME_BYTES // 2**21 + 1

    def exchange(stream: Stream) -> tuple[list[tuple[int, bool]], object]:
        def push() -> None:
            for step in range(count):
                stream.send(Frame(kind=VALUE, step=step), [body])

        sender = caught(push)
        got = [stream.receive() for _ in range(count)]
        return [(each[0].step, each[1] == body) for each in got if each], sender.get(SECONDS)

    at_server: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        at_server.put(exchange(stream))
        stream.receive()

    with listening(transport, handle) as listener:
        stream = open_stream(transport, listener)
        at_client = exchange(stream)
        assert finish(stream) == []

    whole = ([(step, True) for step in range(count)], None)
    assert at_client == at_server.get(timeout=SECONDS) == whole


@pytest.mark.parametrize("size", [LANDING_BYTES - 1, LANDING_BYTES, 3 * 2**20 + 7])
def test_a_payload_lands_where_it_belongs(
    kind: str, transport: Transport, echoing: Listener, size: int
) -> None:
    """A transport that reads from the kernel reads it into the buffers that ``land`` names, few or
    many; what nobody names, or is small, comes in memory of the stream's.
    """
    header, body = frame(1, size)
    asked: list[tuple[Frame, int]] = []
    stream = open_stream(transport, echoing)
    for count in (1, 3, 2000):
        place = bytearray(size)
        pieces = cut(memoryview(place), count)
        stream.send(header, [body])
        got = stream.receive(lambda *of, pieces=pieces: asked.append(of) or pieces)  # type: ignore[misc]
        assert got is not None and got[0] == header
        lands = kind.startswith("tcp") and size >= LANDING_BYTES
        assert (got[1] is LANDED) == lands == (asked == [(header, size)])
        assert (place if lands else got[1]) == body
        asked.clear()
    stream.send(header, [body])
    got = stream.receive(lambda header, size: None)
    assert got is not None and got[1] == body
    assert finish(stream) == []


def test_two_streams_do_not_mix(transport: Transport, echoing: Listener) -> None:
    """Each gets its own answers, and cancelling one leaves the other whole."""
    first, second = open_stream(transport, echoing), open_stream(transport, echoing)
    for step in range(20):
        for stream, mark in ((first, b"1"), (second, b"2")):
            stream.send(Frame(kind=VALUE, step=step), [mark * 1000])
    for stream, mark in ((second, b"2"), (first, b"1")):
        for step in range(20):
            got = stream.receive()
            assert got is not None and (got[0].step, bytes(got[1])) == (step, mark * 1000)
    first.cancel()
    second.send(Frame(kind=VALUE, step=99))

    assert [header.step for header in finish(second)] == [99]


@only("tcp", "shm")
def test_a_frame_that_is_too_large_is_refused_before_it_leaves(
    transport: Transport, echoing: Listener
) -> None:
    """A payload beyond 64 MB, or a header; the stream goes on."""
    stream = open_stream(transport, echoing)
    with pytest.raises(ValueError, match="at most 67108864 bytes, got 2 of header, 67108865"):
        stream.send(Frame(kind=HELLO), [bytes(FRAME_BYTES + 1)])
    part = Part(name="w" * FRAME_BYTES)
    with pytest.raises(ValueError, match="at most 67108864 bytes, got 671088[0-9]{2} of header, 0"):
        stream.send(Frame(kind=HELLO, parts=[part]))
    stream.send(Frame(kind=HELLO))

    assert [header.kind for header in finish(stream)] == [HELLO]


def test_each_end_knows_the_other(kind: str, transport: Transport) -> None:
    """HOST:PORT, the transport's name and, with keys, whose they are."""
    accepted: Queue[Stream] = Queue()

    def handle(stream: Stream) -> None:
        accepted.put(stream)
        echo(stream)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = accepted.get(timeout=SECONDS)
        assert finish(client) == []

    assert client.peer == f"127.0.0.1:{listener.port}" and server.peer
    assert client.transport == server.transport == kind.split()[0]
    bearer = server.bearer and (server.bearer.role, server.bearer.host)
    assert bearer == (("trainer", "a") if "keys" in kind else None)
    assert (server.offer is not None) == (kind == "shm")


# ---- how a stream ends ----


def test_a_half_closed_stream_still_carries_answers(transport: Transport) -> None:
    """After the client has ended its side, the server sees the end and may go on sending."""

    def handle(stream: Stream) -> None:
        heard = []
        while (got := stream.receive()) is not None:
            heard.append(got[0].kind)
        for kind in heard * 2:
            stream.send(Frame(kind=kind), [bytes(1000)])

    with listening(transport, handle) as listener:
        stream = open_stream(transport, listener)
        stream.send(Frame(kind=PULL))
        stream.close()
        stream.close()
        with pytest.raises(Unreachable, match="closed"):
            stream.send(Frame(kind=PULL))

        assert [header.kind for header in finish(stream)] == [PULL, PULL]


def test_the_client_sees_the_server_end(transport: Transport) -> None:
    """When the handler returns, what it sent still arrives, then the end; sending is an error soon
    after.
    """
    with listening(transport, lambda stream: stream.send(Frame(kind=HELLO))) as listener:
        stream = open_stream(transport, listener)
        got = stream.receive()
        assert got is not None and got[0].kind == HELLO
        assert stream.receive() is None
        with pytest.raises(Unreachable):
            stream.send(Frame(kind=GRADIENT), [b"late"])


@pytest.mark.parametrize("late", [False, True])
def test_a_refusal_arrives_while_the_peer_still_sends(
    transport: Transport, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accepting end says why, and ends the stream; the connecting end, in the middle of 64 MB,
    reads it: also where the handler's thread begins when nothing more can leave.
    """
    began, run = Event(), OpenStreams.run

    def run_late(streams: OpenStreams, stream: Stream) -> None:
        assert began.wait(SECONDS)
        run(streams, stream)

    monkeypatch.setattr(OpenStreams, "run", run_late)

    def refuse(stream: Stream) -> None:
        stream.receive()
        stream.send(Frame(kind=BYE, step=42))

    with listening(transport, refuse) as listener:
        stream = open_stream(transport, listener)
        progress: list[float] = []
        sender = caught(lambda: send_until_blocked(stream, progress, frames=64))
        if late:
            eventually(lambda: bool(progress) and time.monotonic() - progress[-1] > 0.2)
        began.set()
        got = stream.receive()
        assert got is not None and (got[0].kind, got[0].step) == (BYE, 42)
        assert stream.receive() is None
        assert isinstance(sender.get(timeout=SECONDS), (type(None), Unreachable))


def test_a_failing_handler_breaks_its_stream(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that raises is logged with its traceback, and its client's wait ends with an
    error.
    """

    def handle(stream: Stream) -> None:
        raise RuntimeError("a mistake of ours")

    with listening(transport, handle) as listener:
        stream = open_stream(transport, listener)
        with pytest.raises(Unreachable):
            stream.receive()

    assert "a mistake of ours" in caplog.text


def held_open(transport: Transport, stack: ExitStack) -> tuple[Stream, Stream]:
    """Both ends of a stream whose handler waits, until the stack is closed."""
    accepted: Queue[Stream] = Queue()
    over = Event()

    def handle(stream: Stream) -> None:
        accepted.put(stream)
        over.wait(SECONDS)

    listener = stack.enter_context(listening(transport, handle))
    stack.callback(over.set)
    return open_stream(transport, listener), accepted.get(timeout=SECONDS)


@pytest.mark.parametrize("canceller", ["client", "server"])
def test_cancel_unblocks_a_receive(transport: Transport, canceller: str) -> None:
    """At either end; neither takes it for a clean end, and whoever has cancelled is told so."""
    with ExitStack() as stack:
        ends = dict(zip(("client", "server"), held_open(transport, stack), strict=True))
        waits = {name: caught(stream.receive) for name, stream in ends.items()}
        ends["client"].send(Frame(kind=HELLO))
        assert isinstance(waits["server"].get(timeout=SECONDS), tuple)
        waits["server"] = caught(ends["server"].receive)
        ends[canceller].cancel()
        errors = {name: wait.get(timeout=SECONDS) for name, wait in waits.items()}
        with pytest.raises(Unreachable, match="cancelled"):
            ends[canceller].receive()

    assert all(isinstance(error, Unreachable) for error in errors.values())
    assert "the stream was cancelled" in str(errors[canceller])


@pytest.mark.parametrize("canceller", ["client", "server"])
def test_cancel_unblocks_a_send(transport: Transport, canceller: str) -> None:
    """A peer that does not read blocks the sender, and cancel frees it, at either end."""
    with ExitStack() as stack:
        ends = dict(zip(("client", "server"), held_open(transport, stack), strict=True))
        progress: list[float] = []
        outcome = caught(lambda: send_until_blocked(ends[canceller], progress))
        # blocked: nothing has left for a while
        eventually(lambda: bool(progress) and time.monotonic() - progress[-1] > 0.2)
        ends[canceller].cancel()
        error = outcome.get(timeout=SECONDS)
        ends["client"].cancel()

    assert isinstance(error, Unreachable) and "cancelled" in str(error)
    assert len(progress) < 200


def test_a_stream_may_be_used_after_its_handler_has_returned(transport: Transport) -> None:
    """Another thread that still sends on, cancels or closes a finished stream gets an error at
    most, never a crash.
    """
    streams: Queue[Stream] = Queue()

    def handle(stream: Stream) -> None:
        streams.put(stream)
        stream.receive()

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = streams.get(timeout=SECONDS)
        senders = [caught(lambda: send_until_blocked(server, [])) for _ in range(2)]
        client.send(Frame(kind=BYE))
        while client.receive() is not None:
            continue
        errors = [sender.get(timeout=SECONDS) for sender in senders]
        server.cancel()
        server.close()

    assert all(isinstance(error, Unreachable) for error in errors)


def test_streams_leave_no_file_descriptor_behind(transport: Transport) -> None:
    """However a stream ends, its connection is given back."""
    accepted: Queue[Stream] = Queue()

    def handle(stream: Stream) -> None:
        accepted.put(stream)
        echo(stream)

    def once(end: str) -> None:
        stream = open_stream(transport, listener)
        stream.send(Frame(kind=HELLO))
        server = accepted.get(timeout=SECONDS)
        if end == "server":
            server.cancel()
            with suppress(Unreachable):
                stream.receive()
                stream.receive()
        elif end == "client":
            stream.cancel()
        else:
            finish(stream)

    with listening(transport, handle) as listener:
        once("clean")
        before = len(os.listdir("/dev/fd"))
        for end in ("clean", "client", "server") * 3:
            once(end)
        eventually(lambda: len(os.listdir("/dev/fd")) <= before + 2)


# ---- listeners, and ports without one ----


def test_a_dead_port_is_unreachable(transport: Transport) -> None:
    """Connecting where nobody listens names HOST:PORT, at once."""
    port = free_port()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        within(SECONDS, lambda: transport.connect("127.0.0.1", port, timeout_seconds=2 * SECONDS))


@only("tcp", "grpc")
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)])
def test_a_port_of_something_else_is_unreachable(transport: Transport, answer: bytes) -> None:
    """Something that accepts connections and says nothing, or other bytes, is given up at the
    deadline.
    """

    def serve() -> None:
        with suppress(OSError):
            while True:
                connections.append(other.accept()[0])
                connections[-1].sendall(answer)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        serving = caught(serve)
        with pytest.raises(PServerError, match=f"127.0.0.1:{port}"):
            within(SECONDS, lambda: transport.connect("127.0.0.1", port, timeout_seconds=0.5))
        other.shutdown(socket.SHUT_RDWR)
        serving.get(timeout=SECONDS)
    for connection in connections:
        connection.close()


@only("tcp", "grpc", "shm")
def test_a_port_in_use_is_one_sentence(
    transport: Transport, echoing: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    """Listening where somebody listens already says so, naming the port, and logs nothing."""
    capfd.readouterr()
    words = f"^cannot listen on .*{echoing.port}: Address already in use$"
    with pytest.raises(OSError, match=words):
        transport.listen(echo, "127.0.0.1", echoing.port)

    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("grace", [0.2, SECONDS], ids=["short", "long"])
def test_closing_a_listener_gives_open_streams_its_grace(
    transport: Transport, grace: float
) -> None:
    """Within it a stream ends in its own way, and close returns then; at its end the waits of the
    others end.  No one gets in.
    """
    listener = transport.listen(echo, "127.0.0.1", 0)
    streams = [open_stream(transport, listener) for _ in range(2)]
    for stream in streams:
        stream.send(Frame(kind=HELLO))
        stream.receive()
    started = time.monotonic()
    closing = caught(lambda: listener.close(grace))
    if grace == SECONDS:
        for stream in streams:
            stream.send(Frame(kind=BYE), [b"x"])
            assert [header.kind for header in finish(stream)] == [BYE]
        assert closing.get(timeout=SECONDS / 2) is None
    else:
        ends = [caught(stream.receive).get(timeout=SECONDS) for stream in streams]
        assert time.monotonic() - started >= grace
        assert all(end is None or isinstance(end, Unreachable) for end in ends)
        assert closing.get(timeout=SECONDS) is None
    with pytest.raises(Unreachable):
        late = transport.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
        late.send(Frame(kind=HELLO))
        late.receive()
