"""This trainer's leases: the samples of a pass that server 0 deals out to it.

See ``pserver/leases`` for the rules.  ``leased_part.py`` makes batches of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pserver.errors import PServerError
from pserver.leases.epoch import Epoch, Lease, Range
from pserver.leases.table import EpochEnd, LeaseAsked
from trainer.communicator.communicator import Communicator
from trainer.samplers.saves import Saves
from transpiler.files import bounded_json
from transpiler.plan.plan import Plan
from transpiler.strategy.strategy import DistributedStrategy

MOST = 64  # batches of a lease that is dealt on demand
ALL = 2**32 - 1  # of a stripe, which no other trainer may have


def stripes_of(plan: Plan, elastic: bool) -> int | None:
    """The number of stripes by which a job's samples are dealt out.

    Args:
        elastic: whether leases are used even where a lost trainer ends the job.

    Returns:
        0: on demand, where no trainer waits for another; the number of trainers where they step
        together; None: without leases.
    """
    together = bool(plan.averaged) or any(
        lane.kind.waits_for_all or lane.staleness is not None for lane in plan.lanes
    )
    if not together:
        return 0
    return plan.trainers if elastic or plan.outlives_trainers else None


class SampleLeases:
    """The leases of one trainer.

    Any thread may ask for leases, such as one that makes batches ahead; the rest is for the
    script's thread.

    Args:
        communicator: of the job.
        stripes: see :func:`stripes_of`.
        meanwhile: does what the others may wait for; called while this trainer waits for them.
        elastic: whether the script has asked for leases.
    """

    def __init__(
        self,
        communicator: Communicator,
        stripes: int,
        meanwhile: Callable[[], None],
        elastic: bool = False,
    ) -> None:
        self.communicator, self.stripes, self._meanwhile = communicator, stripes, meanwhile
        self.elastic = elastic
        self._asking = threading.Lock()  # guards what follows, and is held during a request
        self._asked = 0  # requests
        self._ended: list[EpochEnd] = []  # ends that were found, and not reported yet
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self, loader: Any, epoch: Epoch) -> None:
        """Begins a pass over a loader, and ends the previous pass over it.

        Args:
            loader: identifies passes over the same data.
        """
        before = self._last.get(loader)
        self._last[loader] = epoch.number
        if before is not None and before != epoch.number:
            self.skip(before)

    def counts(self, number: int) -> bool | None:
        """Whether the samples of an epoch were counted when it began; None: it has not begun, here
        or in the job that this one continues.
        """
        with self._asking:
            table = bounded_json.loads(self.communicator.clients[0].leases.state())
        for each in table["epochs"]:
            if each["epoch"]["number"] == number:
                return bool(each["epoch"]["samples"])
        return None

    def skip(self, number: int) -> None:
        """Skips the samples of an epoch that this trainer still holds: no step consumes them."""
        skipped = self.communicator.consumed.drop(number)
        self._ask(skipped=skipped, stopped=(number,))

    def lease(self, epoch: Epoch) -> Lease:
        """Asks for a lease of an epoch, without a wait, while some batches are not given yet."""
        return self._ask(epoch=epoch, most=self._most(epoch))

    def lease_ahead(self, epoch: Epoch) -> Future[Lease] | None:
        """Asks for the next lease in a thread; None where a trainer has its stripe already, or
        reads pieces of files, of which it asks for as many as it parses.
        """
        if epoch.stripes or epoch.in_pieces:
            return None
        future: Future[Lease] = Future()

        def ask() -> None:
            try:
                future.set_result(self.lease(epoch))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=ask, name="lease", daemon=True).start()
        return future

    def wait(self, epoch: Epoch) -> Lease:
        """Waits, with nothing left, until there is more or the epoch is over.

        Raises:
            PServerError: the job has failed.
        """
        if any(lane.kind.collects for lane in self.communicator.plan.lanes):
            self.communicator.drain()  # steps that wait for more of them
        while True:
            unstepped = self.communicator.consumed.waiting(epoch.number)
            with self.communicator.position.waiting():
                lease = self._ask(epoch=epoch, most=self._most(epoch), unstepped=unstepped)
            if lease.ranges or lease.over:
                return lease
            self.communicator.check()
            self.communicator.joint.attend()
            self.communicator.position.answer()
            self._meanwhile()

    def end(self, epoch: Epoch, segment: int, length: int) -> None:
        """Notes an end of the data; the next request reports it."""
        with self._asking:
            self._ended.append((epoch.number, segment, length))

    def hand_back(self, epoch: Epoch, ranges: Sequence[Range]) -> None:
        """Hands samples to other trainers: the script will take no more of an epoch."""
        with suppress(PServerError):  # the job has failed, and raises it elsewhere
            unused = tuple((epoch.number, start, stop) for start, stop in ranges)
            self._ask(unused=unused, stopped=(epoch.number,))

    def leave_out(self, epoch: Epoch, ranges: Sequence[Range]) -> None:
        """Leaves samples out: no batch will have them."""
        self._ask(skipped=tuple((epoch.number, start, stop) for start, stop in ranges))

    def _most(self, epoch: Epoch) -> int:
        return ALL if epoch.stripes else MOST

    def _ask(self, **asked: Any) -> Lease:
        with self._asking:
            self._asked += 1
            ended, self._ended = tuple(self._ended), []
            request = LeaseAsked(self._asked, ended=ended, **asked)
            return self.communicator.clients[0].leases.ask(request)


class JobSamples:
    """The leases of a job's samples.

    Attributes:
        restored: the result of :meth:`lease_state`, from the checkpoint from which the job
            continues; "": none.
    """

    def __init__(self) -> None:
        self.restored = ""
        self._leases: SampleLeases | None = None

    def leases(
        self,
        communicator: Communicator | None,
        first: DistributedStrategy | None,
        saves: Saves | None,
    ) -> SampleLeases | None:
        """This trainer's leases; None where each trainer has a fixed part, for instance before the
        job has a connection.

        Args:
            first: the strategy of ``fleet.init``, as it was there.
        """
        if communicator is None:
            return None
        if self._leases is None or self._leases.communicator is not communicator:
            elastic = first is not None and first.elastic
            stripes = stripes_of(communicator.plan, elastic)
            meanwhile = _nothing if saves is None else saves.waits
            if stripes is None:
                self._leases = None
            else:
                self._leases = SampleLeases(communicator, stripes, meanwhile, elastic)
            if self._leases is not None and self.restored:
                # each trainer sends it before its first request: the first one counts
                communicator.clients[0].leases.restore(self.restored)
        return self._leases

    def restore(self, kept: str) -> None:
        """Takes the result of :meth:`lease_state`, of a checkpoint from which the script continues
        by itself; has no effect after the first lease.
        """
        if self._leases is None:
            self.restored = kept

    def lease_state(self) -> str:
        """The lease table for a checkpoint; "" without leases."""
        if self._leases is None:
            return ""
        return self._leases.communicator.clients[0].leases.state()


def _nothing() -> None:
    """Does nothing, for a job without automatic checkpoints."""
