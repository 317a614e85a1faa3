"""Shared memory: what is left after a kill, what a stranger can do, and that a slot belongs to one
end at a time.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import random
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Queue
from threading import Event

import pytest

from pserver.errors import CorruptFrame, Unreachable
from pserver.transport import memory, shm
from pserver.transport.registry import suited
from pserver.transport.stream import Stream
from pserver.wire_pb2 import HELLO, VALUE, Frame

SECONDS = 20.0
PROMPT = 2.0

CLIENT = """
import sys
from pserver.transport import shm
from pserver.wire_pb2 import VALUE, Frame
stream = shm.connect("127.0.0.1", int(sys.argv[1]), timeout_seconds=20.0)
while True:
    stream.send(Frame(kind=VALUE), [bytes(2**21)])
"""
SERVER = """
import threading
from pserver.transport import shm
from pserver.wire_pb2 import VALUE, Frame
def handle(stream):
    stream.receive()
    while True:
        stream.send(Frame(kind=VALUE), [bytes(2**21)])
print(shm.listen(handle).port, flush=True)
threading.Event().wait(60)
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own, gone at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=SECONDS)


def traces(port: int) -> tuple[list[str], int, bool]:
    """What a stream could leave behind: files in /dev/shm, descriptors of this process, a name in
    the abstract namespace.
    """
    with open("/proc/net/unix") as names:
        bound = f"@pserver-{port}" in names.read().split()
    return sorted(os.listdir("/dev/shm")), len(os.listdir("/dev/fd")), bound


def until(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def outcomes() -> tuple[Queue[object], Callable[[Stream], None]]:
    """A queue, and a handler that puts every frame's size there, and what ended the stream."""
    seen: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        try:
            while (got := stream.receive()) is not None:
                seen.put(got[1].nbytes)
            seen.put(None)
        except Exception as error:
            seen.put(type(error)(str(error)))  # without its traceback, which holds the stream

    return seen, handle


@pytest.mark.processes
def test_a_killed_client_is_noticed_at_once_and_leaves_nothing() -> None:
    """After kill -9 of a client that is sending, the server's wait ends promptly; no file,
    descriptor or segment stays.
    """
    seen, handle = outcomes()
    listener = shm.listen(handle)
    before = traces(listener.port)
    with process(CLIENT, str(listener.port)) as client:
        for _ in range(10):
            assert seen.get(timeout=SECONDS) == 2**21
        during = traces(listener.port)
        os.kill(client.pid, signal.SIGKILL)
        killed = time.monotonic()
        while isinstance(end := seen.get(timeout=SECONDS), int):
            continue
        took = time.monotonic() - killed
    gone = until(lambda: traces(listener.port) == before)
    listener.close(1.0)

    assert isinstance(end, Unreachable) and took < PROMPT
    assert during[0] == before[0] and during[1] > before[1]
    assert gone


@pytest.mark.processes
def test_a_killed_server_is_noticed_at_once_and_leaves_nothing() -> None:
    """After kill -9 of a server that is sending, the client's wait ends promptly; its name and the
    segment are gone.
    """
    with process(SERVER) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        before = traces(port)
        stream = shm.connect("127.0.0.1", port, timeout_seconds=SECONDS)
        stream.send(Frame(kind=HELLO))
        for _ in range(10):
            assert stream.receive() is not None
        os.kill(server.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(Unreachable, match=f"127.0.0.1:{port}: the stream broke"):
            while stream.receive() is not None:
                continue
        took = time.monotonic() - killed
        del stream
        gone = until(lambda: traces(port) == (before[0], before[1], False))

    assert took < PROMPT
    assert before[2] and gone
    with pytest.raises(Unreachable, match="Connection refused"):
        shm.connect("127.0.0.1", port, timeout_seconds=1.0)


def test_a_payload_stays_until_the_next_receive() -> None:
    """However much the sender has to send, the slot that a receiver looks at is not written, nor is
    it a copy.
    """
    senders: list[shm.ShmStream] = []
    sent, done = Event(), Event()

    def handle(stream: Stream) -> None:
        assert isinstance(stream, shm.ShmStream)
        senders.append(stream)
        for index in range(shm.SLOTS + 2):
            stream.send(Frame(kind=VALUE, step=index), [bytes([index]) * shm.SLOT_BYTES])
        sent.set()
        done.wait(SECONDS)

    listener = shm.listen(handle)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    first = stream.receive()
    assert first is not None
    assert until(lambda: not senders[0]._filling.has_room(shm.SLOT_BYTES))
    assert not sent.is_set()  # the sender waits for a slot
    assert (bytes(first[1][:1]), bytes(first[1][-1:])) == (b"\0", b"\0")
    again = [stream.receive() for _ in range(shm.SLOTS + 1)]
    assert [got[0].step for got in again if got] == list(range(1, shm.SLOTS + 2))
    last = again[-1]
    assert last is not None and first[1][0] == shm.SLOTS  # that slot has been used again
    done.set()
    assert stream.receive() is None
    assert last[1][0] == shm.SLOTS + 1  # the memory outlives the stream
    listener.close(1.0)


def test_slots_are_as_long_as_what_they_hold() -> None:
    """Both ends find the same places whatever the sizes are; no two slots in use overlap, and a
    full direction takes no more.
    """
    slots, draw = memoryview(bytearray(shm.DIRECTION_BYTES)), random.Random(0)
    writer, reader = shm.SlotRing(slots), shm.SlotRing(slots)
    waiting: list[tuple[int, int]] = []  # size, mark
    for mark in range(2000):
        size = draw.choice((1, 65, 300_000, shm.SLOT_BYTES - 1, shm.SLOT_BYTES))
        while not writer.has_room(size):
            read, expected = waiting.pop(0)
            slot = reader.next_slot(read)
            assert (slot[0], slot[-1]) == (expected, expected)
            reader.free(1)
            writer.free(1)
        slot = writer.next_slot(size)
        slot[0] = slot[-1] = mark % 251
        waiting.append((size, mark % 251))
        assert len(waiting) == writer.used


# ---- pages ----


def slot_files() -> dict[int, int]:
    """The bytes that the slots of this process' streams take, by file."""
    files = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found = os.stat(f"/dev/fd/{name}")
            if found.st_size == shm.SEGMENT_BYTES:
                files[found.st_ino] = 512 * found.st_blocks
    return files


def echo(stream: Stream) -> None:
    """Sends back what comes."""
    while (got := stream.receive()) is not None:
        stream.send(Frame(kind=VALUE), [bytes(got[1])])


@contextmanager
def connected(
    handle: Callable[[Stream], None],
) -> Iterator[tuple[shm.ShmStream, Callable[[], int]]]:
    """A stream to such a handler, and what gives the bytes that its slots take."""
    others = slot_files()
    listener = shm.listen(handle)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    (own,) = slot_files().keys() - others.keys()
    try:
        yield stream, lambda: slot_files()[own]
    finally:
        stream.cancel()
        listener.close(1.0)


def answered(stream: Stream, payload: bytes, times: int = 1) -> bool:
    """Whether as many frames come back as they went."""
    for _ in range(times):
        stream.send(Frame(kind=VALUE), [payload])
        got = stream.receive()
        if got is None or bytes(got[1]) != payload:
            return False
    return True


LARGE = random.Random(0).randbytes(shm.SLOT_BYTES + 100_000)


def test_slots_that_no_frame_needs_go_back() -> None:
    """At both ends, after some frames past them; then large frames bring them again, and they stay
    for longer.
    """
    with connected(echo) as (stream, slot_bytes):
        assert answered(stream, LARGE) and slot_bytes() == shm.SEGMENT_BYTES
        assert answered(stream, b"small", shm.UNUSED_FRAMES)
        assert until(lambda: slot_bytes() == 0)
        assert answered(stream, LARGE) and slot_bytes() == shm.SEGMENT_BYTES
        assert answered(stream, b"small", 2 * shm.UNUSED_FRAMES - 1)
        assert slot_bytes() == shm.SEGMENT_BYTES
        assert answered(stream, b"small") and until(lambda: slot_bytes() == 0)


def test_slots_in_turn_with_small_frames_stay() -> None:
    """Frames past the slots count from the last one in them."""
    with connected(echo) as (stream, slot_bytes):
        for _ in range(3):
            assert answered(stream, LARGE) and answered(stream, b"small", shm.UNUSED_FRAMES - 1)
            assert slot_bytes() == shm.SEGMENT_BYTES


def test_a_slot_that_is_not_read_yet_does_not_go_back() -> None:
    """However many frames go past it: what is in it arrives."""
    sent, seen = Event(), Queue[bytes]()

    def handle(stream: Stream) -> None:
        sent.wait(SECONDS)
        while (got := stream.receive()) is not None:
            seen.put(bytes(got[1]))

    with connected(handle) as (stream, _):
        stream.send(Frame(kind=VALUE), [LARGE[: shm.SLOT_BYTES]])
        for _ in range(shm.UNUSED_FRAMES + 1):
            stream.send(Frame(kind=VALUE), [b"small"])
        sent.set()
        assert seen.get(timeout=SECONDS) == LARGE[: shm.SLOT_BYTES]


def test_slots_that_have_no_room_any_more_break_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender says so, and does not write to pages that are not there."""
    with connected(echo) as (stream, slot_bytes):
        assert answered(stream, b"small", shm.UNUSED_FRAMES) and until(lambda: slot_bytes() == 0)
        monkeypatch.setattr(memory, "allocate_pages", refused)
        with pytest.raises(Unreachable, match="Cannot allocate memory"):
            stream.send(Frame(kind=VALUE), [LARGE])


def test_where_pages_cannot_come_again_none_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an older system all slots stay."""
    monkeypatch.setattr(memory, "allocate_pages", refused)
    with connected(echo) as (stream, slot_bytes):
        assert answered(stream, b"small", 2 * shm.UNUSED_FRAMES) and answered(stream, LARGE)
        assert slot_bytes() == shm.SEGMENT_BYTES


def refused(part: memoryview) -> None:
    """A system without room."""
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


# ---- strangers ----


def unsealed() -> int:
    """A segment that its maker can still shorten."""
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, shm.SEGMENT_BYTES)
    return descriptor


def short() -> int:
    """A sealed segment that is too small."""
    descriptor = os.memfd_create("short", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def greet(port: int, greeting: bytes, descriptors: list[int]) -> bytes:
    """What a listener answers to any greeting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(SECONDS)
        stranger.connect(f"\0pserver-{port}")
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        stranger.sendmsg([greeting], rights)
        try:
            return stranger.recv(10)
        except ConnectionResetError:
            return b""


def test_a_stranger_gets_no_stream() -> None:
    """Another greeting, no segment, one that can shrink or is too small, a file for a socket: hung
    up on; the next is served.
    """
    seen, handle = outcomes()
    listener = shm.listen(handle)
    before = traces(listener.port)
    near, far = socket.socketpair()
    segments = [shm.make(), unsealed(), short()]
    good, *bad = segments
    with near, far, open(os.devnull) as file:
        attempts = [(b"hello", [good, far.fileno()]), (shm.GREETING, []), (shm.GREETING, [good])]
        attempts += [(shm.GREETING, [good, good]), (shm.GREETING, [file.fileno(), far.fileno()])]
        attempts += [(shm.GREETING, [segment, far.fileno()]) for segment in bad]
        assert [greet(listener.port, *attempt) for attempt in attempts] == [b""] * len(attempts)
    for segment in segments:
        os.close(segment)
    assert until(lambda: traces(listener.port) == before)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    stream.send(Frame(kind=VALUE), [b"fine"])
    stream.close()
    assert stream.receive() is None
    listener.close(1.0)

    assert (seen.get(timeout=SECONDS), seen.get(timeout=SECONDS)) == (4, None)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\7" * shm.PRELUDE.size,
        shm.PRELUDE.pack(shm.INLINE, 2**32 - 1, 0),
        shm.PRELUDE.pack(shm.IN_SLOTS, 0, 2**63),
    ],
    ids=["kind", "header", "payload"],
)
def test_a_prelude_that_cannot_be_is_a_corrupt_frame(garbage: bytes) -> None:
    """Sizes that no frame has are not believed, and nothing is allocated for them."""
    seen, handle = outcomes()
    listener = shm.listen(handle)
    stream = shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    stream._out.sendall(garbage)
    error = seen.get(timeout=SECONDS)
    stream.cancel()
    listener.close(1.0)

    assert isinstance(error, CorruptFrame)


def test_no_room_is_unreachable_and_leaves_nothing() -> None:
    """Where the system gives a segment no room, connecting says so in one sentence, at either
    end.
    """
    listener = shm.listen(lambda stream: None)
    before = traces(listener.port)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shm.SEGMENT_BYTES // 2, limits[1]))
    try:
        with pytest.raises(
            Unreachable,
            match=f"no shared memory with 127.0.0.1:{listener.port} within 5 s: File too large",
        ):
            shm.connect("127.0.0.1", listener.port, timeout_seconds=5.0)
        with pytest.raises(OSError, match="File too large"):
            shm.listen(lambda stream: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert traces(listener.port) == before
    listener.close(1.0)


def test_a_number_is_taken_once() -> None:
    """Two listeners of one number are a mistake that is said, and nobody answers for a number that
    nobody has.
    """
    listener = shm.listen(lambda stream: None)
    with pytest.raises(
        OSError,
        match=f"cannot listen on shared memory's number {listener.port}: Address already in use",
    ):
        shm.listen(lambda stream: None, port=listener.port)
    listener.close(1.0)
    with pytest.raises(Unreachable, match="Connection refused"):
        shm.connect("127.0.0.1", 1 + secrets.randbelow(2**31), timeout_seconds=1.0)


def test_only_a_server_of_this_host_is_asked_for_shared_memory() -> None:
    """A trainer whose server is elsewhere does not ask for what cannot work, unless its user named
    nothing else.
    """
    names = ["shm", "tcp", "grpc"]

    assert suited(names, "127.0.0.1") == suited(names, "localhost") == names
    assert suited(names, "192.0.2.1") == ["tcp", "grpc"]
    assert suited(["shm"], "192.0.2.1") == ["shm"]
