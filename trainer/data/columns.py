"""Samples as columns: for each slot an array with a row for each sample, or a ragged column.

A dense column is an array ``[samples]`` or ``[samples, width]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column with any number of values for each sample.

    Attributes:
        values: [values], those of a sample side by side.
        bounds: int64 [samples + 1]; sample i has ``values[bounds[i] : bounds[i + 1]]``.
    """

    values: Array
    bounds: Array

    @classmethod
    def of(cls, values: Array, counts: Array) -> Ragged:
        """A column of which the values of each sample were counted."""
        bounds = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=bounds[1:])
        return cls(values, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def counts(self) -> Array:
        """int64 [samples]: how many values each sample has."""
        return np.diff(self.bounds)


Column = Array | Ragged
Columns = Mapping[str, Column]


def samples_of(columns: Columns) -> int:
    """How many samples there are."""
    return min((len(column) for column in columns.values()), default=0)


def bytes_of(columns: Columns) -> int:
    """The memory that they take."""
    return sum(
        column.values.nbytes + column.bounds.nbytes if isinstance(column, Ragged) else column.nbytes
        for column in columns.values()
    )


def part(columns: Columns, begin: int, end: int) -> dict[str, Column]:
    """Samples in a row, without a copy."""
    return {name: _part(column, begin, end) for name, column in columns.items()}


def _part(column: Column, begin: int, end: int) -> Column:
    if not isinstance(column, Ragged):
        return column[begin:end]
    bounds = column.bounds[begin : end + 1]
    return Ragged(column.values[bounds[0] : bounds[-1]], bounds - bounds[0])


def taken(columns: Columns, places: Array) -> dict[str, Column]:
    """The samples at these places, in this order."""
    return {name: _taken(column, places) for name, column in columns.items()}


def _taken(column: Column, places: Array) -> Column:
    if not isinstance(column, Ragged):
        return column[places]
    counts = column.counts[places]
    found = Ragged.of(column.values[:0], counts)
    # value j of a sample is j places after its first one
    shift = np.repeat(column.bounds[:-1][places] - found.bounds[:-1], counts)
    return Ragged(column.values[np.arange(found.bounds[-1]) + shift], found.bounds)


def joined(parts: Sequence[Columns]) -> dict[str, Column]:
    """The samples of all parts, which have the same slots; one part is given as it is."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: _joined([each[name] for each in parts]) for name in (parts[0] if parts else ())}


def _joined(columns: Sequence[Column]) -> Column:
    dense = [column for column in columns if not isinstance(column, Ragged)]
    if dense:
        return np.concatenate(dense)
    ragged = [column for column in columns if isinstance(column, Ragged)]
    values = np.concatenate([column.values for column in ragged])
    return Ragged.of(values, np.concatenate([column.counts for column in ragged]))
