"""Rows of this process in an embedding's ``state_dict`` and in its copies.

In a ``state_dict`` they are plain tensors, that any file format of tensors takes: ``table.ids``
(int64 [n]), ``table.values`` ([n, dim]), ``table.state.NAME`` of the update rule, and further
arrays that a table keeps for its rows; ``table.metadata``: steps, counters and rules, as JSON in
bytes.  Rows that servers hold are pulled for it, with ids and values alone: states of optimizers
stay on the servers, here and when rows are loaded.  A module with rows on servers cannot be copied:
``fleet.save`` and ``fleet.export`` write the rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pserver.errors import PServerError
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.rows import are_wanted
from trainer.embedding.table_settings import TableSettings
from transpiler.files import bounded_json

log = logging.getLogger(__name__)

PREFIX = "table."
NEEDED = ("ids", "values", "metadata")
FILES = "fleet.save and fleet.export write them, fleet.load puts them back"


@runtime_checkable
class WholeRows(Protocol):
    """A source of rows that gives and takes the whole table."""

    def read(self) -> tuple[Tensor, Tensor] | None:
        """All rows: ids, int64 [n], and values, [n, dim]; None: there are too many."""

    def write(self, ids: Tensor, values: Tensor) -> None:
        """Replaces the values of all rows; a row that is not given gets its initial value.

        Args:
            ids: int64 [n], each once, on the CPU.
            values: [n, dim], on the CPU; not kept.

        Raises:
            ValueError: rows cannot be written here.
        """


class RowHolder(Protocol):
    """The part of an embedding that concerns its rows.

    Attributes:
        settings: of the table.
        rows: :class:`~trainer.embedding.local_rows.LocalRows`, or a source on servers.
        warned: warnings that the user has seen.
    """

    settings: TableSettings
    rows: Any
    warned: frozenset[str]

    def forget_pulled(self) -> None:
        """Drops rows that were pulled before."""


def save_rows(holder: RowHolder, destination: dict[str, Any], prefix: str) -> None:
    """Writes the rows into a ``state_dict``.

    Raises:
        PServerError: servers fail to send them.
    """
    rows = holder.rows if isinstance(holder.rows, LocalRows) else _copied(holder)
    if rows is not None:
        arrays, metadata = rows.state()
        text = np.frombuffer(json.dumps(metadata).encode(), np.uint8).copy()
        for key, array in {**arrays, "metadata": text}.items():
            destination[f"{prefix}{PREFIX}{key}"] = torch.from_numpy(array)


def split_rows(
    state_dict: Mapping[str, Any], prefix: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A table's rows in a ``state_dict``, by names without a prefix; and all other entries."""
    start = prefix + PREFIX
    rows = {key.removeprefix(start): v for key, v in state_dict.items() if key.startswith(start)}
    return rows, {key: v for key, v in state_dict.items() if not key.startswith(start)}


def load_rows(holder: RowHolder, given: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Loads the rows of a ``state_dict``, as :func:`split_rows` gives them.

    Returns:
        The missing keys; if there are any, nothing is changed.

    Raises:
        ValueError, KeyError, TypeError: they are of another table.
    """
    missing = [prefix + PREFIX + key for key in NEEDED if key not in given]
    if isinstance(holder.rows, LocalRows):
        if not missing:
            _load(holder.rows, given)
    elif missing:
        _warn(holder, f"its rows on servers stay as they are, for none were given: {FILES}")
    else:
        _write(holder, given)
    return missing


def take_moved_rows(module: Any, state_dict: dict[str, Any], prefix: str, *told: Any) -> None:
    """Puts the rows of a state into its ``weight``, before a torch embedding loads it: where the
    embedding is an earlier copy of one whose rows have moved, and the state is of the moved one.
    """
    given, _ = split_rows(state_dict, prefix)
    if state_dict.pop(f"{prefix}proxy", None) is None and not given:
        return
    for key in given:
        del state_dict[f"{prefix}{PREFIX}{key}"]
    weight, padding = module.weight.detach().clone(), module.padding_idx
    if (row := state_dict.pop(f"{prefix}padding_row", None)) is not None:
        weight[padding] = row.to(weight)
    state_dict[f"{prefix}weight"] = weight
    absent = set(range(len(weight))) - {padding}
    if all(key in given for key in NEEDED):
        ids = given["ids"].to(weight.device)
        weight[ids] = given["values"].to(weight)
        absent -= set(ids.tolist())
    if absent:
        errors = told[-1]
        errors.append(
            f"{prefix.removesuffix('.') or 'the embedding'}: its rows have moved to servers after "
            f"this copy was made, and the state has {len(weight) - len(absent)} of its "
            f"{len(weight)} rows: copy from a file of fleet.export, which has all"
        )


def check_copied(holder: RowHolder) -> None:
    """Raises RuntimeError where a copy of the module would have no rows."""
    if not isinstance(holder.rows, LocalRows):
        raise RuntimeError(
            f"{holder.settings.whose()}: its rows are on servers, a copy would have none: "
            "fleet.export writes them"
        )


# ---- rows on servers ----


def _copied(holder: RowHolder) -> LocalRows | None:
    """A copy of the servers' rows, without states; None: they are left out."""
    if not are_wanted():
        return None
    try:
        if not isinstance(holder.rows, WholeRows):
            raise ValueError("they are elsewhere, and cannot be read whole")
        found = holder.rows.read()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PServerError):
            raise
        _warn(holder, f"its rows are not in state_dict(): {error}; {FILES}")
        return None
    if found is None:
        _warn(holder, f"its rows are not in state_dict(), for they have more than 4 GiB: {FILES}")
        return None
    return LocalRows(holder.settings.table(), found)


def _write(holder: RowHolder, given: Mapping[str, Tensor]) -> None:
    if not isinstance(holder.rows, WholeRows):
        raise ValueError("its rows are elsewhere, and cannot be written whole")
    copy = LocalRows(holder.settings.table())
    _load(copy, given)
    if any(key.startswith("state.") for key in given):
        _warn(
            holder,
            "the values of rows are loaded, and not their states: those on servers stay; "
            "fleet.load loads both",
        )
    ids, values = copy.whole() or (
        torch.empty(0, dtype=torch.int64),
        torch.empty((0, copy.dim), dtype=copy.dtype),
    )
    holder.rows.write(ids, values)
    holder.forget_pulled()


def _warn(holder: RowHolder, text: str) -> None:
    """Warns, once for each text."""
    if text not in holder.warned:
        holder.warned |= {text}
        log.warning("%s: %s", holder.settings.whose(), text)


def _load(rows: LocalRows, given: Mapping[str, Tensor]) -> None:
    arrays = {key: np.ascontiguousarray(value.cpu().numpy()) for key, value in given.items()}
    try:
        metadata: dict[str, Any] = bounded_json.loads(arrays.pop("metadata").tobytes())
    except ValueError as error:
        raise ValueError(f"{PREFIX}metadata: expected JSON: {error}") from error
    rows.load(arrays, metadata)
