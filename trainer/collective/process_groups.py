"""Process groups over some trainers of a job, and waits that name the trainer they wait for.

None of them is the default process group of ``torch.distributed``: a script's own stays as it is,
and one process may be in several jobs.

[Note: no timeout on progress]  A trainer may evaluate for an hour while the others wait in a
collective operation, so operations have no timeout of their own; ``rendezvous.py`` finds lost
trainers.  A gloo operation cannot be cancelled, and its group's destructor waits for it: after a
failure groups are never destroyed, so that the process can end.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from pserver.errors import PServerError, TimedOut
from pserver.polling import poll
from trainer.collective.rendezvous import Peers, TrainerEnd, end_at_exit, first_line, never_destroy

# seconds between two checks of the membership; a completed operation ends a wait at once
_SLICE = 0.25
# seconds: a trainer that left in good order may have completed an operation that is still under way
# here
_GRACE = 2.0
_CONNECT = 60.0  # until all trainers of a group are connected
_NEVER = timedelta(days=7)  # see [Note: no timeout on progress]

log = logging.getLogger(__name__)


class ProcessGroups:
    """One trainer's process groups and its operations in them.  Not thread-safe, except for threads
    that use groups of their own.

    Args:
        peers: the trainers, after their rendezvous.
        meanwhile: called while this trainer waits; an exception that it raises ends the wait.

    Attributes:
        peers: the trainers, after their rendezvous; :meth:`close` releases them.
        rank, size: this trainer's rank, and the number of trainers.
    """

    def __init__(self, peers: Peers, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.peers = peers
        self._meanwhile = meanwhile
        self.rank, self.size = peers.rank, peers.size
        self._membership = peers.membership
        self._groups: dict[tuple[str, str], Any] = {}
        self._begun = 0
        self._closed = False

    def split(
        self, name: str, parts: Sequence[Collection[int]], device: torch.device
    ) -> dist.ProcessGroup | None:
        """The process group of the part that this trainer is in; None if it is in none.

        See :meth:`trainer.collective.all_reduce.Group.split`.
        """
        own = next((part for part in parts if self.rank in part), None)
        return None if own is None else self.group(name, [*own], device)

    def group(self, name: str, ranks: Sequence[int], device: torch.device) -> Any:
        """The process group of this name: a ``ProcessGroupGloo`` or, for a CUDA device, a
        ``ProcessGroupNCCL``.

        All of ``ranks`` ask for their groups in the same order; other trainers do not ask.

        Raises:
            PServerError: the group does not come up.
        """
        key, peers = (name, device.type), self.peers
        if key not in self._groups:
            store = PrefixStore(f"{peers.id}/{device.type}/{name}/{min(ranks)}", peers.store)
            place, connect = sorted(ranks).index(self.rank), min(peers.timeout_seconds, _CONNECT)
            make = _nccl if device.type == "cuda" else _gloo
            try:
                arguments = store, place, len(ranks), peers.host, connect
                self._groups[key] = self._watched(partial(make, *arguments), device)
            except RuntimeError as error:
                trainers = ", ".join(map(str, sorted(ranks)))
                self._explain(error, f"coming up of {name} over trainers {trainers}")
        return self._groups[key]

    def _watched(self, make: Callable[[], Any], device: torch.device) -> Any:
        """Makes a group, and watches the trainers meanwhile.  ``make`` returns only when all
        trainers are connected, so a separate thread calls it, and this thread looks for lost
        trainers.
        """
        if device.type == "cuda":  # where nothing is connected before the first operation
            return make()
        made: Future[Any] = Future()

        def call() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=call, name="comes up", daemon=True).start()
        try:
            while not wait_for([made], _SLICE).done:
                self.look("coming up")
        except BaseException:
            end_at_exit(made, _CONNECT)
            raise
        return made.result()

    def _check_meanwhile(self) -> None:
        """Raises an error that ends a wait."""
        try:
            self._meanwhile()
        except PServerError as error:
            self._leave_membership(str(error))
            raise

    def _leave_membership(self, because: str) -> None:
        """Leaves the membership: the job is over, and this process may continue.  The membership
        would end a process that stays long in one place after a loss.
        """
        if self._membership is not None:
            self._membership.close(f"after {self._begun} collective operations, because {because}")

    def begin(self, operation: Callable[[], Work], what: str) -> Work:
        """Starts an operation of a group; ``what`` names it in messages.

        Raises:
            TrainerLost: a trainer is lost.
        """
        self.check(what)
        self._begun += 1
        try:
            return operation()
        except RuntimeError as error:
            self._explain(error, what)

    def wait(self, work: Work, what: str, device: torch.device, seconds: float = math.inf) -> None:
        """Waits for an operation; on a GPU its stream waits, and this returns at once.

        Raises:
            TimedOut: it has not ended after ``seconds``.
            TrainerLost: a trainer is lost or has left, so the operation will never end.
        """
        for waited in poll(log, lambda: self._waiting(what), seconds):
            try:
                if device.type == "cuda":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=_SLICE))
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._explain(error, what)
            self._check_meanwhile()
            event = self._event()
            if event is not None and (event.kind != "left" or waited > _GRACE):
                self._raise(event, what)
        raise TimedOut(f"{self._waiting(what)}: {seconds:g} s; all trainers take the same steps")

    def look(self, what: str) -> None:
        """Raises an error that ends a wait: that of :meth:`check`, or of the caller's
        ``meanwhile``.
        """
        self._check_meanwhile()
        self.check(what)

    def check(self, what: str) -> None:
        """Raises if a trainer has been lost.

        Raises:
            TrainerLost, JobFailed: naming it.
        """
        event = self._event()
        if event is not None and event.kind != "left":
            self._raise(event, what)

    def finish(self) -> None:
        """Tells the other trainers that this one begins no further operation: a trainer that waits
        for one ends with an error.  The groups stay, as others may be in the last operation.
        """
        if self._membership is not None:
            self._membership.announce("left", f"after {self._begun} collective operations")

    def close(self, failure: str = "") -> None:
        """Leaves the other trainers, or tells them of the failure, and releases the groups."""
        if self._closed:
            return
        self._closed = True
        event = self._event()
        lost = bool(failure) or (event is not None and event.kind != "left")
        self.peers.close(f"after {self._begun} collective operations", failure)
        groups, self._groups = self._groups, {}
        for (_, device), group in groups.items():
            if device == "cuda":
                (group.abort if lost else group.shutdown)()
            elif lost:  # see [Note: no timeout on progress]
                never_destroy(group)

    # ---- failures ----

    def _event(self) -> TrainerEnd | None:
        """The end of another trainer, if one is known."""
        return None if self._membership is None else self._membership.event()

    def _explain(self, error: RuntimeError, what: str) -> NoReturn:
        """Raises torch's error anew, with the name of a trainer: the reason for a broken
        connection, the end of a trainer, is soon known.
        """
        event = None if self._membership is None else self._membership.cause()
        if event is not None:
            self._raise(event, what)
        raise PServerError(f"{self.peers.spell(self.rank)}, {what}: {first_line(error)}") from error

    def _raise(self, event: TrainerEnd, what: str) -> NoReturn:
        if event.kind != "left":
            self._leave_membership(f"trainer {event.rank} is gone")
        who, own = self.peers.spell(event.rank), self.peers.spell(self.rank)
        said = {"lost": "is lost", "failed": "failed", "left": "has left the job"}[event.kind]
        more = ": all trainers run the same number of steps" if event.kind == "left" else ""
        raise type(event.error())(
            f"{who} {said} ({event.text}), and {own} is in {what}, its operation "
            f"{self._begun}{more}"
        )

    def _waiting(self, what: str) -> str:
        """A message with the trainers that this one waits for.  Waiting trainers note their number
        of operations, so the others are behind.
        """
        store, names = self.peers.store, ""
        at = {rank: f"{self.peers.id}/at/{rank}" for rank in range(self.size)}
        try:
            store.set(at.pop(self.rank), str(self._begun))
            behind = [
                rank
                for rank, key in at.items()
                if not store.check([key]) or int(store.get(key)) < self._begun
            ]
            names = self.peers.spell(*behind)
        except RuntimeError:  # trainer 0 has gone, and the store with it
            pass
        return f"trainer {self.rank} has waited long in {what}, for {names or 'the others'}"


def _gloo(store: Store, rank: int, size: int, host: str, connect: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub leaves it out
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=connect)
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_NEVER)
    return group


def _nccl(store: Store, rank: int, size: int, host: str, connect: float) -> Any:
    if not dist.is_nccl_available():
        raise ValueError("collective mode on GPUs: expected a torch with NCCL, got one without")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, rank, size, options)
