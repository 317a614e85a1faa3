"""Clicks on advertisements in files of Criteo's format, with a known ground truth.

A line has a label, 13 whole numbers and 26 categories (hexadecimal, of 32 bits), with tabs between
them.  ``parser="criteo"`` reads it: batches of ``label`` float32 [batch], ``numbers`` float32
[batch, 13] and ``ids`` int64 [batch, 26], of which no slot (a column of categories) shares one with
another slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

NUMBERS, SLOTS = 13, 26
SLOT_BITS = 33  # of an id below its slot
LINE = "\t".join(["%d"] * (1 + NUMBERS) + ["%x"] * SLOTS) + "\n"
LINES = 2**13  # that are made at once


def squashed(numbers: torch.Tensor) -> torch.Tensor:
    """sign(x) log(1 + |x|), element by element: counts of any size in a range for a network."""
    return numbers.sign() * numbers.abs().log1p()


@dataclass(frozen=True)
class Generated:
    """Clicks that follow a logistic model, so that the best possible result is known.

    A slot's categories are Zipf distributed, and weigh by a normal number that is a hash of slot
    and category; the numbers weigh too, and so do a few pairs of slots.  ``truth`` gives each
    click's true logit.

    Args:
        categories: in each slot.
        zipf: exponent of their frequencies, above 1.
        seed: of the samples; the weights do not depend on it, so that another seed gives unseen
            samples of the same world.
    """

    categories: int = 1_000_000
    zipf: float = 1.2
    seed: int = 0

    def files(self, folder: str, samples: int, of: int, trainer: int, trainers: int) -> list[str]:
        """Writes this trainer's share of ``of`` files.

        Args:
            samples: of all files together, which have equally many; the remainder is dropped.

        Returns:
            The paths of all files.
        """
        paths = [f"{folder}/clicks-{self.seed}-{number}" for number in range(of)]
        for number in range(trainer, of, trainers):
            random = np.random.default_rng((self.seed, number))
            with open(paths[number], "w") as file:
                for begin in range(0, samples // of, LINES):
                    rows = self._rows(random, min(LINES, samples // of - begin))
                    file.write(LINE * len(rows) % tuple(rows.ravel().tolist()))
        return paths

    @staticmethod
    def truth(numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32 [batch, 13], int64 [batch, 26] -> the true logits, float64 [batch]."""
        slots = ids.numpy()
        pairs = [_weight(slots[:, a] * 31 + slots[:, b]) for a, b in ((0, 1), (2, 3), (4, 5))]
        known = 0.4 * _weight(slots).sum(1) + 0.2 * np.sum(pairs, axis=0) - 0.5
        return torch.from_numpy(known) + 0.15 * squashed(numbers.double()).sum(1)

    def _rows(self, random: np.random.Generator, size: int) -> np.ndarray:
        """int64 [size, 40]: the fields of lines."""
        ranks = self._zipf(random.random((size, SLOTS)))
        normal = random.standard_normal((size, NUMBERS))
        numbers = np.rint(np.sign(normal) * np.expm1(np.abs(normal)))
        ids = torch.from_numpy(ranks + (np.arange(SLOTS) << SLOT_BITS))
        logits = self.truth(torch.from_numpy(numbers), ids).numpy()
        labels = random.random(size) < 1 / (1 + np.exp(-logits))
        return np.column_stack([labels, numbers, ranks]).astype(np.int64)

    def _zipf(self, uniform: np.ndarray) -> np.ndarray:
        """Ranks from 0, with a probability of about 1 / (rank + 1) ** zipf: the inverse of the
        continuous distribution.
        """
        power = 1.0 - self.zipf
        top = (self.categories + 1.0) ** power
        ranks = (1.0 + uniform * (top - 1.0)) ** (1.0 / power)
        return np.asarray(np.minimum(ranks.astype(np.int64) - 1, self.categories - 1))


def _weight(ids: np.ndarray) -> np.ndarray:
    """A number of mean 0 and deviation 1 for each id: a hash of it."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5) * 12**0.5
