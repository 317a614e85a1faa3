"""The part of one pass that leases deal out to this trainer.

A lease has the samples of many steps; a thread asks for the next one before the last one is used
up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pserver.errors import PServerError
from pserver.leases.epoch import WIDTH, Epoch, EpochSegments, Intervals, Lease, LeasedBatches, Range
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.sample_pass import Pass


class LeasedPart:
    """The dealer of leased positions: see :class:`trainer.samplers.sample_pass.Dealer`.

    Loaders and threads draw ahead of the script, so a batch counts as given when the script gets
    it.

    Args:
        leases: of this trainer.
        epoch: the pass.

    Attributes:
        stripes: see :class:`trainer.samplers.sample_pass.Dealer`.
        held: positions that are leased, and of which no item was made yet.
    """

    def __init__(self, leases: SampleLeases, epoch: Epoch) -> None:
        self._leases, self._epoch = leases, epoch
        self.stripes, self.held = epoch.stripes, Intervals()
        self._batches = LeasedBatches(epoch.batch_size)  # leased, not dealt out
        self._made: deque[Sequence[Range]] = deque()  # items that were made, and not given
        self._ahead: Future[Lease] | None = None  # a requested lease
        self._segments: EpochSegments | None = None  # of batches
        if epoch.segments and not epoch.in_pieces:
            self._segments = EpochSegments(epoch.segments, bool(epoch.stripes))
        self._over = False

    def more(self) -> bool:
        """Whether there is more; waits for it where this trainer has nothing left."""
        if not self._over and not self._take_ahead():
            self._take(self._leases.wait(self._epoch))
        return bool(self._batches)

    def batches(self) -> Iterator[list[Range]]:
        """See :class:`trainer.samplers.sample_pass.Dealer`."""
        while self._batches or self._take_ahead() or self._take(self._leases.lease(self._epoch)):
            yield self._batches.pop()

    def made(self, ranges: Sequence[Range]) -> None:
        """See :class:`trainer.samplers.sample_pass.Dealer`."""
        self._let_go(ranges)
        self._made.append(ranges)
        if self._ahead is None and len(self._batches) <= 1:
            self._ahead = self._leases.lease_ahead(self._epoch)

    def leave_out(self, ranges: Sequence[Range]) -> None:
        """Leaves positions out: no batch will have them."""
        self._let_go(ranges)
        self._leases.leave_out(self._epoch, ranges)

    def end(self, segment: int, length: int) -> None:
        """See :class:`trainer.samplers.sample_pass.Dealer`."""
        if self._segments is None:  # of a piece of a file
            begin = segment * WIDTH
            self.held.discard(begin + length, begin + WIDTH)
        elif not self._segments.known:
            for start, stop in self._segments.end(segment, length):
                self.held.discard(start, stop)
            self._batches.keep(self._segments.existing)
        self._leases.end(self._epoch, segment, length)

    def give(self) -> None:
        """Counts the next item that was made as given: the script gets it."""
        number = self._epoch.number
        self._leases.communicator.consumed.give((number, a, b) for a, b in self._made.popleft())

    def close(self) -> None:
        """Hands back the rest: the script takes no more."""
        with suppress(PServerError):  # the job has failed, and raises it elsewhere
            self._take_ahead()
        if not self._over:
            self._over = True
            left = [each for ranges in self._made for each in ranges]
            self._leases.hand_back(self._epoch, [*left, *self.held])

    def _take_ahead(self) -> bool:
        """Takes the requested lease; returns whether it has batches."""
        ahead, self._ahead = self._ahead, None
        return ahead is not None and self._take(ahead.result())

    def _take(self, lease: Lease) -> bool:
        """Takes a lease; returns whether there are batches."""
        self._over = self._over or lease.over
        if lease.ranges:
            self.stripes = lease.stripes
        self._batches.add(lease)
        ranges: Sequence[Range] = lease.ranges
        if self._segments is not None:
            self._batches.keep(self._segments.existing)
            ranges = self._segments.existing(ranges)
        for start, stop in ranges:
            self.held.add(start, stop)
        return bool(self._batches)

    def _let_go(self, ranges: Sequence[Range]) -> None:
        for start, stop in ranges:
            self.held.remove(start, stop)


def leased_batches(
    mine: Pass[LeasedPart], loaded: Callable[[Generator[Any]], Iterator[Any]]
) -> Generator[Any]:
    """The batches of a pass, as they are leased.  The first ones are drawn at once.

    Args:
        loaded: makes the script's batches from drawn items.
    """
    dealer = mine.dealer

    def drawn() -> Iterator[Any]:
        return loaded(iter(mine)) if dealer.more() else iter(())

    def given(batches: Iterator[Any]) -> Generator[Any]:
        try:
            while True:
                for batch in batches:
                    dealer.give()
                    yield batch
                if not dealer.more():
                    return
                batches = loaded(iter(mine))
        finally:
            if isinstance(batches, Generator):
                batches.close()  # threads that draw end before the pass does
            dealer.close()

    return given(drawn())
