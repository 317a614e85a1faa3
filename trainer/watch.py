"""Who of a collective job is still there: trainers that talk to one another have no server that would notice a loss.

Every trainer keeps one connection to trainer 0, the hub.  The kernel closes the connections of a process that dies, so its end is
known at once, and the hub tells the others who it was.  A trainer that is done says so before it goes.  Beats, one a second in
both directions, find what closes no connection: a host that lost its power, a process that is stopped::

    trainer 1 ---- beat, left ---->  hub (trainer 0)  ---- beat, lost 1, left 1 ----> trainer 2, 3, ...

A trainer that finds the hub itself gone knows as much by that.  Nothing here touches tensors or process groups.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pserver.errors import TrainerLost, Unreachable

_FRAME = struct.Struct("!BIQ")  # kind, trainer, steps
_HELLO, _BEAT, _LEFT, _LOST, _SILENT = range(5)
BEAT_SECONDS = 1.0
HOW = {_LEFT: "left", _LOST: "lost", _SILENT: "silent"}


class Gone(NamedTuple):
    """A trainer that takes no further part.

    Attributes:
        how: "left" said so; "lost": its connection closed without a word; "silent": no beat for the deadline.
        steps: the collective operations that it had begun, where it said so.
    """

    rank: int
    how: str
    steps: int = 0


class _Link:
    """One connection: to the hub, or the hub's to a trainer."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.heard = time.monotonic()
        self.buffer = b""

    def frames(self) -> list[tuple[int, int, int]] | None:
        """What has arrived; None at the connection's end."""
        try:
            got = self.connection.recv(4096)
        except OSError:
            return None
        if not got:
            return None
        self.heard = time.monotonic()
        self.buffer += got
        whole = len(self.buffer) - len(self.buffer) % _FRAME.size
        found, self.buffer = self.buffer[:whole], self.buffer[whole:]
        return list(_FRAME.iter_unpack(found))

    def say(self, kind: int, rank: int = 0, steps: int = 0) -> None:
        """Sends a frame; an end is noticed where frames are read."""
        try:
            self.connection.sendall(_FRAME.pack(kind, rank, steps))
        except OSError:
            return


class Watch:
    """This trainer's knowledge of who is gone.

    Args:
        links: by trainer; the hub's has all others, every other trainer's has the hub.
        deadline: seconds of silence that are a loss.
    """

    def __init__(self, rank: int, links: dict[int, socket.socket], deadline: float) -> None:
        self._rank = rank
        self._deadline = deadline
        self._changed = threading.Condition()  # guards the two below, and the order of what is sent
        self._gone: dict[int, Gone] = {}
        self._links = {other: _Link(connection, other) for other, connection in links.items()}
        self._closed = False
        self._listeners: list[Callable[[Gone], None]] = []
        self._thread = threading.Thread(target=self._run, name=f"watch of trainer {rank}", daemon=True)
        self._thread.start()

    def gone(self) -> Gone | None:
        """The first trainer that was lost, or else the first that left; None while all are there."""
        with self._changed:
            found = list(self._gone.values())
        return next((each for each in found if each.how != "left"), found[0] if found else None)

    def wait(self, seconds: float) -> Gone | None:
        """As :meth:`gone`, after at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone, seconds)
        return self.gone()

    def tell(self, listener: Callable[[Gone], None]) -> None:
        """Calls the listener, on the watch's thread, for every trainer that is gone from now on."""
        self._listeners.append(listener)

    def leave(self, steps: int) -> None:
        """Says good-bye, and watches no longer."""
        with self._changed:
            self._closed = True
            for link in self._links.values():
                link.say(_LEFT, self._rank, steps)
                try:
                    link.connection.shutdown(socket.SHUT_WR)  # wakes the thread, at both ends
                except OSError:
                    continue
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_SECONDS)

    # ---- the watch's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.connection, selectors.EVENT_READ, link)
            beat = 0.0
            while self._links and not self._closed:
                for key, _ in selector.select(BEAT_SECONDS / 2):
                    self._read(key.data, selector)
                if time.monotonic() - beat >= BEAT_SECONDS:
                    beat = time.monotonic()
                    self._beat()
        for link in self._links.values():
            link.connection.close()

    def _read(self, link: _Link, selector: selectors.BaseSelector) -> None:
        frames = link.frames()
        if frames is None:
            selector.unregister(link.connection)
            link.connection.close()
            with self._changed:
                self._links.pop(link.rank, None)
            self._note(Gone(link.rank, "lost"))
        for kind, rank, steps in frames or ():
            if kind in HOW:
                self._note(Gone(rank, HOW[kind], steps))

    def _beat(self) -> None:
        now = time.monotonic()
        with self._changed:
            links = [] if self._closed else list(self._links.values())
            for link in links:
                link.say(_BEAT)
        for link in links:
            if now - link.heard > self._deadline:
                self._note(Gone(link.rank, "silent"))

    def _note(self, gone: Gone) -> None:
        with self._changed:
            if gone.rank in self._gone or gone.rank == self._rank or self._closed:
                return
            self._gone[gone.rank] = gone
            if self._rank == 0:
                kind = next(number for number, how in HOW.items() if how == gone.how)
                for link in self._links.values():
                    link.say(kind, gone.rank, gone.steps)
            self._changed.notify_all()
        for listener in self._listeners:
            listener(gone)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket at exactly this address.

    Raises:
        OSError: the address is in use, or is none of this host's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening


def accept_all(listening: socket.socket, world: int, seconds: float) -> dict[int, socket.socket]:
    """The hub's connections, one from each other trainer.

    Raises:
        TrainerLost: some have not connected in this time; the message has their numbers.
    """
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + seconds
    while len(found) < world - 1:
        listening.settimeout(max(end - time.monotonic(), 0.001))
        try:
            connection, _ = listening.accept()
        except OSError:
            for connection in found.values():
                connection.close()
            missing = ", ".join(str(rank) for rank in range(1, world) if rank not in found)
            raise TrainerLost(f"trainer {missing} announced itself and did not connect within {seconds:g} s") from None
        rank = _hello(connection, min(seconds, 5.0))
        if not 0 < rank < world or rank in found:
            connection.close()  # no trainer of this job
            continue
        found[rank] = connection
    return found


def _hello(connection: socket.socket, seconds: float) -> int:
    """The number of the trainer that connected; 0 if it is none."""
    connection.settimeout(seconds)
    try:
        got = b""
        while len(got) < _FRAME.size:
            part = connection.recv(_FRAME.size - len(got))
            if not part:
                return 0
            got += part
    except OSError:
        return 0
    connection.settimeout(None)
    kind, rank, _ = _FRAME.unpack(got)
    return int(rank) if kind == _HELLO else 0


def connect(host: str, port: int, rank: int, seconds: float) -> socket.socket:
    """A trainer's connection to the hub.

    Raises:
        Unreachable: there is no answer in this time.
    """
    try:
        connection = socket.create_connection((host, port), seconds)
    except OSError as error:
        raise Unreachable(f"trainer 0 announced itself and does not answer at {host}:{port}: {error}") from None
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_FRAME.pack(_HELLO, rank, 0))
    return connection
