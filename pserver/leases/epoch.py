"""What an epoch is, what a trainer gets of it, and what has become of it."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from pserver.leases.intervals import Range
from pserver.leases.stripes import Stripes


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over a data set, the same on every trainer.

    Attributes:
        number: among the passes of the job.
        loader: which data it is over.
        seed: of its permutation, in words.
        samples: of the data set.
        batch_size: of one trainer.
        stripes: 0: leases are dealt on demand; otherwise how many trainers step together.
        drop_last: the last samples that fill no batch are left out.
    """

    number: int
    loader: str
    seed: str
    samples: int
    batch_size: int
    stripes: int = 0
    drop_last: bool = False

    def divided(self) -> Stripes:
        """How it is divided.

        Raises:
            ValueError: there are too few samples.
        """
        return Stripes(self.samples, self.batch_size, self.stripes or 1, self.drop_last)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


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
        batches: list[list[Range]] = []
        ranges = deque(self.ranges)
        for number in range(self.batches):
            last = number == self.batches - 1
            wanted = sum(stop - start for start, stop in ranges) if last else batch_size
            batches.append([])
            while wanted:
                start, stop = ranges.popleft()
                count = min(wanted, stop - start)
                batches[-1].append((start, start + count))
                wanted -= count
                if start + count < stop:
                    ranges.appendleft((start + count, stop))
        return batches


@dataclass(frozen=True, slots=True)
class Account:
    """What has become of an epoch's samples.

    Attributes:
        samples: of the data set.
        decided: in decided steps.
        skipped: handed out and never stepped on, or left by scripts that broke off.
        left_out: by ``drop_last``, or too few for each of the trainers to have one.
        over: the rest, if any, is in steps that are not decided.
    """

    samples: int
    decided: int
    skipped: int
    left_out: int
    over: bool
