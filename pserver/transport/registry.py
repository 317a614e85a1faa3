"""All transports by name, and the choice among them.

- ``tcp``          plain sockets on a port of its own: the fastest between hosts
- ``grpc``         plain grpcio on the control port
- ``shm``          shared memory between processes of one host: the fastest there
- ``inprocess``    between threads of one process, for tests
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pserver.errors import Refused
from pserver.security.keys import Keys
from pserver.transport import grpc_stream, inprocess, shm, tcp
from pserver.transport.endpoint import is_here
from pserver.transport.stream import Handler, Listener, Stream


class Transport(Protocol):
    """The two functions of a transport's module."""

    def listen(self, handle: Handler, host: str = ..., port: int = ...) -> Listener:
        """Accepts streams; port 0 is any free one.

        Raises:
            OSError: it cannot listen there; one sentence.
        """

    def connect(
        self, host: str, port: int, *, timeout_seconds: float, keys: Keys | None = ...
    ) -> Stream:
        """Opens a stream.

        Args:
            keys: this process's, for transports that leave it: TLS; None: without.

        Raises:
            Unreachable: no server answers within ``timeout_seconds``.
            Untrusted: one end does not take the other's certificate.
        """


TRANSPORTS: dict[str, Transport] = {
    "tcp": tcp,
    "grpc": grpc_stream,
    "shm": shm,
    "inprocess": inprocess,
}
"""The transports by the names that Join negotiates (``inprocess`` is never offered)."""


def suited(names: Sequence[str], host: str) -> list[str]:
    """The transports of a trainer that can reach a server at ``host``: "shm" only where that is
    this host, or where no other is named.
    """
    return [name for name in names if name != "shm" or len(names) == 1 or is_here(host)]


def connect(transport: str, host: str, port: int, *, timeout_seconds: float) -> Stream:
    """Opens a stream over the transport of that name.

    Raises:
        Refused: there is no such transport here.
        Unreachable: no server answered within ``timeout_seconds``.
    """
    if transport not in TRANSPORTS:
        raise Refused(f"expected one of the transports {', '.join(TRANSPORTS)}, got {transport!r}")
    return TRANSPORTS[transport].connect(host, port, timeout_seconds=timeout_seconds)
