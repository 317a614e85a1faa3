"""Where the samples of files lie, and which trainer has which: known to every trainer alike, from
how many samples each piece of the files has.

A sample has an index, its place among those of all files in their order, which stays while the
files do; and a number, by which it is known to the trainers of a job: see
:mod:`~trainer.data.sample_hash`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.columns import Array
from trainer.data.sample_hash import PLACE_BITS, hashed, numbers_of, shuffled

GLOBAL, LOCAL, NEVER = 1, 2, -1
BLOCK = 2**20  # samples that are hashed at once


class SamplePlaces:
    """The samples of all files, as so many trainers number them.

    Args:
        files: of each piece, the number of its file; pieces are in the order of the files.
        counts: of each piece, its samples.
        trainers: trainer i of n has read files i, i + n, ...

    Attributes:
        parts: how many samples each trainer has read.
    """

    def __init__(self, files: Sequence[int], counts: Sequence[int], trainers: int) -> None:
        own, self.trainers = np.array(counts, np.int64), trainers
        self._ends = own.cumsum()
        self._begins = self._ends - own
        self._part = np.array(files, np.int64) % trainers
        # the pieces of each part, and where each begins among its part's samples
        self._of_part = [np.flatnonzero(self._part == part) for part in range(trainers)]
        self._first = np.zeros(len(own), np.int64)
        for pieces in self._of_part:
            self._first[pieces] = own[pieces].cumsum() - own[pieces]
        self.parts = [int(own[pieces].sum()) for pieces in self._of_part]

    def pieces(self, indices: Array) -> tuple[Array, Array]:
        """In which piece samples lie, and the place of each there."""
        pieces = np.searchsorted(self._ends, indices, "right")
        return pieces, indices - self._begins[pieces]

    def numbers(self, indices: Array) -> Array:
        """The numbers of samples."""
        pieces, places = self.pieces(indices)
        numbers: Array = (self._part[pieces] << PLACE_BITS) + self._first[pieces] + places
        return numbers

    def indices(self, numbers: Array) -> Array:
        """The indices of samples by their numbers."""
        parts, places = numbers >> PLACE_BITS, numbers & (2**PLACE_BITS - 1)
        found = np.empty(len(numbers), np.int64)
        for part, pieces in enumerate(self._of_part):
            mine = np.flatnonzero(parts == part)
            if len(mine):
                at = np.searchsorted(self._first[pieces], places[mine], "right") - 1
                piece = pieces[at]
                found[mine] = self._begins[piece] + places[mine] - self._first[piece]
        return found


@dataclass(frozen=True, slots=True)
class Shuffles:
    """The last shuffles of samples.

    Attributes:
        seed: of them.
        globally, locally: their numbers; NEVER: there was none.
    """

    seed: int
    globally: int = NEVER
    locally: int = NEVER


def receivers(numbers: Array, seed: int, number: int, trainers: int) -> Array:
    """int64 [samples]: which trainer a global shuffle gives each."""
    found: Array = (hashed(numbers, seed, GLOBAL, number) % np.uint64(trainers)).astype(np.int64)
    return found


class SharedOrder:
    """Which samples each trainer has after some shuffles, and in which order.

    Args:
        places: of the samples.
        shuffles: that were made last.
    """

    def __init__(self, places: SamplePlaces, shuffles: Shuffles) -> None:
        self.places, self._shuffles = places, shuffles
        self._counts: list[int] | None = None

    @property
    def counts(self) -> list[int]:
        """How many samples each trainer has."""
        if self._counts is None:
            if self._shuffles.globally == NEVER:
                self._counts = list(self.places.parts)
            else:
                each = np.zeros(self.places.trainers, np.int64)
                for part, samples in enumerate(self.places.parts):
                    for first in range(0, samples, BLOCK):
                        numbers = numbers_of(part, min(first + BLOCK, samples))[first:]
                        each += np.bincount(self._to(numbers), minlength=len(each))
                self._counts = each.tolist()
        return self._counts

    def of(self, trainer: int) -> Array:
        """int64 [samples]: the indices of a trainer's samples, in its order."""
        places, shuffles = self.places, self._shuffles
        if shuffles.globally == NEVER:
            numbers = numbers_of(trainer, places.parts[trainer])
        else:
            parts = (numbers_of(part, samples) for part, samples in enumerate(places.parts))
            numbers = np.concatenate([each[self._to(each) == trainer] for each in parts])
        if shuffles.locally != NEVER:
            numbers = numbers[shuffled(numbers, shuffles.seed, LOCAL, shuffles.locally)]
        return places.indices(numbers)

    def _to(self, numbers: Array) -> Array:
        shuffles = self._shuffles
        return receivers(numbers, shuffles.seed, shuffles.globally, self.places.trainers)


def batch_bounds(counts: Sequence[int], size: int, drop_last: bool) -> list[Array]:
    """For each trainer int64 [batches + 1]: where its batches begin and end, equally many on all.

    Args:
        counts: samples of each trainer.
        size: of a batch, at most.
        drop_last: all batches are as large, and what is left is in none.

    Raises:
        ValueError: a trainer has fewer samples than there are batches.
    """
    if len(counts) == 1:
        batches = counts[0] // size if drop_last else -(-counts[0] // size)
        return [np.minimum(np.arange(batches + 1) * size, counts[0])]
    if drop_last:
        return [np.arange(min(counts) // size + 1) * size] * len(counts)
    most = -(-max(counts) // size)
    if min(counts) < most:
        least = counts.index(min(counts))
        raise ValueError(
            f"expected {most} samples or more on every trainer, as the largest part has {most} "
            f"batches, got {counts[least]} on trainer {least}: call global_shuffle(), or give "
            "the trainers equally many samples in their files; a pass that only evaluates, under "
            "torch.no_grad(), may be unequal"
        )
    return [np.arange(most + 1) * own // max(most, 1) for own in counts]
