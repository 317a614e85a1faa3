"""Payloads that are copied once, to where they belong in the accepting end's memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

import pytest
import torch

from pserver.errors import CorruptFrame, Unreachable
from pserver.transport import memory, shm
from pserver.transport.memory import ZoneMemory, address_of
from pserver.transport.stream import Stream
from pserver.wire_pb2 import GRADIENT, HELLO, VALUE, Frame, Part
from tests.support.processes import PATIENCE
from tests.support.streams import SECONDS, finish
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("no_thread_stays")
SIZE = 2**18


def frame(name: str = "w", offset: int = 0, size: int = SIZE, step: int = 1) -> Frame:
    return Frame(kind=GRADIENT, step=step, parts=[Part(name=name, offset=offset, size=size)])


@contextmanager
def offering(
    segment: ZoneMemory, act: Callable[[Stream], None]
) -> Iterator[tuple[shm.ShmStream, Queue[object]]]:
    """A connecting end to which the segment has been offered; the queue gets what ``act`` raised,
    or None.
    """
    results: Queue[object] = Queue()
    segments = [segment]  # a listener is garbage, with its handler, only when it is collected
    del segment

    def handle(stream: Stream) -> None:
        assert stream.offer is not None
        stream.offer(GRADIENT, segments.pop())
        stream.send(Frame(kind=HELLO))
        try:
            act(stream)
            results.put(None)
        except Exception as error:
            results.put(type(error)(str(error)))

    listener = shm.listen(handle)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    try:
        assert stream.receive() is not None
        yield stream, results
    finally:
        stream.cancel()
        listener.close(2.0)


def test_a_payload_arrives_where_it_belongs() -> None:
    """In parts, in several buffers; only where the zone is free, and once each time."""
    segment = ZoneMemory({"v": 100, "w": 2 * SIZE})
    begin = address_of(segment.memory) + segment.zones["w"].begin
    places: list[int] = []
    seen: list[int] = []

    def act(stream: Stream) -> None:
        for step in range(6):
            got = stream.receive()
            assert got is not None
            places.append(address_of(got[1]) - begin)
            seen.append(int(got[1][0]) + int(got[1][-1]))
            if step in (0, 4):
                segment.counts += 1
                stream.send(Frame(kind=HELLO))

    with offering(segment, act) as (stream, results):
        stream.send(frame(), [bytes([1]) * SIZE])  # not free yet
        assert stream.receive() is not None
        stream.send(frame(), [bytes([2]) * (SIZE - 5), bytes([3]) * 5])
        stream.send(frame(), [bytes([4]) * SIZE])  # a second time
        stream.send(frame(offset=SIZE), [bytes([5]) * SIZE])
        stream.send(frame(name="x"), [bytes([6]) * SIZE])
        assert stream.receive() is not None
        stream.send(frame(), [bytes([7]) * SIZE])  # free again
        assert results.get(timeout=SECONDS) is None

    assert seen == [2, 5, 8, 10, 12, 14]
    assert [place in (0, SIZE) for place in places] == [False, True, False, True, False, True]
    assert [places[index] for index in (1, 3, 5)] == [0, SIZE, 0]


def test_what_is_in_use_is_not_written() -> None:
    """A frame that is sent again, after the zone was read and before it is free, leaves it."""
    segment = ZoneMemory({"w": SIZE})
    segment.counts += 1

    def act(stream: Stream) -> None:
        assert stream.receive() is not None
        segment.memory[-SIZE:] = bytes([9]) * SIZE
        stream.send(Frame(kind=HELLO))
        again = stream.receive()
        assert again is not None and again[1][0] == 1
        assert segment.memory[-1] == 9

    with offering(segment, act) as (stream, results):
        stream.send(frame(), [bytes([1]) * SIZE])
        assert stream.receive() is not None
        stream.send(frame(), [bytes([1]) * SIZE])
        assert results.get(timeout=SECONDS) is None


@pytest.mark.parametrize(
    "header",
    [
        frame(name="x"),
        frame(offset=1),
        frame(offset=2**63),
        frame(size=2 * SIZE),
        frame(size=5),
        Frame(kind=GRADIENT, parts=[Part(name="w", size=SIZE), Part(name="w")]),
        Frame(kind=GRADIENT),
        Frame(kind=VALUE, parts=[Part(name="w", size=SIZE)]),
    ],
)
def test_a_frame_that_fits_no_zone_is_refused(header: Frame) -> None:
    """Whatever it says: an unknown zone, beyond its end, another size, several parts, a kind for
    which nothing was offered.
    """
    segment = ZoneMemory({"w": SIZE})

    def act(stream: Stream) -> None:
        stream.receive()

    with offering(segment, act) as (stream, results):
        head = header.SerializeToString()
        stream._out.sendall(shm.PRELUDE.pack(shm.IN_ZONE, len(head), SIZE) + head)
        assert isinstance(results.get(timeout=SECONDS), CorruptFrame)


def test_a_connecting_end_offers_nothing() -> None:
    """Such a prelude is no frame there, and its descriptor is dropped."""
    results: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        try:
            results.put(stream.receive())
        except Exception as error:
            results.put(type(error)(str(error)))

    segment = ZoneMemory({"w": SIZE})
    listener = shm.listen(handle)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    before = len(os.listdir("/dev/fd"))
    with suppress(Unreachable):  # the other end was faster
        stream.offer(GRADIENT, segment)
    assert isinstance(results.get(timeout=SECONDS), CorruptFrame)
    assert len(os.listdir("/dev/fd")) <= before
    stream.cancel()
    listener.close(2.0)


@pytest.mark.parametrize("zone", [(0, SIZE), (64, 2 * SIZE), (2**63, 1), (SIZE, 128)])
def test_zones_outside_of_their_segment_are_refused(zone: tuple[int, int]) -> None:
    """The connecting end believes no number of a table."""
    segment = ZoneMemory({"w": SIZE})
    table = Frame(kind=GRADIENT, parts=[Part(name="w", offset=zone[0], size=zone[1])])
    segment.table = lambda kind: table  # type: ignore[method-assign]
    with pytest.raises(CorruptFrame, match="expected zones within"):
        with offering(segment, lambda stream: None):
            pass


def test_memory_that_cannot_be_trusted_is_not_mapped() -> None:
    """A segment that its maker can shorten is not used: gradients come another way."""
    segment = ZoneMemory({"w": SIZE})
    segment.counts += 1
    os.close(segment.descriptor)
    unsealed = os.memfd_create("unsealed")
    assert unsealed == segment.descriptor
    os.ftruncate(unsealed, segment.memory.nbytes)
    arrived: list[bytes] = []

    def act(stream: Stream) -> None:
        got = stream.receive()
        assert got is not None
        arrived.append(bytes(got[1]))

    with offering(segment, act) as (stream, results):
        stream.send(frame(), [bytes([3]) * SIZE])
        assert results.get(timeout=SECONDS) is None
    assert arrived == [bytes([3]) * SIZE]


def test_what_is_sealed_cannot_be_written() -> None:
    """By nobody who gets the descriptor; the maker's own mapping still writes."""
    segment = ZoneMemory({"w": SIZE}, read_only=True)
    with pytest.raises(PermissionError):
        memory.attach(segment.descriptor, segment.memory.nbytes)
    with pytest.raises(PermissionError):
        os.pwrite(segment.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)
    segment.memory[-1] = 7
    seen = memory.attach(segment.descriptor, segment.memory.nbytes, writable=False)
    assert seen.readonly and seen[-1] == 7


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process of its own, gone at the end."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments]) as child:
        try:
            yield child
        finally:
            child.kill()


def held() -> set[str]:
    """Files and sockets that this process has open, and memory files that it has mapped, each by
    its inode: what earlier tests have left may end meanwhile.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = {f"mapped {line.split()[4]}" for line in maps if "memfd:pserver" in line}
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(f"open {os.stat(f'/proc/self/fd/{each}').st_ino}")
    return found


def test_nothing_stays_behind() -> None:
    """When a stream has ended, no descriptor and no mapping of it is left, at either end."""
    gc.collect()  # what other tests have left
    before = held()
    segment = ZoneMemory({"w": SIZE})
    with offering(segment, lambda stream: None) as (stream, results):
        assert results.get(timeout=SECONDS) is None
        assert finish(stream) == []
    assert held() - before
    del segment, stream
    eventually(lambda: held() <= before)


CLIENT = """
import sys
from pserver.transport import shm
from pserver.wire_pb2 import GRADIENT, Frame, Part
stream = shm.connect("127.0.0.1", int(sys.argv[1]), timeout_seconds=20.0)
stream.receive()
while True:
    stream.send(Frame(kind=GRADIENT, parts=[Part(name="w", size=2**18)]), [bytes(2**18)])
"""


@pytest.mark.processes
def test_a_killed_client_leaves_nothing_of_what_it_was_offered() -> None:
    """After kill -9 in the middle of its writing."""
    gc.collect()
    before = held()
    segments, ended = [ZoneMemory({"w": SIZE})], Queue[int]()
    segments[0].counts += 1

    def handle(stream: Stream) -> None:
        assert stream.offer is not None
        stream.offer(GRADIENT, segments.pop())
        stream.send(Frame(kind=HELLO))
        try:
            while stream.receive() is not None:
                ended.put(1)
        except Unreachable:
            ended.put(0)

    listener = shm.listen(handle)
    with process(CLIENT, str(listener.port)) as client:
        assert ended.get(timeout=PATIENCE) == 1
        os.kill(client.pid, signal.SIGKILL)
        while ended.get(timeout=PATIENCE):
            continue
    listener.close(2.0)
    eventually(lambda: held() <= before)


def test_tensors_keep_the_memory_of_their_segment() -> None:
    """Of any dtype and shape; no two overlap, and all begin at a multiple of 64."""
    segment = ZoneMemory({"a": 12, "b": 8, "c": 4})
    a = segment.tensor("a", torch.int32, (3,))
    b = segment.tensor("b", torch.float64, ())
    c = segment.tensor("c", torch.float32, (1, 1))
    del segment
    for tensor, value in ((a, 3), (b, 0.5), (c, 4)):
        tensor.fill_(value)
    assert (a.tolist(), b.item(), c.tolist()) == ([3, 3, 3], 0.5, [[4.0]])
    assert all(each.data_ptr() % 64 == 0 for each in (a, b, c))
