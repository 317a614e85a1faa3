"""What clients of this process say in their steps, frame by frame, without what differs by run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import Buffer, Land, Stream
from pserver.wire_pb2 import Commit, Frame, Kind

STEPS = (Kind.GRADIENT, Kind.VALUE, Kind.ROWS, Kind.COMMIT, Kind.ASSIGN)
Said = tuple[int, int, str, bytes]  # lane, step, what, its bytes


class Recorded:
    """Parts of frames and commits, by the order of their names: in a step gradients leave as they
    come.  Any thread may add some.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what was said
        self._said: list[Said] = []

    def add(self, lane: int, header: Frame, payload: bytes) -> None:
        """A frame that a client sends."""
        at = 0
        found: list[Said] = []
        for part in header.parts:
            what = f"{Kind.Name(header.kind)} {part.name} {part.dtype} {part.offset}"
            found.append((lane, header.step, what, payload[at : at + part.size]))
            at += part.size
        if header.kind == Kind.COMMIT:
            commit = Commit.FromString(header.commit.SerializeToString())
            commit.absent.sort()
            said = commit.SerializeToString(deterministic=True)
            found.append((lane, header.step, "COMMIT", said))
        with self._lock:
            self._said += found

    def of_steps(self) -> list[Said]:
        """All of it, sorted."""
        with self._lock:
            return sorted(self._said)


class _RecordedStream:
    def __init__(self, stream: Stream, recorded: Recorded) -> None:
        self.transport, self.peer, self.bearer = stream.transport, stream.peer, stream.bearer
        self.offer = stream.offer
        self._stream, self._recorded, self._lane = stream, recorded, -1

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        if header.kind == Kind.HELLO and not header.hello.tables:
            self._lane = header.hello.lane
        if header.kind in STEPS:
            self._recorded.add(self._lane, header, b"".join(payload))
        self._stream.send(header, payload)

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        return self._stream.receive(land)

    def close(self) -> None:
        self._stream.close()

    def cancel(self) -> None:
        self._stream.cancel()


class _RecordedTransport:
    def __init__(self, transport: Transport, recorded: Recorded) -> None:
        self.listen = transport.listen
        self._transport, self._recorded = transport, recorded

    def connect(self, host: str, port: int, **options: Any) -> Stream:
        stream = self._transport.connect(host, port, **options)
        return _RecordedStream(stream, self._recorded)


@contextmanager
def recording() -> Iterator[Recorded]:
    """While it lasts, what the streams of new connections carry to servers is recorded."""
    recorded = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        for name, transport in list(TRANSPORTS.items()):
            patch.setitem(TRANSPORTS, name, _RecordedTransport(transport, recorded))
        yield recorded
