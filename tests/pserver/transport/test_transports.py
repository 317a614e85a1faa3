"""One suite for all transports: what a stream promises, it promises whatever runs below it."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Queue
from random import Random
from threading import Event, Thread

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from pserver.errors import CorruptFrame, Unreachable
from pserver.transport import grpc_stream
from pserver.transport.endpoint import cut, spell
from pserver.transport.flight import DESCRIPTOR, SCHEMA
from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import Handler, Listener, Stream
from pserver.wire_pb2 import BYE, GRADIENT, HELLO, PULL, VALUE, Frame, Part

SECONDS = 10.0  # the deadline of every wait here
PROMPT = 2.0  # how soon a cancelled call must return


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    """Each transport in turn."""
    return TRANSPORTS[request.param]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """After every test all of its threads are gone."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + SECONDS
    for thread in set(threading.enumerate()) - before:
        # a thread of C++'s pool that has run Python once
        if isinstance(thread, threading._DummyThread):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} still runs"


@contextmanager
def listening(transport: Transport, handle: Handler) -> Iterator[Listener]:
    """An accepting end."""
    listener = transport.listen(handle, "127.0.0.1", 0)
    try:
        yield listener
    finally:
        listener.close(grace_seconds=2.0)


def open_stream(transport: Transport, listener: Listener) -> Stream:
    """A connecting end."""
    return transport.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)


def finish(stream: Stream) -> list[Frame]:
    """Ends the client's side and reads what is left."""
    stream.close()
    left = []
    while (got := stream.receive()) is not None:
        left.append(got[0])
    return left


def echo(stream: Stream) -> None:
    """Sends back what comes, until the client ends its side."""
    while (got := stream.receive()) is not None:
        stream.send(got[0], [bytes(got[1])])


def caught(action: Callable[[], object]) -> Queue[object]:
    """Runs ``action`` in a thread; the queue gets what it returned or raised."""
    result: Queue[object] = Queue()

    def run() -> None:
        try:
            result.put(action())
        except Exception as error:
            result.put(error)

    Thread(target=run, daemon=True).start()
    return result


def send_until_blocked(stream: Stream, progress: list[float]) -> None:
    """Sends for ever; ``progress`` gets the time of each frame that left."""
    megabyte = bytes(2**20)
    while True:
        stream.send(Frame(kind=VALUE), [megabyte])
        progress.append(time.monotonic())


def wait_until_still(progress: list[float]) -> None:
    """Returns when nothing has left for a while: the sender is blocked."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if progress and time.monotonic() - progress[-1] > 0.3:
            return
        threading.Event().wait(0.02)
    raise AssertionError(
        f"a sender whose peer does not read sent {len(progress)} MB without blocking"
    )


def test_frames_arrive_whole_and_in_order(transport: Transport) -> None:
    """Payloads of 0 B to 8 MB in one or several buffers arrive with their headers, byte for byte,
    in order.
    """
    rng = Random(0)
    sizes = [0, 1, 7, 64, 4095, 65536, 100_001, 2**20, 2**21 + 3, 2**23, 0, 5]
    with listening(transport, echo) as listener:
        stream = open_stream(transport, listener)
        for index, size in enumerate(sizes):
            body = memoryview(rng.randbytes(size))
            middle = rng.randrange(size + 1)
            header = Frame(
                kind=GRADIENT,
                step=index,
                parts=[Part(name="w", dtype="uint8", shape=[size], size=size)],
            )
            stream.send(
                header, [body[:middle], b"", bytearray(body[middle:])] if index % 2 else [body]
            )
            got = stream.receive()

            assert got is not None
            assert got[0] == header
            assert (got[1].nbytes, zlib.crc32(got[1])) == (size, zlib.crc32(body))
            assert got[1].contiguous and got[1].itemsize == 1
        assert finish(stream) == []


def test_headers_travel_alone(transport: Transport) -> None:
    """Frames need no payload."""
    with listening(transport, echo) as listener:
        stream = open_stream(transport, listener)
        stream.send(Frame(kind=HELLO))
        stream.send(Frame(kind=BYE), [b""])
        kinds = [header.kind for header in finish(stream)]

    assert kinds == [HELLO, BYE]


@pytest.mark.slow
def test_many_small_frames_keep_their_order(transport: Transport) -> None:
    """Thousands of frames sent without waiting for answers come back in the order in which they
    left.
    """
    count = 3000
    with listening(transport, echo) as listener:
        stream = open_stream(transport, listener)

        def send_all() -> None:
            for index in range(count):
                stream.send(Frame(kind=VALUE, step=index), [index.to_bytes(4, "little")])
            stream.close()

        sender = caught(send_all)
        seen = []
        while (got := stream.receive()) is not None:
            seen.append((got[0].step, int.from_bytes(got[1], "little")))
        assert sender.get(timeout=SECONDS) is None

    assert seen == [(index, index) for index in range(count)]


def test_both_directions_carry_large_payloads_at_once(transport: Transport) -> None:
    """Each end sends 64 MB while it receives 64 MB: neither direction waits for the other."""
    chunk, count = bytes(range(256)) * 8192, 32

    def push(stream: Stream) -> None:
        for index in range(count):
            stream.send(Frame(kind=VALUE, step=index), [chunk])

    def pull(stream: Stream) -> list[tuple[int, int]]:
        got = [stream.receive() for _ in range(count)]
        return [(frame[0].step, zlib.crc32(frame[1])) for frame in got if frame]

    results: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        sender = caught(lambda: push(stream))
        results.put(pull(stream))
        results.put(sender.get(timeout=SECONDS))
        stream.receive()

    with listening(transport, handle) as listener:
        stream = open_stream(transport, listener)
        sender = caught(lambda: push(stream))
        steps = [
            (frame[0].step, frame[1].nbytes)
            for frame in (stream.receive() for _ in range(count))
            if frame
        ]
        assert sender.get(timeout=SECONDS) is None
        assert finish(stream) == []

    assert steps == [(index, len(chunk)) for index in range(count)]
    assert results.get(timeout=SECONDS) == [(index, zlib.crc32(chunk)) for index in range(count)]
    assert results.get(timeout=SECONDS) is None


@pytest.mark.slow
def test_a_tensor_of_300_mb_goes_through_in_chunks(transport: Transport) -> None:
    """The size of a variable is bounded by memory, not by a message."""
    chunk, count = Random(1).randbytes(2**22), 75

    def sink(stream: Stream) -> None:
        total, checksum = 0, 0
        while (got := stream.receive()) is not None:
            total, checksum = total + got[1].nbytes, zlib.crc32(got[1], checksum)
        stream.send(Frame(kind=VALUE, step=checksum, parts=[Part(offset=total)]))

    with listening(transport, sink) as listener:
        stream = open_stream(transport, listener)
        for index in range(count):
            stream.send(
                Frame(kind=GRADIENT, parts=[Part(offset=index * len(chunk))]), [memoryview(chunk)]
            )
        (answer,) = finish(stream)
    expected = 0
    for _ in range(count):
        expected = zlib.crc32(chunk, expected)

    assert (answer.parts[0].offset, answer.step) == (count * len(chunk), expected)


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
        kinds = [header.kind for header in finish(stream)]

    assert kinds == [PULL, PULL]


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


@pytest.mark.parametrize("end", ["client", "server"])
def test_cancel_unblocks_a_receive(transport: Transport, end: str) -> None:
    """A thread that waits for a silent peer is freed within two seconds of cancel, at either
    end.
    """
    streams: Queue[Stream] = Queue()
    results: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        streams.put(stream)
        try:
            results.put(stream.receive())
        except Exception as error:
            results.put(error)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = streams.get(timeout=SECONDS)
        waiting = caught(client.receive)
        started = time.monotonic()
        (client if end == "client" else server).cancel()
        at_client, at_server = waiting.get(timeout=PROMPT), results.get(timeout=PROMPT)

    assert time.monotonic() - started < SECONDS
    assert isinstance(at_client, Unreachable) and isinstance(at_server, Unreachable)
    assert "cancelled" in str(at_client if end == "client" else at_server)


@pytest.mark.parametrize("end", ["client", "server"])
def test_cancel_unblocks_a_send(transport: Transport, end: str) -> None:
    """A peer that does not read blocks the sender, and cancel frees the sender within two seconds,
    at either end.
    """
    streams: Queue[Stream] = Queue()
    done = Event()
    progress: list[float] = []
    results: Queue[Queue[object]] = Queue()

    def handle(stream: Stream) -> None:
        streams.put(stream)
        if end == "server":
            results.put(caught(lambda: send_until_blocked(stream, progress)))
        done.wait(SECONDS)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = streams.get(timeout=SECONDS)
        if end == "client":
            results.put(caught(lambda: send_until_blocked(client, progress)))
        outcome = results.get(timeout=SECONDS)
        wait_until_still(progress)
        (client if end == "client" else server).cancel()
        error = outcome.get(timeout=PROMPT)
        done.set()
        client.cancel()

    assert isinstance(error, Unreachable) and "cancelled" in str(error)
    assert len(progress) < 200


def test_a_vanished_client_does_not_read_as_a_clean_end(transport: Transport) -> None:
    """A client that breaks off is an error at the server, not an end of input."""
    outcome: Queue[object] = Queue()
    began = Event()

    def handle(stream: Stream) -> None:
        stream.receive()
        began.set()
        try:
            outcome.put(stream.receive())
        except Exception as error:
            outcome.put(error)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        client.send(Frame(kind=HELLO))
        assert began.wait(SECONDS)
        client.cancel()
        error = outcome.get(timeout=PROMPT)

    assert isinstance(error, Unreachable)


def raw_grpc(port: int, method: str, message: bytes) -> None:
    """Any bytes to any method."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=grpc_stream.OPTIONS) as channel:
        try:
            list(channel.stream_stream(method)(iter([message]), timeout=SECONDS))
        except grpc.RpcError:
            return


def raw_flight(port: int, header: bytes | None, column: pa.Array) -> None:
    """Any app_metadata and any column."""
    with fl.FlightClient(f"grpc+tcp://127.0.0.1:{port}") as client:
        writer, reader = client.do_exchange(DESCRIPTOR)
        batch = pa.RecordBatch.from_arrays([column], names=["payload"])
        try:
            writer.begin(batch.schema)
            writer.write_batch(batch) if header is None else writer.write_with_metadata(
                batch, pa.py_buffer(header)
            )
            writer.done_writing()
            reader.read_chunk()
        except (fl.FlightError, pa.ArrowException, OSError, StopIteration):
            return


def garbage_inprocess(port: int) -> None:
    """Bytes that no stream of ours would send."""
    stream = TRANSPORTS["inprocess"].connect("127.0.0.1", port, timeout_seconds=SECONDS)
    stream._out.put(b"\xff\xff\xff", b"")  # type: ignore[attr-defined]


BYTES = pa.array([1, 2, 3], pa.uint8())
GARBAGE: list[tuple[str, str, Callable[[int], None]]] = [
    ("inprocess", "header", garbage_inprocess),
    (
        "grpc",
        "random",
        lambda port: raw_grpc(port, "/pserver.ParameterServer/Exchange", Random(2).randbytes(100)),
    ),
    (
        "grpc",
        "truncated",
        lambda port: raw_grpc(port, "/pserver.ParameterServer/Exchange", b"\x7a\xff\x01abc"),
    ),
    ("flight", "header", lambda port: raw_flight(port, b"\xff\xff\xff", BYTES)),
    ("flight", "no header", lambda port: raw_flight(port, None, BYTES)),
    ("flight", "dtype", lambda port: raw_flight(port, b"", pa.array([1, 2, 3], pa.int64()))),
    ("flight", "strings", lambda port: raw_flight(port, b"", pa.array(["a", "b"]))),
    ("flight", "nulls", lambda port: raw_flight(port, b"", pa.array([1, None], pa.uint8()))),
]


@pytest.mark.parametrize(
    ("name", "attack"),
    [(n, a) for n, _, a in GARBAGE],
    ids=[f"{n}-{what}" for n, what, _ in GARBAGE],
)
def test_garbage_is_a_corrupt_frame(name: str, attack: Callable[[int], None]) -> None:
    """Whatever a peer sends that is no frame, the receiver gets CorruptFrame, and the next stream
    works.
    """
    outcome: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        try:
            outcome.put(stream.receive())
        except Exception as error:
            outcome.put(error)

    with listening(TRANSPORTS[name], handle) as listener:
        attack(listener.port)
        error = outcome.get(timeout=SECONDS)
        stream = open_stream(TRANSPORTS[name], listener)
        stream.send(Frame(kind=HELLO), [b"fine"])
        after = outcome.get(timeout=SECONDS)
        finish(stream)

    assert isinstance(error, CorruptFrame)
    assert isinstance(after, tuple) and after[0].kind == HELLO


def test_raw_bytes_to_flight_end_the_stream_only() -> None:
    """Random bytes in place of Flight's own messages are an error of that stream: the server lives
    on.
    """
    outcome: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        try:
            outcome.put(stream.receive())
        except Exception as error:
            outcome.put(error)

    with listening(TRANSPORTS["flight"], handle) as listener:
        rng = Random(3)
        for size in (1, 10, 1000):
            raw_grpc(
                listener.port,
                "/arrow.flight.protocol.FlightService/DoExchange",
                rng.randbytes(size),
            )
        stream = open_stream(TRANSPORTS["flight"], listener)
        stream.send(Frame(kind=HELLO), [b"fine"])
        finish(stream)
        seen = []
        while not outcome.empty():
            seen.append(outcome.get())

    assert isinstance(seen[-1], tuple) and seen[-1][0].kind == HELLO
    assert all(isinstance(error, (CorruptFrame, Unreachable)) for error in seen[:-1])


def test_another_flight_command_is_refused() -> None:
    """A Flight client that wants something else than an exchange of ours gets a sentence, and no
    stream.
    """
    with (
        listening(TRANSPORTS["flight"], echo) as listener,
        fl.FlightClient(f"grpc+tcp://127.0.0.1:{listener.port}") as client,
    ):
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b"other"))
        with pytest.raises(
            fl.FlightError, match="expected an exchange b'pserver.Exchange', got b'other'"
        ):
            writer.begin(SCHEMA)
            reader.read_chunk()


def test_two_streams_do_not_mix(transport: Transport) -> None:
    """Streams to one listener are independent: each gets its own answers, and cancelling one leaves
    the other whole.
    """
    with listening(transport, echo) as listener:
        first, second = open_stream(transport, listener), open_stream(transport, listener)
        for index in range(20):
            for stream, mark in ((first, b"1"), (second, b"2")):
                stream.send(Frame(kind=VALUE, step=index), [mark * 1000])
        for stream, mark in ((second, b"2"), (first, b"1")):
            for index in range(20):
                got = stream.receive()
                assert got is not None and (got[0].step, bytes(got[1])) == (index, mark * 1000)
        first.cancel()
        second.send(Frame(kind=VALUE, step=99))
        left = finish(second)

    assert [header.step for header in left] == [99]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_dead_port_is_unreachable(transport: Transport) -> None:
    """Connecting where nobody listens names HOST:PORT, within the deadline."""
    port = free_port()
    started = time.monotonic()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        transport.connect("127.0.0.1", port, timeout_seconds=1.0)

    assert time.monotonic() - started < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpc", "flight"])
def test_a_port_that_answers_with_silence_is_unreachable(name: str) -> None:
    """Something that accepts connections and says nothing is given up at the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
            TRANSPORTS[name].connect("127.0.0.1", port, timeout_seconds=1.0)

    assert time.monotonic() - started < 4.0


@pytest.mark.parametrize("name", ["grpc", "flight"])
def test_a_port_in_use_is_one_sentence(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Listening where somebody listens already says so, naming HOST:PORT, and logs nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=f"^cannot listen on 127.0.0.1:{port}: Address already in use$"
        ):
            TRANSPORTS[name].listen(echo, "127.0.0.1", port)

    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_closing_a_listener_ends_open_streams(transport: Transport) -> None:
    """A listener with open, idle streams closes within its grace and a little; the clients' waits
    end, and no one gets in.
    """
    listener = transport.listen(echo, "127.0.0.1", 0)
    streams = [open_stream(transport, listener) for _ in range(2)]
    for stream in streams:
        stream.send(Frame(kind=HELLO))
        stream.receive()
    waiting = [caught(stream.receive) for stream in streams]
    started = time.monotonic()
    listener.close(grace_seconds=0.5)
    took = time.monotonic() - started
    ends = [wait.get(timeout=PROMPT) for wait in waiting]

    assert 0.4 < took < 3.0
    assert all(end is None or isinstance(end, Unreachable) for end in ends)
    with pytest.raises(Unreachable):
        late = transport.connect("127.0.0.1", listener.port, timeout_seconds=0.5)
        late.send(Frame(kind=HELLO))
        late.receive()


def test_closing_a_listener_lets_streams_finish(transport: Transport) -> None:
    """Within the grace an open stream ends in its own way, and close returns then."""
    listener = transport.listen(echo, "127.0.0.1", 0)
    stream = open_stream(transport, listener)
    stream.send(Frame(kind=HELLO))
    stream.receive()
    closing = caught(lambda: listener.close(grace_seconds=SECONDS))
    stream.send(Frame(kind=BYE), [b"x"])
    left = finish(stream)
    started = time.monotonic()

    assert [header.kind for header in left] == [BYE]
    assert closing.get(timeout=SECONDS) is None
    assert time.monotonic() - started < 5.0


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


def test_a_connection_is_cut_and_nothing_else() -> None:
    """Cutting a peer off ends that connection, at both ends, and leaves no file descriptor
    behind.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        pairs = []
        for _ in range(2):
            client = socket.create_connection(listening_socket.getsockname(), timeout=SECONDS)
            pairs.append((client, listening_socket.accept()[0]))
        before = len(os.listdir("/dev/fd"))
        (cut_client, cut_server), (client, server) = pairs
        assert cut(spell(*cut_client.getsockname()))
        assert cut_server.recv(1) == b"" == cut_client.recv(1)
        server.sendall(b"x")
        assert client.recv(1) == b"x"
        assert not cut(spell("127.0.0.2", client.getsockname()[1]))

        assert len(os.listdir("/dev/fd")) == before
        for ends in pairs:
            for end in ends:
                end.close()


@pytest.mark.slow
def test_streams_leave_no_file_descriptor_behind(transport: Transport) -> None:
    """However a stream ends, its connection is given back."""

    def once(end: str) -> None:
        stream = open_stream(transport, listener)
        stream.send(Frame(kind=HELLO))
        server = servers.get(timeout=SECONDS)
        if end == "server":
            server.cancel()
            with suppress(Unreachable):
                stream.receive()
                stream.receive()
        elif end == "cancel":
            stream.cancel()
        else:
            finish(stream)

    def handle(stream: Stream) -> None:
        servers.put(stream)
        echo(stream)

    servers: Queue[Stream] = Queue()
    with listening(transport, handle) as listener:
        once("clean")
        before = len(os.listdir("/dev/fd"))
        for end in ("clean", "cancel", "server") * 4:
            once(end)
        deadline = time.monotonic() + SECONDS
        while len(os.listdir("/dev/fd")) > before + 4 and time.monotonic() < deadline:
            time.sleep(0.02)

        assert len(os.listdir("/dev/fd")) <= before + 4
