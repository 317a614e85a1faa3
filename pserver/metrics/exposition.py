"""GET /metrics: the page that Prometheus reads."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

from pserver.errors import Untrusted
from pserver.half_open import HalfOpen
from pserver.repeated_lines import LimitedLog
from pserver.security import keys as tls
from pserver.security.keys import ROLES, Keys

log = logging.getLogger(__name__)

SECONDS = 10.0  # for a connection, from its handshake to the end of its answer
MOST_OPEN = 16  # connections; of more an older one is closed


class Exposition:
    """Answers GET /metrics, in threads of its own.

    It lets in whoever reaches it, as the process's other ports do without keys; with keys it speaks
    TLS 1.3 and wants a certificate of the cluster, of any role.

    Args:
        host, port: where it listens; port 0 is any free one.
        collector: asked for each page.
        keys: this host's; None: plain HTTP.

    Attributes:
        port: the one that it listens on.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(self, host: str, port: int, collector: Collector, keys: Keys | None) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server = _Server(host, port, registry, keys)
        except OSError as error:
            raise OSError(f"metrics at {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        scheme = "http" if keys is None else "https"
        log.info("metrics at %s://%s:%d/metrics", scheme, host, self.port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; harmless when called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection, of which there are few: whoever comes is served, and an older
    one makes room.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MOST_OPEN

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, keys: Keys | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._keys, self._log = keys, LimitedLog(log)
        self._open = HalfOpen(MOST_OPEN, SECONDS)
        self._lock = threading.Lock()  # guards the one below
        self._begun: dict[Any, tuple[int, socket.socket]] = {}  # by the peer's address and port
        super().__init__((host, port), _handler(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a connection's thread."""
        handle = request.dup()  # TLS puts another socket in the place of this one
        number = self._open.begin(str(client_address[0]), partial(_end, handle))
        with self._lock:
            self._begun[client_address] = number, handle
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a request, in the connection's thread."""
        secured = request
        try:
            request.settimeout(SECONDS)
            if self._keys is not None:
                secured, _ = tls.accept(request, self._keys, *ROLES)
            super().finish_request(secured, client_address)
        except (Untrusted, OSError, ValueError) as error:
            text = f"a request for metrics from {client_address[0]}: {error}"
            self._log.say("metrics", text, logging.INFO)
        finally:
            with self._lock:
                number, handle = self._begun.pop(client_address)
            self._open.over(number)
            handle.close()
            self.shutdown_request(secured)

    def service_actions(self) -> None:
        """Ends connections that take too long; called a few times a second."""
        self._open.end_late()


def _end(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


def _handler(registry: CollectorRegistry) -> type[MetricsHandler]:
    class Handler(MetricsHandler):
        """GET /metrics, and nothing else."""

        timeout = SECONDS

        def do_GET(self) -> None:
            """The page."""
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            super().do_GET()

    Handler.registry = registry
    return Handler
