"""Batches that are read ahead of the script, so that the rows of coming steps are looked up ahead.

[Note: whether batches may be read ahead]  A script must not be able to tell.  A loader that draws
the script's random numbers for its batches would draw them earlier, and one that makes each batch
in the memory of an earlier one would spoil that.  So the first batches are read when the script
asks for them, and watched: whether reading one has changed a random state, or a batch before it.
Only after as many as would be read ahead, and one more, are the following ones read ahead.  (The
first batch of a pass may draw: a sampler draws its order there, and nothing of the script runs
between.)

A position, a lease or a random state that is saved is that of the batch which the script has.
So the batches of the job's own passes are read ahead within these, also where not the job's but a
program's lookups are made ahead: :func:`read_for` says to the pass for whom.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

STAYS = (
    "look_ahead: this loader's batches are not read ahead, as %s: make them by num_workers of a "
    "DataLoader, or announce them by fleet.prefetch or Executor.prefetch"
)


class AnnouncedBatches(Protocol):
    """The lookups of coming batches: see trainer/senders/look_ahead.py.

    Attributes:
        depth: batches whose rows are looked up ahead; 0: none.
    """

    depth: int

    def announce_batch(self, batch: Any, source: object) -> None:
        """Announces a batch that the script will get.

        Args:
            source: of the batch.
        """

    def give(self, batch: Any) -> None:
        """Notes that the script gets a batch."""

    def withdraw(self, source: object = None) -> None:
        """Forgets the announced batches of a source: the script takes no more."""


@dataclass(slots=True)
class _Reader:
    """The reader whose lookups the pass that begins makes ahead.

    Attributes:
        taken: whether the pass has read it, and reads batches ahead.
    """

    announced: AnnouncedBatches
    taken: bool = False


_reader: ContextVar[_Reader | None] = ContextVar("_reader", default=None)


def read_for(announced: AnnouncedBatches, data: Iterable[Any]) -> Iterator[Any]:
    """The batches of a pass over the data, read ahead for these lookups.

    One that is its own iterator is not: it goes on behind a pass that was left.
    """
    if not announced.depth or isinstance(data, Iterator):
        return iter(data)
    reader = _Reader(announced)
    token = _reader.set(reader)
    try:
        batches = iter(data)
        first = list(islice(batches, 1))  # a pass may begin with its first batch only
    finally:
        _reader.reset(token)
    whole = chain(first, batches)
    return whole if reader.taken else ReadAhead(lambda: announced)(whole)


class ReadAhead:
    """Reads the batches of one loader ahead, in passes in which rows are looked up ahead.

    Args:
        announced: returns the job's lookups of coming batches; None: there are none.
        goes_on: whether the loader goes on behind a pass that was left, and would lose what was
            read ahead: it is not.
    """

    def __init__(
        self, announced: Callable[[], AnnouncedBatches | None], goes_on: bool = False
    ) -> None:
        self._announced, self._goes_on = announced, goes_on
        self._may: bool | None = None  # whether batches may be read ahead; None: not known yet
        # batches that were read while it is not known, with copies
        self._watched: deque[tuple[list[Tensor], list[Tensor]]] = deque()

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches.  A pass without gradients is an evaluation, which is not read ahead."""
        announced = self._announced()
        if (reader := _reader.get()) is not None:
            announced, reader.taken = reader.announced, True
        if announced is None or not announced.depth or self._goes_on:
            return batches
        if not torch.is_grad_enabled():
            return batches
        return self._ahead(batches, announced)

    def _ahead(
        self, batches: Iterator[Any], announced: AnnouncedBatches
    ) -> Generator[Any, None, None]:
        waiting, over, source = deque[Any](), False, object()
        failure: Exception | None = None
        first = True
        try:
            while True:
                most = 1 + (announced.depth if self._may else 0)
                while not over and len(waiting) < most:
                    try:
                        batch = self._read(batches, announced.depth, first, bool(waiting))
                    except StopIteration:
                        over = True
                        break
                    except Exception as error:  # for the script, when it comes to this batch
                        over, failure = True, error
                        break
                    if waiting:
                        announced.announce_batch(batch, source)
                    waiting.append(batch)
                    first = False
                    most = 1 + (announced.depth if self._may else 0)
                if not waiting:
                    if failure is not None:
                        raise failure
                    return
                batch = waiting.popleft()
                announced.give(batch)
                yield batch
        finally:
            announced.withdraw(source)
            if isinstance(batches, Generator):
                batches.close()  # threads that draw end before the pass does

    def _read(self, batches: Iterator[Any], depth: int, first: bool, ahead: bool) -> Any:
        """The next batch of a pass."""
        if self._may is False or (first and self._may):
            return next(batches)
        states = _random_states()
        batch = next(batches)
        drawn = not first and not _are_equal(states, _random_states())
        if ahead and drawn:
            log.warning(
                "look_ahead: reading a batch ahead has changed the script's random numbers, which "
                "no batch before it did: batches are not read ahead any more"
            )
        elif drawn:
            log.warning(STAYS, "reading one draws the script's random numbers")
        if drawn:
            self._may = False
        elif self._may is None:
            self._watch(batch, depth)
        return batch

    def _watch(self, batch: Any, depth: int) -> None:
        """Decides whether batches may be read ahead, where this one tells it."""
        if any(not _are_equal(now, before) for now, before in self._watched):
            log.warning(STAYS, "one is made in the memory of another")
            self._may = False
        elif len(self._watched) > depth:
            self._may = True
        if self._may is None:
            tensors = _tensors(batch)
            self._watched.append((tensors, [each.clone() for each in tensors]))
        else:
            self._watched.clear()


class BatchesAhead:
    """The batches of a loader that is not divided, read ahead."""

    def __init__(self, loader: Iterable[Any], ahead: ReadAhead) -> None:
        self._loader, self._ahead = loader, ahead

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises where there is no length

    def __iter__(self) -> Iterator[Any]:
        return self._ahead(iter(self._loader))


def _tensors(batch: Any) -> list[Tensor]:
    """The numbers in a batch."""
    leaves = (
        torch.from_numpy(leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iuf"
        else leaf
        for leaf in tree_leaves(batch)
    )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _random_states() -> list[Any]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return [torch.get_rng_state(), random.getstate(), torch.from_numpy(keys), position]


def _are_equal(these: list[Any], others: list[Any]) -> bool:
    """Whether tensors have the same bits, and other things are equal."""
    return all(
        torch.equal(_bits(one), _bits(other)) if isinstance(one, Tensor) else one == other
        for one, other in zip(these, others, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
