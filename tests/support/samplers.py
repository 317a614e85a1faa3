"""Loaders over the numbers 0 to 23, one for each way in which a script may choose samples.

Each is made by a function of the trainer's number: what differs between processes differs by it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)

COUNT = 24
Make = Callable[[int], Iterable[Any]]


class Numbers(Dataset[int]):
    """Sample i is the number i; a list of indices gives a tensor."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index) if isinstance(index, list) else index


class Drawn(Sampler[int]):
    """A sampler of the script's own: what ``permute`` gives, anew in every pass."""

    def __init__(self, permute: Callable[[], Sequence[int]]) -> None:
        self.permute = permute

    def __iter__(self) -> Iterator[int]:
        return iter(self.permute())

    def __len__(self) -> int:
        return COUNT


class Endless(Drawn):
    """The same, which says no length."""

    __len__ = None  # type: ignore[assignment]


class Batches(Sampler[list[int]]):
    """A batch sampler of the script's own."""

    def __init__(self, permute: Callable[[], Sequence[int]], size: int = 4) -> None:
        self.permute, self.size = permute, size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.permute())
        for begin in range(0, COUNT, self.size):
            yield order[begin : begin + self.size]

    def __len__(self) -> int:
        return -(-COUNT // self.size)


class EndlessBatches(Batches):
    """The same, which says no length."""

    __len__ = None  # type: ignore[assignment]


class Epochs(Drawn):
    """A sampler that is told its epoch."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__(lambda: np.random.default_rng(self.epoch).permutation(COUNT).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset[int]):
    """Samples without a length; worker processes divide them."""

    def __init__(self, permute: Callable[[], Sequence[int]]) -> None:
        self.permute = permute

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(self.permute()[info.id :: info.num_workers] if info else self.permute())


class RepeatedAugmentation(DistributedSampler[int]):
    """A sampler of one rank's part that is not torch's own."""


def by_torch() -> list[int]:
    return torch.randperm(COUNT).tolist()


def by_random() -> list[int]:
    return random.sample(range(COUNT), COUNT)


def by_numpy() -> list[int]:
    return np.random.permutation(COUNT).tolist()


def by(generator: np.random.Generator) -> Callable[[], list[int]]:
    """A generator of the sampler's own, which goes on from pass to pass."""
    return lambda: generator.permutation(COUNT).tolist()


def by_the_system() -> list[int]:
    return sorted(range(COUNT), key=lambda _: os.urandom(8))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def listed(permute: Callable[[], Sequence[int]], size: int = 4) -> Iterator[torch.Tensor]:
    """A generator of batches, without a DataLoader."""
    order = list(permute())
    for begin in range(0, COUNT, size):
        yield torch.tensor(order[begin : begin + size])


def _loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), **arguments)


def _ranked(trainer: int) -> DistributedSampler[Any]:
    return DistributedSampler(Numbers(), 2, trainer % 2, shuffle=True, drop_last=True)


# every sample once, in an order that every pass draws anew
SHUFFLED: dict[str, Make] = {
    "shuffle": lambda n: _loader(batch_size=4, shuffle=True),
    "shuffle with a generator": lambda n: _loader(batch_size=4, shuffle=True, generator=seeded(7)),
    "RandomSampler": lambda n: _loader(batch_size=4, sampler=RandomSampler(Numbers())),
    "SubsetRandomSampler": lambda n: _loader(
        batch_size=4, sampler=SubsetRandomSampler(range(COUNT))
    ),
    "SubsetRandomSampler with a generator": lambda n: _loader(
        batch_size=4, sampler=SubsetRandomSampler(range(COUNT), generator=seeded(7))
    ),
    "a sampler by torch": lambda n: _loader(batch_size=4, sampler=Drawn(by_torch)),
    "a sampler by random": lambda n: _loader(batch_size=4, sampler=Drawn(by_random)),
    "a sampler by numpy": lambda n: _loader(batch_size=4, sampler=Drawn(by_numpy)),
    "a sampler without a length": lambda n: _loader(batch_size=4, sampler=Endless(by_random)),
    "numpy's generator, seeded": lambda n: _loader(
        batch_size=4,
        sampler=Drawn(by(np.random.default_rng(3))),
    ),
    "BatchSampler": lambda n: _loader(
        batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, False)
    ),
    "a batch_sampler by torch": lambda n: _loader(batch_sampler=Batches(by_torch)),
    "a batch_sampler by random": lambda n: _loader(batch_sampler=Batches(by_random, 5)),
    "a batch_sampler by numpy": lambda n: _loader(batch_sampler=Batches(by_numpy, 7)),
    "a batch_sampler without a length": lambda n: _loader(
        batch_sampler=EndlessBatches(by_torch, 5)
    ),
    "batch_size=None": lambda n: _loader(batch_size=None, shuffle=True),
    "batch_size=None, without a length": lambda n: _loader(
        batch_size=None, sampler=Endless(by_random)
    ),
    "batch_size=None with batches": lambda n: _loader(
        batch_size=None, sampler=BatchSampler(RandomSampler(Numbers()), 5, False)
    ),
    "a data set that iterates": lambda n: DataLoader(Stream(by_random), batch_size=4),
    "a list by random": lambda n: Listed(),
}


class Listed:
    """An iterable of batches that is no DataLoader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return listed(by_random)


# every sample once, in the same order in every pass
IN_ORDER: dict[str, Make] = {
    "no shuffle": lambda n: _loader(batch_size=4),
    "SequentialSampler": lambda n: _loader(batch_size=5, sampler=SequentialSampler(Numbers())),
    "batches in order": lambda n: _loader(batch_sampler=Batches(lambda: range(COUNT), 5)),
    "set_epoch": lambda n: _loader(batch_size=4, sampler=Epochs()),
    "DistributedSampler": lambda n: _loader(batch_size=4, sampler=_ranked(n)),
    "DistributedSampler, batch_size=None": lambda n: _loader(batch_size=None, sampler=_ranked(n)),
    "a generator of batches": lambda n: list(listed(lambda: range(COUNT))),
}

# what is refused, and a part of what the error says
REFUSED: dict[str, tuple[Make, str]] = {
    "a sampler by the system": (
        lambda n: _loader(batch_size=4, sampler=Drawn(by_the_system)),
        "Drawn must draw alike in every process",
    ),
    "a sampler without a length, by the system": (
        lambda n: _loader(batch_size=4, sampler=Endless(by_the_system)),
        "Endless must draw alike in every process",
    ),
    "a batch_sampler by the system": (
        lambda n: _loader(batch_sampler=Batches(by_the_system)),
        "Batches must draw alike in every process",
    ),
    "a generator seeded otherwise": (
        lambda n: _loader(batch_size=4, shuffle=True, generator=seeded(n)),
        "RandomSampler must draw alike in every process",
    ),
    "a sampler of each rank's part": (
        lambda n: _loader(batch_size=4, sampler=RepeatedAugmentation(Numbers(), 2, n % 2)),
        "RepeatedAugmentation, which gives one rank's part: leave it out",
    ),
    "a batch_sampler of each rank's part": (
        lambda n: _loader(batch_sampler=_InBatches(_ranked(n))),
        "_InBatches, which gives one rank's part: leave it out",
    ),
    "a sampler that divides in silence": (
        lambda n: _loader(batch_size=4, sampler=Drawn(lambda: range(n % 2, COUNT, 2))),
        "a sampler that gives each rank its part must be left out",
    ),
    "a data set that divides itself": (
        lambda n: DataLoader(Stream(lambda: range(n % 2, COUNT, 2)), batch_size=4),
        "iterate over data that is divided already without fleet.shard",
    ),
    "a list by the system": (
        lambda n: list(listed(by_the_system)),
        "every trainer must read the same batches",
    ),
    "data of another length": (
        lambda n: DataLoader(range(COUNT - n), 4),  # type: ignore[arg-type]
        "every trainer must call fleet.shard equally often",
    ),
}


class _InBatches(Batches):
    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        super().__init__(lambda: list(sampler))
        self.sampler = sampler
