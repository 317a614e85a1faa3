"""One trainer's part of an order of samples or batches: no sample is in two parts, none is lost,
and all trainers have equally many batches.

[Note: equal numbers of batches]  A sync step needs every trainer.  If one had a batch less than the
others, its next step would meet their last one, and a barrier at the end of an epoch would wait
forever.  So the data set is cut into joint batches of ``trainers * batch_size`` samples, each
trainer takes its part of each, and the last, smaller one is divided evenly.  The batches of a batch
sampler are dealt out one by one, and the remaining ones are divided, too.  Batches of unknown
content (of an iterable data set, a list, a generator) cannot be divided: where the last ones are
fewer than the trainers they are left out, and a warning counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pserver.leases.epoch import WIDTH, Epoch, Lease, LeasedBatches, Range

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One trainer's part, among several equal ones."""

    index: int
    of: int

    def share(self, samples: Sequence[Any]) -> list[Any]:
        """This part of some samples; the first parts have one more where they do not divide."""
        each, more = divmod(len(samples), self.of)
        first = self.index * each + min(self.index, more)
        return list(samples[first : first + each + (self.index < more)])

    def expect(self, count: int, what: str) -> None:
        """Checks that there is at least one for each trainer.

        Raises:
            ValueError: there are fewer.
        """
        if count < self.of:
            raise ValueError(
                f"fleet.shard: expected at least one {what} for each of {self.of} trainers, got "
                f"{count}: make smaller batches, or iterate without fleet.shard over data that "
                "every trainer is to see whole"
            )


# ---- division ----


def expect_joint_batch(samples: int, batch_size: int, part: Part, drop_last: bool) -> None:
    """Checks that every trainer has a batch of this size, or, without ``drop_last``, a sample.

    Raises:
        ValueError: there are fewer samples.
    """
    part.expect(samples, "sample")
    joint = batch_size * part.of
    if drop_last and samples < joint:
        raise ValueError(
            f"fleet.shard: expected at least {joint} samples, a full batch of {batch_size} for "
            f"each of {part.of} trainers, got {samples} with drop_last=True, which leaves no "
            "batch: lower batch_size, or set drop_last=False"
        )


class FixedPart:
    """The dealer of one trainer's stripe of an epoch, from its beginning to its end: see
    :class:`trainer.samplers.sample_pass.Dealer`, and [Note: equal numbers of batches].

    Args:
        epoch: the pass; it has as many stripes as there are parts.
        part: this trainer's.
        after: batches that a resumed pass leaves out.

    Attributes:
        stripes: see :class:`trainer.samplers.sample_pass.Dealer`.
    """

    def __init__(self, epoch: Epoch, part: Part, after: int = 0) -> None:
        self._epoch, self._part, self._after = epoch, part, after
        self.stripes = epoch.stripes
        self._divided = None if epoch.segments else epoch.divided()  # None: the end is not known
        self._over = False

    def __len__(self) -> int:
        if self._divided is None:
            raise TypeError(f"pass {self._epoch.number} has no length")
        return self._divided.batches(self._part.index)

    def batches(self) -> Iterator[list[Range]]:
        """See :class:`trainer.samplers.sample_pass.Dealer`."""
        index = self._part.index
        if self._divided is None:
            position = index * WIDTH + self._after
            while not self._over:
                yield [(position, position + 1)]
                position += 1
            return
        if self._epoch.whole:
            warn_left_out(self._divided.left_out, self._part, self._epoch.number)
        mine = LeasedBatches(self._epoch.batch_size)
        mine.add(Lease((self._divided.of(index),), len(self)))
        for number in range(len(self)):
            batch = mine.pop()
            if number >= self._after:
                yield batch

    def made(self, ranges: Sequence[Range]) -> None:
        """Does nothing: the script counts its batches."""

    def end(self, segment: int, length: int) -> None:
        """Ends the part: there are so many batches, of all trainers."""
        self._over = True
        warn_left_out(length % self._part.of, self._part, self._epoch.number)


def joint_batches_by_and_by(
    windows: Iterator[list[Any]], batch_size: int, part: Part, drop_last: bool
) -> Iterator[list[Any]]:
    """One trainer's part of joint batches where the order has no known length: each joint batch is
    held until the next window has arrived.
    """
    held: list[Any] = []
    for window in windows:
        if len(window) == batch_size * part.of or (len(window) >= part.of and not drop_last):
            if held:
                yield part.share(held)
            held = window
        elif not drop_last:  # too few for every trainer to have one
            held = held + window
    part.expect(len(held), "sample")
    yield part.share(held)


def dealt(batches: Sequence[Sequence[Any]], part: Part) -> list[list[Any]]:
    """A batch sampler's batches: batch ``part.index`` of each ``part.of`` consecutive ones, and a
    share of the remaining ones.

    Raises:
        ValueError: there are fewer samples than trainers.
    """
    full = len(batches) // part.of * part.of
    mine = [list(batch) for batch in batches[part.index : full : part.of]]
    rest: list[Any] = []
    for batch in batches[full:]:
        rest += batch
        if len(rest) >= part.of:
            mine.append(part.share(rest))
            rest = []
    if not mine:
        part.expect(len(rest), "sample")
    if rest and part.index < len(rest):  # fewer than trainers: they join the last batch
        mine[-1].append(rest[part.index])
    return mine


def dealt_by_and_by(windows: Iterator[list[Any]], part: Part) -> Iterator[list[Any]]:
    """A batch sampler's batches where they have no known end: they arrive ``part.of`` at a time,
    and each full group is held until the next one has arrived.
    """
    held: list[Any] = []
    for window in windows:
        if held and len(window) == part.of:
            yield list(held[part.index])
            held = window
        else:
            held = held + window
    yield from dealt(held, part)


def singles(order: Iterable[Any], part: Part, number: int) -> Iterator[Any]:
    """Draw ``part.index`` of each ``part.of`` consecutive ones; each draw is a step of its own.

    A last group that is not full is left out.
    """
    draws, count = iter(order), 0
    while len(group := list(islice(draws, part.of))) == part.of:
        yield group[part.index]
        count += 1
    if not count:
        part.expect(len(group), "sample")
    warn_left_out(len(group), part, number)


def warn_left_out(count: int, part: Part, number: int) -> None:
    """Warns of the last batches, or samples, of a pass that no trainer gets, unless it is 0."""
    if count:
        log.warning(
            "fleet.shard left out the last %d of pass %d: too few for each of %d trainers to have "
            "one",
            count,
            number,
            part.of,
        )
