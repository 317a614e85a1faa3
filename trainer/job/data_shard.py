"""This trainer's part of the data: every process computes the same split, no sample is in two
parts, and all trainers have equally many batches.

[Note: equal numbers of batches]  A sync step needs every trainer.  If one had a batch less than the
others, its next step would be theirs of the last one, and a barrier at the end of an epoch would
wait for ever.  So the data set is cut into joint batches of ``trainers * batch_size`` samples, each
trainer takes its part of each, and the last, smaller one is divided evenly.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

log = logging.getLogger(__name__)

# by loader: epochs that have begun
_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class JointBatches:
    """A batch sampler: one trainer's part of each joint batch.

    See [Note: equal numbers of batches].

    Args:
        order: of the samples in this epoch, the same on every trainer.
        batch_size: of one trainer.
        trainers, trainer_id: how many share the data, and which one this is.
        drop_last: leaves out a last joint batch that is not full.

    Raises:
        ValueError: there are fewer samples than trainers.
    """

    def __init__(
        self, order: Sequence[int], batch_size: int, trainers: int, trainer_id: int, drop_last: bool
    ) -> None:
        samples = len(order)
        if samples < trainers:
            raise ValueError(
                f"expected at least one sample for each of {trainers} trainers, got {samples}"
            )
        self._order, self._trainers, self._trainer_id = order, trainers, trainer_id
        joint = batch_size * trainers
        full, rest = divmod(samples, joint)
        self._bounds = [(index * joint, (index + 1) * joint) for index in range(full)]
        if rest >= trainers and not drop_last:
            self._bounds.append((full * joint, samples))
        # too few for every trainer to have one: they join the batch before
        elif rest and not drop_last:
            begin = self._bounds[-1][0]
            self._bounds[-1] = (begin, samples)

    def __len__(self) -> int:
        return len(self._bounds)

    def __iter__(self) -> Iterator[list[int]]:
        for begin, end in self._bounds:
            share, more = divmod(end - begin, self._trainers)
            first = begin + self._trainer_id * share + min(self._trainer_id, more)
            yield list(self._order[first : first + share + (self._trainer_id < more)])


def shard(
    loader: Iterable[Any], trainers: int, trainer_id: int, seed: int | None = None
) -> Iterable[Any]:
    """One trainer's part of one epoch.

    A ``DataLoader`` over a data set with a length is cut sample by sample; where it shuffles, every
    call gives another order, the same in every process.  A sampler of the script's own decides
    which samples there are, and in which order: it is asked with torch's random state seeded alike
    everywhere.  Of any other iterable the trainer gets every ``trainers``-th batch.

    Args:
        loader: what a single-node script would iterate over.
        trainers, trainer_id: how many share the data, and which one this is.
        seed: of the shuffling; with None a loader that shuffles uses 0 and one that does not keeps
            its order.

    Returns:
        An iterable of batches.

    Raises:
        ValueError: there are fewer samples than trainers.
    """
    if trainers == 1 and seed is None:
        return loader
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_size is None
    ):
        return _every_nth(loader, trainers, trainer_id)
    epoch = _epochs.get(loader, 0)
    _epochs[loader] = epoch + 1
    batches = JointBatches(
        _order(loader, seed, epoch), loader.batch_size, trainers, trainer_id, loader.drop_last
    )
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _order(loader: DataLoader[Any], seed: int | None, epoch: int) -> Sequence[int]:
    """The samples of an epoch, in their order: the same in every process."""
    sampler, samples = loader.sampler, len(loader.dataset)  # type: ignore[arg-type]  # a data set with a length
    permutes = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == samples
    )
    if not permutes and not isinstance(sampler, SequentialSampler):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed((seed or 0) + epoch)
            return list(sampler)
    if not permutes and seed is None:
        return range(samples)
    generator = torch.Generator().manual_seed((seed or 0) + epoch)
    return torch.randperm(samples, generator=generator).tolist()


def _every_nth(batches: Iterable[Any], trainers: int, trainer_id: int) -> Iterator[Any]:
    """Batch ``trainer_id`` of each ``trainers`` in a row; a last group that is not full is left
    out, so that all have as many.
    """
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == trainers:
            yield group[trainer_id]
            group = []
    if group:
        log.info("left out the last %d batches: too few for %d trainers", len(group), trainers)
