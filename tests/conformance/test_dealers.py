"""The promises of a dealer of samples: in every pass each sample goes to one trainer, all have as
many batches, and the order is drawn alike on all; or it is refused.

A way in which a script may choose its samples is one more of tests/support/samplers.py.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

from pserver.leases.epoch import Epoch
from tests.support.samplers import (
    COUNT,
    IN_ORDER,
    REFUSED,
    SHUFFLED,
    Make,
    Numbers,
    Stream,
    by_random,
    by_torch,
    listed,
)
from trainer.samplers.file_order import FileOrder
from trainer.samplers.passes import Passes
from trainer.samplers.shard import shard

Dealt = list[list[list[int]]]  # of a pass: by trainer, its batches
KINDS = SHUFFLED | IN_ORDER
TRAINERS = (2, 3)


def deal(make: Make, trainers: int, count: int = 2, after: int = 0) -> list[Dealt]:
    """The batches of each trainer in each of ``count`` passes, ``after`` some that were before.

    The trainers' processes have drawn different random numbers.
    """
    said: dict[str, str] = {}
    mine: list[Iterable[Any]] = []
    for number in range(trainers):
        begun = Passes(number, said.setdefault)
        begun.count = after
        mine.append(shard(make(number), trainers, number, passes=begun))
    found = []
    for _ in range(count):
        dealt = []
        for number, batches in enumerate(mine):
            torch.manual_seed(number), random.seed(number), np.random.seed(number)
            dealt.append([torch.as_tensor(batch).reshape(-1).tolist() for batch in batches])
        found.append(dealt)
    return found


def samples(dealt: Dealt) -> list[int]:
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(dealt)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_goes_to_one_trainer(kind: str) -> None:
    """In every pass, and all have as many batches; a shuffled one has an order of its own."""
    for trainers in TRAINERS:
        found = deal(KINDS[kind], trainers)

        for dealt in found:
            assert sorted(samples(dealt)) == list(range(COUNT))
            assert len({len(batches) for batches in dealt}) == 1
            assert all(batch for batches in dealt for batch in batches)
        assert (found[0] != found[1]) == (kind in SHUFFLED)


class Counted(Numbers):
    """So many samples: sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


@given(
    count=st.integers(1, 70),
    size=st.integers(1, 6),
    trainers=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@example(count=61, size=4, trainers=3, shuffle=False, drop_last=False)
@example(count=7, size=4, trainers=2, shuffle=True, drop_last=True)
def test_parts_are_equal(
    count: int, size: int, trainers: int, shuffle: bool, drop_last: bool
) -> None:
    """By one sample at most; with ``drop_last`` all batches are full, and only the last joint batch
    is left out.  Less than that for each is an error.
    """

    def parts() -> Dealt:
        loader = DataLoader(Counted(count), size, shuffle=shuffle, drop_last=drop_last)
        mine = [shard(loader, trainers, number, 5) for number in range(trainers)]
        return [[torch.as_tensor(batch).tolist() for batch in batches] for batches in mine]

    least = trainers * size if drop_last else trainers
    if count < least:
        with pytest.raises(ValueError, match=f"at least .*got {count}"):
            parts()
        return
    found = parts()
    lengths = [len(samples([batches])) for batches in found]

    assert len(set(samples(found))) == sum(lengths) and set(samples(found)) <= set(range(count))
    assert len({len(batches) for batches in found}) == 1
    if drop_last:
        assert lengths == [count // least * size] * trainers
        assert all(len(batch) == size for batches in found for batch in batches)
    else:
        assert sum(lengths) == count and max(lengths) - min(lengths) <= 1
        assert all(batch for batches in found for batch in batches)


@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.sampled_from((0, 1, 4, 11))), max_size=9),
    stripes=st.integers(1, 4),
    size=st.integers(1, 5),
    steps=st.lists(st.integers(1, 9), min_size=1),
)
def test_each_sample_of_files_has_one_position(
    counts: list[tuple[int, int]], stripes: int, size: int, steps: list[int]
) -> None:
    """Whatever the files are, in equal shares; positions in any ranges are the same samples."""
    pieces = [*sorted(counts), (6, 4)]
    files, lengths = [file for file, _ in pieces], [length for _, length in pieces]
    made = Epoch(0, "", "", sum(lengths), size, stripes, False)
    order = FileOrder(made, files, lengths, stripes)

    def at(start: int, stop: int) -> list[tuple[int, int]]:
        spans = list(order.spans(start, stop))
        assert all(span.place < span.end <= len(order.pieces) for span in spans)
        return [(order.pieces[s.place], n) for s in spans for n in range(s.first, s.stop)]

    shares = [at(*made.divided().of(trainer)) for trainer in range(stripes)]
    every = list(itertools.chain.from_iterable(shares))
    ends = [*itertools.takewhile(len(every).__gt__, itertools.accumulate(itertools.cycle(steps)))]
    ranges = list(itertools.pairwise([0, *ends, len(every)]))

    assert sorted(every) == [(piece, n) for piece, c in enumerate(lengths) for n in range(c)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [sample for start, stop in ranges for sample in at(start, stop)] == every


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_dealt_out_is_refused(kind: str) -> None:
    """The message says what to write instead."""
    make, words = REFUSED[kind]

    for trainers in TRAINERS:
        with pytest.raises(ValueError, match="^fleet.shard") as raised:
            deal(make, trainers)
        assert words in str(raised.value)


@pytest.mark.parametrize("kind", [kind for kind in SHUFFLED if "numpy's generator" not in kind])
def test_a_restart_does_not_repeat_the_first_order(kind: str) -> None:
    """After passes that a checkpoint counts, the orders are those that an uninterrupted job has."""
    make = SHUFFLED[kind]
    whole = deal(make, 2, 4)

    assert deal(make, 2, 2, after=2) == whole[2:]
    assert whole[0] not in whole[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_scripts_own_random_numbers_stay(kind: str) -> None:
    """What the script draws after a pass is what it would have drawn without it, from random and
    numpy; torch's DataLoader draws its workers' seed from torch's.
    """
    mine = shard(KINDS[kind](0), 2, 0)
    random.seed(3), np.random.seed(3)
    list(mine)

    drawn = random.random(), np.random.random()
    random.seed(3), np.random.seed(3)
    assert drawn == (random.random(), np.random.random())


def test_samples_with_weights_are_dealt_out_as_they_are_drawn() -> None:
    """A sampler that repeats samples decides which; each draw goes to one trainer."""

    def make(number: int) -> DataLoader[int]:
        return DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([0.0, 1.0] * 12, 20))

    (first,) = deal(make, 2, 1)
    torch.manual_seed(0)

    assert sorted(samples(first)) == sorted(WeightedRandomSampler([0.0, 1.0] * 12, 20))


def test_a_distributed_sampler_divides_nothing_twice() -> None:
    """Alone, too: it gives all samples, in the order of its seed and epoch."""
    sampler = DistributedSampler(Numbers(), 2, 0, seed=5)
    sampler.set_epoch(3)
    found = [
        int(sample)
        for batch in shard(DataLoader(Numbers(), 4, sampler=sampler), 1, 0)
        for sample in batch
    ]
    whole = DistributedSampler(Numbers(), 1, 0, seed=5)
    whole.set_epoch(3)

    assert found == list(whole)


def test_a_break_begins_another_pass_on_every_trainer() -> None:
    """A pass that a trainer leaves early counts as one."""
    said: dict[str, str] = {}
    both = [
        shard(SHUFFLED["shuffle"](n), 2, n, passes=Passes(n, said.setdefault)) for n in range(2)
    ]
    for _ in both[0]:
        break
    list(both[1])
    found = [[batch.tolist() for batch in part] for part in both]

    assert sorted(samples(found)) == list(range(COUNT))


def test_several_loaders_share_one_count() -> None:
    """Train and validation data in turn, each divided; a loader made anew in every epoch too."""
    said: dict[str, str] = {}
    passes = [Passes(number, said.setdefault) for number in range(2)]
    found = []
    for _ in range(2):
        for make in (SHUFFLED["shuffle"], IN_ORDER["no shuffle"]):
            epoch = [
                [batch.tolist() for batch in shard(make(n), 2, n, passes=passes[n])]
                for n in range(2)
            ]
            assert sorted(samples(epoch)) == list(range(COUNT))
            found.append(epoch)

    assert found[0] != found[2] and found[1] == found[3]
    with pytest.raises(ValueError, match="pass 5: expected trainer 0's 24 draws"):
        list(shard(SHUFFLED["shuffle"](0), 2, 0, passes=passes[0]))  # trainer 0 alone
        for n in range(2):
            list(shard(SHUFFLED["shuffle"](n), 2, n, passes=passes[n]))
            list(shard(IN_ORDER["no shuffle"](n), 2, n, passes=passes[n]))


@pytest.mark.parametrize(("trainers", "lost"), [(2, 0), (4, 2)])
def test_batches_that_are_left_out_are_counted(
    trainers: int, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Six batches of unknown contents cannot be divided among four trainers."""
    with caplog.at_level(logging.WARNING):
        (found,) = deal(lambda n: DataLoader(Stream(by_random), batch_size=4), trainers, 1)

    assert len(set(samples(found))) == COUNT - 4 * lost
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (trainers if lost else 0)
    assert all("left out the last 2 of pass 0" in words for words in said)


@pytest.mark.parametrize("kind", ["a list", "a loader", "a batch_sampler", "batch_size=None"])
def test_fewer_than_trainers_are_an_error(kind: str) -> None:
    """Nobody trains on nothing, and exits as if all were well."""
    makes: dict[str, Make] = {
        "a list": lambda n: list(listed(lambda: range(COUNT), 16)),
        "a loader": lambda n: DataLoader([1, 2], 2),  # type: ignore[arg-type]
        "a batch_sampler": lambda n: DataLoader([1, 2], batch_sampler=[[0], [1]]),  # type: ignore
        "batch_size=None": lambda n: DataLoader([1, 2], batch_size=None),  # type: ignore[arg-type]
    }

    with pytest.raises(ValueError, match="expected at least one .* of 3 trainers, got 2"):
        deal(makes[kind], 3)


def test_the_length_is_that_of_the_coming_pass() -> None:
    """len() draws no pass of its own."""
    passes = Passes()
    part = shard(SHUFFLED["a batch_sampler by random"](0), 3, 0, passes=passes)

    assert len(part) == len(list(part)) and passes.count == 1  # type: ignore[arg-type]
    assert len(shard([1, 2, 3, 4, 5], 2, 0)) == 2  # type: ignore[arg-type]


@pytest.mark.processes
def test_workers_of_an_iterable_data_set_draw_alike() -> None:
    """Worker processes get their seeds from the pass."""
    (found,) = deal(
        lambda n: DataLoader(Stream(by_torch_in_order), batch_size=4, num_workers=1), 2, 1
    )

    assert sorted(samples(found)) == list(range(COUNT))


def by_torch_in_order() -> list[int]:
    """Drawn in a worker process."""
    return by_torch()
