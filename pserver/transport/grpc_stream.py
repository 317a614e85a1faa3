"""``ParameterServer.Exchange`` over plain grpcio, on the control port: for one-port deployments and
clients in other languages.

grpcio takes a message only as ``bytes``, so sending joins header and payload once; receiving copies
nothing.  Without TLS messages have checksums, as [Note: checked messages] in checksums.py says.

[Note: who is near]  Over gRPC a peer's address does not show its host: a proxy of a service
mesh, or one that forwards a port, is on this host, and the bytes come from another.  So "auto" is
on for every peer that asks, but under TLS.

[Note: two threads a stream, on the accepting end]  grpcio pulls outgoing messages from an iterator,
in a thread of its pool.  A handler sends when it has something to send.  So the handler runs in a
thread of its own, and a :class:`Pipe` connects the two.  The streams have a pool of their own, so
that none of them takes a thread from a control call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Thread, Timer

import grpc

from pserver.errors import CorruptFrame, Unreachable
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security import keys as tls
from pserver.security.bearer import Bearer
from pserver.security.keys import Keys
from pserver.transport import checksums
from pserver.transport.checksums import (
    ASKED,
    FRAMES,
    MESSAGE_CHECKSUM,
    OFF,
    ON,
    UNASKED,
    opened,
    sealed,
)
from pserver.transport.endpoint import spell
from pserver.transport.frames import decode, encode_header
from pserver.transport.grpc_port import CLIENT_OPTIONS, MESSAGE_BYTES, GrpcPort
from pserver.transport.grpc_security import bearer_of, open_channel
from pserver.transport.stream import Buffer, Handler, Land, OpenStreams, Pipe, bytes_of
from pserver.wire_pb2 import Frame

SERVICE = "pserver.ParameterServer"
CANCEL_NOTICE_SECONDS = 0.05  # grpcio may tell the end of input so long before the cancellation


class GrpcStream:
    """One end of an Exchange call.

    Args:
        peer: the other end, for messages.
        first_bytes: of a frame, until the peer is admitted.

    Attributes:
        outgoing: the frames that grpcio is to send.
        checked: messages have checksums.
        bearer: see :class:`pserver.transport.stream.Stream`.
    """

    transport = "grpc"
    offer = None

    def __init__(self, peer: str, first_bytes: int = MESSAGE_BYTES) -> None:
        self.peer = peer
        self.bearer: Bearer | None = None
        self.outgoing = Pipe()
        self.checked = False
        self._accepting = False
        self._incoming: Iterator[bytes] = iter(())
        self._end: Callable[[], object] = lambda: None
        self._release: Callable[[], object] = lambda: None
        self._admitted: Callable[[], object] = lambda: None
        self._over = Event()  # the call has ended, for any reason
        self._most = first_bytes  # of the next frame
        self._cancelled = False

    def attach(
        self,
        incoming: Iterator[bytes],
        end: Callable[[], object],
        release: Callable[[], object] | None,
        admitted: Callable[[], object] = lambda: None,
    ) -> None:
        """Attaches the stream's call.

        Args:
            incoming: the messages that arrive.
            end: cancels the call.
            release: closes the connection; None at the accepting end.
            admitted: called when the peer has been admitted.
        """
        self._admitted = admitted
        self._incoming, self._end, self._accepting = incoming, end, release is None
        self._release = release or (lambda: None)

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        head = encode_header(header, bytes_of(payload))
        pieces = (head, *payload)
        self.outgoing.put(sealed(pieces) if self.checked else b"".join(pieces))

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        try:
            message = next(self._incoming, None)
        except grpc.RpcError as error:
            self.ended()
            raise self._broken(_reason(error)) from error
        if message is not None:
            if len(message) > self._most + MESSAGE_CHECKSUM.size * self.checked:
                raise CorruptFrame(
                    f"{self.peer}: expected a first frame of up to {self._most} bytes, got "
                    f"{len(message)}"
                )
            return decode(opened(message) if self.checked else message)
        if self._accepting and self._over.wait(CANCEL_NOTICE_SECONDS):
            raise self._broken("the peer is gone or has cancelled it")
        self._release()
        return None

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._most = MESSAGE_BYTES
        self._admitted()

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self.outgoing.close()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._cancelled = True
        # before the pipe breaks: otherwise the accepting end's call would end like a clean one
        self._end()
        self.ended()
        self._release()

    def ended(self) -> None:
        """Breaks the pipe, because the call is over and nothing can be sent any more."""
        self._over.set()
        reason = "the stream was cancelled" if self._cancelled else "the peer has ended the stream"
        self.outgoing.break_(f"{self.peer}: {reason}")

    def _broken(self, reason: str) -> Unreachable:
        self._release()
        return Unreachable(
            f"{self.peer}: the stream {'was cancelled' if self._cancelled else 'broke: ' + reason}"
        )


class Exchanges:
    """The Exchange method of one ``grpc.Server``, and its open streams.

    Args:
        handle: called with each stream, in a thread of its own.
        limits: how many streams there may be.
        checksum: "on", "off", or "auto": on but under TLS.
    """

    def __init__(
        self, handle: Handler, limits: Limits = ANY_FIRST_FRAME, checksum: str = "auto"
    ) -> None:
        self._streams, self._checksum = OpenStreams(handle), checksum
        self._most = limits.hello_bytes
        self._admits_all = limits is ANY_FIRST_FRAME
        self._pool = ThreadPoolExecutor(limits.connections, thread_name_prefix="grpc exchange")

    def add_to(self, port: GrpcPort) -> None:
        """Adds the method to a server, which may have others of the same service."""

        def exchange(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._exchange(requests, context, port)

        # grpc's own health service chooses its threads in the same way
        exchange.experimental_thread_pool = self._pool  # type: ignore[attr-defined]
        # no serializers: bytes in and out
        method = grpc.stream_stream_rpc_method_handler(exchange)
        port.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Exchange": method}),)
        )

    def _exchange(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, port: GrpcPort
    ) -> Iterator[bytes]:
        """Serves one call.  See [Note: two threads a stream, on the accepting end]."""
        if self._admits_all:  # before it knows that it is connected, and sends without end
            port.admit(context)
        stream = GrpcStream(port.peer(context), self._most)
        stream.bearer = bearer_of(context)
        stream.checked = self._agree(stream, context)
        stream.attach(requests, context.cancel, None, partial(port.admit, context))
        if not context.add_callback(stream.ended):
            return
        Thread(
            target=self._streams.run, args=(stream,), name=f"exchange {stream.peer}", daemon=True
        ).start()
        yield from stream.outgoing.drain()

    def _agree(self, stream: GrpcStream, context: grpc.ServicerContext) -> bool:
        """Tells the peer whether messages have checksums."""
        asked = checksums.value(FRAMES, context.invocation_metadata()) == ASKED
        on = self._checksum == "on" or (self._checksum == "auto" and stream.bearer is None)
        if self._checksum == "on" and not asked:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this server takes frames with checksums only (--checksum on): expected {ASKED!r} "
                f"in the call's metadata {FRAMES!r}",
            )
        context.send_initial_metadata(((FRAMES, (ON if on else OFF) if asked else UNASKED),))
        return asked and on

    def close(self, grace_seconds: float) -> None:
        """Ends all open exchanges, as :meth:`pserver.transport.stream.Listener.close` says; the
        server itself keeps running.
        """
        self._streams.close(grace_seconds)

    def end_threads(self) -> None:
        """Ends the threads, when the server has stopped."""
        self._pool.shutdown(wait=False)


class GrpcListener:
    """A gRPC server whose only method is Exchange.

    Attributes:
        port: the one that it is bound to.
    """

    def __init__(
        self, handle: Handler, host: str, port: int, keys: Keys | None, checksum: str
    ) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grpc")  # its method has its own
        self._grpc = GrpcPort(host, port, self._pool, keys, Limits())
        self.port = self._grpc.port
        self._exchanges = Exchanges(handle, checksum=checksum)
        self._exchanges.add_to(self._grpc)
        self._grpc.start()

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        self._exchanges.close(grace_seconds)
        self._grpc.stop(grace_seconds)
        self._exchanges.end_threads()
        self._pool.shutdown(wait=False)


def listen(
    handle: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    keys: Keys | None = None,
    checksum: str = "auto",
) -> GrpcListener:
    """Accepts streams on a server of its own.

    Args:
        checksum: "on", "off", or "auto": on but under TLS.
        keys: the server's; None: without TLS.

    Raises:
        OSError: it cannot listen there; one sentence.
    """
    return GrpcListener(handle, host, port, keys, checksum)


def connect(
    host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None
) -> GrpcStream:
    """Opens a stream, on a connection of its own.

    Args:
        keys: this process's; None: without TLS.

    Raises:
        Unreachable: no server answered within ``timeout_seconds``.
        Untrusted: the process there is not a server of ours, or does not take our certificate.
    """
    channel = open_channel(host, port, CLIENT_OPTIONS, timeout_seconds, keys)
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_seconds)
    except grpc.FutureTimeoutError as error:
        channel.close()
        tls.check_plain(host, port, keys)
        raise Unreachable(
            f"no answer at {spell(host, port)} within {timeout_seconds:g} s: it does not speak gRPC"
        ) from error
    stream = GrpcStream(spell(host, port))
    asks = ((FRAMES, ASKED),)
    call = channel.stream_stream(f"/{SERVICE}/Exchange")(stream.outgoing.drain(), metadata=asks)
    stream.attach(call, call.cancel, channel.close)
    if not call.add_callback(stream.ended):
        stream.ended()
    stream.checked = _agreed(call, stream, timeout_seconds)
    return stream


def _agreed(call: grpc.Call, stream: GrpcStream, timeout_seconds: float) -> bool:
    """Whether messages have checksums, as the server announces before its first one.

    Raises:
        Unreachable: it does not announce it.
    """
    late = Timer(timeout_seconds, call.cancel)
    late.daemon = True
    late.start()
    try:
        said = checksums.value(FRAMES, call.initial_metadata())
    except grpc.RpcError:  # grpcio has kept why the call ended
        said = None
    late.cancel()
    if said in (ON, OFF):
        return said == ON
    reason = f"the server has not announced whether frames have checksums, but sent {said!r}"
    if said is None and call.done():
        reason = f"{call.code().name}, {call.details()}"
    stream.cancel()
    raise Unreachable(f"{stream.peer}: {reason}")


def _reason(error: grpc.RpcError) -> str:
    """The reason of a call's end, which a client's call has and a server's does not."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}, {error.details()}"
    return "the peer is gone or has cancelled it"
