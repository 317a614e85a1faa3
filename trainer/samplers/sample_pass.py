"""One pass over data, as a trainer has it: ``Pass(source, dealer)``.

A *dealer* says which positions of the pass are this trainer's, batch by batch; a *source* makes the
items that they stand for.  So data that is read in a new way is one more source, and another way to
divide it is one more dealer.

[Note: sources and dealers]  ::

    source, and what a position is       dealer                  whose passes they are
    SampleLists: a sample of an order    FixedPart, LeasedPart   Shard, of a loader
    BatchLists: a batch of a sampler's   FixedPart, LeasedPart   likewise
    CountedReader: a batch of data that  FixedPart, LeasedPart   likewise, of any iterable
      is known by its number only
    FilePieces: a sample of a piece      LeasedPart, on demand   a dataset of the job: of files
    CountedFiles: a sample of the files  LeasedPart              likewise, whose samples are counted
    MemoryBatches: a trainer's batch     LeasedPart, by stripes  likewise: of samples in memory

A :class:`~trainer.samplers.part.FixedPart` is the stripe of the epoch that has this trainer's
number, from its beginning to its end, and needs no other process.  A
:class:`~trainer.samplers.leased_part.LeasedPart` has what server 0 leases to this trainer: on
demand, or of its stripe and of those of lost trainers, as the epoch says.

What they tell others, beside the :class:`~trainer.samplers.pass_log.LoggedPass` of a pass of either
kind::

    dealer       tells                            a checkpoint has    a resumed pass leaves out
    FixedPart    nothing                          the number of       so many batches of this
                                                  batches             trainer
    LeasedPart   its steps' commits: the          the lease table     what decided steps have; of a
                 positions of the batches that                        pass without leases before,
                 the script has got; server 0:                        ``Epoch.begun``
                 requests, ends, what is left

Three kinds of data have no positions, and no Pass: draws of a sampler without a known end that
leases do not deal out, which are divided as they are drawn (``part.py``); the files and the memory
of a dataset that leases do not deal out, which has what it has loaded; and the batches of trainers
that end together (``lockstep_batches.py``), which may be any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pserver.leases.epoch import Range


class Dealer(Protocol):
    """Deals out the positions of one pass to this trainer.

    Attributes:
        stripes: that determine the order of the positions, as in
            :class:`~pserver.leases.epoch.Lease`.
    """

    stripes: int

    def batches(self) -> Iterator[list[Range]]:
        """The positions of each of the next batches; of a piece of a file, all that are left."""

    def made(self, ranges: Sequence[Range]) -> None:
        """Notes that an item was made of these positions."""

    def end(self, segment: int, length: int) -> None:
        """Notes that data ends: so many positions of a segment exist."""


D = TypeVar("D", bound=Dealer)
D_contra = TypeVar("D_contra", bound=Dealer, contravariant=True)


class Source(Protocol[D_contra]):
    """Makes the items of a pass."""

    def items(self, dealer: D_contra) -> Iterator[tuple[Sequence[Range], Any]]:
        """The items of what the dealer deals out without a wait, each with its positions."""


class Pass(Generic[D]):
    """The items of one pass; a sampler of a DataLoader, too.

    Args:
        source: of the items.
        dealer: of the positions.

    Attributes:
        dealer: as given.
    """

    def __init__(self, source: Source[D], dealer: D) -> None:
        self._source, self.dealer = source, dealer

    def __len__(self) -> int:
        return len(self.dealer)  # type: ignore[arg-type]  # raises where there is no length

    def __iter__(self) -> Generator[Any]:
        """The items that need no wait."""
        for ranges, item in self._source.items(self.dealer):
            self.dealer.made(ranges)
            yield item


class NoSuchBatch(Exception):
    """Signals that there is no such batch.

    Args:
        length: the number of batches.
    """

    def __init__(self, length: int) -> None:
        super().__init__(f"{length} batches")
        self.length = length


class PositionItems(ABC):
    """A source that makes an item of any of its positions."""

    def items(self, dealer: Dealer) -> Iterator[tuple[Sequence[Range], Any]]:
        """See :class:`Source`."""
        for batch in dealer.batches():
            try:
                item = self.at(batch, dealer.stripes)
            except NoSuchBatch as end:
                dealer.end(0, end.length)
                continue
            yield batch, item

    @abstractmethod
    def at(self, batch: Sequence[Range], stripes: int) -> Any:
        """The batch of some positions.

        Args:
            stripes: that determine the order of positions, as in
                :class:`~pserver.leases.epoch.Lease`.

        Raises:
            NoSuchBatch: there are fewer items.
        """
