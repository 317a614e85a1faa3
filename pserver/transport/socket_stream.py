"""What streams over sockets share: one frame at a time in each direction, and how they end.

What a frame is on its way is the transport's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, RLock

from pserver.errors import CorruptFrame, Unreachable
from pserver.security.certificates import Bearer
from pserver.transport.stream import Buffer, Land
from pserver.wire_pb2 import Frame

FRAME_BYTES = 2**26  # the largest header, and the largest payload, that is accepted


class SocketStream(ABC):
    """One end of a stream over sockets; a :class:`pserver.transport.stream.Stream` but for
    ``offer``.

    The accepting end's ``close`` ends both directions, as the end of an RPC does.

    Args:
        peer: the other end, for messages.
        accepting: this is the accepting end.
        bearer: who the other end is, under TLS.
        first_bytes: of a frame's header and payload, until the peer is admitted.
    """

    def __init__(self, peer: str, accepting: bool, bearer: Bearer | None, first_bytes: int) -> None:
        self.peer = peer
        self.bearer = bearer
        self._accepting = accepting
        self._most = first_bytes  # of the next frame's header, and of its payload
        # held while a frame is sent.  A broken stream releases it at once
        self._sending = RLock()
        # held while a frame is received.  Taken before _sending, never after
        self._receiving = RLock()
        self._state = Lock()  # guards the two below; nothing blocks under it
        self._cancelled = False
        self._closed = False  # nothing is sent any more
        self._ended = False  # the peer has closed its side

    # ---- what a transport does; all but _shut_down under the lock of its direction ----

    @abstractmethod
    def _write(self, header: Frame, head: bytes, payload: Sequence[Buffer]) -> None:
        """Sends a frame whose serialised header is ``head``; OSError: the connection broke."""

    @abstractmethod
    def _read(self, land: Land | None) -> tuple[Frame, memoryview] | None:
        """The next frame, None at the peer's end; OSError: the connection broke."""

    @abstractmethod
    def _write_end(self) -> None:
        """Tells the peer that nothing more comes."""

    @abstractmethod
    def _linger(self) -> None:
        """After the end of the accepting side: lets the peer read what was said last."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Breaks the connections, so that nobody waits for them any more."""

    @abstractmethod
    def _release(self) -> None:
        """Closes what is open.  Nobody sends or receives."""

    # ---- a stream ----

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`.

        Raises:
            ValueError: the frame has more than 64 MB.
        """
        assert header.kind and not header.payload, (
            "a frame has a kind, and its payload travels beside its header"
        )
        head = header.SerializeToString()
        with self._sending:
            if self._closed or self._cancelled:
                raise Unreachable(
                    f"{self.peer}: the stream {'was cancelled' if self._cancelled else 'is closed'}"
                )
            try:
                self._write(header, head, payload)
            except OSError as error:
                raise self._broken(error) from error

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._receiving:
            if self._ended and not self._cancelled:
                return None
            try:
                received = self._read(land)
            except OSError as error:
                self._hang_up()
                # raised without a local name: a reference cycle would keep shared memory alive
                raise self._broken(error) from error
            except CorruptFrame as error:  # where the next frame begins is not known any more
                self._ended = True
                raise CorruptFrame(f"{self.peer}: {error}") from error
            if received is None:
                self._ended = True
                if not self._accepting:
                    self._hang_up()
            return received

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._most = FRAME_BYTES

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        with self._sending, suppress(OSError):  # the peer has ended the stream first
            self._write_end()
        if self._accepting:
            with self._receiving:
                self._linger()
            self._hang_up()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._cancelled = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Breaks the connections, and closes them when no thread waits for them any more.

        The peer can still read what was sent.
        """
        with self._state:
            self._closed = True
        self._shut_down()
        with self._receiving, self._sending:
            self._release()

    def _broken(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.peer}: the stream {'was cancelled' if self._cancelled else f'broke: {error}'}"
        )


def check_size(head: bytes, size: int) -> None:
    """Raises ValueError if a frame with ``size`` bytes of payload is too large to be accepted."""
    if max(len(head), size) > FRAME_BYTES:
        raise ValueError(
            f"expected a frame of at most {FRAME_BYTES} bytes, got {len(head)} of header, {size} "
            "of payload"
        )
