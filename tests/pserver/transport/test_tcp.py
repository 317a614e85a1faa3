"""TCP: where payloads land, checksums, streams of several connections, and refusals that arrive."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from queue import Queue
from threading import Thread

import pytest

from pserver.errors import CorruptFrame, PServerError, Unreachable
from pserver.transport import tcp
from pserver.transport.stream import LANDED, Stream
from pserver.transport.tcp import LANDING_BYTES, FrameSocket
from pserver.wire_pb2 import BYE, GRADIENT, HELLO, VALUE, Frame, Part
from tests.support.streams import SECONDS, caught, echo, finish

pytestmark = pytest.mark.usefixtures("no_thread_stays")
SIZES = [0, 1, 1000, LANDING_BYTES, LANDING_BYTES + 1, 2**21, 5, 3 * 2**20 + 7]


def dealt(
    handle: Callable[[Stream], None], connections: int = 1, checksum: str = "auto"
) -> tuple[tcp.TcpListener, tcp.TcpStream]:
    listener = tcp.listen(handle, connections=connections, checksum=checksum)
    return listener, tcp.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)


@pytest.mark.parametrize("connections", [1, 2, 5])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_frames_keep_their_order_over_connections(connections: int, checksum: str) -> None:
    """Frames of all sizes come back as they left, whichever connection each took."""
    bodies = [random.Random(size).randbytes(size) for size in SIZES] * 3
    listener, stream = dealt(echo, connections, checksum)

    def send_all() -> None:
        for index, body in enumerate(bodies):
            stream.send(Frame(kind=VALUE, step=index), [body[:7], memoryview(body)[7:]])

    sender = caught(send_all)
    for index, body in enumerate(bodies):
        got = stream.receive()
        assert got is not None and got[0].step == index and bytes(got[1]) == body
    assert sender.get(timeout=SECONDS) is None
    assert finish(stream) == []
    listener.close(1.0)


@pytest.mark.parametrize("checksum", ["on", "off"])
def test_a_payload_lands_where_it_belongs(checksum: str) -> None:
    """From ``LANDING_BYTES`` on it is read into the buffers that ``land`` names, one or many; what
    nobody names, or is smaller, comes in memory of the stream's.
    """
    listener, stream = dealt(echo, 1, checksum)
    for size in SIZES:
        body = random.Random(size).randbytes(size)
        for count in (1, 3, 2000):
            whole = bytearray(size)
            cuts = sorted(random.Random(count).choices(range(size + 1), k=count - 1))
            places = [
                memoryview(whole)[begin:end]
                for begin, end in zip([0, *cuts], [*cuts, size], strict=True)
            ]
            stream.send(Frame(kind=GRADIENT, step=size), [body])
            got = stream.receive(lambda header, bytes_, places=places: places)
            assert got is not None and got[0].step == size
            assert (got[1] is LANDED) == (size >= LANDING_BYTES)
            assert (bytes(whole) if got[1] is LANDED else bytes(got[1])) == body
        stream.send(Frame(kind=GRADIENT), [body])
        got = stream.receive(lambda header, bytes_: None)
        assert got is not None and bytes(got[1]) == body
    assert finish(stream) == []
    listener.close(1.0)


def test_every_flipped_bit_is_noticed() -> None:
    """With checksums, in prefix, header and payload: CorruptFrame or a broken stream, and nothing
    lands where a changed header says.
    """
    header = Frame(kind=GRADIENT, step=3, parts=[Part(name="w", dtype="uint8", size=2**16)])
    body = random.Random(0).randbytes(2**16)
    near, far = pair()
    sender = FrameSocket(near, checked=True)
    sender.send(header.SerializeToString(), [body], len(body))
    near.shutdown(socket.SHUT_WR)
    message = b""
    while more := far.recv(2**20):
        message += more
    near.close(), far.close()
    bits = [*range(8 * 60), *random.Random(1).sample(range(8 * len(message)), 300)]
    for bit in bits:
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        near, far = pair()
        feeding = Thread(target=lambda near=near, data=bytes(changed): feed(near, data))
        feeding.start()
        places = Places()
        reader = FrameSocket(far, checked=True)
        with pytest.raises((CorruptFrame, OSError)):
            reader.receive(places.land)
        assert places.asked in ([], [header])
        reader.close()
        feeding.join(SECONDS)


class Places:
    """One place for payloads, and for which headers it was asked."""

    def __init__(self) -> None:
        self.asked: list[Frame] = []

    def land(self, header: Frame, size: int) -> list[memoryview]:
        self.asked.append(header)
        return [memoryview(bytearray(size))]


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        return near, listening.accept()[0]


def feed(near: socket.socket, data: bytes) -> None:
    with near:
        try:
            near.sendall(data)
        except OSError:  # the reader has seen enough
            return


def test_without_checksums_a_stream_of_garbage_ends() -> None:
    """After bytes that are no frame nobody knows where the next one begins."""
    listener, stream = dealt(lambda peer: peer._sockets[0].send(b"\xff\xff", (), 0))  # type: ignore[attr-defined]
    with pytest.raises(CorruptFrame):
        stream.receive()
    assert stream.receive() is None
    stream.cancel()
    listener.close(1.0)


def test_a_refusal_arrives_while_the_peer_still_sends() -> None:
    """The accepting end says why, and ends the stream; the connecting end, in the middle of 64 MB,
    reads it.
    """

    def refuse(stream: Stream) -> None:
        stream.receive()
        stream.send(Frame(kind=BYE, step=42))

    listener, stream = dealt(refuse)

    def send_all() -> None:
        for _ in range(32):
            stream.send(Frame(kind=VALUE), [bytes(2**21)])

    sender = caught(send_all)
    got = stream.receive()
    assert got is not None and (got[0].kind, got[0].step) == (BYE, 42)
    assert stream.receive() is None
    assert isinstance(sender.get(timeout=SECONDS), (type(None), Unreachable))
    listener.close(1.0)


def test_a_stream_whose_further_connections_do_not_come_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The listener waits for a while, and lives on."""
    monkeypatch.setattr("pserver.transport.tcp.GREETING_SECONDS", 0.3)
    streams: Queue[Stream] = Queue()
    listener = tcp.listen(streams.put, connections=3)
    with socket.create_connection(("127.0.0.1", listener.port)) as alone:
        tcp.Greeting().send(alone)
        assert tcp.Welcome.receive(alone).connections == 3
        assert alone.recv(1) == b""
    assert streams.empty()
    stream = tcp.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    streams.get(timeout=SECONDS)
    stream.cancel()
    listener.close(1.0)


def test_a_frame_that_is_too_large_is_refused_before_it_leaves() -> None:
    """64 MB of payload, or of header."""
    listener, stream = dealt(echo)
    with pytest.raises(ValueError, match="at most 67108864 bytes, got 2 of header, 67108865"):
        stream.send(Frame(kind=HELLO), [bytes(2**26 + 1)])
    stream.send(Frame(kind=HELLO))
    assert [header.kind for header in finish(stream)] == [HELLO]
    listener.close(1.0)


def test_a_server_of_something_else_is_unreachable() -> None:
    """What answers with other bytes is no parameter server; the message names HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
                connection.recv(1)

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(PServerError, match=f"127.0.0.1:{port} .*no parameter server's port"):
            tcp.connect("127.0.0.1", port, timeout_seconds=SECONDS)
        thread.join(SECONDS)
