"""The tensor streams that a server has open, over whichever transports, so that it can say DRAIN on
all of them.

A transport's listener can end streams; this knows more: whether a stream is in the middle of an
answer or waits for its trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition, Thread

from pserver.errors import PServerError
from pserver.transport.stream import Buffer, Stream
from pserver.wire_pb2 import Frame, Kind


class DrainingStreams:
    """Runs ``serve(stream)`` for each stream of each transport."""

    def __init__(self, serve: Callable[[Stream], None]) -> None:
        self._serve = serve
        self.changed = Condition()  # guards _open and each stream's idle; nothing blocks under it
        self._open: set[_Watched] = set()

    def handle(self, stream: Stream) -> None:
        """A transport's handler."""
        watched = _Watched(stream, self.changed)
        with self.changed:
            self._open.add(watched)
        try:
            self._serve(watched)
        finally:
            with self.changed:
                self._open.discard(watched)
                self.changed.notify_all()

    def drain(self, grace_seconds: float) -> None:
        """Waits, this long at most, until no stream is in the middle of an answer, then sends DRAIN
        on each.
        """
        with self.changed:
            self.changed.wait_for(lambda: all(stream.idle for stream in self._open), grace_seconds)
            streams = list(self._open)
        threads = [Thread(target=_say_drain, args=(stream,), daemon=True) for stream in streams]
        # one each: a peer that does not read must not keep the others waiting
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.5)


class _Watched:
    """A stream that knows whether it waits for its peer."""

    def __init__(self, stream: Stream, changed: Condition) -> None:
        self.transport, self.peer = stream.transport, stream.peer
        self.idle = False
        self._stream, self._changed = stream, changed
        self.send, self.close, self.cancel = stream.send, stream.close, stream.cancel

    def receive(self) -> tuple[Frame, memoryview] | None:
        self._set_idle(True)
        try:
            return self._stream.receive()
        finally:
            self._set_idle(False)

    def _set_idle(self, idle: bool) -> None:
        with self._changed:
            self.idle = idle
            if idle:
                self._changed.notify_all()


def _say_drain(stream: _Watched) -> None:
    payload: Sequence[Buffer] = ()
    try:
        stream.send(Frame(kind=Kind.DRAIN), payload)
    except PServerError:
        return  # it has ended in the meantime
