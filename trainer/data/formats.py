"""Formats by the names that scripts give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainer.data.criteo_lines import CriteoLines
from trainer.data.csv_lines import CsvLines
from trainer.data.data_feed_desc import DataFeedDesc
from trainer.data.lines import LineFormat, Parsed
from trainer.data.multislot_lines import MultiSlotLines
from trainer.data.parquet import Parquet
from trainer.data.pieces import Piece
from trainer.data.python_lines import PythonLines
from trainer.data.slots import Slot


class Format(Protocol):
    """How files become columns; see :class:`trainer.data.lines.LineFormat`.

    Attributes:
        slots: its columns.
        in_processes: whether only processes parse it in parallel.
        each_line: whether the script leaves no line out that is right.
    """

    slots: tuple[Slot, ...]
    in_processes: bool
    each_line: bool

    def pieces(self, path: str) -> list[Piece]:
        """A file in pieces."""

    def read(self, piece: Piece, skip: bool) -> Parsed:
        """The samples of a piece."""

    def why_nothing(self, path: str) -> str:
        """Why a file with bytes has no sample."""

    def count(self, piece: Piece, skip: bool) -> int:
        """How many samples a piece has."""


FORMATS: dict[str, Callable[[Sequence[Slot]], Format]] = {
    "criteo": CriteoLines,
    "csv": CsvLines,
    "multislot": MultiSlotLines,
    "parquet": Parquet,
}


def format_of(parser: Any, slots: Sequence[Slot]) -> Format:
    """The format that a script asks for.

    Args:
        parser: one of ``FORMATS``, a format itself, a description of one, or a function from a
            line to its slots' values.

    Raises:
        TypeError: it is something else.
        ValueError: there is no format of this name, or the slots do not fit it.
        ImportError: its extra is not installed.
    """
    if isinstance(parser, str):
        if parser not in FORMATS:
            raise ValueError(f"parser: expected one of {', '.join(FORMATS)}, got {parser!r}")
        return FORMATS[parser](slots)
    if isinstance(parser, DataFeedDesc):
        parser = MultiSlotLines(parser.slots, parser.used)
    if isinstance(parser, LineFormat | Parquet):
        if slots and tuple(slots) != parser.slots:
            raise ValueError(
                "use_var: expected the slots of the parser, or none, got "
                f"{', '.join(slot.name for slot in slots)}"
            )
        return parser
    if callable(parser):
        return PythonLines(parser, slots)
    raise TypeError(
        f"parser: expected one of {', '.join(FORMATS)}, or a function from a line to a dict, got "
        f"{type(parser).__name__}"
    )
