"""A stream whose frames are numbered in both directions: the receiving end notices a missing frame
and a repeated one.

[Note: a loss shows]  A transport delivers frames in order, or breaks; this layer does not trust
that.  Both ends number the frames that they send.  The receiving end ignores a number that it has
seen.  A gap in the numbers breaks the stream, and the connecting end sends its request again
(:mod:`pserver.client.channel`).  A lost last frame leaves no gap.  A waiting trainer therefore
sends PROBE, which the server answers with PROBE; the next frame that arrives reveals the gap.  A
frame that is slow arrives before the PROBE behind it, so slowness is never taken for a loss.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pserver.errors import Unreachable
from pserver.transport.byte_counters import ByteCounters
from pserver.transport.stream import Buffer, Land, Stream
from pserver.wire_pb2 import Frame


class SequencedStream:
    """A :class:`~pserver.transport.stream.Stream` over another, with numbered frames.

    Any thread may send, one thread receives.  Frames of a peer that does not number them
    (``sequence`` 0) pass unchanged.

    Args:
        stream: the one below.
        traffic: counts the bytes of its frames by name; None: nothing does.

    Attributes:
        sent, received: the number of the last frame in each direction.
    """

    def __init__(self, stream: Stream, traffic: ByteCounters | None = None) -> None:
        self.transport, self.peer, self.bearer = stream.transport, stream.peer, stream.bearer
        self.offer = stream.offer
        self.sent = 0
        self.received = 0
        self._stream = stream
        self._traffic = traffic or ByteCounters()
        # held while a frame is sent, so that frames leave in the order of their numbers; ``cancel``
        # does not take it
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

    def send_if_free(self, header: Frame) -> bool:
        """Sends a frame without payload, unless another thread is sending one.

        Returns:
            Whether it was sent.

        Raises:
            Unreachable: the peer is gone.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            self.sent += 1
            header.sequence = self.sent
            self._stream.send(header)
            return True
        finally:
            self._sending.release()

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`.

        Raises:
            Unreachable: also where a frame is missing.
        """
        while (received := self._stream.receive(self._landing(land))) is not None:
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

    def _landing(self, land: Land | None) -> Land | None:
        """Likewise, for the frame that is expected: a repeated one lands nowhere."""
        if land is None:
            return None
        return lambda header, size: (
            land(header, size) if header.sequence in (0, self.received + 1) else None
        )

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.admit()

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.close()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.cancel()
