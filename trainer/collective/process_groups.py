"""How the trainers of a collective job find one another: a store at trainer 0's endpoint,
announcements, process groups.

::

    open_store     trainer 0 listens at its endpoint, the others connect
    bring_up       everybody announces itself and what it runs; who is missing or differs is named
    World.group    a process group over some of the trainers: NCCL for tensors on GPUs, gloo otherwise
    World.wait     waits for an operation; an error says which trainer is gone, and in which step

Nothing here is ``torch.distributed``'s default process group: a script's own stays as it is, and
one process may hold several worlds.

[Note: no timeout on progress]  A trainer may evaluate for an hour while the others wait in a
collective operation, so operations have no deadline of their own; that a trainer is gone is found
by ``membership.py``.  A gloo operation cannot be called off, and its group's destructor waits for it:
after a failure groups are never destroyed, so that nobody waits, and the process can end.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from pserver.config import HEARTBEAT_TIMEOUT_SECONDS, START_TIMEOUT_SECONDS, split_endpoint
from pserver.errors import (
    FingerprintMismatch,
    PServerError,
    Refused,
    TimedOut,
    TrainerLost,
    Unreachable,
)
from trainer.collective.membership import Event, Membership
from transpiler.plan.plan import differences

SAY_SECONDS = 3.0  # a wait that lasts longer says for whom, once
# seconds between two looks at the watch; an operation that is done ends a wait at once
_SLICE = 0.25
# a trainer that left in good order may have finished an operation whose end is still on its way
# here
_GRACE = 2.0
_NEVER = timedelta(days=7)  # see [Note: no timeout on progress]

log = logging.getLogger(__name__)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket at this host's own address; behind a name or an address that is not its
    own, at all of them.
    """
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return socket.create_server(("", port), backlog=512)


def open_store(endpoint: str, rank: int, patience: float) -> Store:
    """The store that the trainers share: trainer 0 serves it at ``endpoint``, the others connect to
    it.

    Args:
        patience: seconds until trainer 0 must answer.

    Raises:
        ValueError: trainer 0 cannot listen there.
        Unreachable: it does not answer in time.
    """
    host, port = split_endpoint(endpoint)
    if rank == 0:
        try:
            listening = _listen(host, port)
        except OSError as error:
            raise ValueError(
                f"trainer 0 cannot listen at its endpoint {endpoint}: {error}"
            ) from None
        port = listening.getsockname()[1]
        limit = timedelta(seconds=patience)
        return TCPStore(host, port, None, True, limit, False, master_listen_fd=listening.detach())
    _wait_for_port(host, port, f"trainer 0 ({endpoint})", rank, patience)
    try:
        return TCPStore(host, port, None, False, timedelta(seconds=min(patience, 30.0)), False)
    except RuntimeError as error:
        raise Unreachable(
            f"trainer 0 ({endpoint}): expected the trainers' store there, got: {_first_line(error)}"
        ) from None


def _wait_for_port(host: str, port: int, who: str, rank: int, patience: float) -> None:
    began, said, pause = time.monotonic(), False, 0.02
    while True:
        left = began + patience - time.monotonic()
        try:
            socket.create_connection((host, port), max(min(left, 5.0), 0.1)).close()
            return
        except OSError as error:
            if left <= 0:
                raise Unreachable(
                    f"trainer {rank} waited {patience:g} s for {who}, which does not answer: "
                    f"{error}"
                ) from None
        if not said and time.monotonic() - began > SAY_SECONDS:
            said = True
            log.warning("trainer %d waits for %s to come up", rank, who)
        time.sleep(min(pause, max(left, 0.0)))
        pause = min(pause * 1.5, 0.5)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def bring_up(
    store: Store,
    rank: int,
    endpoints: Sequence[str],
    *,
    facts: Mapping[str, str] | None = None,
    patience: float = START_TIMEOUT_SECONDS,
    deadline: float = HEARTBEAT_TIMEOUT_SECONDS,
    host: str = "",
    meeting: int = 1,
) -> World:
    """Meets the other trainers of a job.  Every one of them calls this, with a store of its own to
    the same server.

    Args:
        store: what :func:`open_store` gave, or another store that all of them reach (torchrun's).
        rank: this trainer, from 0.
        endpoints: one name a trainer, for messages: its HOST:PORT where it has one.
        facts: what this trainer runs; must be the same everywhere, and what differs is said.
        patience: seconds until the last trainer must have come.
        deadline: seconds of silence after which a trainer is lost.
        host: this trainer's address, at which the others reach it; "" is 127.0.0.1.
        meeting: how often these trainers have met, this time included.

    Raises:
        TimedOut: some have not come; the message names them.
        FingerprintMismatch: some run something else than trainer 0; the message names them, and
            what differs.
        Refused: two processes say that they are the same trainer.
    """
    store = PrefixStore(f"pserver/{meeting}", store)
    host = host or "127.0.0.1"
    process = f"{socket.gethostname()}:{os.getpid()}"
    own = {"host": host, "process": process, "facts": dict(facts or {}), "id": uuid.uuid4().hex}
    announced = _announce(store, rank, endpoints, own, patience)
    _compare(store, rank, announced, endpoints)
    presence = None
    if len(endpoints) > 1:
        try:
            presence = Membership(rank, len(endpoints), announced[0]["host"], store, deadline)
        except OSError as error:
            raise Unreachable(
                f"{_named(rank, endpoints)} and {_named(0, endpoints)} cannot reach one another: "
                f"{error}"
            ) from None
    return World(store, rank, tuple(endpoints), presence, announced[0]["id"], host, patience)


def _announce(
    store: Store, rank: int, endpoints: Sequence[str], own: Mapping[str, Any], patience: float
) -> dict[int, dict[str, Any]]:
    """Says that this trainer is there, and gives what each of them said."""
    try:
        if store.add(f"claim/{rank}", 1) > 1:
            other = (
                json.loads(store.get(f"come/{rank}"))["process"]
                if store.check([f"come/{rank}"])
                else "another process"
            )
            if other != own["process"]:  # this one may have tried before
                raise Refused(
                    f"{_named(rank, endpoints)}: expected one process, got two: {other} and this "
                    f"one, {own['process']}"
                )
        store.set(f"come/{rank}", json.dumps(own))
        # Trainer 0 waits a little longer: the store goes with it, and the others want to find out
        # who is missing.
        _wait_for_all(store, rank, endpoints, patience, 1.0 if rank == 0 else 0.0)
        found = {other: json.loads(store.get(f"come/{other}")) for other in range(len(endpoints))}
        store.add("read", 1)
        return found
    except RuntimeError as error:  # torch's own errors of a store
        raise TrainerLost(
            f"{_named(0, endpoints)} has gone while {_named(rank, endpoints)} waited for all to "
            f"come: {_first_line(error)}"
        ) from None


def _wait_for_all(
    store: Store, rank: int, endpoints: Sequence[str], patience: float, longer: float
) -> None:
    began, said, pause = time.monotonic(), False, 0.005
    missing = list(range(len(endpoints)))
    while True:
        missing = [other for other in missing if not store.check([f"come/{other}"])]
        waited = time.monotonic() - began
        if not missing:
            return
        names = ", ".join(_named(other, endpoints) for other in missing)
        if waited > patience + longer:
            raise TimedOut(
                f"expected {len(endpoints)} trainers, and after {patience:g} s these have not "
                f"come: {names}"
            )
        if not said and waited > SAY_SECONDS:
            said = True
            log.warning("trainer %d waits for %s to come up", rank, names)
        time.sleep(min(pause, _SLICE))  # a wait of the store's own would fill the log with warnings
        pause *= 1.5


def _compare(
    store: Store, rank: int, announced: Mapping[int, Mapping[str, Any]], endpoints: Sequence[str]
) -> None:
    """Whether all run the same; trainer 0 is the measure."""
    measure = announced[0]["facts"]
    odd = {
        rank: differences(each["facts"], measure, "trainer 0")
        for rank, each in announced.items()
        if each["facts"] != measure
    }
    if not odd:
        return
    end = time.monotonic() + _GRACE
    while rank == 0 and store.add("read", 0) < len(endpoints) and time.monotonic() < end:
        time.sleep(0.01)  # the store goes with trainer 0, and the others are still reading
    said = "; ".join(f"{_named(rank, endpoints)} has {what}" for rank, what in odd.items())
    raise FingerprintMismatch(
        f"expected the same program on all {len(endpoints)} trainers, got: {said}"
    )


def _named(rank: int, endpoints: Sequence[str]) -> str:
    return f"trainer {rank} ({endpoints[rank]})" if endpoints[rank] else f"trainer {rank}"


class World:
    """The trainers of one job, met; what :func:`bring_up` gives.

    Attributes:
        rank: this trainer.
        endpoints: the trainers' names in messages.
        id: 32 hexadecimal digits that trainer 0 drew for this job, the same on all.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        endpoints: tuple[str, ...],
        presence: Membership | None,
        id: str,
        host: str,
        patience: float,
    ) -> None:
        self.rank = rank
        self.endpoints = endpoints
        self.id = id
        self._store = store
        self._host = host
        self._patience = patience
        self._groups: dict[tuple[str, str], Any] = {}
        self._begun = 0
        self._presence = presence
        self._closed = False

    @property
    def size(self) -> int:
        """The number of trainers."""
        return len(self.endpoints)

    def group(self, name: str, ranks: Sequence[int], device: torch.device) -> Any:
        """The process group of this name: a ``ProcessGroupGloo`` or, for a CUDA device, a
        ``ProcessGroupNCCL``.

        All of ``ranks`` ask for their groups in the same order; those that are not among them do
        not ask.

        Raises:
            PServerError: the group does not come up.
        """
        key = (name, device.type)
        if key not in self._groups:
            store = PrefixStore(f"{self.id}/{device.type}/{name}/{min(ranks)}", self._store)
            place = sorted(ranks).index(self.rank)
            make = _nccl if device.type == "cuda" else _gloo
            try:
                self._groups[key] = make(
                    store, place, len(ranks), self._host, min(self._patience, 60.0)
                )
            except RuntimeError as error:
                self._explain(
                    error, f"coming up of {name} over trainers {', '.join(map(str, sorted(ranks)))}"
                )
        return self._groups[key]

    def begin(self, operation: Callable[[], Work], what: str) -> Work:
        """Starts an operation of a group; ``what`` names it in messages.

        Raises:
            TrainerLost: a trainer is gone.
        """
        self.check(what)
        self._begun += 1
        try:
            return operation()
        except RuntimeError as error:
            self._explain(error, what)

    def wait(self, work: Work, what: str, device: torch.device) -> None:
        """Waits for an operation: on a GPU its stream does, and this returns at once.

        Raises:
            TrainerLost: a trainer is gone, so that the operation will never end.
        """
        began, said = time.monotonic(), False
        while True:
            try:
                if device.type == "cuda":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=_SLICE))
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._explain(error, what)
            waited = time.monotonic() - began
            event = self._event()
            if event is not None and (event.kind != "left" or waited > _GRACE):
                self._raise(event, what)
            if not said and waited > SAY_SECONDS:
                said = True
                self._say_for_whom(what)

    def check(self, what: str) -> None:
        """Raises if a trainer has been lost.

        Raises:
            TrainerLost, JobFailed: naming it.
        """
        event = self._event()
        if event is not None and event.kind != "left":
            self._raise(event, what)

    def close(self, failure: str = "") -> None:
        """Says good-bye, or what went wrong, and lets the groups go."""
        if self._closed:
            return
        self._closed = True
        event = self._event()
        lost = bool(failure) or (event is not None and event.kind != "left")
        if self._presence is not None:
            if failure:
                self._presence.tell("failed", failure)
            self._presence.close(f"after {self._begun} collective operations")
        groups, self._groups = self._groups, {}
        del self._store  # trainer 0's serves until nobody holds it
        for (_, device), group in groups.items():
            if device == "cuda":
                (group.abort if lost else group.shutdown)()
            elif lost:  # see [Note: no timeout on progress]
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    # ---- failures ----

    def _event(self) -> Event | None:
        """What is known to have become of another trainer."""
        return None if self._presence is None else self._presence.event()

    def _explain(self, error: RuntimeError, what: str) -> NoReturn:
        """Torch's error in words that name a trainer: a connection that broke is soon known to be
        somebody's end.
        """
        event = None if self._presence is None else self._presence.cause()
        if event is not None:
            self._raise(event, what)
        raise PServerError(
            f"{_named(self.rank, self.endpoints)}, {what}: {_first_line(error)}"
        ) from error

    def _raise(self, event: Event, what: str) -> NoReturn:
        if event.kind != "left" and self._presence is not None:
            # The job is over, and this process may go on: presence would end one that stays long in
            # one place after a loss.
            self._presence.close(
                f"after {self._begun} collective operations, because of trainer {event.rank}"
            )
        who = _named(event.rank, self.endpoints)
        said = {"lost": "is lost", "failed": "failed", "left": "has left the job"}[event.kind]
        here = f"{_named(self.rank, self.endpoints)} is in {what}, its operation {self._begun}"
        more = ": all trainers run the same number of steps" if event.kind == "left" else ""
        raise type(event.error())(f"{who} {said} ({event.text}), and {here}{more}")

    def _say_for_whom(self, what: str) -> None:
        """A line for the log; the trainers that wait note how far they are, so those that do not
        are behind.
        """
        try:
            self._store.set(f"{self.id}/at/{self.rank}", str(self._begun))
            others = [rank for rank in range(self.size) if rank != self.rank]
            at = {rank: f"{self.id}/at/{rank}" for rank in others}
            behind = [
                r
                for r in others
                if not self._store.check([at[r]]) or int(self._store.get(at[r])) < self._begun
            ]
        except RuntimeError:
            return
        names = ", ".join(_named(rank, self.endpoints) for rank in behind) or "the others"
        log.warning("trainer %d has waited long in %s, for %s", self.rank, what, names)


def _gloo(store: Store, rank: int, size: int, host: str, patience: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub leaves it out
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=patience)  # until all are connected
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_NEVER)
    return group


def _nccl(store: Store, rank: int, size: int, host: str, patience: float) -> Any:
    if not dist.is_nccl_available():
        raise ValueError("collective mode on GPUs: expected a torch with NCCL, got one without")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, rank, size, options)
