"""Process groups over some trainers of a job, and waits that name the trainer they wait for.

Nothing here is ``torch.distributed``'s default process group: a script's own stays as it is, and
one process may take part in several jobs.

[Note: no timeout on progress]  A trainer may evaluate for an hour while the others wait in a
collective operation, so operations have no timeout of their own; that a trainer is gone is found
by ``rendezvous.py``.  A gloo operation cannot be called off, and its group's destructor waits for
it: after a failure groups are never destroyed, so that nobody waits, and the process can end.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
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
from trainer.collective.rendezvous import Event, Peers, end_at_exit, first_line, never_destroy

# seconds between two looks at the membership; an operation that is done ends a wait at once
_SLICE = 0.25
# a trainer that left in good order may have finished an operation whose end is still on its way
# here
_GRACE = 2.0
_CONNECT = 60.0  # until all trainers of a group are connected
_NEVER = timedelta(days=7)  # see [Note: no timeout on progress]

log = logging.getLogger(__name__)


class ProcessGroups:
    """One trainer's process groups and its operations in them.  Not thread-safe, but for threads
    that use groups of their own.

    Args:
        peers: the trainers, after their rendezvous.
        meanwhile: called while this trainer waits; raises what should end the wait.

    Attributes:
        peers: the trainers, after their rendezvous; :meth:`close` lets them go.
        rank, size: this trainer, and how many there are.
    """

    def __init__(self, peers: Peers, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.peers = peers
        self._meanwhile = meanwhile
        self.rank, self.size = peers.rank, peers.size
        self._membership = peers.membership
        self._groups: dict[tuple[str, str], Any] = {}
        self._begun = 0
        self._closed = False

    def group(self, name: str, ranks: Sequence[int], device: torch.device) -> Any:
        """The process group of this name: a ``ProcessGroupGloo`` or, for a CUDA device, a
        ``ProcessGroupNCCL``.

        All of ``ranks`` ask for their groups in the same order; those that are not among them do
        not ask.

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
        """What ``make`` returns.  It does not return before all trainers are there, so a thread of
        its own calls it, and this one looks whether they still come.
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
        """Raises what should end a wait."""
        try:
            self._meanwhile()
        except PServerError as error:
            self._leave_membership(str(error))
            raise

    def _leave_membership(self, because: str) -> None:
        """The job is over, and this process may go on: the membership would end one that stays long
        in one place after a loss.
        """
        if self._membership is not None:
            self._membership.close(f"after {self._begun} collective operations, because {because}")

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

    def wait(self, work: Work, what: str, device: torch.device, seconds: float = math.inf) -> None:
        """Waits for an operation: on a GPU its stream does, and this returns at once.

        Raises:
            TimedOut: it has not ended after ``seconds``.
            TrainerLost: a trainer is gone, so that the operation will never end.
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
        """Raises what should end a wait: :meth:`check`, and what the caller's own look finds."""
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
        """Tells the other trainers that this one takes part in no further operation: one that waits
        for it ends with an error.  The groups stay, as others may be in the last one.
        """
        if self._membership is not None:
            self._membership.tell("left", f"after {self._begun} collective operations")

    def close(self, failure: str = "") -> None:
        """Leaves the other trainers, or tells them what went wrong, and lets the groups go."""
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

    def _event(self) -> Event | None:
        """What is known to have become of another trainer."""
        return None if self._membership is None else self._membership.event()

    def _explain(self, error: RuntimeError, what: str) -> NoReturn:
        """Torch's error in words that name a trainer: a connection that broke is soon known to be
        somebody's end.
        """
        event = None if self._membership is None else self._membership.cause()
        if event is not None:
            self._raise(event, what)
        raise PServerError(f"{self.peers.spell(self.rank)}, {what}: {first_line(error)}") from error

    def _raise(self, event: Event, what: str) -> NoReturn:
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
        """For whom this trainer waits.  Trainers that wait note how far they are, so those that do
        not are behind.
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
