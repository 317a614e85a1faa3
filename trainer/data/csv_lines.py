"""CSV: numbers by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.data.lines import LineFormat, Lines, buffer_of, exact, why_of_fields
from trainer.data.slots import Slot
from trainer.data.text_kernels import csv_lines


class CsvLines(LineFormat):
    """Lines of fields, of which slots name those that are read; they hold numbers.

    Other columns may hold anything, also fields between quotes, but no end of a line.

    Args:
        slots: dense ones; a slot of width 0 is the column of its name.
        columns: the names of a file's columns, where its first line does not say them.
        delimiter: one character between fields.
        groups: for each slot of a width the names of its columns.
        fill: what an empty field is; None: it is wrong.

    Example::

        slots = [fleet.Slot("label", "float32"), fleet.Slot("numbers", "float32", 2)]
        parser = CsvLines(slots, groups={"numbers": ["a", "b"]}, fill=0.0)
        dataset = fleet.InMemoryDataset()
        dataset.init(batch_size=4, parser=parser)

    Raises:
        ValueError: there is no slot, one is ragged, or a slot has another number of columns than
            its width says.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        columns: Sequence[str] = (),
        delimiter: str = ",",
        groups: Mapping[str, Sequence[str]] | None = None,
        fill: float | None = None,
    ) -> None:
        self.slots, self._columns, groups = tuple(slots), tuple(columns), dict(groups or {})
        if not slots:
            raise ValueError("csv: expected use_var, the columns to read, got none")
        if len(delimiter.encode()) != 1 or delimiter in '\r\n"':
            raise ValueError(f"csv: delimiter: expected one character, got {delimiter!r}")
        if unknown := set(groups) - {slot.name for slot in slots}:
            raise ValueError(f"csv: groups: no slot of use_var is {min(unknown)!r}")
        self._delimiter = delimiter.encode()
        self._fill = np.nan if fill is None else float(fill)
        self._wanted = [(slot, _names(slot, groups)) for slot in slots]
        self.head_lines = 0 if columns else 1

    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """See :meth:`LineFormat.parse`.

        Raises:
            ValueError: the file lacks a column, or has two of its name, or the names are no UTF-8.
        """
        columns = self._columns_of(head)
        fields = [(name, slot) for slot, names in self._wanted for name in names]
        places = np.full(len(columns), -1, np.int64)
        for place, (name, _) in enumerate(fields):
            if columns.count(name) != 1:
                raise ValueError(
                    f"expected one column {name!r}, got the columns {', '.join(columns)}"
                )
            places[columns.index(name)] = place
        floats = np.array([not slot.whole for _, slot in fields], np.uint8)
        whole = np.empty((text.count(b"\n"), len(fields)), np.int64)
        hard = np.empty(1 + whole.size, np.int64)
        hard[0] = 0
        right, wrong, first, begin, end, place = csv_lines(
            buffer_of(text),
            self._delimiter[0],
            places,
            floats,
            self._fill,
            whole,
            hard,
            skip,
        )
        found, at = {}, 0
        for slot, names in self._wanted:
            values = np.ascontiguousarray(whole[:right, at : at + len(names)]).reshape(-1)
            values = values if slot.whole else exact(values, hard, text)
            found[slot.name] = slot.column(values, np.empty(0, np.int64))
            at += len(names)
        why = self._why(text[begin:end], columns, place) if wrong else ""
        return Lines(found, wrong, first, why)

    def _columns_of(self, head: bytes) -> list[str]:
        if self._columns:
            return list(self._columns)
        try:
            line = head.decode("utf-8-sig").removesuffix("\r")
        except UnicodeDecodeError:
            raise ValueError(f"expected the columns' names in UTF-8, got {head[:60]!r}") from None
        names = line.split(self._delimiter.decode())
        return [name.strip().strip('"') for name in names]

    def _why(self, line: bytes, columns: Sequence[str], place: int) -> str:
        kinds = {name: slot.whole for slot, names in self._wanted for name in names}
        expected = [
            f"{name}: expected a {'whole number of 64 bits' if kinds.get(name) else 'number'}"
            for name in columns
        ]
        return why_of_fields(line, self._delimiter, expected, place)


def _names(slot: Slot, groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The columns of a slot."""
    names = tuple(groups.get(slot.name, (slot.name,)))
    if slot.width is None or len(names) != max(slot.width, 1):
        raise ValueError(
            f"csv: slot {slot.name!r}: expected a dense slot with a column for each of its values, "
            f"got {slot.values} and the columns {', '.join(names)}"
        )
    return names
