"""A parser of the script's own: a function from a line to its slots' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.data.columns import Columns
from trainer.data.lines import SHOWN_BYTES, LineFormat, Lines
from trainer.data.slots import Slot

SHOWN_VALUES = 3  # of a sample, in a message

Parser = Callable[[str], "Mapping[str, Any] | None"]


class PythonLines(LineFormat):
    """Lines that a function of the script parses, in processes.

    Args:
        parser: takes a line without its end and gives the values of each slot: one, or a list of
            them; None leaves the line out.  It stands at the top of a module, so that other
            processes find it.  What it raises as a ValueError, KeyError, IndexError or TypeError
            makes the line a wrong one.
        slots: that it gives.

    Raises:
        ValueError: there is no slot.
    """

    in_processes = True
    each_line = False  # the parser may leave one out

    def __init__(self, parser: Parser, slots: Sequence[Slot]) -> None:
        if not slots:
            raise ValueError("parser: expected use_var, the slots that it gives, got none")
        self._parser, self.slots = parser, tuple(slots)

    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """See :meth:`LineFormat.parse`."""
        rows, wrong, first, why = list[list[Any]](), 0, -1, ""
        for number, line in enumerate(text.split(b"\n")[:-1]):
            try:
                given = self._parser(line.decode().removesuffix("\r"))
                if given is not None:
                    rows.append([_values(slot, _given(slot, given)) for slot in self.slots])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                if not wrong:
                    first, why = number, f"{type(error).__name__}: {_cut(str(error))}"
                wrong += 1
                if not skip:
                    break
        return Lines(self._columns(rows), wrong, first, why)

    def _columns(self, rows: Sequence[Sequence[Any]]) -> Columns:
        if not rows:
            return {slot.name: slot.empty() for slot in self.slots}
        found = {}
        for slot, parts in zip(self.slots, zip(*rows, strict=True), strict=True):
            counts = np.array([len(values) for values in parts], np.int64)
            found[slot.name] = slot.column(np.concatenate(parts), counts)
        return found


def _given(slot: Slot, sample: Any) -> Any:
    """What the parser gives for a slot."""
    if not isinstance(sample, Mapping):
        raise TypeError(f"expected a dict or None from the parser, got {_shown(sample)}")
    if slot.name not in sample:
        raise ValueError(f"slot {slot.name!r}: expected it in {list(sample)}")
    return sample[slot.name]


def _shown(given: Any) -> str:
    """The values that a parser has given, in a message: how many values, where they are many."""
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) > SHOWN_VALUES:
        first = ", ".join(repr(each)[:SHOWN_BYTES] for each in given[:SHOWN_VALUES])
        return f"{len(given)} values: {first}, ..."
    return _cut(repr(given), SHOWN_BYTES)


def _cut(text: str, most: int = 3 * SHOWN_BYTES) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _values(slot: Slot, given: Any) -> Any:
    """A slot's values in one line."""
    values = np.atleast_1d(np.asarray(given, None if len(np.atleast_1d(given)) else slot.dtype))
    if slot.width is not None and values.shape != (max(slot.width, 1),):
        raise ValueError(f"slot {slot.name!r}: expected {slot.values}, got {_shown(given)}")
    if values.ndim != 1 or values.dtype.kind not in ("iub" if slot.whole else "iubf"):
        kind = "whole numbers" if slot.whole else "numbers"
        raise ValueError(f"slot {slot.name!r}: expected {kind}, got {_shown(given)}")
    return values.astype(slot.dtype)
