"""This trainer's part of the data: the same split in every process, nobody's twice, everybody's number of batches equal.

[Note: equal numbers of batches]  A sync step needs every trainer.  If one had a batch less than the others, its next step
would be theirs of the last one, and a barrier at the end of an epoch would wait for ever.  So the data set is cut into joint
batches of ``trainers * batch_size`` samples, each trainer takes its part of each, and the last, smaller one is shared out evenly.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

log = logging.getLogger(__name__)

_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by loader: how often it has been gone through


class JointBatches:
    """A batch sampler: one trainer's part of each joint batch.

    Args:
        samples: of the data set.
        batch_size: of one trainer.
        trainers, trainer_id: how many share the data, and which one this is.
        seed: of the order of samples; None keeps the data set's own order.
        drop_last: leaves out a last joint batch that is not full.

    Raises:
        ValueError: there are fewer samples than trainers.
    """

    def __init__(self, samples: int, batch_size: int, trainers: int, trainer_id: int, seed: int | None, drop_last: bool) -> None:
        if samples < trainers:
            raise ValueError(f"expected at least one sample for each of {trainers} trainers, got {samples}")
        self._samples, self._trainers, self._trainer_id, self._seed = samples, trainers, trainer_id, seed
        joint = batch_size * trainers
        full, rest = divmod(samples, joint)
        self._bounds = [(index * joint, (index + 1) * joint) for index in range(full)]
        if rest >= trainers and not drop_last:
            self._bounds.append((full * joint, samples))
        elif rest and not drop_last:  # too few for everybody to have one: they join the batch before
            begin = self._bounds[-1][0]
            self._bounds[-1] = (begin, samples)

    def __len__(self) -> int:
        return len(self._bounds)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._samples))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed)
            order = torch.randperm(self._samples, generator=generator).tolist()
        for begin, end in self._bounds:
            share, more = divmod(end - begin, self._trainers)
            first = begin + self._trainer_id * share + min(self._trainer_id, more)
            yield order[first : first + share + (self._trainer_id < more)]


def shard(loader: Iterable[Any], trainers: int, trainer_id: int, seed: int | None = None) -> Iterable[Any]:
    """One trainer's part of one epoch.

    A ``DataLoader`` over a data set with a length is cut sample by sample; where it shuffles, every call gives another order, the
    same in every process.  Of any other iterable the trainer gets every ``trainers``-th batch.

    Args:
        loader: what a single-node script would go through.
        seed: of the shuffling; with None a loader that shuffles uses 0 and one that does not keeps its order.
    """
    if trainers == 1 and seed is None:
        return loader
    epoch = _epochs.get(loader, 0)
    _epochs[loader] = epoch + 1
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return _every_nth(loader, trainers, trainer_id)
    shuffles = isinstance(loader.sampler, RandomSampler)
    order = None if not shuffles and seed is None else (seed or 0) + epoch
    batches = JointBatches(len(loader.dataset), loader.batch_size, trainers, trainer_id, order, loader.drop_last)  # type: ignore[arg-type]
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def _every_nth(batches: Iterable[Any], trainers: int, trainer_id: int) -> Iterator[Any]:
    """Batch ``trainer_id`` of each ``trainers`` in a row; a last group that is not full is left out, so that all have as many."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == trainers:
            yield group[trainer_id]
            group = []
    if group:
        log.info("left out the last %d batches: too few for %d trainers", len(group), trainers)
