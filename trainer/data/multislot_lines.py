"""The original's MultiSlot text: for each slot of a line a count, and then so many values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from trainer.data.columns import Column
from trainer.data.lines import LineFormat, Lines, buffer_of, exact, quoted
from trainer.data.slots import Slot
from trainer.data.text_kernels import multislot_lines, pick


class MultiSlotLines(LineFormat):
    """Lines like ``3 17 4 99 1 0.5``: the slots in their order, each with a count before its
    values.

    Args:
        slots: all those of a line, in its order.  A dense slot has as many values in each line.
        used: the names of those that become columns; None: of all.

    Raises:
        ValueError: there is no slot, or none is used.
    """

    def __init__(self, slots: Sequence[Slot], used: Collection[str] | None = None) -> None:
        if not slots:
            raise ValueError("multislot: expected use_var, the slots of a line, got none")
        self._line = tuple(slots)
        self._used = [n for n, slot in enumerate(slots) if used is None or slot.name in used]
        self.slots = tuple(slots[number] for number in self._used)
        if not self.slots:
            names = ", ".join(slot.name for slot in slots)
            raise ValueError(f"multislot: expected used slots among {names}, got none")
        self._floats = np.array([not slot.whole for slot in slots], np.uint8)
        widths = [-1 if slot.width is None else max(slot.width, 1) for slot in slots]
        self._widths = np.array(widths, np.int64)

    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """See :meth:`LineFormat.parse`."""
        counts = np.empty((text.count(b"\n"), len(self._line)), np.int64)
        whole = np.empty(len(text) // 2 + 1, np.int64)
        hard = np.empty(1 + len(whole), np.int64)
        hard[0] = 0
        right, wrong, first, begin, end, place = multislot_lines(
            buffer_of(text),
            self._floats,
            self._widths,
            counts,
            whole,
            hard,
            skip,
        )
        counts = counts[:right]
        begins = counts.cumsum().reshape(counts.shape) - counts
        columns = dict[str, Column]()
        for number in self._used:
            slot, own = self._line[number], counts[:, number]
            values = np.empty(int(own.sum()), np.int64)
            pick(whole, begins[:, number], own, values)
            given = values if slot.whole else exact(values, hard, text)
            columns[slot.name] = slot.column(given, own)
        why = self._why(text[begin:end], place) if wrong else ""
        return Lines(columns, wrong, first, why)

    def _why(self, line: bytes, place: int) -> str:
        """What is wrong with a line: counted again, word by word."""
        words, at = line.split(), 0
        for _ in range(place):
            at += 1 + int(words[at])
        if place == len(self._line):
            return f"expected {place} slots, got {len(words) - at} words after them"
        slot = self._line[place]
        kind = "whole number of 64 bits" if slot.whole else "number"
        expected = f"slot {slot.name!r}: expected a count and {slot.values}, each a {kind}"
        got = b" ".join(words[at:])
        return f"{expected}, got {quoted(got) if got else 'nothing'}"
