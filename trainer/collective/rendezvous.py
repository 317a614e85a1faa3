"""The rendezvous of a job's trainers: they find one another, and compare their programs.

::

    connect_store   trainer 0 serves a store at its endpoint, the others connect to it
    rendezvous      each trainer announces itself in the store, and its program; missing
                    trainers and differences are named; then the membership watches all
    Peers           the trainers, after the rendezvous

``init_parallel_env`` and ``spawn``, a collective program's runtime and the dense all-reduce of a
job with servers all begin with it.

[Note: who closes the store]  The store ends with the object that serves it, which cuts off trainers
that still read from it.  Process groups keep a store for as long as they live, and a script may
keep them in a model for long after its job.  So they get a connection of their own, and only
:class:`Peers` has the serving object.  A trainer that leaves announces it, and then ends its
connection to trainer 0; trainer 0 closes the store when all have done that.

[Note: a group that waits]  The destructor of a group waits for its threads, one of which may be in
an abandoned operation, and needs the interpreter's lock to free its tensors.  The thread that
destroys the group holds that lock: for instance the garbage collector, which finds the group among
the objects of a failed job.  So a group with such an operation is never destroyed.

[Note: a group that has just worked]  A gloo thread releases an operation's tensors after it has
reported the operation as done.  torch's reducer holds its group and, as the last owner, destroys it
while it holds the interpreter's lock: a job that ends just after a collective would wait for that
thread, and the thread for the lock.  So a job waits until these threads are at rest before it gives
up its groups.

[Note: gloo at exit]  A gloo thread tells the main thread that an operation is done, and frees its
tensors after that, for which it needs the interpreter's lock.  A script whose last call is a
collective may be at its end by then; a thread that asks for the lock while the interpreter ends is
terminated inside a destructor, which aborts the process (until Python 3.14; 1 run in 8 of a small
script).  So an interpreter ends after these threads are at rest.  A thread that still waits for a
peer is at rest, too.

[Note: a group that nobody waits for]  A group that was given up while it came up leaves a thread
behind, which waits for a lost trainer.  The thread ends by its timeout, or when the store ends with
trainer 0; if the interpreter is ending by then, the thread aborts the process.  So a process with
such a thread ends after it, unless it ends with an error: then it has failed anyway, and the others
must learn of it soon.

[Note: who is lost]  When a trainer dies, gloo tells its neighbours that some port was closed, NCCL
gives no notice, and neither names a trainer.  So every trainer holds one connection to trainer 0,
beside the collectives.  Both sides send heartbeats; a trainer whose connection ends without a
goodbye, or is silent for the heartbeat timeout, is lost, and trainer 0 tells the others.  Time in
which this process did not run does not count as silence::

    trainer 1  --heartbeat, left, failed-->  trainer 0
    trainer 0  --heartbeat, and each trainer's end-->  trainers 1, 2, ...

Errors of a collective are then raised anew under the name of the trainer that caused them
(:meth:`TrainerHeartbeats.cause`).  A process whose main thread still waits in the same place
STUCK_SECONDS after a trainer was lost can't be woken, so it prints the reason, and ends.  Once
trainer 0 has left, trainers are no longer watched; no collective needs that any more.

[Note: whose frames]  To see whether the main thread still waits in the same call, the thread of the
connections holds that call's frame, and so may be the last owner of the tensors and operations in
it.  Their destructors give up the interpreter's lock, and a thread that asks for it again while the
interpreter ends is terminated inside a destructor, which aborts the process.  So the main thread
drops that reference before it leaves, at the latest at exit.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
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
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from pserver.config import START_TIMEOUT_SECONDS, split_endpoint
from pserver.errors import (
    FingerprintMismatch,
    JobFailed,
    PServerError,
    Refused,
    TimedOut,
    TrainerLost,
    Unreachable,
)
from pserver.polling import poll
from pserver.running_clock import RUNNING
from pserver.side_business import SideBusiness
from pserver.timeouts import Timeouts
from trainer.environment.environment import Connection
from transpiler.files import bounded_json
from transpiler.plan.plan import differences

# ---- gloo threads ----
#
# gloo's own threads, when a group, a job or the process ends.


_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_LOOKS = 10  # in a row: a thread that has got the lock, or waits for it, may not have run yet
_PAUSE_SECONDS = 0.002  # during which other threads can take the lock
_LONGEST_SECONDS = 2.0
_SILENT_SECONDS = 2.0  # of a wait at exit before a message

log = logging.getLogger(__name__)


def never_destroy(group: object) -> None:
    """Keeps a process group for as long as the process lives.  See [Note: a group that waits]."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def end_at_exit(comes_up: Future[Any], seconds: float) -> None:
    """Lets this process end after a group that was given up while it came up.

    See [Note: a group that nobody waits for].

    Args:
        comes_up: done when the thread of the group is.
        seconds: until the thread gives up by itself.
    """
    atexit.register(_wait_for_end, comes_up, time.monotonic() + seconds)


def _wait_for_end(comes_up: Future[Any], end: float) -> None:
    if getattr(sys, "last_value", None) is not None:
        return
    if not wait([comes_up], _SILENT_SECONDS).not_done:
        return
    left = end - time.monotonic()
    if left > 0:
        log.warning("waiting up to %.0f s for the end of a process group that was given up", left)
        wait([comes_up], left)


@cache
def rest_at_exit() -> None:
    """Lets this process end after gloo's threads have released their tensors.

    See [Note: gloo at exit].
    """
    atexit.register(wait_for_rest)


def wait_for_rest(tasks: Path = _TASKS, longest_seconds: float = _LONGEST_SECONDS) -> bool:
    """Waits until gloo's threads sleep.

    Args:
        tasks: the folder in which Linux describes this process's threads; other systems have none,
            and this only pauses.
        longest_seconds: the longest wait.

    Returns:
        Whether they sleep.
    """
    end, resting = time.monotonic() + longest_seconds, 0
    while resting < _LOOKS and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        resting = resting + 1 if _at_rest(tasks) else 0
    return resting == _LOOKS


def _at_rest(tasks: Path) -> bool:
    """Whether no gloo thread runs, or waits for a core."""
    return all(_state(stat) == "S" for stat in tasks.glob("*/stat"))


def _state(stat: Path) -> str:
    """A gloo thread's state; "S", asleep, for any other thread, or one that has ended.

    proc(5): ``number (name) state ...``.
    """
    try:
        _, _, rest = stat.read_text().partition(f"({_NAME}) ")
    except OSError:
        return "S"
    return rest[:1] or "S"


# ---- membership ----
#
# The membership of a job's trainers: the live ones, and how the others ended.


STUCK_SECONDS = 10.0
CAUSE_SECONDS = 3.0  # the report of a death may arrive after the error that it causes
SECOND_SECONDS = 0.5
CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """The end of a trainer, as reported to the others.

    Attributes:
        kind: "lost", "failed" or "left".
        text: how it ended, as the end of a sentence.
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
        heard: the time at which it last sent something, by the clock of this process's running
            time.
        rest: the beginning of a line whose end has not arrived yet.
    """

    connection: socket.socket
    heard: float
    rest: bytes = b""


class TrainerHeartbeats:
    """One trainer's connections for heartbeats: trainer 0's to all others, another's to trainer 0.

    See [Note: who is lost].  The script's thread asks; a separate thread reads and sends.

    Args:
        rank, size: this trainer's rank, and the number of trainers.
        address: of trainer 0.
        store: holds trainer 0's port.
        heartbeat_timeout: seconds without a heartbeat after which a trainer is lost.
        ends_process: whether a loss ends the job: it is then logged, and ends a process whose main
            thread it blocks.

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
        self._events: dict[int, TrainerEnd] = {}
        self._ended = set[int]()  # whose connection has ended; guarded likewise
        self._leaving = False
        self._sending = threading.Lock()  # one line at a time on a connection
        self._closed = False
        self._guard = MainThreadGuard(self._serious)
        self._peers = (
            self._accept(size, address, store) if rank == 0 else {0: self._connect(address, store)}
        )
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._run, name="membership", daemon=True).start()

    # ---- connecting ----

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

    # ---- calls of the trainer ----

    def cause(self, seconds: float = CAUSE_SECONDS) -> TrainerEnd | None:
        """The end of a trainer that explains why a collective failed: of one that is lost or has
        failed, otherwise of one that has left; None if no trainer is known to have ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), seconds)
            # a trainer that left may have left because of it
            self._changed.wait_for(lambda: self._serious() is not None, SECOND_SECONDS)
            return self._serious() or next(iter(self._events.values()), None)

    def event(self) -> TrainerEnd | None:
        """The end of a trainer that is known now, chosen as :meth:`cause` does; None if there is
        none.
        """
        with self._changed:
            return self._serious() or next(iter(self._events.values()), None)

    def check(self, needed: Collection[int] = ()) -> None:
        """Raises an error for the end of another trainer.

        Args:
            needed: trainers whose part is still missing, so that it matters if they have left in
                good order, too.

        Raises:
            PServerError: a trainer is lost or has failed, or a needed one has left.
        """
        with self._changed:
            event = self._serious() or next(
                (event for rank, event in self._events.items() if rank in needed), None
            )
        if event is not None:
            raise event.error()

    def announce(self, kind: str, text: str) -> None:
        """Sends "failed" or "left" to all others; "left" is sent once only."""
        if kind == "left":
            if self._leaving:
                return
            self._leaving = True
            self._guard.close()  # this trainer waits for no collective any more
        self._send(TrainerEnd(kind, self._rank, text), self._peers)

    def there(self, seconds: float = 0.0) -> list[int]:
        """The other trainers whose connection has not ended; lost ones are left out.

        Args:
            seconds: to wait until none is left.
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
            self.announce("left", text)
            self._closed = True
            self._wake.close()
            self._guard.close()

    def _serious(self) -> TrainerEnd | None:
        return next((event for event in self._events.values() if event.kind != "left"), None)

    # ---- the thread ----

    def _run(self) -> None:
        with RUNNING.ticking():
            self._serve()

    def _serve(self) -> None:
        peers, interval = self._peers, Timeouts(self._timeout).beat
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
                    self._note(TrainerEnd("lost", rank, f"silent for {self._timeout:g} s"))
            if self._ends_process:
                looking.do(self._guard.look)
        for peer in peers.values():
            peer.connection.close()
        self._woken.close()

    def _read(self, rank: int) -> bool:
        """Reads what a peer has sent; False at its end."""
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
                    TrainerEnd(
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
                self._note(TrainerEnd(**said))
        return True

    def _note(self, event: TrainerEnd) -> None:
        """Notes the end of a trainer, of which only the first report counts; trainer 0 passes it
        on.
        """
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

    def _send(self, event: TrainerEnd | None, peers: dict[int, _Peer]) -> None:
        line = json.dumps(asdict(event) if event is not None else {}).encode() + b"\n"
        with self._sending:
            for peer in peers.values():
                with suppress(OSError):  # the reading thread notices its end
                    peer.connection.sendall(line)


class MainThreadGuard:
    """Ends this process if its main thread waits for a lost trainer and can't be woken.

    Args:
        serious: gives the event that ends the job, if there is one.
    """

    def __init__(self, serious: Callable[[], TrainerEnd | None]) -> None:
        self._serious = serious
        self._since = 0.0
        self._place: tuple[object, ...] | None = None
        self._looking = threading.Lock()  # while the other thread holds a frame
        self._closed = False
        atexit.register(self.close)

    def look(self) -> None:
        """Checks the main thread; called every few seconds by another thread."""
        with self._looking:
            event = self._serious()
            if event is not None and not self._closed:
                self._look(event)

    def close(self) -> None:
        """Stops checking, and releases the main thread's frame.

        See [Note: whose frames].
        """
        with self._looking:
            self._closed, self._place = True, None
        atexit.unregister(self.close)

    def _look(self, event: TrainerEnd) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = (frame, frame.f_lasti) if frame is not None else None
        if place != self._place:
            self._place, self._since = place, RUNNING()
        elif place is not None and RUNNING() - self._since > STUCK_SECONDS:
            try:
                print(
                    f"{type(event.error()).__name__}: {event.error()}; this trainer is blocked "
                    "on the lost trainer:",
                    file=sys.stderr,
                )
                traceback.print_stack(frame, file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # also if stderr is closed
                os._exit(1)


def _listening(address: str) -> socket.socket:
    """The socket at which trainer 0 listens: at the address that the others know, or at all
    addresses if that one is not this host's own.
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


# ---- own address ----
#
# The address at which other trainers reach this host.


def own_address(endpoint: str) -> str:
    """This host's address on the way to an endpoint."""
    host, port = split_endpoint(endpoint)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


# ---- rendezvous ----


PAUSE_SECONDS = 0.25  # at most, between two looks into the store
ANSWER_SECONDS = 30.0  # for the store's greeting, once its port answers
LINGER_SECONDS = 2.0
LOOK_SECONDS = 0.25  # between two checks whether all have left


@dataclass(slots=True)
class Peers:
    """The trainers of one job, after their rendezvous.

    Attributes:
        rank: this trainer's rank.
        names: one a trainer, for messages: its HOST:PORT, or "".
        store: holds the trainers' short messages to one another.
        host: the address at which the others reach this trainer.
        timeout_seconds: of :meth:`meet`.
        id: 32 hexadecimal digits that trainer 0 drew for this job, the same on all.
        meanwhile: called while this trainer waits; raises what should end the wait.
        membership: watches the others; None in a world of one, and if the script itself made
            torch's process group.
        server: serves the store, on trainer 0; see [Note: who closes the store].
    """

    rank: int
    names: tuple[str, ...]
    store: Store
    host: str = "127.0.0.1"
    timeout_seconds: float = START_TIMEOUT_SECONDS
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    meanwhile: Callable[[], None] = lambda: None
    membership: TrainerHeartbeats | None = None
    server: Store | None = None
    _read: dict[tuple[int, ...], str] = field(default_factory=dict)  # the last key, by ranks

    @property
    def size(self) -> int:
        """The number of trainers."""
        return len(self.names)

    def spell(self, *ranks: int) -> str:
        """Trainers in a message: "trainer 1 (10.0.0.2:6170), trainer 3 (10.0.0.4:6170)"."""
        return ", ".join(
            f"trainer {rank}" + (f" ({self.names[rank]})" if self.names[rank] else "")
            for rank in ranks
        )

    def check(self, needed: Collection[int] = ()) -> None:
        """Raises an error for the end of another trainer; see :meth:`TrainerHeartbeats.check`."""
        if self.membership is not None:
            self.membership.check(needed)

    def meet(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        """Exchanges texts: each of these trainers gives one, and gets the texts of all.

        A trainer that has given its text may leave: the others still get it.

        Args:
            topic: the same for all, and never used before.

        Raises:
            TimedOut: some trainers have given none; the message names them, and is the same on all
                that wait.
            PServerError: one of the trainers is lost, has failed or has left.
        """
        try:
            texts = self._texts_of(topic, text, ranks)
        except DistError as error:  # which says "Connection reset"
            event = None if self.membership is None else self.membership.cause()
            if event is not None:
                raise event.error() from error
            raise TrainerLost(
                f"{topic}: {self.spell(0)}, which serves the trainers' store, has gone while "
                f"{self.spell(self.rank)} waited: {first_line(error)}"
            ) from error
        among = tuple(ranks)
        former, self._read[among] = self._read.get(among), f"{topic}/{self.rank}"
        if former is not None:  # all of these have read it, or they would not have given a new text
            with suppress(RuntimeError):
                self.store.delete_key(former)
        return texts

    def _texts_of(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        gave_up = f"{topic}/gave up"

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if not self.store.check([key])]

        def waiting() -> str:
            return f"{topic}: trainer {self.rank} waits for {self.spell(*missing())}"

        self.store.set(keys[self.rank], text)
        for _ in poll(log, waiting, self.timeout_seconds, PAUSE_SECONDS):
            if self.store.check([gave_up]):
                raise TimedOut(self.store.get(gave_up).decode())
            if self.store.check(list(keys.values())):
                return [self.store.get(key).decode() for key in keys.values()]
            if self.membership is not None:
                try:
                    self.check(missing())
                except PServerError:
                    if missing():  # otherwise it has given its text, and then left
                        raise
                    continue
            self.meanwhile()
        said = (
            f"{topic}: expected {len(keys)} trainers, and after {self.timeout_seconds:g} s these "
            f"are missing: {self.spell(*missing())}"
        )
        raise TimedOut(self.store.compare_set(gave_up, "", said).decode())

    def agree(self, topic: str, text: str) -> str:
        """Proposes a text about a topic; the first trainer's text counts.

        Returns:
            The first trainer's text.
        """
        return self.store.compare_set(f"agree/{topic}", "", text).decode()

    def close(self, text: str, failure: str = "") -> None:
        """Leaves the other trainers, and releases the store.

        Args:
            text: sent to trainers that still need this one.
            failure: the reason for a failure here, for all others; "" without a failure.
        """
        if self.membership is not None:
            if failure:
                self.membership.announce("failed", failure)
            self.membership.close(text)
        self.store, self.server = HashStore(), None

    def leave(self, text: str) -> None:
        """Announces that this trainer takes part in no further operation; :meth:`close` follows."""
        if self.membership is not None:
            self.membership.announce("left", text)

    def wait_for_all(self) -> None:
        """Waits, before trainer 0 closes the store, until the others have closed their ends, or are
        lost.  See [Note: who closes the store].
        """
        membership = self.membership
        if membership is None or self.rank:
            return

        def waiting() -> str:
            return (
                f"trainer 0 has finished, and serves the trainers' store until all have: it waits "
                f"for {self.spell(*membership.there())}"
            )

        for _ in poll(log, waiting, self.timeout_seconds):
            if not membership.there(LOOK_SECONDS):
                return
        log.warning(
            "trainer 0 leaves, and the trainers' store ends: after %g s these have not finished: "
            "%s",
            *(self.timeout_seconds, self.spell(*membership.there())),
        )


def rendezvous(
    store: Store,
    rank: int,
    names: Sequence[str],
    connection: Connection,
    *,
    metadata: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    number: str = "1",
    meanwhile: Callable[[], None] = lambda: None,
    ends_process: bool = True,
) -> Peers:
    """Finds the other trainers of a job.  Every one of them calls this, with a store of its own to
    the same server.

    Args:
        store: of :func:`connect_store`.
        rank: this trainer, from 0.
        names: one a trainer, for messages: its HOST:PORT, or "".
        connection: gives the seconds within which all trainers must join, and the heartbeat
            timeout.
        metadata: describes this trainer's program; it must be the same everywhere, and differences
            are named.
        host: the address at which the others reach this trainer.
        number: of this rendezvous among those that use the same store.
        meanwhile: called while this trainer waits; raises what should end the wait.
        ends_process: whether the loss of a trainer ends the job; see :class:`TrainerHeartbeats`.

    Raises:
        TimedOut: some trainers have not joined; the message names them.
        FingerprintMismatch: some trainers run another program than trainer 0; the message names
            them, and the differences.
        Refused: two processes have the same trainer's number.
        TrainerLost: trainer 0, which serves the store, has ended.
        Unreachable: trainer 0 cannot be reached for the membership.
    """
    rest_at_exit()
    server = store
    if rank == 0 and isinstance(store, TCPStore):
        store = store.clone()  # type: ignore[attr-defined]  # not in torch's stub
    store = PrefixStore(f"pserver/{number}", store)
    limit = connection.start_timeout_seconds
    peers = Peers(rank, tuple(names), store, host, limit, meanwhile=meanwhile, server=server)
    try:
        announced = _announced(peers, dict(metadata or {}))
    except RuntimeError as error:  # torch's own errors of a store
        raise TrainerLost(
            f"{peers.spell(0)} has gone while {peers.spell(rank)} waited for all to come: "
            f"{first_line(error)}"
        ) from None
    peers.id = announced[0]["id"]
    if peers.size > 1:
        address, timeout = announced[0]["host"], connection.heartbeat_timeout_seconds
        try:
            peers.membership = TrainerHeartbeats(
                rank, peers.size, address, store, timeout, ends_process
            )
        except OSError as error:
            raise Unreachable(
                f"{peers.spell(rank)} and {peers.spell(0)} at {address} cannot reach one another: "
                f"{error}"
            ) from error
    return peers


def _announced(peers: Peers, metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """The trainers' descriptions of themselves, by rank; all run the same program."""
    process = f"{socket.gethostname()}:{os.getpid()}"
    other = peers.store.compare_set(f"process/{peers.rank}", "", process).decode()
    if other != process:  # the same process may have tried before
        raise Refused(
            f"{peers.spell(peers.rank)}: expected one process, got two: {other} and this one, "
            f"{process}"
        )
    own = {"host": peers.host, "metadata": metadata, "id": peers.id}
    try:
        texts = peers.meet("rendezvous", json.dumps(own), range(peers.size))
        announced = [bounded_json.loads(text) for text in texts]
        _compare(peers, [each["metadata"] for each in announced])
    except PServerError:
        _linger(peers)
        raise
    return announced


def _compare(peers: Peers, metadata: Sequence[Mapping[str, str]]) -> None:
    """Raises an error unless all trainers run trainer 0's program."""
    said = [
        f"{peers.spell(rank)} has {differences(each, metadata[0], 'trainer 0')}"
        for rank, each in enumerate(metadata)
        if each != metadata[0]
    ]
    if said:
        raise FingerprintMismatch(
            f"expected the same program on all {peers.size} trainers, got: {'; '.join(said)}"
        )


def _linger(peers: Peers) -> None:
    """Makes trainer 0, with which the store ends, wait until the others in the rendezvous have read
    the result.
    """
    come = sum(peers.store.check([f"rendezvous/{rank}"]) for rank in range(peers.size))
    read, end = peers.store.add("read", 1), time.monotonic() + LINGER_SECONDS
    while peers.rank == 0 and read < come and time.monotonic() < end:
        time.sleep(0.01)
        read = peers.store.add("read", 0)


# ---- the store ----


def connect_store(
    host: str,
    port: int,
    rank: int,
    connection: Connection,
    *,
    served: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> TCPStore:
    """The store that the trainers share: trainer 0 serves it, the others connect to it.

    Args:
        host, port: trainer 0's endpoint; port 0 chooses a free one, which the result's ``port``
            gives.
        rank: this trainer's rank.
        connection: gives the seconds until the store must answer.
        served: another process serves the store (torchrun's agent, or ``spawn``'s parent).
        meanwhile: called while this trainer waits; raises what should end the wait.

    Raises:
        Unreachable: trainer 0 cannot listen at the endpoint, or it does not answer in time.
    """
    limit = timedelta(seconds=connection.start_timeout_seconds)
    who = f"the store of the job ({host}:{port})" if served else f"trainer 0 ({host}:{port})"
    if rank == 0 and not served:
        try:
            port, listening = _listen(host, port)
            return TCPStore(host, port, None, True, limit, False, master_listen_fd=listening)
        except (OSError, RuntimeError) as error:
            raise Unreachable(f"{who} cannot listen at its endpoint: {first_line(error)}") from None
    own = f"trainer {rank}"
    _wait_for_port(host, port, own, who, connection.start_timeout_seconds, meanwhile)
    try:
        store = TCPStore(
            host, port, None, False, min(limit, timedelta(seconds=ANSWER_SECONDS)), False
        )
    except RuntimeError as error:
        raise Unreachable(
            f"{who}: expected the trainers' store there, got: {first_line(error)}"
        ) from None
    store.set_timeout(limit)
    return store


def _listen(host: str, port: int) -> tuple[int, int | None]:
    """A port, and a socket that listens there at this host's own address; None if the name or
    address is not this host's own: torch then listens at all addresses.
    """
    try:
        listening = socket.create_server((host, port), backlog=512)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return port, None
    return listening.getsockname()[1], listening.detach()


def _wait_for_port(
    host: str, port: int, own: str, who: str, timeout: float, meanwhile: Callable[[], None]
) -> None:
    reason: OSError | None = None
    for waited in poll(log, lambda: f"{own} waits for {who} to come up", timeout, PAUSE_SECONDS):
        try:
            socket.create_connection((host, port), max(min(timeout - waited, 5.0), 0.1)).close()
            return
        except OSError as error:
            reason = error
        meanwhile()
    raise Unreachable(f"{own} waited {timeout:g} s for {who}, which does not answer: {reason}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, as a C++ stack follows in torch's; and NCCL's last error,
    which follows the stack.
    """
    first, *others = str(error).splitlines() or [type(error).__name__]
    said = others[others.index("Last error:") + 1 :] if "Last error:" in others else []
    return f"{first}: {said[0]}" if said and said[0] else first
