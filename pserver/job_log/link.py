"""One end of a link between server 0 and another server, and its messages.

[Note: exactly once and in order]  A stream may break with frames on their way, and neither end
knows which have arrived.  So messages are numbered over all streams of a link, each frame carries
the number of the peer's messages that were heard, and an end keeps the unheard ones.  On a new
stream it sends those again, and the peer drops those that it has.  An earlier stream may still
bring frames: none of them counts any more, as two threads could hand out the messages of both in a
wrong order.

[Note: whoever sends takes all]  A message leaves in the thread that sends it: no other thread has
to wake up for it.  Where another thread is sending, that one takes this message along, together
with all others that were added meanwhile.  What is on its way is bounded, below what the buffers of
a transport hold, so no thread that sends a message waits for a peer that does not read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from pserver.errors import CorruptFrame, GarbledStream, Unreachable
from pserver.running_clock import RUNNING
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import Frame, Kind

# ---- messages ----
#
# The messages of one end of a link: what it has said and the peer has not heard yet, and how much
# it has heard.  No thread, lock, socket or clock.


# what may be on its way and not heard yet: less than a transport's buffers hold, so that no sender
# has to wait for its peer
WINDOW_BYTES, WINDOW_MESSAGES = 2**16, 128
FRAME_BYTES = 2**13  # of messages that leave in one frame: what a changed bit makes void
MOST_BYTES = 2**21  # of one message: it travels in a header, which may have twice as much
MESSAGE_BYTES = 16  # that a message takes besides its own


class Messages:
    """One end's messages, numbered from 1, and the number that it has received.

    A message is kept until the peer has heard it, so that it can be sent again on another stream.

    Example::

        messages = Messages()
        messages.add(b"staged")
        messages.next_batch()  # (1, [b"staged"])
        messages.was_heard(1)

    Attributes:
        heard: the number of the last message of the peer that was heard.
    """

    def __init__(self) -> None:
        self.heard = 0
        self._told = 0  # of `heard`, to the peer
        self._done = 0  # the number of the last own message that the peer has heard
        self._flying: deque[bytes] = deque()  # on their way, from number _done + 1 on
        self._waiting: deque[bytes] = deque()  # behind them
        self._flying_bytes = self._heard_bytes = 0  # the latter: since the peer was told

    @property
    def unheard(self) -> int:
        """The number of messages that the peer has not heard."""
        return len(self._flying) + len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether the peer should receive an acknowledgement, as its window fills."""
        return (
            self._heard_bytes > WINDOW_BYTES // 4 or self.heard - self._told > WINDOW_MESSAGES // 4
        )

    def add(self, message: bytes) -> None:
        """Adds a message, behind all others.

        Raises:
            ValueError: it has more than ``MOST_BYTES``.
        """
        if len(message) > MOST_BYTES:
            raise ValueError(
                f"expected a message of at most {MOST_BYTES} bytes, got {len(message)}"
            )
        self._waiting.append(message)

    def next_batch(self) -> tuple[int, list[bytes]]:
        """The messages that may leave now in one frame, with the number of the first; none where
        the window is full.
        """
        first, batch = self._done + len(self._flying) + 1, list[bytes]()
        size = 0
        while self._waiting and self._has_room(len(self._waiting[0])) and size < FRAME_BYTES:
            batch.append(self._waiting.popleft())
            size += len(batch[-1])
            self._flying.append(batch[-1])
            self._flying_bytes += len(batch[-1]) + MESSAGE_BYTES
        return first, batch

    def _has_room(self, size: int) -> bool:
        if not self._flying:
            return True
        size += self._flying_bytes + MESSAGE_BYTES
        return size <= WINDOW_BYTES and len(self._flying) < WINDOW_MESSAGES

    def acknowledgement(self) -> int:
        """The value of ``heard`` for a frame that leaves now."""
        self._told, self._heard_bytes = self.heard, 0
        return self.heard

    def was_heard(self, number: int) -> None:
        """Drops messages up to this number, which the peer has heard.

        Raises:
            CorruptFrame: there are not so many.
        """
        if number > self._done + self.unheard:
            raise CorruptFrame(
                f"expected a number of up to {self._done + self.unheard} messages, got {number}"
            )
        while self._done < number:
            self._done += 1
            if self._flying:
                self._flying_bytes -= len(self._flying.popleft()) + MESSAGE_BYTES
            else:  # it has heard them on an earlier stream
                self._waiting.popleft()

    def receive(self, first: int, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Takes a frame's messages; returns the new ones.

        Args:
            first: the number of the first.

        Raises:
            CorruptFrame: one is missing before them.
        """
        if messages and not 1 <= first <= self.heard + 1:
            raise CorruptFrame(f"expected message {self.heard + 1} of the link, got {first}")
        fresh = messages[self.heard + 1 - first :] if messages else ()
        self.heard += len(fresh)
        self._heard_bytes += sum(map(len, fresh))
        return fresh

    def begin_again(self) -> None:
        """Begins anew on another stream: unheard messages leave again."""
        self._waiting.extendleft(reversed(self._flying))
        self._flying.clear()
        self._flying_bytes = 0


# ---- link end ----
#
# One end of a link: its messages leave on the present stream, and again on the one that takes its
# place.


ASK_SECONDS = 0.02  # between two questions whether the peer has heard all


class LinkEnd:
    """One end of a link.  Any thread may send; one thread for each stream receives.

    Args:
        kind: of its frames: STAGED or RECORD.
        received: called with each message of the peer, once and in order, in the thread of a
            stream.
        clock: seconds that never go back.

    Attributes:
        last_heard: when a frame has arrived last.
    """

    def __init__(
        self,
        kind: Kind,
        received: Callable[[bytes], None],
        clock: Callable[[], float] = RUNNING,
    ) -> None:
        self._kind, self._received, self._clock = kind, received, clock
        self.last_heard = clock()
        # guards the five below; nothing blocks under it
        self._changed = threading.Condition()
        self._messages = Messages()
        self._stream: SequencedStream | None = None
        self._number = 0  # of the stream, by the follower's count
        self._sending = False  # a thread sends, and takes along what there is
        self._ended = False  # no stream and no message counts any more
        # held while messages are handed out; taken before _changed.  A message may end the link
        self._handing_out = threading.RLock()

    # ---- streams ----

    def attach(self, stream: SequencedStream, number: int) -> None:
        """Attaches a stream in place of an earlier one, which breaks.

        Raises:
            Unreachable: a later one is attached already, or the link has ended.
        """
        with self._changed:
            if self._ended:
                raise Unreachable("the link has ended")
            if number <= self._number:
                raise Unreachable(
                    f"it is stream {number} of the link, and came after stream {self._number}"
                )
            earlier, self._stream, self._number = self._stream, stream, number
            self._messages.begin_again()
        if earlier is not None:
            earlier.cancel()
        self._send()

    def detach(self, stream: SequencedStream) -> None:
        """Detaches a stream that has ended; messages wait for the next."""
        with self._changed:
            if self._stream is stream:
                self._stream = None
            self._changed.notify_all()

    def cancel(self) -> None:
        """Breaks the present stream."""
        with self._changed:
            stream, self._stream = self._stream, None
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()

    def end(self) -> None:
        """Ends the link: no stream counts any more, and further messages are dropped.  It does not
        wait for a message that is being handed out: :meth:`wait_handed_out` does.
        """
        with self._changed:
            self._ended = True
        self.cancel()

    def wait_handed_out(self) -> None:
        """Waits, after :meth:`end`, until ``received`` is not running; it is not called again.

        The caller holds no lock that ``received`` takes.
        """
        with self._handing_out:
            pass

    # ---- messages ----

    def send(self, message: bytes) -> None:
        """Sends a message, now or on the next stream; after the end it is dropped.

        Raises:
            ValueError: it is too large.
        """
        with self._changed:
            if not self._ended:
                self._messages.add(message)
        self._send()

    def _send(self) -> None:
        """See [Note: whoever sends takes all]."""
        while True:
            with self._changed:
                stream = self._stream
                if self._sending or stream is None:
                    return
                first, batch = self._messages.next_batch()
                if not batch:
                    return
                frame = Frame(
                    kind=self._kind,
                    log=batch,
                    log_first=first,
                    log_heard=self._messages.acknowledgement(),
                )
                self._sending = True
            try:
                stream.send(frame)
            except Unreachable:
                self.detach(stream)  # its own thread sees it too
            finally:
                with self._changed:
                    self._sending = False

    def probe(self) -> None:
        """Sends PROBE, which acknowledges messages, and which a coordinator answers."""
        with self._changed:
            stream, heard = self._stream, self._messages.acknowledgement()
        if stream is not None:
            with suppress(Unreachable):
                stream.send(Frame(kind=Kind.PROBE, log_heard=heard))

    def say_bye(self) -> None:
        """Sends BYE, and ends this side of the stream."""
        with self._changed:
            stream = self._stream
        if stream is not None:
            with suppress(Unreachable):
                stream.send(Frame(kind=Kind.BYE))
                stream.close()

    def wait_heard(self, timeout_seconds: float) -> bool:
        """Waits until the peer has heard all messages, the stream has broken, or the time is over.

        Returns:
            Whether the peer has heard all.
        """
        deadline = self._clock() + timeout_seconds
        while self._is_waiting() and self._clock() < deadline:
            self.probe()
            with self._changed:
                self._changed.wait_for(lambda: not self._is_waiting(), ASK_SECONDS)
        with self._changed:
            return not self._messages.unheard

    def _is_waiting(self) -> bool:
        return bool(self._messages.unheard) and self._stream is not None

    # ---- arrivals ----

    def next_frame(self, stream: SequencedStream) -> Frame | None:
        """The next frame of a stream; None at its end.

        Raises:
            Unreachable: it broke.
            GarbledStream: the received bytes are not a frame.
        """
        try:
            received = stream.receive()
        except CorruptFrame as error:
            raise GarbledStream(str(error)) from error
        return None if received is None else received[0]

    def receive(self, stream: SequencedStream, header: Frame) -> None:
        """Takes a frame of a stream, and hands its messages to ``received``.

        Raises:
            Unreachable: another stream has taken the place of this one.
            GarbledStream: the frame contradicts those before it.
        """
        with self._handing_out:
            for message in self._take(stream, header):
                if not self._ended:
                    self._received(message)
        self._send()  # there may be room now
        with self._changed:
            is_due = self._messages.is_due
        if is_due:
            self.probe()

    def _take(self, stream: SequencedStream, header: Frame) -> Sequence[bytes]:
        with self._changed:
            if self._stream is not stream:
                raise Unreachable("another stream has taken the place of this one, or it broke")
            self.last_heard = self._clock()
            try:
                self._messages.was_heard(header.log_heard)
                fresh = self._messages.receive(header.log_first, header.log)
            except CorruptFrame as error:
                raise GarbledStream(str(error)) from error
            if not self._messages.unheard:
                self._changed.notify_all()
            return fresh
