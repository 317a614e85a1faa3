"""Bytes that no stream of ours would send: an error of that stream, and the listener lives on."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from random import Random

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from pserver.errors import CorruptFrame, Unreachable
from pserver.transport import grpc_stream
from pserver.transport.flight import DESCRIPTOR, SCHEMA
from pserver.transport.registry import TRANSPORTS
from pserver.transport.stream import Stream
from pserver.wire_pb2 import HELLO, Frame
from tests.support.streams import SECONDS, echo, finish, listening, open_stream

pytestmark = pytest.mark.usefixtures("no_thread_stays")


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
