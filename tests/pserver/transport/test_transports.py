"""One suite for all transports: what a stream carries, it carries whatever runs below it."""

from __future__ import annotations

import socket
import time
import zlib
from queue import Queue
from random import Random

import pytest

from pserver.errors import Unreachable
from pserver.launcher.cluster import free_port
from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import Stream
from pserver.wire_pb2 import BYE, GRADIENT, HELLO, VALUE, Frame, Part
from tests.support.streams import PROMPT, SECONDS, caught, echo, finish, listening, open_stream

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_frames_arrive_whole_and_in_order(transport: Transport) -> None:
    """Payloads of 0 B to 4 MB in one or several buffers arrive with their headers, byte for byte,
    in order.
    """
    rng = Random(0)
    sizes = [0, 1, 7, 64, 4095, 65536, 100_001, 2**20, 2**21 + 3, 2**22, 0, 5]
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


# ---- listeners, and ports without one ----


def test_a_dead_port_is_unreachable(transport: Transport) -> None:
    """Connecting where nobody listens names HOST:PORT, within the deadline."""
    port = free_port()
    started = time.monotonic()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        transport.connect("127.0.0.1", port, timeout_seconds=1.0)

    assert time.monotonic() - started < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpc", "tcp"])
def test_a_port_that_answers_with_silence_is_unreachable(name: str) -> None:
    """Something that accepts connections and says nothing is given up at the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
            TRANSPORTS[name].connect("127.0.0.1", port, timeout_seconds=1.0)

    assert time.monotonic() - started < 4.0


@pytest.mark.parametrize("name", ["grpc", "tcp"])
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
