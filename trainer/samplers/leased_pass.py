"""One pass over data that leases deal out: the items of positions, batch by batch.

A lease has the samples of many steps; a thread asks for the next one before the last one is used
up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from pserver.errors import PServerError
from pserver.leases.epoch import Epoch, EpochSegments, Lease, LeasedBatches, Range, Stripes
from pserver.leases.table import EpochRange
from trainer.samplers.counted_reader import NoSuchBatch
from trainer.samplers.part import Part, dealt
from trainer.samplers.sample_leases import SampleLeases


class PassItems(Protocol):
    """The items that the positions of an epoch stand for."""

    def at(self, batch: Sequence[Range], stripes: int) -> Any:
        """The batch of some positions.

        Args:
            stripes: that determine the order of positions, as in :class:`Lease`.

        Raises:
            NoSuchBatch: there are fewer items.
        """


class SampleLists:
    """Positions are samples; a batch is a list of them.

    Args:
        epoch: the pass.
        order: its permutation.
    """

    def __init__(self, epoch: Epoch, order: Sequence[Any]) -> None:
        self._epoch, self._order = epoch, order
        self._divided: dict[int, Stripes] = {}

    def at(self, batch: Sequence[Range], stripes: int) -> list[Any]:
        """See :class:`PassItems`."""
        divided = self._divided.get(stripes)
        if divided is None:
            epoch, of = self._epoch, max(1, stripes)
            divided = Stripes(epoch.samples, epoch.batch_size, of, epoch.drop_last)
            self._divided[stripes] = divided
        places = (place for a, b in batch for place in divided.places(a, b))
        return [sample for a, b in places for sample in self._order[a:b]]


class BatchLists:
    """Positions are batches that the script's sampler has made, lists of samples.

    Trainers that step together have them in the order of jobs without leases: the last ones, fewer
    than trainers, are divided sample by sample.

    Args:
        batches: all of the pass.
        whole: whether each is the item of one step, of any type, which is never divided.
    """

    def __init__(self, batches: Sequence[Any], whole: bool = False) -> None:
        self._batches, self._whole = batches, whole
        self._divided: dict[int, list[Any]] = {}

    def count(self, stripes: int) -> int:
        """The number of positions."""
        return len(self._of(stripes))

    def at(self, batch: Sequence[Range], stripes: int) -> Any:
        """See :class:`PassItems`."""
        mine = self._of(stripes)
        divided = Stripes(len(mine), 1, max(1, stripes), self._whole)
        places = (place for a, b in batch for place in divided.places(a, b))
        found = [mine[place] for a, b in places for place in range(a, b)]
        return found[0] if len(found) == 1 else [sample for each in found for sample in each]

    def _of(self, stripes: int) -> Sequence[Any]:
        if self._whole or stripes <= 1:
            return self._batches
        if stripes not in self._divided:
            parts = [dealt(self._batches, Part(each, stripes)) for each in range(stripes)]
            self._divided[stripes] = [batch for row in zip(*parts, strict=True) for batch in row]
        return self._divided[stripes]


class LeasedPass:
    """This trainer's batches of one pass, drawn lease by lease.

    Loaders draw ahead of the script, so a batch counts as given when the script gets it.

    Args:
        leases: of this trainer.
        epoch: the pass.
        items: that its positions stand for.
    """

    def __init__(self, leases: SampleLeases, epoch: Epoch, items: PassItems) -> None:
        self._leases, self._epoch, self._items = leases, epoch, items
        self._batches = LeasedBatches(epoch.batch_size)  # leased, not drawn
        self._drawn: deque[list[Range]] = deque()  # by the loader, not given
        self._ahead: Future[Lease] | None = None  # a requested lease
        self._segments = (
            EpochSegments(epoch.segments, bool(epoch.stripes)) if epoch.segments else None
        )
        self._stripes = epoch.stripes  # those in whose order positions are
        self._over = False

    def more(self) -> bool:
        """Whether there is more; waits for it where this trainer has nothing left."""
        if not self._over and not self._take_ahead():
            self._take(self._leases.wait(self._epoch))
        return bool(self._batches)

    def draw(self) -> Iterator[Any]:
        """The items of the batches that need no wait."""
        while self._batches or self._take_ahead() or self._take(self._leases.lease(self._epoch)):
            batch = self._batches.pop()
            try:
                item = self._items.at(batch, self._stripes)
            except NoSuchBatch as end:
                self._end(end.length)
                continue
            self._drawn.append(batch)
            if self._ahead is None and len(self._batches) <= 1:
                self._ahead = self._leases.lease_ahead(self._epoch)
            yield item

    def give(self) -> None:
        """Counts the next drawn batch as given: the script gets it."""
        number = self._epoch.number
        consumed: list[EpochRange] = [(number, a, b) for a, b in self._drawn.popleft()]
        self._leases.communicator.consumed.give(consumed)

    def close(self) -> None:
        """Hands back the rest: the script takes no more."""
        with suppress(PServerError):  # the job has failed, and raises it elsewhere
            self._take_ahead()
        if not self._over:
            left = [each for batch in self._drawn for each in batch] + self._batches.ranges
            self._over = True
            self._leases.hand_back(self._epoch, left)

    def _end(self, length: int) -> None:
        """Notes the end of the data, after ``length`` batches."""
        segments = self._segments
        assert segments is not None, "where the number of samples is known there are so many"
        if not segments.known:
            for _ in segments.end(0, length):
                pass
            self._leases.end(self._epoch, 0, length)
        self._batches.keep(segments.existing)

    def _take_ahead(self) -> bool:
        """Takes the requested lease; returns whether it has batches."""
        ahead, self._ahead = self._ahead, None
        return ahead is not None and self._take(ahead.result())

    def _take(self, lease: Lease) -> bool:
        """Takes a lease; returns whether it has batches."""
        self._over = self._over or lease.over
        if lease.ranges:
            self._stripes = lease.stripes
        self._batches.add(lease)
        if self._segments is not None:
            self._batches.keep(self._segments.existing)
        return bool(self._batches)


class Leased(Protocol):
    """A pass for :func:`leased_batches`; see :class:`LeasedPass`."""

    def more(self) -> bool:
        """Whether there is more; waits for it where this trainer has nothing left."""

    def draw(self) -> Iterator[Any]:
        """The items of the positions that need no wait."""

    def give(self) -> None:
        """Counts the next drawn batch as given: the script gets it."""

    def close(self) -> None:
        """Hands back the rest: the script takes no more."""


def leased_batches(
    mine: Leased, loaded: Callable[[Iterator[Any]], Iterator[Any]]
) -> Generator[Any]:
    """The batches of a pass, as they are leased.  The first ones are drawn at once.

    Args:
        loaded: makes the script's batches from drawn items.
    """

    def drawn() -> Iterator[Any]:
        return loaded(mine.draw()) if mine.more() else iter(())

    def given(batches: Iterator[Any]) -> Generator[Any]:
        try:
            while True:
                for batch in batches:
                    mine.give()
                    yield batch
                if not mine.more():
                    return
                batches = loaded(mine.draw())
        finally:
            if isinstance(batches, Generator):
                batches.close()  # threads that draw end before the pass does
            mine.close()

    return given(drawn())
