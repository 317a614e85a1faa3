"""Promises about stripes and intervals: today's order, and every position once."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pserver.leases.epoch import Epoch, Intervals, Range, Stripes
from pserver.leases.table import LeaseAsked, LeaseTable
from trainer.samplers.part import FixedPart, Part
from trainer.samplers.sample_lists import SampleLists
from trainer.samplers.sample_pass import Pass


def joint_batches(samples: int, batch: int, part: Part, drop_last: bool) -> list[list[int]]:
    """One trainer's share of each joint batch, by slices of the order."""
    joint = batch * part.of
    ends = list(range(joint, samples + 1, joint))
    rest = samples - len(ends) * joint
    if rest and not drop_last:  # too few for every trainer to have one join the batch before
        ends = [*(ends if rest >= part.of else ends[:-1]), samples]
    begins = [0, *ends[:-1]]
    return [part.share(range(a, b)) for a, b in zip(begins, ends, strict=True)]


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


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 90), st.booleans(), st.integers(0, 3))
def test_fixed_parts_and_leases_have_the_order_of_joint_batches(
    trainers: int, batch: int, samples: int, drop_last: bool, after: int
) -> None:
    """Batch by batch on every trainer, so that a cluster's run stays equal to a single node's; of a
    resumed pass the rest.
    """
    assume(samples >= trainers * (batch if drop_last else 1))
    parts = [Part(trainer, trainers) for trainer in range(trainers)]
    expected = [joint_batches(samples, batch, part, drop_last) for part in parts]
    lists = SampleLists(Epoch(0, "", "0", samples, batch, 0, drop_last), range(samples))
    epoch = lists.epoch(trainers)
    fixed = [Pass(lists, FixedPart(epoch, part)) for part in parts]
    resumed = [list(Pass(lists, FixedPart(epoch, part, after))) for part in parts]

    assert [list(each) for each in fixed] == expected
    assert [len(each) for each in fixed] == list(map(len, expected))
    assert resumed == [each[after:] for each in expected]
    leased = leased_batches(samples, batch, trainers, drop_last)
    assert leased == [each for of_trainer in expected for each in of_trainer]


RANGES = st.tuples(st.integers(0, 15), st.integers(1, 4)).map(lambda it: (it[0], sum(it)))


class IntervalsAsSet(RuleBasedStateMachine):
    """Intervals say what a set says, after any adding, removing and taking."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals, self.numbers = Intervals(), set[int]()

    @rule(numbers=RANGES)
    def adds(self, numbers: Range) -> None:
        between = set(range(*numbers))
        if between & self.numbers:
            with pytest.raises(ValueError, match="is already present"):
                self.intervals.add(*numbers)
        else:
            self.intervals.add(*numbers)
            self.numbers |= between

    @rule(numbers=st.lists(st.integers(0, 18)))
    def adds_one_by_one(self, numbers: list[int]) -> None:
        for number in numbers:
            self.adds((number, number + 1))

    @rule(numbers=RANGES)
    def removes(self, numbers: Range) -> None:
        between = set(range(*numbers))
        if between <= self.numbers:
            self.intervals.remove(*numbers)
            self.numbers -= between
        else:
            with pytest.raises(ValueError, match="to be present"):
                self.intervals.remove(*numbers)

    @rule(numbers=RANGES)
    def discards(self, numbers: Range) -> None:
        self.intervals.discard(*numbers)
        self.numbers -= set(range(*numbers))

    @rule(count=st.integers(0, 9))
    def takes_the_first(self, count: int) -> None:
        taken = {n for a, b in self.intervals.pop(count) for n in range(a, b)}
        assert taken == set(sorted(self.numbers)[:count])
        self.numbers -= taken

    @rule(numbers=RANGES)
    def says_what_is_between(self, numbers: Range) -> None:
        between = set(range(*numbers))
        assert self.intervals.covers(*numbers) == (between <= self.numbers)
        assert self.intervals.overlaps(*numbers) == bool(between & self.numbers)

    @rule(nothing=st.sampled_from([(3, 3), (4, 3), (-1, 2)]))
    def refuses_what_is_no_range(self, nothing: Range) -> None:
        assert not self.intervals.covers(*nothing)
        with pytest.raises(ValueError, match="expected a range"):
            self.intervals.add(*nothing)

    @invariant()
    def is_the_set(self) -> None:
        found = list(self.intervals)
        assert [n for a, b in found for n in range(a, b)] == sorted(self.numbers)
        assert self.intervals.size == len(self.numbers)
        assert len(self.intervals) == len(found)  # neighbours have merged
        assert all(b < c for (_, b), (c, _) in zip(found, found[1:], strict=False))
        if found:
            assert self.intervals.first == found[0]


TestIntervals = IntervalsAsSet.TestCase
