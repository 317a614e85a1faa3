"""Columns of Parquet files, by pyarrow, which the extra ``parquet`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.data.columns import Column
from trainer.data.lines import Parsed
from trainer.data.pieces import Piece, opened
from trainer.data.slots import Slot
from transpiler.files.files import shown


class Parquet:
    """Slots by the names of columns; lists are ragged, or dense where all are as long.

    A null is wrong.  ``read`` gives a piece's samples; wrong rows are never left out, as a Parquet
    file has no lines that could be torn.

    Args:
        slots: which columns to read.

    Raises:
        ValueError: there is no slot.
        ImportError: pyarrow is not installed.
    """

    in_processes = False
    each_line = True

    def __init__(self, slots: Sequence[Slot]) -> None:
        if not slots:
            raise ValueError("parquet: expected use_var, the columns to read, got none")
        self.slots = tuple(slots)
        _parquet()

    def pieces(self, path: str) -> list[Piece]:
        """One for each group of rows.

        Raises:
            OSError: the file cannot be read, or is no Parquet file.
            ValueError: it has no row.
        """
        with opened(path) as file:
            groups = self._file(file, path).num_row_groups
        if not groups:
            raise ValueError(f"{shown(path)}: expected rows, got a Parquet file without any")
        return [Piece(path, group, group + 1) for group in range(groups)]

    def read(self, piece: Piece, skip: bool) -> Parsed:
        """The samples of a group of rows.

        Raises:
            OSError: the file cannot be read.
            ValueError: it lacks a column, or a column holds something else than its slot.
        """
        names = [slot.name for slot in self.slots]
        with opened(piece.path) as file:
            source = self._file(file, piece.path)
            known = source.schema_arrow.names
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"{piece.shown}: expected a column {name!r}, got {', '.join(known)}"
                    )
            table = source.read_row_group(piece.begin, names, use_threads=False)
        columns = {slot.name: _column(slot, table.column(slot.name), piece) for slot in self.slots}
        return Parsed([columns] if table.num_rows else [])

    def why_nothing(self, path: str) -> str:
        """See :meth:`trainer.data.lines.LineFormat.why_nothing`."""
        return "its groups of rows are empty"

    def count(self, piece: Piece, skip: bool) -> int:
        """How many rows a group has, as the file says.

        Raises:
            OSError: the file cannot be read.
        """
        with opened(piece.path) as file:
            return int(self._file(file, piece.path).metadata.row_group(piece.begin).num_rows)

    @staticmethod
    def _file(file: Any, path: str) -> Any:
        arrow, parquet = _parquet()
        try:
            return parquet.ParquetFile(file)
        except arrow.ArrowInvalid as error:
            raise OSError(f"expected a Parquet file, got: {error}") from None


def _column(slot: Slot, chunked: Any, piece: Piece) -> Column:
    arrow, _ = _parquet()
    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    if arrow.types.is_large_list(array.type) or arrow.types.is_list(array.type):
        counts = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        values = array.flatten()
    else:
        counts, values = np.ones(len(array), np.int64), array
    wrong = ""
    if array.null_count or values.null_count:
        wrong = "a null"
    elif not (
        arrow.types.is_integer(values.type)
        or (not slot.whole and arrow.types.is_floating(values.type))
        or arrow.types.is_boolean(values.type)
    ):
        wrong = f"{array.type}"
    elif slot.width is not None and not (counts == max(slot.width, 1)).all():
        wrong = f"{counts[counts != max(slot.width, 1)][0]} values"
    if wrong:
        kind = "whole numbers" if slot.whole else "numbers"
        raise ValueError(
            f"{piece.shown}, row group {piece.begin}, column {slot.name!r}: expected {kind}, "
            f"{slot.values} in each row, got {wrong}"
        )
    return slot.column(np.array(values), counts.astype(np.int64))  # arrow's own is read-only


def _parquet() -> tuple[Any, Any]:
    """pyarrow and its module for Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            "parser='parquet': expected pyarrow, which pip install '.[parquet]' in a checkout of "
            "pserver brings"
        ) from None
    return pyarrow, pyarrow.parquet
