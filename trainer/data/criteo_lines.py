"""Criteo's format: a label, 13 whole numbers and 26 categories, with tabs between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.columns import Array
from trainer.data.lines import LineFormat, Lines, buffer_of, why_of_fields
from trainer.data.slots import Slot
from trainer.data.text_kernels import CATEGORIES, NUMBERS, criteo_lines

SLOTS = (Slot("label", "float32"), Slot("numbers", "float32", 13), Slot("ids", "int64", 26))
EXPECTED = [
    "label: expected 0 or 1",
    *(f"number {place + 1}: expected a whole number" for place in range(NUMBERS)),
    *(
        f"category {place + 1}: expected at most 8 hexadecimal digits"
        for place in range(CATEGORIES)
    ),
]


class CriteoLines(LineFormat):
    """Clicks: ``label`` float32 [samples], ``numbers`` float32 [samples, 13] and ``ids`` int64
    [samples, 26].

    Any field but the label may be empty: a number is then 0, and a category one of its own.  No id
    of one category's column is one of another's: the column stands above the category's 32 bits.

    Args:
        slots: which of the three a script wants; none: all.

    Raises:
        ValueError: there is no such slot, or it has another dtype or width.
    """

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        for slot in slots:
            if slot not in SLOTS:
                raise ValueError(f"criteo: expected slots among {SLOTS}, got {slot}")
        self.slots = tuple(slots) or SLOTS

    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """See :meth:`LineFormat.parse`."""
        lines = text.count(b"\n")
        labels = np.empty(lines, np.float32)
        numbers = np.empty((lines, NUMBERS), np.float32)
        ids = np.empty((lines, CATEGORIES), np.int64)
        right, wrong, first, begin, end, place = criteo_lines(
            buffer_of(text), labels, numbers, ids, skip
        )
        found: dict[str, Array] = {
            "label": labels[:right],
            "numbers": numbers[:right],
            "ids": ids[:right],
        }
        columns = {slot.name: found[slot.name] for slot in self.slots}
        why = why_of_fields(text[begin:end], b"\t", EXPECTED, place) if wrong else ""
        return Lines(columns, wrong, first, why)
