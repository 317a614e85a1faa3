"""Promises about stripes and intervals: today's order, and every position once."""

from __future__ import annotations

import random

import pytest

from pserver.leases.epoch import Epoch, Intervals, Stripes
from pserver.leases.table import LeaseAsked, LeaseTable
from trainer.samplers.part import JointBatches, Part


def leased_batches(samples: int, batch: int, trainers: int, drop_last: bool) -> list[list[int]]:
    """Of each trainer, one after the other: the places of its batches in the permutation."""
    table, found = LeaseTable(trainers), []
    epoch = Epoch(0, "", "0", samples, batch, trainers, drop_last)
    for trainer in range(trainers):
        table.join(trainer, "a")
        lease = table.lease(trainer, "a", LeaseAsked(1, epoch, 2**30, 0))
        places = Stripes(samples, batch, lease.stripes, drop_last).places
        for each in lease.cut(batch):
            found.append([p for a, b in each for x, y in places(a, b) for p in range(x, y)])
    return found


@pytest.mark.parametrize("seed", range(300))
def test_a_job_that_loses_nobody_has_the_order_of_joint_batches(seed: int) -> None:
    """Batch by batch on every trainer, so that a cluster's run stays equal to a single node's."""
    draw = random.Random(seed)
    trainers, batch = draw.randint(1, 5), draw.randint(1, 6)
    samples, drop_last = draw.randint(trainers, 90), draw.random() < 0.3
    if drop_last and samples < trainers * batch:
        drop_last = False
    order = range(samples)

    expected = [
        each
        for trainer in range(trainers)
        for each in JointBatches(order, batch, Part(trainer, trainers), drop_last)
    ]

    assert leased_batches(samples, batch, trainers, drop_last) == expected


def test_intervals_are_a_set() -> None:
    """They say what a set says, after any adding, removing and taking."""
    draw = random.Random(0)
    intervals, numbers = Intervals(), set[int]()
    for _ in range(3000):
        start = draw.randint(0, 60)
        stop = start + draw.randint(1, 9)
        between = set(range(start, stop))
        assert intervals.covers(start, stop) == (between <= numbers)
        if draw.random() < 0.1:
            count = draw.randint(0, 9)
            taken = {n for a, b in intervals.pop(count) for n in range(a, b)}
            assert taken == set(sorted(numbers)[:count])
            numbers -= taken
        elif draw.random() < 0.5 and not between & numbers:
            intervals.add(start, stop)
            numbers |= between
        elif between & numbers and not between <= numbers:
            with pytest.raises(ValueError, match="to be present"):
                intervals.remove(start, stop)
            with pytest.raises(ValueError, match="is already present"):
                intervals.add(start, stop)
        elif between <= numbers:
            intervals.remove(start, stop)
            numbers -= between

        found = list(intervals)
        assert {n for a, b in found for n in range(a, b)} == numbers
        assert intervals.size == len(numbers)
        assert all(b < c for (_, b), (c, _) in zip(found, found[1:], strict=False))
