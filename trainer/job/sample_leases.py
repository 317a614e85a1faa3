"""This trainer's leases: which samples of a pass it trains on, as server 0 deals them out.

See ``pserver/leases`` for the rules.  A lease has the samples of many steps; the next one is asked
for, by a thread, before the last one is used up.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pserver.errors import PServerError
from pserver.leases.epoch import Epoch, Lease
from pserver.leases.intervals import Range
from pserver.leases.lease_table import EpochRange, LeaseAsked
from pserver.leases.stripes import Stripes
from trainer.communicator.communicator import Communicator
from trainer.job.saves import Saves
from transpiler.plan.plan import Plan
from transpiler.strategy.strategy import DistributedStrategy

MOST = 64  # batches of a lease that is dealt on demand
ALL = 2**32 - 1  # of a stripe: nobody else may have them


def stripes_of(plan: Plan, elastic: bool) -> int | None:
    """How a job's samples are dealt out.

    Returns:
        0: on demand, where no trainer waits for another; the number of trainers where they step
        together; None: as in a job without leases.
    """
    together = bool(plan.averaged) or any(
        lane.kind.waits_for_all or lane.staleness is not None for lane in plan.lanes
    )
    if not together:
        return 0
    return plan.trainers if elastic else None


class SampleLeases:
    """The leases of one trainer.  The script's thread uses it.

    Args:
        communicator: of the job.
        stripes: as :func:`stripes_of` says.
        meanwhile: called while it waits for others: what they may wait for.
    """

    def __init__(
        self, communicator: Communicator, stripes: int, meanwhile: Callable[[], None]
    ) -> None:
        self.communicator, self.stripes, self._meanwhile = communicator, stripes, meanwhile
        self._asked = 0  # requests
        self._ahead: Future[Lease] | None = None  # a request under way
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self, loader: Any, epoch: Epoch) -> None:
        """A pass over a loader begins; of the last one over it nothing is taken any more."""
        before = self._last.get(loader)
        self._last[loader] = epoch.number
        if before is not None and before != epoch.number:
            skipped = self.communicator.consumed.drop(before)
            self._ask(skipped=skipped, stopped=(before,))

    def lease(self, epoch: Epoch) -> Lease:
        """What is to be had now, of an epoch of which some batches are not given yet."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead.result()
        return self._ask(epoch=epoch, most=self._most)

    def lease_ahead(self, epoch: Epoch) -> None:
        """Asks for the next lease, which :meth:`lease` gives."""
        if self._ahead is not None or self.stripes:
            return
        future: Future[Lease] = Future()
        asked = self._next(epoch=epoch, most=self._most)

        def ask() -> None:
            try:
                future.set_result(self.communicator.clients[0].leases.ask(asked))
            except BaseException as error:
                future.set_exception(error)

        self._ahead = future
        threading.Thread(target=ask, name="lease", daemon=True).start()

    def wait(self, epoch: Epoch) -> Lease:
        """Waits, with nothing left, until there is more or the epoch is over.

        Raises:
            PServerError: the job has failed.
        """
        if any(lane.kind.collects for lane in self.communicator.plan.lanes):
            self.communicator.drain()  # steps that wait for more of them
        while True:
            unstepped = self.communicator.consumed.waiting
            lease = self._ask(epoch=epoch, most=self._most, unstepped=unstepped)
            if lease.ranges or lease.over:
                return lease
            self.communicator.check()
            if not self.stripes:  # otherwise all have equally many steps
                self._meanwhile()

    def hand_back(self, epoch: Epoch, ranges: Sequence[Range]) -> None:
        """The script will take no more of an epoch: others get these, and what is under way."""
        with suppress(PServerError):  # the job has failed, and says so elsewhere
            ahead, self._ahead = self._ahead, None
            late = () if ahead is None else ahead.result().ranges
            unused = tuple((epoch.number, start, stop) for start, stop in (*ranges, *late))
            self._ask(unused=unused, stopped=(epoch.number,))

    @property
    def _most(self) -> int:
        return ALL if self.stripes else MOST

    def _next(self, **asked: Any) -> LeaseAsked:
        self._asked += 1
        return LeaseAsked(self._asked, **asked)

    def _ask(self, **asked: Any) -> Lease:
        assert self._ahead is None, "one request at a time"
        return self.communicator.clients[0].leases.ask(self._next(**asked))


class JobSamples:
    """How the samples of a job are dealt out to its trainers.

    Attributes:
        restored: what :meth:`kept` gave, from the checkpoint from which the job goes on; "": none.
    """

    def __init__(self) -> None:
        self.restored = ""
        self._leases: SampleLeases | None = None

    def leases(
        self,
        communicator: Communicator | None,
        strategy: DistributedStrategy | None,
        saves: Saves | None,
    ) -> SampleLeases | None:
        """This trainer's leases; None where each trainer has a part that is fixed, as long as the
        job has no connection, for instance.
        """
        if communicator is None:
            return None
        if self._leases is None or self._leases.communicator is not communicator:
            elastic = strategy is not None and strategy.elastic
            stripes = stripes_of(communicator.plan, elastic)
            meanwhile = _nothing if saves is None else saves.waits
            if stripes is None:
                self._leases = None
            else:
                self._leases = SampleLeases(communicator, stripes, meanwhile)
            if self._leases is not None and self.restored:
                # each trainer says it, before it asks: the first one counts
                communicator.clients[0].leases.restore(self.restored)
        return self._leases

    def kept(self) -> str:
        """What a checkpoint is to keep; "" where nothing is dealt out."""
        if self._leases is None:
            return ""
        return self._leases.communicator.clients[0].leases.kept()


def _nothing() -> None:
    """A job that does not save by itself."""


class LeasedPass:
    """One pass, as this trainer has it: batches of samples, drawn lease by lease.

    Loaders draw ahead of the script, so a batch counts as given when the script gets it.

    Args:
        leases: of this trainer.
        epoch: the pass.
        order: its permutation.
    """

    def __init__(self, leases: SampleLeases, epoch: Epoch, order: Sequence[Any]) -> None:
        self._leases, self._epoch, self._order = leases, epoch, order
        self._batches: deque[list[Range]] = deque()  # leased, not drawn
        self._drawn: deque[list[Range]] = deque()  # by the loader, not given
        self._stripes = Stripes(epoch.samples, epoch.batch_size, 1, epoch.drop_last)
        self._over = False

    def more(self) -> bool:
        """Whether there is more; waits for it where this trainer has nothing left."""
        if not self._over:
            self._take(self._leases.wait(self._epoch))
        return bool(self._batches)

    def draw(self) -> Iterator[list[Any]]:
        """A batch sampler: what can be had without waiting."""
        while self._batches or self._take(self._leases.lease(self._epoch)):
            batch = self._batches.popleft()
            self._drawn.append(batch)
            if len(self._batches) <= 1:
                self._leases.lease_ahead(self._epoch)
            places = (place for a, b in batch for place in self._stripes.places(a, b))
            yield [sample for a, b in places for sample in self._order[a:b]]

    def give(self) -> None:
        """The script gets the next batch that was drawn."""
        number = self._epoch.number
        consumed: list[EpochRange] = [(number, a, b) for a, b in self._drawn.popleft()]
        self._leases.communicator.consumed.give(consumed)

    def close(self) -> None:
        """The script takes no more."""
        if not self._over:
            left = [each for batch in (*self._drawn, *self._batches) for each in batch]
            self._over = True
            self._leases.hand_back(self._epoch, left)

    def _take(self, lease: Lease) -> bool:
        """Whether the lease has batches."""
        self._over = self._over or lease.over
        if lease.ranges:
            epoch = self._epoch
            stripes = max(1, lease.stripes)
            self._stripes = Stripes(epoch.samples, epoch.batch_size, stripes, epoch.drop_last)
            self._batches += lease.cut(epoch.batch_size)
        return bool(lease.ranges)
