"""A gRPC channel to one server that can be dialled again: another takes its place.

gRPC's own channel connects again by itself, but only where it notices that its connection has
ended, and to the addresses that it has resolved.  Here every dial resolves the name anew and makes
another channel.
"""

from __future__ import annotations

import threading

import grpc

from pserver.errors import Unreachable
from pserver.security.keys import Keys
from pserver.transport.endpoint import spell
from pserver.transport.grpc_port import CLIENT_OPTIONS
from pserver.transport.grpc_security import open_channel


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
            Untrusted: what listens there is no server of ours, or takes no certificate of ours.
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
