"""What the columns of a dataset are: slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.data.columns import Array, Column, Ragged

DTYPES = ("int64", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: a column by its name.

    Example::

        labels, words = Slot("label", "float32"), Slot("words", width=None)

    Attributes:
        name: of the column.
        dtype: "int64", "float32" or "float64".
        width: values of each sample; 0: one value, and the column is [samples]; None: any number
            of them, and the column is ragged.

    Raises:
        ValueError: the dtype is another one, or the width is below 0.
    """

    name: str
    dtype: str = "int64"
    width: int | None = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"slot {self.name!r}: dtype: expected one of {', '.join(DTYPES)}, got "
                f"{self.dtype!r}"
            )
        if self.width is not None and self.width < 0:
            raise ValueError(f"slot {self.name!r}: expected a width from 0, got {self.width}")

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.dtype == "int64"

    @property
    def values(self) -> str:
        """In words how many values a sample has."""
        if self.width is None:
            return "any number of values"
        return "1 value" if self.width <= 1 else f"{self.width} values"

    def column(self, values: Array, counts: Array) -> Column:
        """The column of these values, of which each sample has ``counts``."""
        values = values.astype(self.dtype, copy=False)
        if self.width is None:
            return Ragged.of(values, counts)
        return values if self.width == 0 else values.reshape(-1, self.width)

    def empty(self) -> Column:
        """The column of no samples."""
        return self.column(np.empty(0, self.dtype), np.empty(0, np.int64))


def slots_of(use_var: Iterable[Any]) -> tuple[Slot, ...]:
    """The slots that a script names.

    Args:
        use_var: of each slot a :class:`Slot`, a ``transpiler.data(...)``, or an input of a program:
            the size of dimension 0 is that of a batch, one further size is the width, and where
            that is free the slot is ragged.

    Raises:
        TypeError: something else is among them.
        ValueError: two have one name, or one has no name or more than 2 dimensions.
    """
    found = tuple(_slot(each) for each in use_var)
    names = [slot.name for slot in found]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"use_var: expected slots with names of their own, got {names}")
    return found


def _slot(given: Any) -> Slot:
    if isinstance(given, Slot):
        return given
    if not all(hasattr(given, part) for part in ("name", "shape", "dtype")):
        raise TypeError(
            "use_var: expected fleet.Slot(name, dtype, width), transpiler.data(...) or inputs of a "
            f"program, got {type(given).__name__}"
        )
    sizes = tuple(given.shape[1:])
    if len(sizes) > 1:
        raise ValueError(
            f"use_var: {given.name!r}: expected [batch] or [batch, values], got {list(given.shape)}"
        )
    free = sizes and not isinstance(sizes[0], int)
    return Slot(given.name, given.dtype, None if free else sizes[0] if sizes else 0)
