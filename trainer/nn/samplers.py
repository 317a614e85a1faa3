"""Where negative classes come from: distributions over class ids, and draws without repetition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """A distribution over the ids 0 to ``classes`` - 1."""

    classes: int

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Ids, each drawn by itself: int64 [count], on the CPU."""

    def probability(self, ids: Tensor) -> Tensor:
        """Of one draw, float32 or float64 of the ids' shape, on their device."""


class UniformSampler:
    """Every class alike.

    Args:
        classes: 1 or more.
    """

    def __init__(self, classes: int) -> None:
        self.classes = _checked(classes)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """See :class:`Sampler`."""
        return torch.randint(self.classes, (count,), generator=generator)

    def probability(self, ids: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        return torch.full_like(ids, 1 / self.classes, dtype=torch.float64)


class LogUniformSampler:
    """Class k with a probability of log((k + 2) / (k + 1)) / log(classes + 1): Zipf's law nearly,
    for classes that are numbered from the most frequent one on.

    Args:
        classes: 1 or more.
    """

    def __init__(self, classes: int) -> None:
        self.classes = _checked(classes)
        self._range = math.log(classes + 1)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """See :class:`Sampler`."""
        exponents = torch.rand(count, generator=generator, dtype=torch.float64) * self._range
        return (exponents.exp().long() - 1).clamp(0, self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        return (1 / (ids.to(torch.float64) + 1)).log1p() / self._range


class GivenSampler:
    """Class k with a given probability.

    Args:
        probabilities: floats [classes], none below 0; they are divided by their sum.

    Raises:
        ValueError: they are no such numbers.
    """

    def __init__(self, probabilities: Tensor) -> None:
        given = probabilities.detach().double().cpu()
        if given.dim() != 1 or not len(given) or bool((given < 0).any()) or not given.sum() > 0:
            raise ValueError(
                "probabilities: expected [classes], none below 0 and one above it, got "
                f"{list(given.shape)}"
            )
        self.classes = len(given)
        self._probabilities = given / given.sum()
        self._cumulated = self._probabilities.cumsum(0)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """See :class:`Sampler`."""
        drawn = torch.rand(count, generator=generator, dtype=torch.float64) * self._cumulated[-1]
        return torch.searchsorted(self._cumulated, drawn, right=True).clamp(max=self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        return self._probabilities.to(ids.device)[ids]


@dataclass(frozen=True)
class Negatives:
    """Classes that were drawn, and how likely that was.

    Attributes:
        ids: int64 [samples].
        tries: how many draws it took; None: as many as there are samples, which may repeat.
        sampler: that drew them.
    """

    ids: Tensor
    tries: int | None
    sampler: Sampler

    def expected(self, ids: Tensor) -> Tensor:
        """How often an id is among the samples on average, floats of the ids' shape."""
        probability = self.sampler.probability(ids)
        if self.tries is None:
            return probability * len(self.ids)
        return -torch.expm1(self.tries * torch.log1p(-probability))


def draw_unique(
    sampler: Sampler, count: int, generator: torch.Generator | None = None
) -> Negatives:
    """Draws until there are ``count`` ids that differ, and counts the draws.

    Raises:
        ValueError: there are not so many classes.
    """
    if not 1 <= count <= sampler.classes:
        raise ValueError(f"num_samples: expected 1 to {sampler.classes}, got {count}")
    drawn = sampler.draw(2 * count, generator)
    while True:
        ids, inverse = torch.unique(drawn, return_inverse=True)
        if len(ids) >= count:
            break
        drawn = torch.cat([drawn, sampler.draw(len(drawn), generator)])
    places = torch.arange(len(drawn))
    first = torch.full_like(ids, len(drawn)).scatter_reduce(0, inverse, places, "amin")
    kept = first.sort().values[:count]
    return Negatives(drawn[kept], int(kept[-1]) + 1, sampler)


def seeded(seed: int) -> torch.Generator | None:
    """A generator of its own; of 0 None, which is torch's."""
    return torch.Generator().manual_seed(seed) if seed else None


def _checked(classes: int) -> int:
    if classes < 1:
        raise ValueError(f"classes: expected 1 or more, got {classes}")
    return classes
