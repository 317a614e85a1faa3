"""A stream whose frames are counted in both directions, so that whoever receives notices what is
missing and what came twice.

[Note: a loss shows]  A transport delivers frames in order, or breaks; this layer does not trust that.
Both ends number what they send.  A number that has been seen is ignored; one that leaves out
another breaks the stream, and the connecting end asks again (:mod:`pserver.client.channel`).  What nothing
follows cannot be missed: so a trainer that waits sends PROBE behind it, and the server answers
PROBE.  A frame that is slow arrives before the PROBE behind it, so slowness is never taken for a
loss.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pserver.errors import Unreachable
from pserver.transport.byte_counters import ByteCounters
from pserver.transport.stream import Buffer, Stream
from pserver.wire_pb2 import Frame


class SequencedStream:
    """A :class:`~pserver.transport.stream.Stream` over another.  Frames of a peer that does not count
    (``sequence`` 0) pass as they are.

    Args:
        traffic: where the bytes of its frames are counted, by name.
    """

    def __init__(self, stream: Stream, traffic: ByteCounters | None = None) -> None:
        self.transport, self.peer = stream.transport, stream.peer
        self.sent = 0
        self.received = 0
        self._stream = stream
        self._traffic = traffic or ByteCounters()
        # so that frames leave in the order of their numbers; never held by ``cancel``
        self._sending = threading.Lock()

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`.

        Writes the number into ``header``, which may be sent again elsewhere.
        """
        with self._sending:
            self.sent += 1
            header.sequence = self.sent
            self._stream.send(header, payload)
        self._traffic.sent(header)

    def receive(self) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`; also Unreachable where a frame is missing."""
        while (received := self._stream.receive()) is not None:
            number, expected = received[0].sequence, self.received + 1
            if number == 0 or number == expected:
                self.received = number or self.received
                self._traffic.received(received[0])
                return received
            if number > expected:
                raise Unreachable(
                    f"{self.peer}: expected frame {expected} of the stream, got frame {number}"
                )
        return None

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.close()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.cancel()
