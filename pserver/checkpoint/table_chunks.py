"""A table's rows in chunks; and the rows at the end of a chain of checkpoints.

A chunk is a mapping of arrays, as ``SparseTable.scan`` returns it: ``ids`` int64[m] with columns of
m rows beside it ("values", "state.NAME", ...), ``waiting.ids`` int64[w] with columns "waiting.NAME"
for ids that are not admitted yet, and in a delta ``removed`` int64[r], ids without a row.

[Note: merging a chain]  The newest checkpoint that names an id decides about it: its row, that it
is not admitted yet, or that it was removed.  So the checkpoints are read from the newest to the
oldest, and ids that a newer one names are left out of the older ones.  That takes memory for the
ids that all but the oldest name, 8 bytes each.  If there are more than ``MAX_IDS`` of them, they
are divided by a hash of the id, and the chain is read once for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MAX_IDS = 1 << 25
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NAMES = ("ids", "waiting.ids", "removed")

Chunk = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Layer:
    """One checkpoint's part of a table.

    Attributes:
        chunks: reads its chunks, from the first on.
        ids: how many ids they name.
    """

    chunks: Callable[[], Iterator[Chunk]]
    ids: int


def merged(layers: Sequence[Layer], max_ids: int = MAX_IDS) -> Iterator[Chunk]:
    """The rows at the end of a chain: each id once, none that was removed.

    See [Note: merging a chain].

    Args:
        layers: the newest first.
        max_ids: how many ids memory may hold.
    """
    parts = max(1, -(-sum(layer.ids for layer in layers[:-1]) // max_ids))
    for part in range(parts):
        later = np.empty(0, np.int64)
        for layer in layers:
            named = [later]
            for chunk in layer.chunks():
                chunk = _select(chunk, _Part(part, parts)) if parts > 1 else chunk
                if layer is not layers[-1]:
                    named += [chunk[name] for name in _NAMES if name in chunk]
                chunk.pop("removed", None)
                kept = _select(chunk, _Without(later)) if len(later) else chunk
                if rows(kept):
                    yield kept
            later = np.unique(np.concatenate(named))


@dataclass(frozen=True, slots=True)
class _Part:
    """Selects the ids of one part: a hash of the id divides all ids into ``parts``."""

    part: int
    parts: int

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(
            ((ids.view(np.uint64) * _GOLDEN) >> np.uint64(40)) % np.uint64(self.parts) == self.part
        )


@dataclass(frozen=True, slots=True)
class _Without:
    """Selects the ids that are not among ``ordered``, which is sorted."""

    ordered: np.ndarray

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        positions = np.minimum(np.searchsorted(self.ordered, ids), len(self.ordered) - 1)
        return np.asarray(self.ordered[positions] != ids)


def rows(chunk: Mapping[str, np.ndarray]) -> int:
    """How many ids are in a chunk."""
    return sum(len(chunk[name]) for name in _NAMES if name in chunk)


def _select(chunk: Chunk, selects: Callable[[np.ndarray], np.ndarray]) -> Chunk:
    """The part of a chunk whose ids are selected."""
    masks = {name: selects(chunk[name]) for name in _NAMES if name in chunk}
    return {name: column[masks[_ids_of(name)]] for name, column in chunk.items()}


def _ids_of(column: str) -> str:
    """The name of the ids that a column belongs to."""
    if column == "removed":
        return column
    return "waiting.ids" if column.startswith("waiting.") else "ids"


def check(chunk: Mapping[str, np.ndarray]) -> None:
    """Returns if every column has a value for each of its ids.

    Raises:
        ValueError: one has not, or there are no ids.
    """
    for name, column in chunk.items():
        ids = chunk.get(_ids_of(name))
        if ids is None or ids.dtype != np.int64 or ids.ndim != 1:
            got = "nothing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
            raise ValueError(
                f"a table's rows: {name}: expected int64 [n] as {_ids_of(name)!r}, got {got}"
            )
        if column.ndim < 1 or len(column) != len(ids):
            raise ValueError(
                f"a table's rows: {name}: expected {len(ids)} values, one for each id, got "
                f"{list(column.shape)}"
            )
