"""TLS in memory over a socket: the same as Python's own, in fewer calls of the system."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from pserver.security.tls_connection import FIRST_BYTES, MOST_BYTES, SENT_BYTES, TlsConnection
from tests.support.cluster_keys import keys_of
from tests.support.streams import SECONDS

SIZES = [1, FIRST_BYTES, FIRST_BYTES + 1, SENT_BYTES, 3 * MOST_BYTES + 7]


@dataclass
class Counted:
    """A socket whose calls are counted, and of which a byte may be changed."""

    below: socket.socket
    calls: int = 0
    flips: bool = False

    def sendall(self, data: bytes) -> None:
        """Sends it."""
        self.calls += 1
        self.below.sendall(data[:-1] + bytes([data[-1] ^ 1]) if self.flips else data)

    def recv_into(self, room: memoryview) -> int:
        """Receives what fills it, but for the last."""
        self.calls += 1
        return self.below.recv_into(room)


@pytest.fixture
def pair() -> Iterator[tuple[TlsConnection, TlsConnection]]:
    """The connecting and the accepting end of a connection."""
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        for each in (near, far):
            each.settimeout(SECONDS)
        accepted = pool.submit(TlsConnection, far, keys_of("server").server_context(), None)
        dialled = TlsConnection(near, keys_of("trainer").client_context(), "127.0.0.1")
        yield dialled, accepted.result(SECONDS)


def moved(sender: TlsConnection, receiver: TlsConnection, body: bytes) -> bytearray:
    """Sends bytes, and gives those that arrive."""
    room = bytearray(len(body))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send_all, [memoryview(body)])
        receiver.fill(memoryview(room))
        sent.result(SECONDS)
    return room


@pytest.mark.parametrize("size", SIZES)
def test_bytes_arrive_both_ways(pair: tuple[TlsConnection, TlsConnection], size: int) -> None:
    """Whatever their number, of records and of calls."""
    body = bytes(index % 251 for index in range(size))
    near, far = pair

    assert moved(near, far, body) == body
    assert moved(far, near, body) == body


def test_pieces_arrive_one_behind_another(pair: tuple[TlsConnection, TlsConnection]) -> None:
    """Buffers that leave together are received in parts as small as asked for."""
    near, far = pair
    near.send_all([memoryview(b"abc"), memoryview(b"defg")])
    room = bytearray(5)

    assert far.recv(2) == b"ab"
    far.fill(memoryview(room))
    assert room == b"cdefg"


def test_many_records_travel_in_one_call(pair: tuple[TlsConnection, TlsConnection]) -> None:
    """Sixteen megabytes are a thousand records, in fewer calls at either end."""
    near, far = pair
    counted = Counted(near.below), Counted(far.below)
    near.below, far.below = counted  # type: ignore[assignment]  # doubles

    moved(near, far, bytes(2**24))

    assert counted[0].calls <= 2**24 // SENT_BYTES + 1
    assert far._room.nbytes == MOST_BYTES


def test_a_changed_bit_ends_the_connection(pair: tuple[TlsConnection, TlsConnection]) -> None:
    """It raises, and the peer is told."""
    near, far = pair
    near.below = Counted(near.below, flips=True)  # type: ignore[assignment]  # a double
    near.sendall(b"some bytes")

    with pytest.raises(ssl.SSLError, match=r"(?i)mac|decrypt"):
        far.recv(16)

    near.below = near.below.below  # type: ignore[attr-defined]  # the double's
    with pytest.raises(ssl.SSLError, match=r"(?i)bad.record.mac"):
        near.recv(16)


def test_a_peer_that_ends_is_an_end(pair: tuple[TlsConnection, TlsConnection]) -> None:
    """With TLS's own word and without; in the middle of a payload it is an error."""
    near, far = pair
    near.sendall(b"abc")
    with suppress(ssl.SSLWantReadError):  # it would wait for ours
        near.tls.unwrap()
    near.below.sendall(near._leaving.read())
    near.below.shutdown(socket.SHUT_WR)

    assert far.recv(3) == b"abc"
    assert far.recv(1) == b""
    far.below.shutdown(socket.SHUT_WR)
    assert near.recv(1) == b""
    with pytest.raises(ConnectionError):
        near.fill(memoryview(bytearray(1)))


@dataclass
class Dripping:
    """A peer of which a byte arrives each second, on a clock of its own."""

    hello: bytes
    now: float = 0.0
    timeouts: list[float] = field(default_factory=list)

    def gettimeout(self) -> float:
        """Of the whole handshake."""
        return 4.5

    def settimeout(self, seconds: float) -> None:
        """Of the next byte."""
        self.timeouts.append(seconds)

    def recv_into(self, room: memoryview) -> int:
        """One byte more."""
        self.now += 1.0
        if self.timeouts[-1] < 1.0:
            raise TimeoutError("timed out")
        room[0] = self.hello[int(self.now) - 1]
        return 1


def test_the_timeout_is_for_the_whole_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends byte by byte does not stay."""
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = keys_of("trainer").client_context().wrap_bio(arrived, leaving, server_hostname="a")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    peer = Dripping(leaving.read())
    monkeypatch.setattr("pserver.security.tls_connection.time.monotonic", lambda: peer.now)

    with pytest.raises(TimeoutError):
        TlsConnection(peer, keys_of("server").server_context(), None)  # type: ignore[arg-type]  # a double

    assert peer.timeouts == [4.5, 3.5, 2.5, 1.5, 0.5]
