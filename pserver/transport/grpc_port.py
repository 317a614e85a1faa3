"""A gRPC server on a port, behind a proxy that bounds its connections.

[Note: a call without its message]  grpcio gives a call a thread when its headers have arrived, and
the thread waits for the message.  A stranger that sends headers alone would take thread after
thread.  So at most half of a pool waits so: where one more arrives, the oldest is cancelled
(:class:`~pserver.half_open.HalfOpen`).  To be able to cancel it, a handler here gets an iterator of
messages and reads one: on the wire a unary call is just that.  The message is bytes, as its size is
looked at before it is parsed: parsed it takes up to forty times as much.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2

from pserver.errors import CorruptFrame, Unreachable
from pserver.half_open import HalfOpen, address_of
from pserver.limits import PART_BYTES, SLACK_BYTES, Limits
from pserver.security.keys import Keys
from pserver.transport.checksums import check_message, of_message
from pserver.transport.endpoint import spell
from pserver.transport.grpc_security import listen_on, open_channel
from pserver.transport.strangers import PrivateSocket, TcpProxy

# ---- call threads ----
#
# Threads for a gRPC server's calls, a few pools of them, by what the calls do.
#
# A heartbeat that waits for a thread is a trainer that is taken for dead.  So calls that wait for
# other trainers, calls that write files, and tensor streams each have threads of their own; however
# many of them there are, those of the heartbeats stay free.


THREADS = 32  # of a pool whose calls do not wait for other trainers
SMALL_BYTES = 2**16  # of the message of a call that is in none of the groups below
TEXT_BYTES = 2**20  # of the message of a call that says why a trainer has failed
TALK_BYTES = 2**22  # of the message of a call that tells other trainers something
BYTES_PER_SECOND = 2**20  # of the slowest connection on which a large message arrives in time

POOLS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("Heartbeat", "Announce", "Leave"), "beats"),
        **dict.fromkeys(("Meet", "Finish"), "waits"),
        "Challenge": "challenges",  # one goes before each heartbeat, and strangers may ask for it
        **dict.fromkeys(("Install", "Save", "Load", "Shrink", "Observe"), "works"),
    }
)
OTHERS = "asks"  # the pool of all other calls

Answer = Callable[[bytes, grpc.ServicerContext], Message]
"""Answers a call: the bytes of its message, and its context."""


class CallThreads:
    """The pools of one gRPC server.

    Args:
        limits: on their numbers and sizes.
        peer: HOST:PORT of the caller.
    """

    def __init__(self, limits: Limits, peer: Callable[[grpc.ServicerContext], str]) -> None:
        self._limits, self._peer = limits, peer
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._waiting: dict[str, HalfOpen] = {}
        for name in {*POOLS.values(), OTHERS}:
            threads = THREADS + (limits.trainers if name == "waits" else 0)
            self._pools[name] = ThreadPoolExecutor(threads, thread_name_prefix=f"control {name}")
            largest = max(
                [self.most_bytes(call) for call, pool in POOLS.items() if pool == name],
                default=limits.manifest_bytes,
            )
            seconds = limits.hello_seconds + largest / BYTES_PER_SECOND
            self._waiting[name] = HalfOpen(THREADS // 2, seconds)

    def most_bytes(self, call: str) -> int:
        """The largest message of a call."""
        of_calls = {
            "Join": self._limits.manifest_bytes,
            "Install": PART_BYTES + SLACK_BYTES,
            "Meet": TALK_BYTES,
            "Trace": PART_BYTES + SLACK_BYTES,  # a part of a trainer's spans
            **dict.fromkeys(("Announce", "Leave"), TEXT_BYTES),
        }
        return of_calls.get(call, SMALL_BYTES)

    def handler(self, call: str, answer: Answer) -> grpc.RpcMethodHandler:
        """The handler of a unary call.

        Args:
            call: its name.
            answer: gives the reply to the bytes of a message, or aborts the call.
        """
        pool = POOLS.get(call, OTHERS)

        def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            received = self._received(call, self._waiting[pool], messages, context)
            try:
                checked = check_message("a request", received, context.invocation_metadata())
                reply = answer(received, context).SerializeToString()
                if checked:
                    context.set_trailing_metadata((of_message(reply),))
                return reply
            except (CorruptFrame, DecodeError) as error:
                context.abort(grpc.StatusCode.INTERNAL, str(error))
                raise AssertionError("abort returns") from error  # it raises

        # grpc's own health service chooses its threads in the same way
        serve.experimental_thread_pool = self._pools[pool]  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(serve)

    def _received(
        self,
        call: str,
        waiting: HalfOpen,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> bytes:
        """A call's message."""
        number = waiting.begin(address_of(self._peer(context)), context.cancel)
        try:
            message = next(messages, None)
        finally:
            waiting.over(number)
        if message is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{call}: expected one message")
            raise AssertionError("abort returns")  # it raises
        if len(message) > (most := self.most_bytes(call)):
            what = f"{call}: expected a message of up to {most} bytes, got {len(message)}"
            hint = " (--max-program)" if call == "Join" else ""
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what + hint)
        return message

    def end_late(self) -> None:
        """Ends calls whose message has not arrived in time; called from time to time."""
        for waiting in self._waiting.values():
            waiting.end_late()

    def close(self) -> None:
        """Starts no further thread."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)


# ---- grpc port ----


CALLS_OF_CONNECTION = 128  # at a time
MESSAGE_BYTES = 2**26  # what a client takes: a reply may have a whole program, with many slices
KEEPALIVE_MILLISECONDS = 60_000  # without a word, until a peer is asked for a sign
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # a cluster's hosts are not behind the proxy that fetches packages
    ("grpc.enable_http_proxy", 0),
    # a connection for each stream, so that tensors never delay a heartbeat
    ("grpc.use_local_subchannel_pool", 1),
]
CLIENT_OPTIONS = [*OPTIONS, ("grpc.max_receive_message_length", MESSAGE_BYTES)]


class GrpcPort:
    """Listens at once and answers after :meth:`start`.

    Args:
        host, port: where; port 0 is any free one.
        pool: runs the handlers that have no threads of their own.
        keys: the server's; None: without TLS.
        limits: what it takes from its peers.

    Attributes:
        port: the one that it is bound to.
        server: for handlers to be added to.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(
        self, host: str, port: int, pool: ThreadPoolExecutor, keys: Keys | None, limits: Limits
    ) -> None:
        self._private = PrivateSocket()
        try:
            self._proxy = TcpProxy(host, port, self._private, limits)
        except OSError:
            self._private.close()
            raise
        self.port = self._proxy.port
        self.server = grpc.server(pool, options=_options(limits))
        try:
            listen_on(self.server, f"unix:{self._private.path}", keys)
            self._private.bound()
        except (OSError, RuntimeError) as error:
            self._close(0.0)
            raise OSError(f"cannot listen on {spell(host, port)}: {error}") from error

    def start(self) -> None:
        """Begins to answer."""
        self.server.start()
        self._proxy.start()

    def peer(self, context: grpc.ServicerContext) -> str:
        """HOST:PORT of the caller."""
        return self._proxy.peer(context.peer())

    def admit(self, context: grpc.ServicerContext) -> None:
        """Admits a caller that has proved its identity: its connection may stay open."""
        self._proxy.admit(context.peer())

    def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, gives running ones ``grace_seconds`` to end, then cancels them."""
        self._proxy.refuse()
        self.server.stop(grace_seconds).wait(grace_seconds + 1)
        self._close(1.0)

    def _close(self, grace_seconds: float) -> None:
        self._proxy.close(grace_seconds)
        self._private.close()


def _options(limits: Limits) -> list[tuple[str, int]]:
    milliseconds = int(1000 * limits.hello_seconds)
    return [
        *OPTIONS,
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", CALLS_OF_CONNECTION),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        # a trainer's heartbeat keeps its connection busy
        ("grpc.max_connection_idle_ms", milliseconds),
        ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


# ---- dialled channel ----
#
# A gRPC channel to one server that can be dialled again: another takes its place.
#
# gRPC's own channel connects again by itself, but only where it notices that its connection has
# ended, and to the addresses that it has resolved.  Here every dial resolves the name anew and
# makes another channel.


class DialledChannel:
    """The present channel to one server.  Any thread may use it.

    Args:
        host, port: the server's.
        keys: this process's; None: without TLS.

    Attributes:
        redials: channels that a heartbeat has put in the place of another.
        closed: whether :meth:`close` was called.
    """

    def __init__(self, host: str, port: int, keys: Keys | None = None) -> None:
        self.redials = 0
        self.closed = False
        self._host, self._port, self._keys = host, port, keys
        self._lock = threading.Lock()  # guards all but the two above; nothing blocks under it
        self._present: grpc.Channel | None = None

    def dial(self, timeout_seconds: float) -> grpc.Channel:
        """A further channel, to the address that the host's name has now.

        Raises:
            Unreachable: no address of the host accepts a connection within the timeout.
            Untrusted: the process there is not a server of ours, or does not take our certificate.
        """
        return open_channel(self._host, self._port, CLIENT_OPTIONS, timeout_seconds, self._keys)

    def present(self, timeout_seconds: float) -> grpc.Channel:
        """The present channel; dialled where there is none.

        Raises:
            Unreachable: it cannot be dialled within the timeout, or was closed.
        """
        with self._lock:
            present = self._present
        if present is not None:
            return present
        if self.closed:
            raise self._was_closed()
        fresh = self.dial(timeout_seconds)
        with self._lock:
            if self._present is None and not self.closed:
                self._present = fresh
            present = self._present
        if present is not fresh:  # another thread was faster, or has closed this
            fresh.close()
        if present is None:
            raise self._was_closed()
        return present

    def _was_closed(self) -> Unreachable:
        return Unreachable(f"{spell(self._host, self._port)}: the connection was closed")

    def replace(self, fresh: grpc.Channel) -> None:
        """Puts a channel in the place of the present one, whose calls end as cancelled."""
        before: grpc.Channel | None = fresh
        with self._lock:
            if not self.closed:
                before, self._present = self._present, fresh
                self.redials += 1
        if before is not None:
            before.close()

    def drop(self, channel: grpc.Channel) -> None:
        """Gives up a channel, if it is the present one; the next call dials another."""
        with self._lock:
            if self._present != channel:
                return
            self._present = None
        channel.close()

    def replaced(self, channel: grpc.Channel) -> bool:
        """Whether another channel has taken this one's place."""
        with self._lock:
            return self._present not in (None, channel)

    def close(self) -> None:
        """Ends the connection; harmless when called twice."""
        with self._lock:
            self.closed, present, self._present = True, self._present, None
        if present is not None:
            present.close()


# ---- health service ----
#
# The standard health service of gRPC, with bounds.


MOST_WATCHES = 64  # calls of Watch, at a time


class HealthService(health.HealthServicer):  # type: ignore[misc]  # it has no types
    """Health checks with threads of their own, and few calls of Watch at a time, as each lasts.

    Args:
        welcome: called with each call that lasts.
    """

    def __init__(self, welcome: Callable[[grpc.ServicerContext], None]) -> None:
        super().__init__()
        self._welcome = welcome
        self._watching = 0  # calls of Watch
        self._counting = Lock()  # guards it

    def add_to(self, server: grpc.Server, threads: CallThreads) -> None:
        """Adds the service to a server."""
        asked, answered = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse

        def check(received: bytes, context: grpc.ServicerContext) -> Message:
            reply: Message = self.Check(asked.FromString(received), context)
            return reply

        methods = {
            "Check": threads.handler("Check", check),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.Watch, asked.FromString, answered.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods),)
        )

    def Watch(self, request: Any, context: grpc.ServicerContext, send: Any = None) -> Any:  # noqa: N802  # grpc's
        """Sends each change of a service's status, until the caller ends it."""
        with self._counting:
            full = self._watching >= MOST_WATCHES
            self._watching += not full
        if full:
            what = f"expected at most {MOST_WATCHES} calls of Watch at a time"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        context.add_callback(self._watched)
        self._welcome(context)
        return super().Watch(request, context, send)

    def _watched(self) -> None:
        with self._counting:
            self._watching -= 1
