"""The messages of one end of a link: what it has said and the peer has not heard yet, and how much
it has heard.  No thread, lock, socket or clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pserver.errors import CorruptFrame

# what may be on its way and not heard yet: less than a transport's buffers hold, so that no sender
# has to wait for its peer
WINDOW_BYTES, WINDOW_MESSAGES = 2**16, 128
FRAME_BYTES = 2**13  # of messages that leave in one frame: what a changed bit makes void
MOST_BYTES = 2**21  # of one message: it travels in a header, which may have twice as much
MESSAGE_BYTES = 16  # that a message takes besides its own


class Messages:
    """What one end says, numbered from 1, and what it has heard.

    A message is kept until the peer has heard it, so that it can be said again on another stream.

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
        """How many messages the peer has not heard."""
        return len(self._flying) + len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether the peer should be told what was heard, as its window fills."""
        return (
            self._heard_bytes > WINDOW_BYTES // 4 or self.heard - self._told > WINDOW_MESSAGES // 4
        )

    def add(self, message: bytes) -> None:
        """Says a message, behind all others.

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

    def told(self) -> int:
        """``heard``, for a frame that leaves now."""
        self._told, self._heard_bytes = self.heard, 0
        return self.heard

    def was_heard(self, number: int) -> None:
        """The peer has heard all messages up to this number.

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

    def hear(self, first: int, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Those of a frame's messages that are new.

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
        """Another stream takes the place of the one before: what was not heard leaves again."""
        self._waiting.extendleft(reversed(self._flying))
        self._flying.clear()
        self._flying_bytes = 0
