"""The membership of a job's trainers: which of them are still there, and how the others ended.

[Note: who is lost]  When a trainer dies, gloo tells its neighbours that some port was closed, NCCL
tells nobody, and neither names a trainer.  So every trainer holds one connection to trainer 0,
beside the collectives.  Both sides send heartbeats; a trainer whose connection ends without a
goodbye, or is silent for the heartbeat timeout, is lost, and trainer 0 tells the others.  Time in
which this process has not run is nobody's silence::

    trainer 1  --heartbeat, left, failed-->  trainer 0
    trainer 0  --heartbeat, and each trainer's end-->  trainers 1, 2, ...

Errors of a collective are then raised anew under the name of the trainer that caused them
(:func:`Membership.cause`).  A process whose main thread still waits in the same place GRACE_SECONDS
after a trainer was lost can't be woken, so it says why, and ends.  Once trainer 0 has left no
trainer is watched any more, and no collective needs to be.

[Note: whose frames]  To see whether the main thread still waits in the same call, the thread of the
connections holds that call's frame, and so may be the last to hold the tensors and operations in
it.  Their destructors give up the interpreter's lock, and a thread that asks for it again while the
interpreter ends is ended inside a destructor, which aborts the process.  So the main thread takes
the frame away before it leaves, at the latest at exit.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

# torch.distributed's own, which strict typing does not see there
from torch._C._distributed_c10d import Store

from pserver.errors import JobFailed, PServerError, TrainerLost
from pserver.running_clock import RUNNING
from pserver.side_business import SideBusiness
from transpiler.files import bounded_json

GRACE_SECONDS = 10.0
CAUSE_SECONDS = 3.0  # news of a death and the error that it causes race each other
SECOND_SECONDS = 0.5
CONNECT_SECONDS = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """The end of a trainer, as the others hear of it.

    Attributes:
        kind: "lost", "failed" or "left".
        text: how, as the end of a sentence.
    """

    kind: str
    rank: int
    text: str

    def error(self) -> PServerError:
        """The error that the others raise when they need that trainer."""
        if self.kind == "failed":
            return JobFailed(f"trainer {self.rank} failed: {self.text}")
        return TrainerLost(
            f"trainer {self.rank} {'is lost' if self.kind == 'lost' else 'has left the job'}: "
            f"{self.text}"
        )


@dataclass(slots=True)
class _Peer:
    """The other side of a connection.

    Attributes:
        heard: when it sent something last, by the clock of this process's running time.
        rest: the begin of a line whose end has not come yet.
    """

    connection: socket.socket
    heard: float
    rest: bytes = b""


class Membership:
    """One trainer's connections for heartbeats: trainer 0's to all others, another's to trainer 0.

    See [Note: who is lost].  The script's thread asks, a thread of its own reads and sends.

    Args:
        rank, size: this trainer, and how many there are.
        address: of trainer 0.
        store: where trainer 0 writes down its port.
        heartbeat_timeout: seconds without a heartbeat after which a trainer is lost.
        ends_process: a loss ends the job, so it is logged, and a main thread that it blocks ends.

    Raises:
        OSError: trainer 0 cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        store: Store,
        heartbeat_timeout: float,
        ends_process: bool = True,
    ) -> None:
        self._rank, self._timeout, self._ends_process = rank, heartbeat_timeout, ends_process
        self._changed = threading.Condition()  # guards _events
        self._events: dict[int, Event] = {}
        self._ended = set[int]()  # whose connection has ended; guarded likewise
        self._leaving = False
        self._sending = threading.Lock()  # one line at a time on a connection
        self._closed = False
        self._guard = Guard(self._serious)
        self._peers = (
            self._accept(size, address, store) if rank == 0 else {0: self._connect(address, store)}
        )
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._run, name="membership", daemon=True).start()

    # ---- coming up ----

    def _accept(self, size: int, address: str, store: Store) -> dict[int, _Peer]:
        token = secrets.token_hex(16)
        with _listening(address) as listener:
            store.set("membership", f"{listener.getsockname()[1]} {token}")
            peers: dict[int, _Peer] = {}
            listener.settimeout(CONNECT_SECONDS)
            while len(peers) < size - 1:
                connection, _ = listener.accept()
                connection.settimeout(CONNECT_SECONDS)
                said = bounded_json.loads(_line(connection) or b"{}")
                if said.get("token") != token:  # not a trainer of this job
                    connection.close()
                    continue
                peers[said["rank"]] = _Peer(connection, RUNNING())
            return peers

    def _connect(self, address: str, store: Store) -> _Peer:
        port, token = store.get("membership").decode().split()
        connection = socket.create_connection((address, int(port)), CONNECT_SECONDS)
        connection.sendall(json.dumps({"rank": self._rank, "token": token}).encode() + b"\n")
        return _Peer(connection, RUNNING())

    # ---- for the trainer ----

    def cause(self, seconds: float = CAUSE_SECONDS) -> Event | None:
        """The end of a trainer that explains why a collective failed: one that is lost or has
        failed, or else one that has left; None: no trainer is known to have ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), seconds)
            # one that left may have left because of it
            self._changed.wait_for(lambda: self._serious() is not None, SECOND_SECONDS)
            return self._serious() or next(iter(self._events.values()), None)

    def event(self) -> Event | None:
        """What is known at this moment, as :meth:`cause` has it."""
        with self._changed:
            return self._serious() or next(iter(self._events.values()), None)

    def check(self, needed: Collection[int] = ()) -> None:
        """Raises the end of another trainer.

        Args:
            needed: trainers whose part in something is still to come, so that it matters if they
                have left in order, too.

        Raises:
            PServerError: one is lost, has failed, or (of these) has left.
        """
        with self._changed:
            event = self._serious() or next(
                (event for rank, event in self._events.items() if rank in needed), None
            )
        if event is not None:
            raise event.error()

    def tell(self, kind: str, text: str) -> None:
        """Says "failed" or "left" to all others; who leaves once leaves once."""
        if kind == "left":
            if self._leaving:
                return
            self._leaving = True
            self._guard.close()  # this trainer waits for no collective any more
        self._send(Event(kind, self._rank, text), self._peers)

    def there(self, seconds: float = 0.0) -> list[int]:
        """The other trainers whose connection has not ended; a lost one is not there.

        Args:
            seconds: to wait for a change, where some are there.
        """

        def found() -> list[int]:
            gone = self._ended | {e.rank for e in self._events.values() if e.kind == "lost"}
            return [rank for rank in self._peers if rank not in gone]

        with self._changed:
            if seconds:
                self._changed.wait_for(lambda: not found(), seconds)
            return found()

    def close(self, text: str) -> None:
        """Leaves, with a goodbye."""
        if not self._closed:
            self.tell("left", text)
            self._closed = True
            self._wake.close()
            self._guard.close()

    def _serious(self) -> Event | None:
        return next((event for event in self._events.values() if event.kind != "left"), None)

    # ---- the thread ----

    def _run(self) -> None:
        with RUNNING.ticking():
            self._serve()

    def _serve(self) -> None:
        peers, interval = self._peers, min(2.0, self._timeout / 4)
        selector = selectors.DefaultSelector()
        selector.register(self._woken, selectors.EVENT_READ)
        for rank, peer in peers.items():
            selector.register(peer.connection, selectors.EVENT_READ, rank)
        sent = 0.0
        selecting = SideBusiness("waiting for what the other trainers say")
        looking = SideBusiness("the look at the main thread")
        while not self._closed:
            for key, _ in selecting.do(partial(selector.select, interval)) or ():
                if key.data is not None and not self._read(key.data):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if now - sent >= interval:
                sent = now
                self._send(None, peers)
            for rank, peer in peers.items():
                if RUNNING() - peer.heard > self._timeout:
                    self._note(Event("lost", rank, f"silent for {self._timeout:g} s"))
            if self._ends_process:
                looking.do(self._guard.look)
        for peer in peers.values():
            peer.connection.close()
        self._woken.close()

    def _read(self, rank: int) -> bool:
        """Takes what a peer has sent; False at its end."""
        peer = self._peers[rank]
        try:
            data = peer.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            peer.heard = float("inf")
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()
            if not self._closed:
                self._note(
                    Event(
                        "lost",
                        rank,
                        "its connection ended without a goodbye; it was killed, or its host is "
                        "gone",
                    )
                )
            return False
        peer.heard = RUNNING()
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            said = bounded_json.loads(line)
            if said:
                self._note(Event(**said))
        return True

    def _note(self, event: Event) -> None:
        """The first thing that becomes of a trainer counts; trainer 0 passes it on."""
        with self._changed:
            if event.rank in self._events or event.rank == self._rank:
                return
            self._events[event.rank] = event
            self._changed.notify_all()
        if event.kind != "left" and self._ends_process and not self._leaving:
            log.error("%s", event.error())
        if self._rank == 0:
            self._send(
                event, {rank: peer for rank, peer in self._peers.items() if rank != event.rank}
            )

    def _send(self, event: Event | None, peers: dict[int, _Peer]) -> None:
        line = json.dumps(asdict(event) if event is not None else {}).encode() + b"\n"
        with self._sending:
            for peer in peers.values():
                with suppress(OSError):  # the reading thread notices its end
                    peer.connection.sendall(line)


class Guard:
    """Ends this process where its main thread waits for a lost trainer and can't be woken.

    Args:
        serious: gives the event that ends the job, once there is one.
    """

    def __init__(self, serious: Callable[[], Event | None]) -> None:
        self._serious = serious
        self._since = 0.0
        self._place: tuple[object, ...] | None = None
        self._looking = threading.Lock()  # while the other thread holds a frame
        self._closed = False
        atexit.register(self.close)

    def look(self) -> None:
        """Called every few seconds, by a thread that is not the main thread."""
        with self._looking:
            event = self._serious()
            if event is not None and not self._closed:
                self._look(event)

    def close(self) -> None:
        """Ends nothing any more, and lets the main thread's frame go.

        See [Note: whose frames].
        """
        with self._looking:
            self._closed, self._place = True, None
        atexit.unregister(self.close)

    def _look(self, event: Event) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = (frame, frame.f_lasti) if frame is not None else None
        if place != self._place:
            self._place, self._since = place, RUNNING()
        elif place is not None and RUNNING() - self._since > GRACE_SECONDS:
            try:
                print(
                    f"{type(event.error()).__name__}: {event.error()}; this trainer is blocked "
                    "on the lost trainer:",
                    file=sys.stderr,
                )
                traceback.print_stack(frame, file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # also where nobody can be told
                os._exit(1)


def _listening(address: str) -> socket.socket:
    """Where trainer 0 listens: at the address that the others know, or where that is not this
    host's own name, anywhere.
    """
    with suppress(OSError):
        return socket.create_server((address, 0))
    return socket.create_server(("", 0))


def _line(connection: socket.socket) -> bytes:
    """The first line, of at most a few hundred bytes."""
    found = b""
    with suppress(OSError):
        while not found.endswith(b"\n") and len(found) < 1024 and (byte := connection.recv(1)):
            found += byte
    return found if found.endswith(b"\n") else b""
