"""Every trainer's part of the data: a partition, as many batches for each, the same in every
process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.support.fork_server import finished
from trainer import fleet
from trainer.samplers.shard import shard


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def parts(loader: Any, trainers: int, seed: int | None = None) -> list[list[list[int]]]:
    """For each trainer, its batches of one epoch.

    Each has a loader of its own, as each has in its own process.
    """
    loaders = [loader() for _ in range(trainers)]
    return [
        [torch.as_tensor(batch).tolist() for batch in shard(each, trainers, number, seed)]
        for number, each in enumerate(loaders)
    ]


def samples(of_a_trainer: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(of_a_trainer))


def test_without_shuffling_the_joint_batches_are_the_data_sets_own_order() -> None:
    """Step n of the job sees what step n of a single node with the joint batch size sees."""
    first, second = parts(lambda: DataLoader(Numbers(16), 4), 2)

    assert first == [[0, 1, 2, 3], [8, 9, 10, 11]] and second == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_a_loader_that_shuffles_is_reshuffled_at_every_iteration() -> None:
    """Another order in each epoch; each of them again a partition between the trainers."""
    mine = [shard(DataLoader(Numbers(40), 5, shuffle=True), 2, number) for number in range(2)]
    epochs = [[samples([b.tolist() for b in part]) for part in mine] for _ in range(3)]

    for first, second in epochs:
        assert sorted(first + second) == list(range(40))
    assert len({tuple(first) for first, _ in epochs}) == 3


def test_the_seed_decides_the_order() -> None:
    """The same seed, the same order; another seed, another; with a seed a loader that does not
    shuffle is shuffled.
    """

    def loader() -> DataLoader[int]:
        return DataLoader(Numbers(40), 5)

    assert parts(loader, 2, seed=1) == parts(loader, 2, seed=1)
    assert parts(loader, 2, seed=1) != parts(loader, 2, seed=2)
    assert parts(loader, 2) == parts(loader, 2)


def test_torchs_own_random_state_has_no_part_in_it() -> None:
    """Trainers that seeded torch differently, or drew different numbers, still split alike; and
    nothing is drawn.
    """
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(parts(lambda: DataLoader(Numbers(30), 5, shuffle=True), 2, seed=3))
        assert torch.initial_seed() == seed

    assert found[0] == found[1]


@pytest.mark.processes
def test_every_process_splits_alike() -> None:
    """No salted hash, no clock: a fresh process with another hash seed than this one's prints the
    same split.
    """
    code = (
        "import torch; from torch.utils.data import DataLoader, TensorDataset\n"
        "from trainer.samplers.shard import shard\n"
        "loader = DataLoader(TensorDataset(torch.arange(50)), 4, shuffle=True)\n"
        "mine = shard(loader, 3, 1)\n"
        "print([[b.tolist() for b, in mine] for _ in range(2)])"
    )
    done = finished(["-c", code], {**os.environ, "PYTHONHASHSEED": "1"})
    loader = DataLoader(TensorDataset(torch.arange(50)), 4, shuffle=True)
    mine = shard(loader, 3, 1)
    here = str([[batch.tolist() for (batch,) in mine] for _ in range(2)])

    assert done.stdout.strip() == here, done


SAMPLERS = {
    "some": lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6, 5]),
    "weighted": lambda: WeightedRandomSampler([0.0, 1.0] * 20, 24),
    "with replacement": lambda: RandomSampler(Numbers(40), replacement=True, num_samples=24),
    "fewer": lambda: RandomSampler(Numbers(40), num_samples=24),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_of_the_scripts_own_decides_which_samples_there_are(kind: str) -> None:
    """It is not replaced by another order: drawn alike on every trainer, anew in every epoch."""
    mine = []
    for number in range(2):
        torch.manual_seed(number)  # what trainers drew before has no part in it
        mine.append(shard(DataLoader(Numbers(40), 4, sampler=SAMPLERS[kind]()), 2, number))
    epochs = [[[b.tolist() for b in part] for part in mine] for _ in range(2)]
    joint = [
        list(itertools.chain(*(a + b for a, b in zip(*parts, strict=True)))) for parts in epochs
    ]

    for epoch, found in enumerate(joint):
        with torch.random.fork_rng():
            torch.manual_seed(epoch)
            assert found == list(SAMPLERS[kind]())
    assert joint[0] != joint[1]


def test_an_iterable_data_set_is_dealt_out_batch_by_batch() -> None:
    """Trainer i gets batch i of each round; a last round that is not full is left out, so that all
    have as many.
    """
    found = parts(lambda: DataLoader(Stream(22), 2), 2)

    assert found == [
        [[0, 1], [4, 5], [8, 9], [12, 13], [16, 17]],
        [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]],
    ]


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("given", [None, 5, Numbers])
def test_what_is_no_iterable_is_refused(given: Any, trainers: int) -> None:
    """Also where one trainer has all data, and gets the loader as it is."""
    with pytest.raises(TypeError, match="expected a DataLoader or another iterable of batches"):
        shard(given, trainers, 0)


def test_any_iterable_of_batches_will_do() -> None:
    """A list, or a generator, without torch's DataLoader."""
    batches = [torch.full((2,), number) for number in range(7)]

    assert [int(batch[0]) for batch in shard(batches, 3, 2)] == [2, 5]
    assert [int(batch[0]) for batch in shard((batch for batch in batches), 3, 0)] == [0, 3]
    with pytest.raises(ValueError, match="at least one batch for each of 8 trainers, got 7"):
        list(shard(batches, 8, 0))


def test_a_loader_without_batches_of_its_own_is_dealt_out_sample_by_sample() -> None:
    """batch_size=None: what the loader yields is what is dealt out."""
    found = parts(lambda: DataLoader(Numbers(6), batch_size=None), 2)  # type: ignore[arg-type]

    assert found == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.processes
def test_worker_processes_change_nothing() -> None:
    """num_workers, collate_fn and worker_init_fn go along.  In a process of its own: workers are
    forks, and this one has threads of other tests.
    """
    code = "from tests.trainer.job.test_data_shard import compare_workers as c; print(c())"
    done = finished(["-c", code])
    assert done.stdout == "[True, True]\n", done.stderr


def compare_workers() -> list[bool]:
    """Whether both kinds of data give with worker processes what they give without."""
    same = []
    for data, workers in ((Numbers, 2), (Stream, 1)):
        plain, forked = (
            parts(partial(DataLoader, data(24), 4, collate_fn=_tenfold, num_workers=count), 2)
            for count in (0, workers)
        )
        same.append(plain == forked)
    return same


def _tenfold(values: list[int]) -> torch.Tensor:
    return torch.tensor(values) * 10


def test_one_trainer_gets_the_loader_itself() -> None:
    """Alone, nothing about the data changes: its order is the loader's, drawn from torch's own
    state as ever.
    """
    loader = DataLoader(Numbers(10), 3, shuffle=True)
    fleet.init()
    try:
        assert fleet.shard(loader) is loader
    finally:
        fleet.finish()
