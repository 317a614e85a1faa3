"""Bytes that no stream of ours would send: an error of that stream, and the listener lives on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from random import Random

import grpc
import pytest

from pserver.errors import CorruptFrame
from pserver.transport.grpc_port import CLIENT_OPTIONS
from pserver.transport.registry import TRANSPORTS
from pserver.transport.stream import Stream
from pserver.transport.tcp import PREFIX, Greeting, Welcome
from pserver.wire_pb2 import HELLO, Frame
from tests.support.streams import SECONDS, echo, finish, listening, open_stream

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def raw_grpc(port: int, method: str, message: bytes) -> None:
    """Any bytes to any method."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        try:
            list(channel.stream_stream(method)(iter([message]), timeout=SECONDS))
        except grpc.RpcError:
            return


GOOD = Greeting()


def raw_tcp(port: int, data: bytes, greeting: Greeting | None = GOOD) -> None:
    """Any bytes, behind a greeting or in its place."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        if greeting is not None:
            greeting.send(connection)
        if greeting == GOOD:
            Welcome.receive(connection)
        with suppress(ConnectionError):  # it does not read to the end
            connection.sendall(data)
            end_sending(connection)
            while connection.recv(2**16):
                pass


def end_sending(connection: socket.socket) -> None:
    """Shuts a connection down one way, unless the peer has broken it."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise


def garbage_inprocess(port: int) -> None:
    """Bytes that no stream of ours would send."""
    stream = TRANSPORTS["inprocess"].connect("127.0.0.1", port, timeout_seconds=SECONDS)
    stream._out.put(b"\xff\xff\xff", b"")  # type: ignore[attr-defined]


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
    ("tcp", "header", lambda port: raw_tcp(port, PREFIX.pack(3, 0) + b"\xff\xff\xff")),
    ("tcp", "no header", lambda port: raw_tcp(port, PREFIX.pack(0, 5) + b"abcde")),
    ("tcp", "huge header", lambda port: raw_tcp(port, PREFIX.pack(2**32 - 1, 0))),
    ("tcp", "huge payload", lambda port: raw_tcp(port, PREFIX.pack(2, 2**63) + b"\x08\x01")),
    ("tcp", "random", lambda port: raw_tcp(port, Random(2).randbytes(100))),
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


def test_a_stranger_on_the_port_gets_no_stream() -> None:
    """Whatever comes in place of a greeting, or a further connection of no stream, is closed; the
    listener lives on.
    """
    streams: list[Stream] = []
    with listening(TRANSPORTS["tcp"], lambda stream: (streams.append(stream), echo(stream))) as it:  # type: ignore[func-returns-value]
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", Random(3).randbytes(1000), b""):
            raw_tcp(it.port, data, None)
        raw_tcp(it.port, b"", Greeting(1, b"k" * 16))
        stream = open_stream(TRANSPORTS["tcp"], it)
        stream.send(Frame(kind=HELLO), [b"fine"])
        assert [header.kind for header in finish(stream)] == [HELLO]

    assert len(streams) == 1
