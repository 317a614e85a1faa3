"""Whether a tensor has a NaN or an infinity in it, in one read; and a step that has one.

[Note: one sum]  A sum over a tensor that has a NaN or an infinity is one, too: infinities of both
signs make a NaN.  A sum is about as fast as memory, ten times as fast as a test of each element.
Where the sum is not finite, each element is tested after all: a sum may overflow by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

NAMED = 3  # variables that a message names


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite.

    Args:
        tensor: of any dtype and shape, in main memory.

    Example:
        >>> is_finite(torch.tensor([1.0, -2.0])), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
        >>> is_finite(torch.tensor([complex(0.0, float("inf"))]))
        False
        >>> is_finite(torch.full((2,), 3e38))  # though their sum is none
        True
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())


@dataclass(frozen=True, slots=True)
class NonFiniteStep:
    """A trainer's step in which a value was not finite.

    Attributes:
        trainer, step: whose, and its number in the lane.
        variables: names of parameters and tables, sorted.
    """

    trainer: int
    step: int
    variables: tuple[str, ...]

    def __str__(self) -> str:
        """``step 3 of trainer 1 has a NaN or an infinity in 'fc.weight'``."""
        return f"step {self.step} of trainer {self.trainer} has a NaN or an infinity in " + listed(
            self.variables
        )


def listed(variables: Collection[str]) -> str:
    """The first few of some names, and how many more there are."""
    named = ", ".join(map(repr, sorted(variables)[:NAMED]))
    more = len(variables) - NAMED
    return named + (f" and {more} more" if more > 0 else "")
