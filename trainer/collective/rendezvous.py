"""The rendezvous of a job's trainers: they find one another, and compare what they run.

::

    connect_store   trainer 0 serves a store at its endpoint, the others connect to it
    rendezvous      each trainer writes into the store that it is there, and what it runs; missing
                    trainers and differences are named; then the membership watches them all
    Peers           the trainers, after that

``init_parallel_env`` and ``spawn``, a collective program's runtime and the dense all-reduce of a
job with servers all begin with it.

[Note: who closes the store]  The store ends with the object that serves it, and whoever still reads
an answer there is cut off.  Process groups keep a store for as long as they live, and a script may
keep them in a model for long after its job.  So they get a connection of their own, and only
:class:`Peers` has what serves.  A trainer that leaves says so, and then ends its connection to
trainer 0; trainer 0 closes the store when all have done that.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

# torch.distributed's own, which strict typing does not see there
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from pserver.config import START_TIMEOUT_SECONDS
from pserver.errors import (
    FingerprintMismatch,
    PServerError,
    Refused,
    TimedOut,
    TrainerLost,
    Unreachable,
)
from pserver.polling import poll
from trainer.collective.gloo_threads import rest_at_exit
from trainer.collective.membership import Membership
from trainer.environment.environment import Connection
from transpiler.files import bounded_json
from transpiler.plan.plan import differences

PAUSE_SECONDS = 0.25  # the longest, between two looks into the store
ANSWER_SECONDS = 30.0  # for the store's greeting, once its port answers
LINGER_SECONDS = 2.0
LOOK_SECONDS = 0.25  # between two looks whether all have left

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Peers:
    """The trainers of one job, after their rendezvous.

    Attributes:
        rank: this trainer.
        names: one a trainer, for messages: its HOST:PORT, or "".
        store: where trainers leave one another short messages.
        host: this trainer's address, at which the others reach it.
        timeout_seconds: of :meth:`exchange`.
        id: 32 hexadecimal digits that trainer 0 drew for this job, the same on all.
        meanwhile: called while this trainer waits; raises what should end the wait.
        membership: watches the others; None in a world of one, and where the script itself made
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
    membership: Membership | None = None
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
        """Raises what has happened to another trainer; see :meth:`Membership.check`."""
        if self.membership is not None:
            self.membership.check(needed)

    def exchange(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        """Each of these trainers gives a text, and gets the texts of all.

        A trainer that has given its text may leave: the others get it.

        Args:
            topic: the same for all, and never used before.

        Raises:
            TimedOut: some have given none; the message names them, and is the same on all that
                wait.
            PServerError: one of them is lost, has failed or has left.
        """
        try:
            texts = self._exchanged(topic, text, ranks)
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
        if former is not None:  # all of these have read it, or they would not be here
            with suppress(RuntimeError):
                self.store.delete_key(former)
        return texts

    def _exchanged(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
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
            f"have not come: {self.spell(*missing())}"
        )
        raise TimedOut(self.store.compare_set(gave_up, "", said).decode())

    def close(self, text: str, failure: str = "") -> None:
        """Leaves the others, and lets the store go.

        Args:
            text: what others are told who still need this trainer.
            failure: what went wrong here, for all others; "" where nothing did.
        """
        if self.membership is not None:
            if failure:
                self.membership.tell("failed", failure)
            self.membership.close(text)
        self.store, self.server = HashStore(), None

    def leave(self, text: str) -> None:
        """Says that this trainer takes part in nothing more; :meth:`close` follows."""
        if self.membership is not None:
            self.membership.tell("left", text)

    def wait_for_all(self) -> None:
        """Before trainer 0 closes the store: waits until the others have closed their ends, or are
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
        names: one a trainer, for messages: its HOST:PORT where it has one.
        connection: gives the seconds until the last trainer must have come, and the heartbeat
            timeout after which one is lost.
        metadata: what this trainer runs; must be the same everywhere, and differences are said.
        host: this trainer's address, at which the others reach it.
        number: of this rendezvous among those that use the same store.
        meanwhile: called while this trainer waits; raises what should end the wait.
        ends_process: the loss of a trainer ends the job; see :class:`Membership`.

    Raises:
        TimedOut: some have not come; the message names them.
        FingerprintMismatch: some run something else than trainer 0; the message names them, and
            the differences.
        Refused: two processes say that they are the same trainer.
        TrainerLost: trainer 0, which serves the store, has gone.
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
            peers.membership = Membership(rank, peers.size, address, store, timeout, ends_process)
        except OSError as error:
            raise Unreachable(
                f"{peers.spell(rank)} and {peers.spell(0)} at {address} cannot reach one another: "
                f"{error}"
            ) from error
    return peers


def _announced(peers: Peers, metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each trainer says of itself, by rank; all run the same."""
    process = f"{socket.gethostname()}:{os.getpid()}"
    other = peers.store.compare_set(f"process/{peers.rank}", "", process).decode()
    if other != process:  # the same one may have tried before
        raise Refused(
            f"{peers.spell(peers.rank)}: expected one process, got two: {other} and this one, "
            f"{process}"
        )
    own = {"host": peers.host, "metadata": metadata, "id": peers.id}
    try:
        texts = peers.exchange("rendezvous", json.dumps(own), range(peers.size))
        announced = [bounded_json.loads(text) for text in texts]
        _compare(peers, [each["metadata"] for each in announced])
    except PServerError:
        _linger(peers)
        raise
    return announced


def _compare(peers: Peers, metadata: Sequence[Mapping[str, str]]) -> None:
    """Whether all run what trainer 0 runs."""
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
    """The store goes with trainer 0, so that one waits until the others that are there have read
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
        host, port: trainer 0's endpoint; port 0 is a free one, which the result's ``port`` says.
        rank: this trainer.
        connection: gives the seconds until the store must answer.
        served: another process serves the store (torchrun's agent, or ``spawn``'s parent).
        meanwhile: called while this trainer waits; raises what should end the wait.

    Raises:
        Unreachable: trainer 0 cannot listen there, or nothing answers in time.
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
    """A port, and a socket that listens there at this host's own address; None behind a name or an
    address that is not its own, where torch listens at all of them.
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
    """The first line of an error's text, as torch's go on with a C++ stack; and what NCCL has to
    say, which stands behind it.
    """
    first, *others = str(error).splitlines() or [type(error).__name__]
    said = others[others.index("Last error:") + 1 :] if "Last error:" in others else []
    return f"{first}: {said[0]}" if said and said[0] else first
