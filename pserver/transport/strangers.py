"""A port whose connections are counted and bounded before gRPC's server sees them."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread

from pserver.half_open import HalfOpen, address_of
from pserver.limits import Limits
from pserver.telemetry.logs import LimitedLog
from pserver.transport.endpoint import listening_socket, of_peer, spell
from pserver.transport.stream import BACKLOG

# ---- private socket ----
#
# A unix socket that only this process can connect to, for a library that listens by itself.
#
# A socket in the abstract namespace could be reached by every process of the host, a file in a
# folder by those of its user, and would stay behind when the process is killed.  So the library
# binds one in a folder of its own, and where the system can name a file by a descriptor (Linux:
# ``O_PATH`` and ``/proc/self/fd``) file and folder go at once: what is left is the descriptor.


class PrivateSocket:
    """The place where a server of this process listens.

    The server binds :attr:`path`; then :meth:`bound` is called, then :meth:`connect` any number of
    times.

    Attributes:
        path: of the socket to bind.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pserver-")  # of mode 0700
        self.path = str(Path(self._folder) / "grpc")
        self._descriptor = -1
        self._connected = 0

    def bound(self) -> None:
        """The server listens.

        Raises:
            OSError: it has bound no socket there.
        """
        if not hasattr(os, "O_PATH"):
            return
        self._descriptor = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        shutil.rmtree(self._folder)

    def connect(self) -> tuple[socket.socket, str]:
        """Opens a non-blocking connection to the server; also returns gRPC's name of its peer.

        Raises:
            OSError: nothing listens there.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            name = self._named(connection)
            connection.setblocking(False)
            connection.connect(
                self.path if self._descriptor < 0 else f"/proc/self/fd/{self._descriptor}"
            )
        except BaseException:
            connection.close()
            raise
        return connection, name

    def _named(self, connection: socket.socket) -> str:
        """Gives this end a name, so that the server can tell its connections apart."""
        if self._descriptor < 0:
            self._connected += 1
            own = Path(self._folder) / str(self._connected)
            connection.bind(str(own))
            own.unlink()
            return f"unix:{own}"
        connection.bind("")  # Linux chooses one
        return f"unix-abstract:{connection.getsockname()[1:].decode()}"

    def close(self) -> None:
        """Closes the descriptor, and removes the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        shutil.rmtree(self._folder, ignore_errors=True)


# ---- proxied connection ----
#
# One connection that a proxy passes on: bytes both ways, without waiting for either end.


READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class OneWay:
    """Bytes on their way from one socket to another; neither blocks.

    Attributes:
        ended: the source sends no more.
    """

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.ended = False
        self._source, self._sink = source, sink
        self._left = b""  # read, and not taken by the sink yet

    @property
    def waits(self) -> bool:
        """Whether the sink has yet to take something; nothing is read until it has."""
        return bool(self._left)

    def move(self, room: memoryview) -> int:
        """Passes on what there is, up to the size of ``room``, which is overwritten.

        Returns:
            How many bytes were read.

        Raises:
            OSError: one of the two is broken.
        """
        if self._left:
            self._left = self._left[self._send(memoryview(self._left)) :]
        if self._left or self.ended:
            return 0
        try:
            count = self._source.recv_into(room)
        except BlockingIOError:
            return 0
        if not count:
            self.ended = True
            return 0
        sent = self._send(room[:count])
        self._left = bytes(room[sent:count])
        return count

    def _send(self, data: memoryview) -> int:
        try:
            return self._sink.send(data)
        except BlockingIOError:
            return 0


class ProxiedConnection:
    """A client's connection, and the one behind it, which leads to the server.

    Args:
        front: the client's.
        back: the server's.

    Attributes:
        received: bytes that the client has sent.
    """

    def __init__(self, front: socket.socket, back: socket.socket) -> None:
        self.front, self.back = front, back
        self.received = 0
        self._up, self._down = OneWay(front, back), OneWay(back, front)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do.  Neither end closes one direction alone: HTTP/2 does not.
        The server's last bytes before its end are passed on.
        """
        return self._up.ended or (self._down.ended and not self._down.waits)

    def move(self, room: memoryview) -> int:
        """Passes on what there is, both ways.

        Returns:
            How many bytes the client has sent.

        Raises:
            OSError: one of the two ends is broken.
        """
        count = self._up.move(room)
        self.received += count
        self._down.move(room)
        return count

    def awaited(self) -> tuple[tuple[socket.socket, int], tuple[socket.socket, int]]:
        """Each socket, and its awaited events: ``READ``, ``WRITE``, both, or 0."""
        return (
            (self.front, _events(self._up, self._down)),
            (self.back, _events(self._down, self._up)),
        )


def _events(reads: OneWay, writes: OneWay) -> int:
    return (0 if reads.waits or reads.ended else READ) | (WRITE if writes.waits else 0)


# ---- tcp proxy ----
#
# A port whose connections are counted before a library's server sees them.
#
# gRPC accepts whoever comes, up to one bound for all addresses: who opens that many connections
# keeps everybody else out.  So the proxy accepts in its place and passes the bytes on, to a socket
# that only this process can reach.  What has not yet proved who it is is bounded in number, in time
# and in bytes, and of a flood it is the flood's own connections that end
# (``pserver/half_open.py``).  TLS passes through unread: its two ends are the client and gRPC.


_log = logging.getLogger(__name__)
SWEEP_SECONDS = 0.2  # between two looks for connections that are late
ACCEPTED_AT_ONCE = 64  # then those that are open have their turn
ROOM_BYTES = 2**18  # passed on at once: what a processor's cache holds
STRANGERS = 512  # connections of unproved peers; gRPC takes 20 KB of each
STRANGERS_BYTES = 2**23  # that all of them together may have sent
KEEPALIVE_SECONDS = 60  # until the kernel asks a silent peer whether it is still there


class ProxiedPeer:
    """The peer of a connection.

    Attributes:
        peer: HOST:PORT.
        proved: it has proved its right to connect, or needs no proof.
        proxied: None: it has sent nothing so far, and the server does not know of it.
        name: gRPC's name of its connection.
    """

    def __init__(self, front: socket.socket, peer: str) -> None:
        self.front, self.peer = front, peer
        self.proved = False
        self.proxied: ProxiedConnection | None = None
        self.name = ""
        self.number = 0  # among the strangers


class TcpProxy:
    """Accepts on a port, from :meth:`start` on, and passes bytes on, in a thread of its own.

    It listens at once: connections that come before that wait in the kernel.

    Args:
        host, port: where; port 0 is any free one.
        private: where the server behind it listens.
        limits: how many connections there may be.  At most half of them are strangers'.

    Attributes:
        port: the one that it is bound to.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(self, host: str, port: int, private: PrivateSocket, limits: Limits) -> None:
        self._listening = listening_socket(host, port)
        self._listening.listen(BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._private, self._most = private, limits.connections
        self._strangers = HalfOpen(max(1, min(STRANGERS, self._most // 2)), limits.hello_seconds)
        self._strangers_bytes = 0  # at least as many as they have sent
        self._refusals = LimitedLog(_log)
        self._clients: dict[socket.socket, ProxiedPeer] = {}  # by their sockets
        self._lock = Lock()  # guards the one below, which only the proxy's thread changes
        self._by_name: dict[str, ProxiedPeer] = {}
        self._room = memoryview(bytearray(ROOM_BYTES))
        self._refusing, self._closing = Event(), Event()
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, READ)
        self._selector.register(self._woken, READ)
        self._thread = Thread(target=self._run, name=f"proxy {self.port}", daemon=True)

    def start(self) -> None:
        """Begins to accept."""
        self._thread.start()

    def peer(self, name: str) -> str:
        """HOST:PORT of the client behind gRPC's name of a connection; any thread may ask."""
        with self._lock:
            client = self._by_name.get(name)
        return of_peer(name) if client is None else client.peer

    def admit(self, name: str) -> None:
        """Admits the client behind gRPC's name of a connection, which has proved itself; any thread
        may call it.
        """
        with self._lock:
            client = self._by_name.get(name)
        if client is not None:
            client.proved = True
            self._strangers.over(client.number)

    def refuse(self) -> None:
        """Accepts nothing from now on; open connections stay."""
        self._refusing.set()
        self._waker.send(b"r")

    def close(self, grace_seconds: float) -> None:
        """Ends, when the server has ended its connections or the grace is over."""
        if self._closing.is_set():
            return
        self.refuse()
        if self._thread.is_alive():
            deadline = time.monotonic() + grace_seconds
            while self._by_name and time.monotonic() < deadline:
                self._closing.wait(0.01)
        self._closing.set()
        if self._thread.is_alive():
            self._waker.send(b"c")
            self._thread.join()
        for each in (self._listening, self._woken, self._waker, self._selector):
            each.close()

    # ---- the proxy's thread ----

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(SWEEP_SECONDS):
                try:
                    self._act(key)
                except Exception as error:  # without this thread no client reaches the server
                    self._refusals.log("bug", f"control {self.port}", logging.ERROR, error)
                    self._drop(key.data)
            if self._refusing.is_set() and self._listening.fileno() >= 0:
                self._watch(self._listening, 0)
                self._listening.close()
            if (now := time.monotonic()) - swept >= SWEEP_SECONDS:
                swept = now
                self._strangers.end_late()
                if self._listening.fileno() >= 0:
                    self._watch(self._listening, READ)
        for client in list(self._clients.values()):
            self._drop(client)

    def _act(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listening:
            self._accept()
        elif key.fileobj is self._woken:
            self._woken.recv(16)
        else:
            self._pass_on(key.data)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                front, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors; one may become free
                self._refusals.log("accept", f"control {self.port}: cannot accept: {error}")
                self._watch(self._listening, 0)  # until the next sweep
                return
            if len(self._clients) >= self._most:
                what = f"expected at most {self._most} connections (--max-connections)"
                self._refusals.log("full", f"control {self.port}: {what}")
                front.close()
                continue
            front.setblocking(False)
            client = self._clients[front] = ProxiedPeer(front, spell(*address[:2]))
            end = partial(self._drop, client)  # called in this thread, as all of its methods
            client.number = self._strangers.begin(address_of(client.peer), end)
            self._watch(front, READ, client)

    def _pass_on(self, client: ProxiedPeer) -> None:
        """Passes on what there is of one connection; both of its sockets may be ready at once."""
        if client.front not in self._clients:
            return
        try:
            proxied = client.proxied or self._connected(client)
            if proxied is None:
                return
            count = proxied.move(self._room)
        except OSError:  # one of the two ends is gone
            self._drop(client)
            return
        if proxied.over:
            self._drop(client)
            return
        for each, events in proxied.awaited():
            self._watch(each, events, client)
        if count and not client.proved:
            self._strangers_bytes += count
            self._bound_bytes()

    def _connected(self, client: ProxiedPeer) -> ProxiedConnection | None:
        """The connection to the server, opened when the client has sent something; None: not yet.

        Raises:
            OSError: the client has gone instead, or nothing listens there.
        """
        try:
            if not client.front.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError("it ended before it had sent anything")
            back, client.name = self._private.connect()
        except BlockingIOError:  # so many connections wait for the server; the next one may not
            return None
        client.front.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.front.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client.front.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        client.proxied = ProxiedConnection(client.front, back)
        with self._lock:
            self._by_name[client.name] = client
        return client.proxied

    def _bound_bytes(self) -> None:
        """Ends the stranger with the most bytes, where all together have sent too many."""
        if self._strangers_bytes <= STRANGERS_BYTES:
            return
        sent = {
            each: each.proxied.received
            for each in self._clients.values()
            if each.proxied is not None and not each.proved
        }
        self._strangers_bytes = sum(sent.values())
        if self._strangers_bytes > STRANGERS_BYTES:
            most = max(sent, key=sent.__getitem__)
            self._strangers_bytes -= sent[most]
            self._drop(most)

    def _watch(self, each: socket.socket, events: int, client: ProxiedPeer | None = None) -> None:
        """Waits for these events of a socket; 0 is none."""
        watched = self._selector.get_map().get(each)
        if watched is None:
            if events:
                self._selector.register(each, events, client)
        elif not events:
            self._selector.unregister(each)
        elif watched.events != events:
            self._selector.modify(each, events, client)

    def _drop(self, client: ProxiedPeer | None) -> None:
        """Closes a connection, if it is one that is open."""
        if client is None or self._clients.pop(client.front, None) is None:
            return
        self._strangers.over(client.number)
        with self._lock:
            self._by_name.pop(client.name, None)
        for each in (client.front, client.proxied.back if client.proxied else None):
            if each is not None:
                self._watch(each, 0)
                each.close()
