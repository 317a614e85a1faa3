"""TCP: checksums, garbage, and streams of several connections."""

from __future__ import annotations

import random
import socket
from queue import Queue
from threading import Thread

import pytest
from crc32c import crc32c

from pserver.errors import CorruptFrame
from pserver.transport import tcp
from pserver.transport.checksums import checksum
from pserver.transport.stream import Stream
from pserver.transport.tcp import GREETING_MAGIC, FrameSocket
from pserver.wire_pb2 import GRADIENT, Frame, Part
from tests.support.streams import SECONDS

pytestmark = pytest.mark.usefixtures("no_thread_stays")


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


def test_the_checksum_is_xxh3() -> None:
    """Of 64 bits without a seed, whatever the pieces: another one would be another protocol."""
    assert checksum([b""]) == 0x2D06800538D394C2
    assert checksum([b"ab", b"", b"c"]) == checksum([b"abc"]) == 0x78AF5F94892F3950


def test_a_peer_of_another_version_is_refused() -> None:
    """Its frames would have other checksums."""
    listener = tcp.listen(lambda peer: None, checksum="on")
    with socket.create_connection(("127.0.0.1", listener.port)) as older:
        older.settimeout(SECONDS)
        said = GREETING_MAGIC[:-1] + b"\1" + bytes(4 + 16)
        older.sendall(said + crc32c(said).to_bytes(4, "little"))
        assert older.recv(1) == b""
    listener.close(1.0)


def test_without_checksums_a_stream_of_garbage_ends() -> None:
    """After bytes that are no frame nobody knows where the next one begins."""
    listener = tcp.listen(lambda peer: peer._sockets[0].send(b"\xff\xff", (), 0))  # type: ignore[attr-defined]
    stream = tcp.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    with pytest.raises(CorruptFrame):
        stream.receive()
    assert stream.receive() is None
    stream.cancel()
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
