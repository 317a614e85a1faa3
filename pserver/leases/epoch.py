"""What an epoch is, what a trainer gets of it, and what has become of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pserver.leases.intervals import Range
from pserver.leases.segments import WIDTH
from pserver.leases.stripes import Stripes

UNITS = ("samples", "batches")
MOST_EPOCHS = 2**32  # of a job
MOST_SAMPLES = 2**40
MOST_RUNS = 2**20  # stripes, or pieces of files: each takes memory
MOST_NUMBER = 2**64 - 1  # that travels


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over a data set, the same on every trainer.

    Attributes:
        number: among the passes of the job.
        loader: which data it is over.
        seed: of its permutation, in words.
        samples: of the data set; 0: nobody knows, and there are ``segments``.
        batch_size: of one trainer, in positions.
        stripes: 0: leases are dealt on demand; otherwise how many trainers step together.
        drop_last: the last samples that fill no batch are left out.
        unit: what a position is: one of ``UNITS``.
        whole: two positions cannot be put together into one batch.
        positions: how many there are with these stripes; 0: as many as samples.
        segments: runs of positions of unknown lengths; 0: the number of samples is known.
        begun: the first positions of each stripe (or of all, where leases are dealt on demand) that
            are in steps already: those of a checkpoint that knows no leases.
        uneven: trainers do not step together, and have stripes all the same, of what each has in
            memory: what a lost one leaves may be divided unevenly.
    """

    number: int
    loader: str
    seed: str
    samples: int
    batch_size: int
    stripes: int = 0
    drop_last: bool = False
    unit: str = "samples"
    whole: bool = False
    positions: int = 0
    segments: int = 0
    begun: int = 0
    uneven: bool = False

    def check(self) -> None:
        """Returns if there can be such an epoch.

        Raises:
            ValueError: a number, or the unit, is none that a trainer has.
        """
        if self.unit not in UNITS:
            raise ValueError(
                f"epoch {self.number}, unit: expected one of {', '.join(UNITS)}, got {self.unit!r}"
            )
        unknown = bool(self.segments) and not self.samples
        # where trainers step together, each has a segment of its own
        runs = (self.stripes, self.stripes) if self.stripes else (1, MOST_RUNS)
        bounds = {
            "number": (0, MOST_EPOCHS - 1),
            "batch_size": (1, MOST_NUMBER),
            "stripes": (0, MOST_RUNS),
            "samples": (0, 0) if unknown else (1, MOST_SAMPLES),
            "segments": runs if unknown else (0, 0),
            # a last batch is divided among the stripes
            "positions": (0, self.samples * max(1, self.stripes)),
            # of another job, whose data may have been longer: only what has no known end has room
            "begun": (0, WIDTH - 2 if unknown else MOST_NUMBER),
        }
        for name, (least, most) in bounds.items():
            if not least <= (given := getattr(self, name)) <= most:
                raise ValueError(
                    f"epoch {self.number}, {name}: expected {least} to {most}, got {given}"
                )

    def divided(self) -> Stripes:
        """How it is divided.

        Raises:
            ValueError: there are too few samples.
        """
        samples, drop_last = self.positions or self.samples, self.drop_last or self.whole
        return Stripes(samples, self.batch_size, self.stripes or 1, drop_last)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions of an epoch for one trainer to train on.

    Attributes:
        ranges: in order; none: there is nothing now.
        batches: in how many batches; the last one has what is left, the others ``batch_size``.
        over: there will be nothing more.
        left: batches that nobody has leased.
        stripes: of the epoch, in the order of which the positions are.
    """

    ranges: tuple[Range, ...] = ()
    batches: int = 0
    over: bool = False
    left: int = 0
    stripes: int = 0

    def cut(self, batch_size: int) -> list[list[Range]]:
        """Its batches, each as ranges of positions."""
        left = LeasedBatches(batch_size)
        left.add(self)
        return [left.pop() for _ in range(self.batches)]


class LeasedBatches:
    """Batches of leases, in order, that were not taken yet.

    Args:
        batch_size: in positions.
    """

    def __init__(self, batch_size: int) -> None:
        self._size = batch_size
        self._leases: deque[tuple[deque[Range], int]] = deque()  # ranges, in how many batches

    def __len__(self) -> int:
        return sum(batches for _, batches in self._leases)

    def add(self, lease: Lease) -> None:
        """One lease more."""
        if lease.ranges:
            self._leases.append((deque(lease.ranges), lease.batches))

    def pop(self) -> list[Range]:
        """The next batch, as ranges of positions; the last one of a lease has what is left.

        Raises:
            IndexError: there is none.
        """
        ranges, batches = self._leases.popleft()
        batch: list[Range] = []
        wanted = self._size if batches > 1 else sum(stop - start for start, stop in ranges)
        while wanted:
            start, stop = ranges.popleft()
            count = min(wanted, stop - start)
            batch.append((start, start + count))
            wanted -= count
            if start + count < stop:
                ranges.appendleft((start + count, stop))
        if batches > 1:
            self._leases.appendleft((ranges, batches - 1))
        return batch

    @property
    def ranges(self) -> list[Range]:
        """All that is left."""
        return [each for ranges, _ in self._leases for each in ranges]

    def keep(self, existing: Callable[[Iterable[Range]], list[Range]]) -> None:
        """Leaves out positions that do not exist, where each is a batch."""
        kept = [existing(ranges) for ranges, _ in self._leases]
        self._leases = deque(
            (deque(ranges), sum(stop - start for start, stop in ranges))
            for ranges in kept
            if ranges
        )


@dataclass(frozen=True, slots=True)
class Account:
    """What has become of an epoch's samples.

    Attributes:
        samples: of the data set; 0: nobody has met its end yet.
        decided: in decided steps.
        skipped: handed out and never stepped on, or left by scripts that broke off.
        left_out: by ``drop_last``, or too few for each of the trainers to have one.
        over: the rest, if any, is in steps that are not decided.
        leased: to trainers, and in no decided step yet; without what has no known end.
        handed_back: of leases, to be dealt out again: by lost trainers, or by scripts that broke
            off.  A position counts each time.
        unit: what is counted: one of ``UNITS``.
    """

    samples: int
    decided: int
    skipped: int
    left_out: int
    over: bool
    leased: int = 0
    handed_back: int = 0
    unit: str = "samples"
