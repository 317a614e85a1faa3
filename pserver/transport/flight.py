"""Arrow Flight's DoExchange: payloads handled in C++, outside the GIL.  The default between hosts.

A frame is one message: its header in ``app_metadata``, its payload as the single uint8 column of a
record batch, or no batch if there is no payload.  A frame with one buffer is sent from that
buffer's memory.  One with several is gathered first: a record batch has one body, and 500 columns
of a few KB cost more than a copy of 2 MB between warm buffers.

[Note: ending an exchange]
- ``shutdown()`` waits for open exchanges, without a timeout.  So it runs in a thread, while
  OpenStreams ends the exchanges.
- The accepting end has no call that cancels an exchange, and its handler may not return while a
  thread reads.  It cuts the connection instead (:func:`pserver.transport.endpoint.cut`), of which
  each stream has one of its own; reads and writes then fail at once.
- A client that was killed reads as a clean end.  ``context.is_cancelled()`` tells the two apart.
- No read or write has a timeout; ``reader.cancel()`` from another thread ends both at the
  connecting end.
- ``writer.done_writing()`` and ``writer.close()`` may finish the call, which reads what is left:
  while another thread reads, gRPC then aborts the process.  So an end closes with a message without
  header or payload, and the thread that reads last finishes the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from pserver.errors import CorruptFrame, Unreachable
from pserver.transport.codec import parse_header
from pserver.transport.endpoint import check_free, cut, of_peer, reach, spell
from pserver.transport.open_streams import CANCEL_SECONDS, OpenStreams
from pserver.transport.stream import Buffer, Handler
from pserver.wire_pb2 import Frame

_log = logging.getLogger(__name__)
SCHEMA = pa.schema([pa.field("payload", pa.uint8(), nullable=False)])
DESCRIPTOR = fl.FlightDescriptor.for_command(b"pserver.Exchange")
# see [Note: ending an exchange]
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
_GONE = (fl.FlightError, pa.ArrowException, OSError)


class FlightStream:
    """One end of an exchange.  The two subclasses differ in how an exchange breaks and ends."""

    transport = "flight"

    def __init__(self, peer: str, reader: Any, writer: Any) -> None:
        self.peer = peer
        self._reader, self._writer = reader, writer
        # held during a call into the writer; guards _closed.  A broken call releases it at once
        self._writing = Lock()
        self._cancelled = False
        self._closed = False  # no call into the writer any more

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        assert header.kind and not header.payload, (
            "a frame has a kind, and its payload travels beside its header"
        )
        head, body = pa.py_buffer(header.SerializeToString()), _gathered(payload)
        try:
            with self._writing:
                if self._cancelled or self._closed:
                    raise Unreachable(
                        f"{self.peer}: the stream "
                        f"{'was cancelled' if self._cancelled else 'is closed'}"
                    )
                if body is None:
                    self._writer.write_metadata(head)
                else:
                    self._writer.write_with_metadata(_batch(body), head)
        except _GONE as error:
            raise self._broken(error) from error

    def receive(self) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            self._end_of_input()
            return None
        except fl.FlightError as error:
            raise self._broken(error) from error
        except (pa.ArrowException, OSError) as error:  # what came could not be read
            raise (
                self._broken(error)
                if self._cancelled
                else CorruptFrame(f"{self.peer}: {_first_line(error)}")
            ) from error
        if chunk.app_metadata is not None and not chunk.app_metadata.size and chunk.data is None:
            return None
        if chunk.app_metadata is None:
            raise CorruptFrame(f"{self.peer}: expected a frame's header in app_metadata, got none")
        return parse_header(chunk.app_metadata.to_pybytes()), _payload(chunk.data)

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        raise NotImplementedError

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._cancelled = True
        self._hang_up()

    def _hang_up(self) -> None:
        raise NotImplementedError

    def _end_of_input(self) -> None:
        """Raises what an end of input means, unless it is a clean one."""
        raise NotImplementedError

    def _broken(self, error: Exception) -> Unreachable:
        reason = "was cancelled" if self._cancelled else f"broke: {_first_line(error)}"
        return Unreachable(f"{self.peer}: the stream {reason}")


class _AcceptedStream(FlightStream):
    """The server's end of an exchange."""

    def __init__(self, context: Any, reader: Any, writer: Any) -> None:
        super().__init__(of_peer(context.peer()), reader, writer)
        self._context = context

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`.

        Waits for another thread's send: after the handler's return it would crash.
        """
        with self._writing:
            self._closed = True

    def _hang_up(self) -> None:
        if not self._closed:
            cut(self.peer)

    def _end_of_input(self) -> None:
        if self._cancelled or self._context.is_cancelled():
            raise self._broken(ConnectionError("the peer is gone"))


class _ConnectedStream(FlightStream):
    """The client's end of an exchange.

    The peer's last frame, or ``cancel``, releases the connection: see [Note: ending an exchange].
    """

    def __init__(self, peer: str, client: Any, reader: Any, writer: Any) -> None:
        super().__init__(peer, reader, writer)
        self._client = client
        self._state = Lock()  # guards the two below; nothing blocks under it
        self._reading = False
        self._released = False

    def receive(self) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._state:
            if self._released:
                raise self._broken(ConnectionError("it has ended"))
            self._reading = True
        try:
            return super().receive()
        except Unreachable:
            self._release(reading=True)
            raise
        finally:
            with self._state:
                self._reading = False
            if self._cancelled:
                self._release()

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._writing:
            if not self._closed:
                self._closed = True
                with suppress(*_GONE):  # the peer has ended the stream first
                    self._writer.write_metadata(pa.py_buffer(b""))

    def _hang_up(self) -> None:
        self._reader.cancel()
        self._release()

    def _end_of_input(self) -> None:
        error = self._release(reading=True)
        if error is not None or self._cancelled:
            raise self._broken(error or ConnectionError())

    def _release(self, reading: bool = False) -> Exception | None:
        """Finishes the call and closes the connection, once.  If a thread reads, only that thread
        does it (``reading``).

        Returns:
            The error that the call ended with, if any.
        """
        with self._state:
            if self._released or self._reading != reading:
                return None
            self._released = True
        with self._writing:
            self._closed = True
            try:
                self._writer.close()
            except _GONE as error:
                return error
            finally:
                self._client.close()
        return None


class _FlightServer(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """A Flight server that turns DoExchange calls into streams."""

    def __init__(self, location: str, streams: OpenStreams) -> None:
        super().__init__(location)
        self._streams = streams

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        """No flights: an answer tells a client that it has reached a Flight server."""
        return iter(())

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serves one exchange, in a thread that Flight has made for it."""
        if descriptor.command != DESCRIPTOR.command:
            raise fl.FlightServerError(
                f"expected an exchange {DESCRIPTOR.command!r}, got {descriptor.command!r}"
            )
        writer.begin(SCHEMA)
        self._streams.run(_AcceptedStream(context, reader, writer))


class FlightListener:
    """A Flight server whose only call is the exchange.

    Attributes:
        port: the one that it is bound to.
    """

    def __init__(self, handle: Handler, host: str, port: int) -> None:
        check_free(host, port)
        self._streams = OpenStreams(handle)
        self._server = _FlightServer(f"grpc+tcp://{spell(host, port)}", self._streams)
        self.port: int = self._server.port

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        stop = Thread(target=self._server.shutdown, name="flight shutdown", daemon=True)
        stop.start()  # refuses new calls from here on
        self._streams.close(grace_seconds)
        stop.join(CANCEL_SECONDS)
        if stop.is_alive():
            _log.error("Flight's server on port %d did not stop", self.port)


def listen(handle: Handler, host: str = "127.0.0.1", port: int = 0) -> FlightListener:
    """Accepts streams.

    Raises:
        OSError: it cannot listen there; one sentence.
    """
    return FlightListener(handle, host, port)


def connect(host: str, port: int, *, timeout_seconds: float) -> FlightStream:
    """Opens a stream, on a connection of its own.

    Raises:
        Unreachable: no server answered within ``timeout_seconds``.
    """
    address = reach(host, port, timeout_seconds)
    authority = [("grpc.default_authority", spell(host, port))]
    client = fl.FlightClient(
        f"grpc+tcp://{spell(address, port)}", generic_options=OPTIONS + authority
    )
    # an exchange has no timeout: a call that has one finds out first whether the connection works
    try:
        list(client.list_flights(options=fl.FlightCallOptions(timeout=timeout_seconds)))
        writer, reader = client.do_exchange(DESCRIPTOR)
    except _GONE as error:
        client.close()
        reason = _first_line(error)
        raise Unreachable(
            f"no answer at {spell(host, port)} within {timeout_seconds:g} s: {reason}"
        ) from error
    with suppress(*_GONE):  # the peer has ended the stream already: what it sent can still be read
        writer.begin(SCHEMA)
    return _ConnectedStream(spell(host, port), client, reader, writer)


def _gathered(payload: Sequence[Buffer]) -> Buffer | None:
    """The payload as one run of bytes; None if it is empty."""
    buffers = [buffer for buffer in payload if memoryview(buffer).nbytes]
    if len(buffers) > 1:
        return b"".join(buffers)
    return buffers[0] if buffers else None


def _batch(body: Buffer) -> Any:
    """A record batch whose only buffer is ``body``, not copied."""
    column = pa.Array.from_buffers(
        pa.uint8(), memoryview(body).nbytes, [None, pa.py_buffer(body)], null_count=0
    )
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def _payload(batch: Any) -> memoryview:
    """The one column's bytes, not copied.

    Raises:
        CorruptFrame: the batch has another form than :func:`_batch` gives.
    """
    if batch is None:
        return memoryview(b"")
    if [field.type for field in batch.schema] != [pa.uint8()] or batch.column(0).null_count:
        raise CorruptFrame(
            f"expected one column of uint8 without nulls, got {batch.schema.to_string()!r}"
        )
    column = batch.column(0)
    start, body = column.offset, column.buffers()[1]
    view = memoryview(b"" if body is None else body).cast("B")[start : start + len(column)]
    if view.nbytes != len(column):
        raise CorruptFrame(f"expected {len(column)} bytes of payload, got {view.nbytes}")
    return view


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
