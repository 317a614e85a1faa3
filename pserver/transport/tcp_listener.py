"""The accepting end of TCP streams: it gathers the connections of each."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Callable
from threading import Condition

from pserver.errors import Untrusted
from pserver.limits import Limits
from pserver.security import tls
from pserver.security.certificates import ROLES, Bearer
from pserver.security.keys import Keys
from pserver.transport.accept_loop import AcceptLoop
from pserver.transport.endpoint import listening_socket, spell
from pserver.transport.frame_socket import FrameSocket
from pserver.transport.open_streams import OpenStreams
from pserver.transport.stream import Handler, Stream
from pserver.transport.tcp_greeting import KEY_BYTES, Greeting, Welcome

GREETING_SECONDS = 5.0  # for a peer to say what it is, and to open its further connections
KEEPALIVE_SECONDS = 60  # until the kernel asks a silent peer whether it is still there

MakeStream = Callable[[str, list[FrameSocket], Bearer | None], Stream]


class TcpListener:
    """A listening socket.

    Args:
        handle: called with each stream, in a thread of its own.
        make: a stream of its peer's name, its connections, and who has opened it, under TLS.
        host, port: where; port 0 is any free one.
        connections: of each stream.
        checksum: "on", "off", or "auto": on but for peers of this host, and under TLS.
        keys: the server's; None: without TLS.
        limits: how many connections there may be.

    Attributes:
        port: the one that it is bound to.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(
        self,
        handle: Handler,
        make: MakeStream,
        host: str,
        port: int,
        connections: int,
        checksum: str,
        limits: Limits,
        keys: Keys | None = None,
    ) -> None:
        self._make, self._checksum, self._keys = make, checksum, keys
        self._connections = connections if keys is None else 2 * connections
        self._streams = OpenStreams(handle)
        self._gathering = Condition()  # guards the one below
        # by a stream's key: its further connections, by index
        self._further: dict[bytes, dict[int, socket.socket]] = {}
        listening = listening_socket(host, port)
        self.port: int = listening.getsockname()[1]
        self._accepting = AcceptLoop(
            listening, self._greet, self._streams, f"tcp {self.port}", limits
        )

    def _greet(self, connection: socket.socket) -> Stream | None:
        """The stream of a first connection; None for a further one.

        Raises:
            OSError: the peer is no trainer.
        """
        peer = spell(*connection.getpeername()[:2])
        connection.settimeout(GREETING_SECONDS)
        bearer = None
        try:
            if self._keys is not None:
                connection, bearer = tls.accept(connection, self._keys, *ROLES)
            greeting = Greeting.receive(connection)
            if greeting.index:
                self._add(greeting, connection)
                return None
            return self._welcomed(connection, peer, bearer)
        except (OSError, Untrusted) as error:
            connection.close()  # under TLS another one than the caller's
            raise OSError(str(error)) from error

    def _add(self, greeting: Greeting, connection: socket.socket) -> None:
        """A further connection; the thread of the first one waits for it."""
        with self._gathering:
            if greeting.key not in self._further:
                raise OSError("a further connection of no stream")
            self._further[greeting.key].setdefault(greeting.index, connection)
            self._gathering.notify_all()

    def _welcomed(self, connection: socket.socket, peer: str, bearer: Bearer | None) -> Stream:
        """A stream, when all of its connections are there.

        Raises:
            OSError: they do not come.
        """
        plain = bearer is None and not _is_local(peer)
        checked = self._checksum == "on" or (self._checksum == "auto" and plain)
        key, further = secrets.token_bytes(KEY_BYTES), dict[int, socket.socket]()
        with self._gathering:
            self._further[key] = further
        try:
            Welcome(self._connections, checked, key).send(connection)
            deadline = time.monotonic() + GREETING_SECONDS
            with self._gathering:
                self._gathering.wait_for(
                    lambda: len(further) == self._connections - 1, deadline - time.monotonic()
                )
        finally:
            with self._gathering:
                del self._further[key]
        if sorted(further) != list(range(1, self._connections)):
            for each in further.values():
                each.close()
            count = 1 + len(further)
            raise OSError(f"{peer} has opened {count} of {self._connections} connections")
        connections = [connection, *(further[index] for index in sorted(further))]
        for each in connections:
            each.settimeout(None)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        return self._make(peer, [FrameSocket(each, checked) for each in connections], bearer)

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        self._accepting.close()
        self._streams.close(grace_seconds)


def _is_local(peer: str) -> bool:
    return ipaddress.ip_address(peer.rpartition(":")[0].strip("[]").partition("%")[0]).is_loopback
