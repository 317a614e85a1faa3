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


def joint_batches(
    order: Sequence[int], batch_size: int, part: Part, drop_last: bool
) -> list[tuple[int, int]]:
    """The bounds of each joint batch in the order.

    Raises:
        ValueError: there are fewer samples than trainers, or ``drop_last`` leaves none.
    """
    samples = len(order)
    part.expect(samples, "sample")
    joint = batch_size * part.of
    full, rest = divmod(samples, joint)
    if drop_last and not full:
        raise ValueError(
            f"fleet.shard: expected at least {joint} samples, a full batch of {batch_size} for "
            f"each of {part.of} trainers, got {samples} with drop_last=True, which leaves no "
            "batch: lower batch_size, or set drop_last=False"
        )
    bounds = [(index * joint, (index + 1) * joint) for index in range(full)]
    if rest >= part.of and not drop_last:
        bounds.append((full * joint, samples))
    # too few for every trainer to have one: they join the batch before
    elif rest and not drop_last:
        bounds[-1] = (bounds[-1][0], samples)
    return bounds


class JointBatches:
    """A batch sampler: one trainer's part of each joint batch.

    See [Note: equal numbers of batches].

    Args:
        order: of the samples in this pass, the same on every trainer.
        batch_size: of one trainer.
        part: this trainer's.
        drop_last: leaves out a last joint batch that is not full.

    Raises:
        ValueError: there are fewer samples than trainers, or ``drop_last`` leaves none.
    """

    def __init__(self, order: Sequence[int], batch_size: int, part: Part, drop_last: bool) -> None:
        self._order, self._part = order, part
        self._bounds = joint_batches(order, batch_size, part, drop_last)

    def __len__(self) -> int:
        return len(self._bounds)

    def __iter__(self) -> Iterator[list[int]]:
        for begin, end in self._bounds:
            yield self._part.share(self._order[begin:end])


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
