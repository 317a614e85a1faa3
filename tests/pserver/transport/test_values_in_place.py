"""Values that a connecting end reads where they are in the accepting end's memory, or misses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue

import pytest

from pserver.errors import CorruptFrame
from pserver.transport import shm, zones
from pserver.transport.memory import ZoneMemory
from pserver.transport.stream import LANDED, MISSED, Stream
from pserver.wire_pb2 import DONE, HELLO, VALUE, Frame, Part
from tests.support.streams import SECONDS

pytestmark = pytest.mark.usefixtures("no_thread_stays")
SIZE = 2**18


def frame(name: str = "w", offset: int = 0, size: int = SIZE) -> Frame:
    return Frame(kind=VALUE, parts=[Part(name=name, offset=offset, size=size)])


def piece(segment: ZoneMemory, offset: int = 0, size: int = SIZE) -> memoryview:
    begin = segment.zones["w"].begin + offset
    return segment.memory[begin : begin + size]


@contextmanager
def reading(segment: ZoneMemory, act: Callable[[Stream], None]) -> Iterator[shm.ShmStream]:
    """A connecting end to which the values have been offered."""
    results: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        assert stream.offer is not None
        stream.offer(VALUE, segment)
        try:
            act(stream)
            results.put(None)
        except Exception as error:
            results.put(error)
        stream.receive()

    listener = shm.listen(handle)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    try:
        yield stream
        assert results.get(timeout=SECONDS) is None
    finally:
        stream.cancel()
        listener.close(2.0)


def test_a_value_is_copied_to_where_it_goes() -> None:
    """Not before it is received, in as many frames as it has; or to memory of its own."""
    segment, target = ZoneMemory({"w": 2 * SIZE}, read_only=True), bytearray(2 * SIZE)

    def act(stream: Stream) -> None:
        stream.send(frame(), [piece(segment)])
        stream.send(frame(offset=SIZE), [piece(segment, SIZE)])
        stream.send(frame(), [piece(segment)])
        segment.memory[-2 * SIZE :] = bytes([1]) * SIZE + bytes([2]) * SIZE
        stream.send(Frame(kind=DONE))

    def land(header: Frame, size: int) -> list[memoryview]:
        offset = header.parts[0].offset
        return [
            memoryview(target)[offset : offset + 10],
            memoryview(target)[offset + 10 :][: size - 10],
        ]

    with reading(segment, act) as stream:
        got = [stream.receive(land), stream.receive(land), stream.receive()]
        assert [each[1] is LANDED for each in got if each] == [True, True, False]
        assert got[2] is not None and len(got[2][1]) == SIZE
        assert set(target[:SIZE]) <= {0, 1} and set(target[SIZE:]) <= {0, 2}


def test_memory_elsewhere_travels() -> None:
    """A copy of a value, and a value without a zone."""
    segment = ZoneMemory({"w": SIZE}, read_only=True)

    def act(stream: Stream) -> None:
        stream.send(frame(), [bytes([3]) * SIZE])
        stream.send(frame(name="x"), [piece(segment)])

    with reading(segment, act) as stream:
        got = [stream.receive(), stream.receive()]
        assert [each[1][0] for each in got if each] == [3, 0]


@pytest.mark.parametrize("offset", [0, SIZE])
def test_a_value_that_is_being_written_is_missed(offset: int) -> None:
    """Its count is odd: also for ever, as a server that was killed leaves it."""
    segment = ZoneMemory({"w": 2 * SIZE}, read_only=True)
    segment.counts += 1

    def act(stream: Stream) -> None:
        stream.send(frame(offset=offset), [piece(segment, offset)])

    with reading(segment, act) as stream:
        got = stream.receive()
        assert got is not None and got[1] is MISSED and got[0].parts[0].name == "w"


def test_a_value_that_changes_while_it_is_read_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three tries; a writer that is done before lets the next one succeed."""
    segment, writes = ZoneMemory({"w": SIZE}, read_only=True), [1, 1, 1, 1, 1]
    spread = zones.spread

    def slow(source: memoryview, places: list[memoryview]) -> None:
        spread(source, places)
        if writes:
            with segment.writing(["w", "no zone"]):
                piece(segment)[0] = writes.pop()

    monkeypatch.setattr(zones, "spread", slow)

    def act(stream: Stream) -> None:
        for _ in range(2):
            stream.send(frame(), [piece(segment)])

    with reading(segment, act) as stream:
        first, second = stream.receive(), stream.receive()
        assert first is not None and first[1] is MISSED
        assert second is not None and second[1][0] == 1 and not writes


def test_the_frames_of_a_value_are_of_one_count() -> None:
    """What follows a change is missed, though it is whole itself."""
    segment, read = ZoneMemory({"w": 2 * SIZE}, read_only=True), Queue[None]()

    def act(stream: Stream) -> None:
        stream.send(frame(), [piece(segment)])
        read.get(timeout=SECONDS)
        with segment.writing(["w"]):
            pass
        stream.send(frame(offset=SIZE), [piece(segment, SIZE)])

    with reading(segment, act) as stream:
        first = stream.receive()
        assert first is not None and first[1] is not MISSED
        read.put(None)
        second = stream.receive()
        assert second is not None and second[1] is MISSED


@pytest.mark.parametrize(
    "header",
    [frame(name="x"), frame(offset=1), frame(size=1), Frame(kind=VALUE), Frame(kind=HELLO)],
)
def test_what_fits_no_zone_is_refused(header: Frame) -> None:
    """A server's numbers are not believed either."""
    segment = ZoneMemory({"w": SIZE}, read_only=True)

    def act(stream: Stream) -> None:
        head = header.SerializeToString()
        assert isinstance(stream, shm.ShmStream)
        stream._out.sendall(shm.PRELUDE.pack(shm.IN_ZONE, len(head), SIZE) + head)

    with reading(segment, act) as stream:
        with pytest.raises(CorruptFrame):
            stream.receive()


def test_values_that_cannot_be_mapped_are_missed() -> None:
    """And asked for in another way, for ever; the stream goes on."""
    segment = ZoneMemory({"w": SIZE}, read_only=True)
    os.close(segment.descriptor)
    assert os.memfd_create("unsealed") == segment.descriptor

    def act(stream: Stream) -> None:
        stream.send(frame(), [piece(segment)])
        stream.send(frame(), [bytes([1]) * SIZE])

    with reading(segment, act) as stream:
        first, second = stream.receive(), stream.receive()
        assert first is not None and first[1] is MISSED
        assert second is not None and second[1][0] == 1
