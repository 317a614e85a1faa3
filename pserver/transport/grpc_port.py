"""A gRPC server on a port, behind a proxy that bounds its connections."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from pserver.limits import Limits
from pserver.security.keys import Keys
from pserver.transport.endpoint import spell
from pserver.transport.grpc_security import listen_on
from pserver.transport.private_socket import PrivateSocket
from pserver.transport.tcp_proxy import TcpProxy

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
        """HOST:PORT of whoever calls."""
        return self._proxy.peer(context.peer())

    def admit(self, context: grpc.ServicerContext) -> None:
        """Whoever calls has proved who it is: its connection may stay as long as it likes."""
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
