"""A port whose connections are counted before a library's server sees them.

gRPC accepts whoever comes, up to one bound for all addresses: who opens that many connections keeps
everybody else out.  So the proxy accepts in its place and passes the bytes on, to a socket that
only this process can reach.  What has not yet proved who it is is bounded in number, in time and in
bytes, and of a flood it is the flood's own connections that end (``pserver/half_open.py``).  TLS
passes through unread: its two ends are the client and gRPC.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from functools import partial
from threading import Event, Lock, Thread

from pserver.half_open import HalfOpen, address_of
from pserver.limits import Limits
from pserver.repeated_lines import LimitedLog
from pserver.transport.accept_loop import BACKLOG
from pserver.transport.endpoint import listening_socket, of_peer, spell
from pserver.transport.private_socket import PrivateSocket
from pserver.transport.proxied_connection import READ, ProxiedConnection

_log = logging.getLogger(__name__)
SWEEP_SECONDS = 0.2  # between two looks for connections that are late
ACCEPTED_AT_ONCE = 64  # then those that are open have their turn
ROOM_BYTES = 2**18  # passed on at once: what a processor's cache holds
STRANGERS = 512  # connections of those who have not proved who they are; gRPC takes 20 KB of each
STRANGERS_BYTES = 2**23  # that all of them together may have sent
KEEPALIVE_SECONDS = 60  # until the kernel asks a silent peer whether it is still there


class Client:
    """Who has opened a connection.

    Attributes:
        peer: HOST:PORT.
        proved: that it may be here, or nobody has to prove that.
        proxied: None: it has said nothing so far, and the server does not know of it.
        name: by which gRPC calls its connection.
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
        self._clients: dict[socket.socket, Client] = {}  # by their sockets
        self._lock = Lock()  # guards the one below, which only the proxy's thread changes
        self._by_name: dict[str, Client] = {}
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
        """Whoever is behind gRPC's name of a connection has proved it; any thread may say so."""
        with self._lock:
            client = self._by_name.get(name)
        if client is not None:
            client.proved = True
            self._strangers.over(client.number)

    def refuse(self) -> None:
        """Accepts nothing from now on; connections that are open go on."""
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
                except Exception as error:  # without this thread nobody reaches the server
                    self._refusals.say("bug", f"control {self.port}", logging.ERROR, error)
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
                self._refusals.say("accept", f"control {self.port}: cannot accept: {error}")
                self._watch(self._listening, 0)  # until the next sweep
                return
            if len(self._clients) >= self._most:
                what = f"expected at most {self._most} connections (--max-connections)"
                self._refusals.say("full", f"control {self.port}: {what}")
                front.close()
                continue
            front.setblocking(False)
            client = self._clients[front] = Client(front, spell(*address[:2]))
            end = partial(self._drop, client)  # called in this thread, as all of its methods
            client.number = self._strangers.begin(address_of(client.peer), end)
            self._watch(front, READ, client)

    def _pass_on(self, client: Client) -> None:
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

    def _connected(self, client: Client) -> ProxiedConnection | None:
        """The connection behind, now that the client has said something; None: not yet.

        Raises:
            OSError: the client has gone instead, or nobody listens.
        """
        try:
            if not client.front.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError("it ended before it had said anything")
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
        """Ends the stranger who has sent most, where all together have sent too much."""
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

    def _watch(self, each: socket.socket, events: int, client: Client | None = None) -> None:
        """Waits for these events of a socket; 0 is none."""
        watched = self._selector.get_map().get(each)
        if watched is None:
            if events:
                self._selector.register(each, events, client)
        elif not events:
            self._selector.unregister(each)
        elif watched.events != events:
            self._selector.modify(each, events, client)

    def _drop(self, client: Client | None) -> None:
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
