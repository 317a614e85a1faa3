"""Rows of this process in an embedding's ``state_dict`` and in its copies.

In a ``state_dict`` they are plain tensors, that any file format of tensors takes: ``table.ids``
(int64 [n]), ``table.values`` ([n, dim]), ``table.state.NAME`` of the update rule, and further
arrays that a table keeps for its rows; ``table.metadata``: steps, counters and rules, as JSON in
bytes.  Rows that servers hold are pulled for it, with ids and values alone: states of optimizers
stay on the servers, here and when rows are loaded.  Copies of a module have none of them:
``fleet.save`` and ``fleet.export`` write them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from pserver.errors import PServerError
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.served_rows import are_wanted
from transpiler.ir.tables import Table

log = logging.getLogger(__name__)

PREFIX = "table."
NEEDED = ("ids", "values", "metadata")
FILES = "fleet.save and fleet.export write them, fleet.load puts them back"


@runtime_checkable
class WholeRows(Protocol):
    """A source of rows that gives and takes the whole table."""

    def read(self) -> tuple[Tensor, Tensor] | None:
        """All rows: ids, int64 [n], and values, [n, dim]; None: they are too many."""

    def write(self, ids: Tensor, values: Tensor) -> None:
        """Replaces the values of all rows; one that is not among them gets its initial value.

        Args:
            ids: int64 [n], each once, on the CPU.
            values: [n, dim], on the CPU; not kept.

        Raises:
            ValueError: rows cannot be written here.
        """


class RowState(nn.Module):
    """A module whose rows are in its ``state_dict`` while they are in this process.

    Attributes:
        rows: :class:`~trainer.embedding.local_rows.LocalRows`, or a source on servers.
        cache: of rows that were pulled; None: off.
    """

    rows: Any
    cache: Any
    look_ahead: Any
    _warned: frozenset[str] = frozenset()

    def whose(self) -> str:
        """The table, in words."""
        raise NotImplementedError

    def table(self) -> Table:
        """The table as a plan has it."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        rows = self.rows if isinstance(self.rows, LocalRows) else self._copied()
        if rows is not None:
            arrays, metadata = rows.state()
            text = np.frombuffer(json.dumps(metadata).encode(), np.uint8).copy()
            for key, array in {**arrays, "metadata": text}.items():
                destination[f"{prefix}{PREFIX}{key}"] = torch.from_numpy(array)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        start = prefix + PREFIX
        given = {
            key.removeprefix(start): value
            for key, value in state_dict.items()
            if key.startswith(start)
        }
        others = {key: value for key, value in state_dict.items() if not key.startswith(start)}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing = [start + key for key in NEEDED if key not in given]
        if missing:
            missing_keys.extend(missing if strict else [])
            if not isinstance(self.rows, LocalRows):
                self._warn(f"its rows on servers stay as they are, for none were given: {FILES}")
            return
        try:
            if isinstance(self.rows, LocalRows):
                _load(self.rows, given)
            else:
                self._write(given)
        except (ValueError, KeyError, TypeError) as error:
            error_msgs.append(f"{self.whose()}: {error}")

    # ---- rows on servers ----

    def _copied(self) -> LocalRows | None:
        """The servers' rows, without states; None: they are left out."""
        if not are_wanted():
            return None
        try:
            if not isinstance(self.rows, WholeRows):
                raise ValueError("they are elsewhere, and cannot be read whole")
            found = self.rows.read()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, PServerError):
                raise
            self._warn(f"its rows are not in state_dict(): {error}; {FILES}")
            return None
        if found is None:
            self._warn(f"its rows are not in state_dict(), for they have more than 4 GiB: {FILES}")
            return None
        return LocalRows(self.table(), found)

    def _write(self, given: Mapping[str, Tensor]) -> None:
        if not isinstance(self.rows, WholeRows):
            raise ValueError("its rows are elsewhere, and cannot be written whole")
        copy = LocalRows(self.table())
        _load(copy, given)
        if any(key.startswith("state.") for key in given):
            self._warn(
                "the values of rows are loaded, and not their states: those on servers stay; "
                "fleet.load loads both"
            )
        ids, values = copy.whole() or (
            torch.empty(0, dtype=torch.int64),
            torch.empty((0, copy.dim), dtype=copy.dtype),
        )
        self.rows.write(ids, values)
        if self.cache is not None:
            self.cache.clear()
        if self.look_ahead is not None:
            self.look_ahead.drop()

    def _warn(self, text: str) -> None:
        """Warns, once."""
        if text not in self._warned:
            self._warned |= {text}
            log.warning("%s: %s", self.whose(), text)

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self.rows, LocalRows):
            raise RuntimeError(
                f"{self.whose()}: its rows are on servers, a copy would have none: fleet.export "
                "writes them"
            )
        return self.__dict__.copy()


def _load(rows: LocalRows, given: Mapping[str, Tensor]) -> None:
    arrays = {key: np.ascontiguousarray(value.cpu().numpy()) for key, value in given.items()}
    try:
        metadata: dict[str, Any] = json.loads(arrays.pop("metadata").tobytes())
    except ValueError as error:
        raise ValueError(f"{PREFIX}metadata: expected JSON: {error}") from error
    rows.load(arrays, metadata)
