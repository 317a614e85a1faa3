"""A path through a network that can fail: a TCP proxy whose connections die with a word or without
one, while new ones are possible.

Only tests use it.  It listens on another loopback address than the server, on the same ports, so
that a trainer which is told 127.0.0.2:PORT reaches every port of the server at 127.0.0.1::

    with NetworkPath("127.0.0.2", ports) as path:
        ...                    # trainers use 127.0.0.2:PORT
        path.drop()            # what is open now carries nothing any more, and does not end
        path.reset()           # what is open now ends with RST
        path.double(1000)      # of what is open now, the next bytes arrive twice
        path.spoil(2, "drop")  # the next two connections carry nothing
        path.flips = Flips(port, every=10_000)  # of later connections, a bit changes now and then
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from types import TracebackType

CHUNK_BYTES = 2**16
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


class Flips:
    """Changes random bits.  Any thread may call it.

    Args:
        port: of the connections in which it does.
        every: on average one bit in so many bytes.
        seed: of the places.

    Attributes:
        count: how many there have been.
    """

    def __init__(self, port: int, every: int, seed: int = 0) -> None:
        self.port = port
        self.count = 0
        self._every, self._random = every, random.Random(seed)
        self._lock = threading.Lock()  # guards the two above

    def changed(self, data: bytes) -> bytes:
        """The bytes, or bytes in which one bit is another."""
        with self._lock:
            place = int(self._random.expovariate(1 / self._every))
            if place >= len(data):
                return data
            self.count += 1
            bit = 1 << self._random.randrange(8)
        return data[:place] + bytes((data[place] ^ bit,)) + data[place + 1 :]


class _Relay:
    """One connection through the path: two sockets, and a thread for each direction."""

    def __init__(
        self, near: socket.socket, far: socket.socket, dropping: bool, flips: Flips | None
    ) -> None:
        self.dropping = dropping
        self._flips = flips
        self.doubled = [0, 0]  # bytes still to be doubled, to the server and from it
        self._ends = near, far
        self._carrying = 2  # threads
        self._lock = threading.Lock()  # guards the count
        for number, (source, sink) in enumerate(((near, far), (far, near))):
            threading.Thread(
                target=self._carry, args=(number, source, sink), name="relay", daemon=True
            ).start()

    def _carry(self, number: int, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if self.dropping:
                    continue
                if self._flips is not None:
                    data = self._flips.changed(data)
                again, self.doubled[number] = data[: self.doubled[number]], 0
                sink.sendall(data[: len(again)] + again + data[len(again) :])
            if not self.dropping:
                sink.shutdown(socket.SHUT_WR)
        with self._lock:
            self._carrying -= 1
            over = not self._carrying
        if over:
            self.end(abruptly=False)

    def end(self, abruptly: bool) -> None:
        """Closes both sockets, ``abruptly`` with RST."""
        for end in self._ends:
            with suppress(OSError):  # closed already
                if abruptly:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RD)  # wakes the thread that receives
            end.close()


class NetworkPath:
    """The connections to one server through one address.  Any thread may call it.

    Args:
        address: where the path listens: a loopback address, not the server's.
        ports: the server's, on ``server``.
        server: its address.

    Attributes:
        connections, spoilt: how many there have been, and how many of them with a fault.
        flips: what changes bits, if something does.
    """

    def __init__(self, address: str, ports: Iterable[int], server: str = "127.0.0.1") -> None:
        self.connections = 0
        self.spoilt = 0
        self.flips: Flips | None = None
        self._server = server
        self._relays: list[_Relay] = []
        self._next: list[str] = []  # what happens to the next connections; "" for nothing
        self._lock = threading.Lock()  # guards all of the above
        with ExitStack() as stack:  # none stays open where a port is taken
            self._listening = [
                stack.enter_context(socket.create_server((address, port)))
                for port in sorted(set(ports))
            ]
            stack.pop_all()
        for listening in self._listening:
            threading.Thread(
                target=self._accept, args=(listening,), name="network path", daemon=True
            ).start()

    def _accept(self, listening: socket.socket) -> None:
        port = listening.getsockname()[1]
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                try:
                    far = socket.create_connection((self._server, port))
                except OSError:
                    near.close()
                    continue
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self.connections += 1
                    fault = self._next.pop(0) if self._next else ""
                    self.spoilt += bool(fault)
                    flips = self.flips if self.flips and self.flips.port == port else None
                    relay = _Relay(near, far, fault == "drop", flips)
                    self._relays.append(relay)
                if fault == "reset":
                    relay.end(abruptly=True)

    def drop(self) -> None:
        """What is open now carries nothing any more, and does not end."""
        with self._lock:
            for relay in self._relays:
                relay.dropping = True

    def reset(self) -> None:
        """What is open now ends with RST."""
        with self._lock:
            relays, self._relays = self._relays, []
        for relay in relays:
            relay.end(abruptly=True)

    def double(self, count: int) -> None:
        """Of what is open now, up to ``count`` of the next bytes arrive twice, each way."""
        with self._lock:
            for relay in self._relays:
                relay.doubled = [count, count]

    def spoil(self, count: int, fault: str, after: int = 0) -> None:
        """The next connections are made, and carry nothing ("drop"), or end at once ("reset").

        Args:
            count: how many.
            after: how many before them stay whole.
        """
        with self._lock:
            self._next = [""] * after + [fault] * count

    def close(self) -> None:
        """Ends every connection and takes no more."""
        for listening in self._listening:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # close alone would leave accept waiting
            listening.close()
        self.reset()

    def __enter__(self) -> NetworkPath:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
