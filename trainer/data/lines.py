"""Formats whose samples are lines of text, and the handling of wrong lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.batches import Array, Columns, Ragged, part, samples_at, samples_of
from trainer.data.pieces import Piece, Slot, blocks_of, lines_before, pieces_of


class WrongLine(ValueError):
    """A line that does not fit its format: the message has the file, the line's number and the
    reason, and nothing of what the line holds, as messages go into logs.
    """


@dataclass(frozen=True, slots=True)
class Parsed:
    """The samples of a piece.

    Attributes:
        blocks: its samples, in order.
        wrong: the number of lines that were left out.
        first: the first of these, in words; "" where there is none.
    """

    blocks: list[Columns]
    wrong: int = 0
    first: str = ""

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(map(samples_of, self.blocks))

    def expect(self, samples: int, piece: Piece) -> None:
        """Checks that a piece has as many samples as were counted.

        Raises:
            ValueError: it has more or fewer.
        """
        if self.samples != samples:
            raise ValueError(
                f"{piece.shown}: expected {samples} samples, as when they were counted, got "
                f"{self.samples}: a file must not change while a job reads it"
            )

    def part(self, first: int, stop: int) -> list[Columns]:
        """The samples from ``first`` to ``stop``, in order."""
        at, found = 0, list[Columns]()
        for block in self.blocks:
            samples = samples_of(block)
            begin, end = max(first, at), min(stop, at + samples)
            if begin < end:
                found.append(part(block, begin - at, end - at))
            at += samples
        return found


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that were parsed together.

    Attributes:
        columns: of the right lines.
        wrong: the number of wrong lines.
        first: the number of the first wrong line, from 0; -1: all are right.
        why: what was expected there, and what was found.
    """

    columns: Columns
    wrong: int = 0
    first: int = -1
    why: str = ""


class LineFormat(ABC):
    """A format whose samples are lines of text.

    Attributes:
        slots: its columns.
        in_processes: whether it holds the GIL while it parses, so that only processes parse in
            parallel.
        head_lines: lines at the beginning of a file that are no samples.
        each_line: whether each other line is a sample, if it is not wrong.
    """

    slots: tuple[Slot, ...]
    in_processes = False
    head_lines = 0
    each_line = True

    @abstractmethod
    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """Parses whole lines.

        Args:
            text: ends with the end of a line.
            skip: leave lines out that are wrong; otherwise it may stop at the first.
            head: the lines at the beginning of the file that are no samples.

        Raises:
            ValueError: ``head`` is wrong.
        """

    def pieces(self, path: str) -> list[Piece]:
        """A file in pieces that :meth:`read` takes.

        Raises:
            OSError: it cannot be read.
        """
        return pieces_of(path)

    def read(self, piece: Piece, skip: bool) -> Parsed:
        """The samples of a piece.

        Args:
            skip: leave wrong lines out, and count them.

        Raises:
            WrongLine: a line is wrong, and ``skip`` is not set.
            ValueError: the lines at the file's beginning are wrong.
            OSError: the file cannot be read.
        """
        blocks, wrong, said = list[Columns](), 0, ""
        head = self._head(piece)
        for text, number in self._texts(piece):
            try:
                found = self.parse(text, skip, head)
            except ValueError as error:
                raise ValueError(f"{piece.shown}: {error}") from None
            if found.wrong and not wrong:
                line = 1 + number + found.first + lines_before(piece)
                said = f"{piece.shown}, line {line}: {found.why}"
                if not skip:
                    raise WrongLine(said)
            wrong += found.wrong
            if samples_of(found.columns):
                blocks.append(found.columns)
        return Parsed(blocks, wrong, said)

    def why_nothing(self, path: str) -> str:
        """The reason why a file with bytes has no sample, in words.

        Raises:
            OSError: it cannot be read.
        """
        whole = Piece(path)
        text = next(blocks_of(whole), b"")
        if not text:
            return "what is compressed there is empty"
        if text.count(b"\n") <= self.head_lines:
            return "it has no line but the first, which names the columns"
        try:
            self.read(whole, skip=False)
        except WrongLine as error:
            return f"no line is right; {str(error).removeprefix(f'{whole.shown}, ')}"
        return "each of its lines was left out"

    def count(self, piece: Piece, skip: bool) -> int:
        """The number of samples that :meth:`read` gives.  Where a wrong line is an error, lines are
        counted, and not parsed.

        Raises:
            WrongLine, ValueError, OSError: see :meth:`read`.
        """
        if skip or not self.each_line:
            return self.read(piece, skip).samples
        return sum(text.count(b"\n") for text, _ in self._texts(piece))

    def _texts(self, piece: Piece) -> Iterator[tuple[bytes, int]]:
        """Blocks of lines, each with the number of its first line in the piece, from 0."""
        number = 0
        for text in blocks_of(piece):
            yield text, number
            number += text.count(b"\n")

    def _head(self, piece: Piece) -> bytes:
        """The lines at the beginning of the piece's file that are no samples."""
        return b""


def buffer_of(text: bytes) -> Array:
    """A text in the form that kernels take, uint8 [bytes]."""
    return np.frombuffer(text, np.uint8)


def described(field: bytes, whole: bool = True) -> str:
    """Describes a wrong field, in words that have nothing of it.

    Args:
        whole: whether not every number would be right.
    """
    if not field.strip(b" \t\r"):
        return "an empty field"
    if not is_number(field):
        return "text"
    return "another number" if whole else "an infinity or a NaN"


def is_number(field: bytes) -> bool:
    """Whether a field is a number for Python; without the underscores that it takes."""
    text = field.strip(b" \t\r").lower()
    if text.lstrip(b"+-") not in (b"nan", b"inf", b"infinity") and text.strip(b"+-.0123456789e"):
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def why_of_fields(line: bytes, delimiter: bytes, expected: list[str], place: int) -> str:
    """The reason why a line of fields is wrong.

    Args:
        expected: of each field, in words that begin with its name.
        place: of the wrong field.
    """
    fields = line.removesuffix(b"\r").split(delimiter)
    if len(fields) != len(expected):
        by = {b"\t": "tabs", b",": "commas"}.get(delimiter, repr(delimiter.decode()))
        return f"expected {len(expected)} fields with {by} between them, got {len(fields)}"
    return f"{expected[place]}, got {described(fields[place])}"


def rows_with(marks: Array, counts: Array) -> Array:
    """bool [samples]: whether one of a sample's values is marked.

    Args:
        marks: bool [values], those of a sample side by side.
        counts: int64 [samples]: the number of values of each.
    """
    rows = np.repeat(np.arange(len(counts)), counts)[marks]
    found: Array = np.bincount(rows, minlength=len(counts)) > 0
    return found


def only_finite(slots: Sequence[Slot], found: Lines, numbers: Array) -> Lines:
    """The lines without those that have an infinity or a NaN in a slot: these are wrong ones.

    Args:
        found: lines that are right otherwise; of a slot of floats a column may have any.
        numbers: int64 [samples]: of each right line, from 0.
    """
    wrong, first, why = np.zeros(len(numbers), np.bool_), found.first, found.why
    for slot in slots:
        column = found.columns[slot.name]
        values = column.values if isinstance(column, Ragged) else column.reshape(-1)
        if slot.array == "int64" or (finite := np.isfinite(values)).all():
            continue
        dense = np.full(len(numbers), max(slot.width or 0, 1), np.int64)
        mine = rows_with(~finite, column.counts if isinstance(column, Ragged) else dense)
        number = int(numbers[mine.argmax()])
        if first < 0 or number < first:
            first = number
            why = f"slot {slot.name!r}: expected a finite number, got an infinity or a NaN"
        wrong |= mine
    if not wrong.any():
        return found
    columns = samples_at(found.columns, np.flatnonzero(~wrong))
    return Lines(columns, found.wrong + int(wrong.sum()), first, why)


def exact(values: Array, hard: Array, text: bytes) -> Array:
    """Floats, including those that the kernels could not read: see [Note: exact numbers].

    Args:
        values: int64, the bits of the floats; changed.
        hard: the number of hard ones, and then their places in the text.
    """
    floats = values.view(np.float64)
    for place in np.flatnonzero((values < 0) & (values >= -hard[0])):
        floats[place] = float(_word(text, hard[-values[place]]))
    return floats


def _word(text: bytes, begin: int) -> bytes:
    """The number that begins there."""
    end = begin
    while text[end] in b"+-.0123456789eE":
        end += 1
    return text[begin:end]
