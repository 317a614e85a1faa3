"""A tensor whose slices are in several parts of a checkpoint, and what it is put together from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """Where the slices of a tensor are.

    Attributes:
        shape: of the whole.
        slices: in the order of their elements: the number of the part, and the slice's name there.

    Example::

        whole = WholeTensor((4,), ((0, "w.block0"), (1, "w.block1")))
        parts = [{"w.block0": torch.zeros(3)}, {"w.block1": torch.ones(1)}]
        whole.assembled("w", parts)     # tensor([0., 0., 0., 1.])
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int, str], ...]

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"shape": list(self.shape), "slices": [list(each) for each in self.slices]}

    @classmethod
    def of(cls, plain: Any, parts: int) -> WholeTensor:
        """What :meth:`plain` gave.

        Args:
            parts: how many there are.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = cls(
                tuple(int(size) for size in plain["shape"]),
                tuple((int(part), str(name)) for part, name in plain["slices"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected a shape and slices, got {plain!r}") from error
        if not found.slices or not all(0 <= part < parts for part, _ in found.slices):
            raise ValueError(f"expected slices in {parts} parts, got {plain['slices']!r}")
        return found

    def assembled(
        self, name: str, parts: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor | None:
        """The whole tensor; None where no part has a slice of it, as with the state of an optimizer
        that has taken no step.

        Args:
            name: of the whole, for messages.
            parts: the tensors of each part, by name.

        Raises:
            ValueError: a slice is missing, or they have another number of elements.
        """
        found = [parts[part][own] for part, own in self.slices if own in parts[part]]
        if not found:
            return None
        if len(found) == len(self.slices) and found[0].dim() == 0 and self.shape:
            return found[0].clone()  # a number that every slice has: the count of steps
        elements = sum(each.numel() for each in found)
        if len(found) < len(self.slices) or elements != math.prod(self.shape):
            raise ValueError(
                f"{name}: expected {len(self.slices)} slices of {list(self.shape)}, got "
                f"{len(found)} with {elements} elements"
            )
        return torch.cat([each.reshape(-1) for each in found]).view(self.shape)
