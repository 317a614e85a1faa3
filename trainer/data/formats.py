"""Formats by the names that scripts give them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from difflib import get_close_matches
from functools import partial
from inspect import signature
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

import numpy as np

from pserver.table.string_ids import string_ids
from trainer.data.arrow import CsvLines, ParquetRows
from trainer.data.batches import Array, Column, Columns
from trainer.data.data_feed_desc import DataFeedDesc
from trainer.data.lines import (
    LineFormat,
    Lines,
    Parsed,
    buffer_of,
    described,
    exact,
    is_number,
    only_finite,
    why_of_fields,
)
from trainer.data.pieces import Piece, Slot, slots_of
from trainer.data.text_kernels import (
    CATEGORIES,
    NUMBERS,
    criteo_lines,
    multislot_lines,
    pick,
)

# ---- criteo lines ----
#
# Criteo's format: a label, 13 whole numbers and 26 categories, with tabs between them.


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
        slots = slots_of(slots, "criteo")
        for slot in slots:
            if slot not in SLOTS:
                raise ValueError(f"criteo: expected slots among {SLOTS}, got {slot}")
        self.slots = slots or SLOTS

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


# ---- multislot lines ----
#
# The original's MultiSlot text: for each slot of a line a count, and then that many values.


class MultiSlotLines(LineFormat):
    """Lines like ``3 17 4 99 1 0.5``: the slots in their order, each with a count before its
    values.  Infinities and NaNs are wrong.

    Args:
        slots: all those of a line, in its order.  A dense slot has as many values in each line.
        used: the names of those that become columns; None: of all.

    Raises:
        ValueError: there is no slot, or none is used.
    """

    def __init__(self, slots: Sequence[Slot], used: Collection[str] | None = None) -> None:
        slots = slots_of(slots, "multislot")
        if not slots:
            raise ValueError("multislot: expected use_var, the slots of a line, got none")
        for slot in slots:
            if slot.text:
                raise ValueError(
                    f"multislot: slot {slot.name!r}: expected numbers, got {slot.dtype!r}: csv, "
                    "parquet and a function of the script have texts"
                )
        self._line = slots
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
        lines = text.count(b"\n")
        counts = np.empty((lines, len(self._line)), np.int64)
        numbers = np.empty(lines, np.int64)
        whole = np.empty(len(text) // 2 + 1, np.int64)
        hard = np.empty(1 + len(whole), np.int64)
        hard[0] = 0
        right, wrong, first, begin, end, place = multislot_lines(
            buffer_of(text),
            self._floats,
            self._widths,
            counts,
            numbers,
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
        return only_finite(self.slots, Lines(columns, wrong, first, why), numbers[:right])

    def _why(self, line: bytes, place: int) -> str:
        """The reason why a line is wrong, found word by word."""
        words, at = line.split(), 0
        for _ in range(place):
            at += 1 + int(words[at])
        if place == len(self._line):
            return f"expected {place} slots, got {len(words) - at} words after them"
        slot = self._line[place]
        return (
            f"slot {slot.name!r}: expected a count and {slot.values}, each {slot.kind}, got "
            f"{_got(slot, words[at:])}"
        )


def _got(slot: Slot, words: Sequence[bytes]) -> str:
    """Describes the words in the place of a slot, without their content.

    Args:
        words: from the slot's count to the line's end.
    """
    if not words:
        return "nothing"
    count, *values = words
    if not count.isdigit():
        return f"{described(count)} as the count"
    many = int(count[:19])  # no line has more
    if slot.width is not None and many != max(slot.width, 1):
        return "another count"
    if len(values) < many:
        return f"{len(values)} words after a larger count"
    right = _is_whole if slot.whole else is_number
    wrong = next((value for value in values[:many] if not right(value)), b"")
    return described(wrong) if wrong else "other bytes between them"


def _is_whole(word: bytes) -> bool:
    digits = word.removeprefix(b"-")
    return digits.isdigit() and (len(digits) < 19 or -(2**63) <= int(word) < 2**64)


# ---- python lines ----
#
# A parser of the script's own: a function from a line to its slots' values.


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
        self._parser, self.slots = parser, slots_of(slots, "parser")
        if not slots:
            raise ValueError("parser: expected use_var, the slots that it gives, got none")

    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """See :meth:`LineFormat.parse`."""
        rows, numbers, wrong, first, why = list[list[Any]](), list[int](), 0, -1, ""
        for number, line in enumerate(text.split(b"\n")[:-1]):
            try:
                row = self._row(line)
            except _Unfit as error:
                if not wrong:
                    first, why = number, str(error)
                wrong += 1
                if not skip:
                    break
            else:
                if row is not None:
                    rows.append(row)
                    numbers.append(number)
        found = Lines(self._columns(rows), wrong, first, why)
        return only_finite(self.slots, found, np.array(numbers, np.int64))

    def _row(self, line: bytes) -> list[Any] | None:
        """The values of each slot in a line; None: the parser leaves it out.

        Raises:
            _Unfit: the line is wrong.
        """
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError:
            raise _Unfit("expected a line in UTF-8, got other bytes") from None
        try:
            given = self._parser(text)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _Unfit(f"the parser raised {_raised(error)}") from None
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise _Unfit(f"expected a dict or None from the parser, got {type(given).__name__}")
        return [_values(slot, given) for slot in self.slots]

    def _columns(self, rows: Sequence[Sequence[Any]]) -> Columns:
        if not rows:
            return {slot.name: slot.empty() for slot in self.slots}
        found = {}
        for slot, parts in zip(self.slots, zip(*rows, strict=True), strict=True):
            counts = np.array([len(values) for values in parts], np.int64)
            found[slot.name] = slot.column(np.concatenate(parts), counts)
        return found


class _Unfit(Exception):
    """A line that the script's parser, or its slots, do not take: why, with nothing of the line."""


def _raised(error: Exception) -> str:
    """An exception of the parser, without its text, which may quote the line."""
    place = error.__traceback__ and error.__traceback__.tb_next  # behind the call
    if place is None:
        return type(error).__name__
    file = os.path.basename(place.tb_frame.f_code.co_filename)
    return f"{type(error).__name__} in line {place.tb_lineno} of {file}"


def _values(slot: Slot, sample: Mapping[str, Any]) -> Array:
    """A slot's values in one line.

    Raises:
        _Unfit: the parser gave no such slot, or something else for it.
    """
    if slot.name not in sample:
        raise _Unfit(f"slot {slot.name!r}: expected it in the parser's dict, got none")
    given = sample[slot.name]
    kind = "texts" if slot.text else "whole numbers" if slot.whole else "numbers"
    try:
        if slot.text:
            given = string_ids([given] if isinstance(given, str | bytes) else given).numpy()
        values = np.atleast_1d(np.asarray(given, None if len(np.atleast_1d(given)) else slot.array))
    except (ValueError, TypeError, OverflowError):
        raise _Unfit(f"slot {slot.name!r}: expected {kind}, got other values") from None
    if slot.width is not None and values.shape != (max(slot.width, 1),):
        got = f"{len(values)} values" if values.ndim == 1 else f"values of shape {values.shape}"
        raise _Unfit(f"slot {slot.name!r}: expected {slot.values}, got {got}")
    if values.ndim != 1 or values.dtype.kind not in ("iub" if slot.array == "int64" else "iubf"):
        got = "text" if values.dtype.kind in "US" else f"values of type {values.dtype}"
        raise _Unfit(f"slot {slot.name!r}: expected {kind}, got {got}")
    with np.errstate(over="ignore"):  # it is an infinity then
        return values.astype(slot.array)


# ---- formats ----


class Format(Protocol):
    """A format of files; see :class:`trainer.data.lines.LineFormat`.

    Attributes:
        slots: its columns.
        in_processes: whether only processes parse it in parallel.
        each_line: whether each right line is a sample.
    """

    slots: tuple[Slot, ...]
    in_processes: bool
    each_line: bool

    def pieces(self, path: str) -> list[Piece]:
        """The pieces of a file."""

    def read(self, piece: Piece, skip: bool) -> Parsed:
        """The samples of a piece."""

    def why_nothing(self, path: str) -> str:
        """The reason why a file with bytes has no sample."""

    def count(self, piece: Piece, skip: bool) -> int:
        """The number of samples of a piece."""


FORMATS: dict[str, Callable[[Sequence[Slot]], Format]] = {
    "criteo": CriteoLines,
    "csv": CsvLines,
    "multislot": MultiSlotLines,
    "parquet": ParquetRows,
    "tsv": partial(CsvLines, delimiter="\t"),
}


def check_parser(parser: Any) -> None:
    """Checks that there is a format of a name, or that something else may be one.

    Raises:
        TypeError: it is something else.
        ValueError: there is no format of this name.
    """
    if isinstance(parser, str):
        if parser not in FORMATS:
            close = get_close_matches(parser.lower(), FORMATS, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"parser: expected one of {', '.join(FORMATS)}, got {parser!r}{hint}")
    elif not callable(parser) and not isinstance(parser, DataFeedDesc | LineFormat | ParquetRows):
        raise TypeError(
            f"parser: expected one of {', '.join(FORMATS)}, or a function from a line to a dict, "
            f"got {type(parser).__name__}"
        )


def options_of(parser: Any) -> dict[str, str]:
    """The options that a format has beside its slots, each with how a script gives it."""
    form: Callable[..., Format] = ParquetRows if parser == "parquet" else CsvLines
    options = [name for name in signature(form).parameters if name != "slots"]
    given = {name: f"{name}=..." for name in options}
    if parser == "tsv":
        given = {name: f"delimiter='\\t', {each}" for name, each in given.items()}
        given["delimiter"] = "delimiter=..."
    return {name: f"{form.__name__}(slots, {each})" for name, each in given.items()}


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
    check_parser(parser)
    if isinstance(parser, str):
        return FORMATS[parser](slots)
    if isinstance(parser, DataFeedDesc):
        parser = MultiSlotLines(parser.slots, parser.used)
    if isinstance(parser, LineFormat | ParquetRows):
        if slots and tuple(slots) != parser.slots:
            raise ValueError(
                "use_var: expected the slots of the parser, or none, got "
                f"{', '.join(slot.name for slot in slots)}"
            )
        return parser
    return PythonLines(parser, slots)


# ---- workers ----
#
# Pieces of files, parsed in parallel, in their order.
#
# Formats whose kernels hold no GIL are parsed by threads: nothing is copied between processes.  A
# parser in Python is run by processes, where there are to be several.  They end with the iteration,
# with an error, and with the process that has started them.


T = TypeVar("T")


def in_parallel(
    form: Format, pieces: Iterable[Piece], workers: int, skip: bool
) -> Generator[tuple[Piece, Parsed]]:
    """Parses pieces; at most ``workers + 1`` of them are in memory.

    Args:
        pieces: in the order in which they come back.
        skip: leave wrong lines out, and count them.

    Raises:
        WrongLine, OSError: see :meth:`trainer.data.lines.LineFormat.read`.
        RuntimeError: a worker process was killed.
    """
    return _each(form.read, form, pieces, workers, skip)


def counted(
    form: Format, pieces: Iterable[Piece], workers: int, skip: bool
) -> Generator[tuple[Piece, int]]:
    """Counts the samples of pieces; see :func:`in_parallel`."""
    return _each(form.count, form, pieces, workers, skip)


def _each(
    what: Callable[[Piece, bool], T],
    form: Format,
    pieces: Iterable[Piece],
    workers: int,
    skip: bool,
) -> Generator[tuple[Piece, T]]:
    pool = _pool(form, workers)
    waiting = deque[tuple[Piece, Future[T]]]()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(what, piece, skip)))
            if len(waiting) > workers:
                first, found = waiting.popleft()
                yield first, found.result()
        while waiting:
            first, found = waiting.popleft()
            yield first, found.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a process that runs the script's parser was killed, perhaps for lack of memory; "
            "set_thread() sets the number of these processes"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pool(form: Format, workers: int) -> Executor:
    if not form.in_processes or workers == 1:
        return ThreadPoolExecutor(workers, "parses")
    # a fork would copy the locks of this process's threads
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, initializer=_begin_worker)


def _begin_worker() -> None:
    """Leaves interrupts to the parent process, and ends this process with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has one"
    wait([parent.sentinel])
    os._exit(1)
