"""CSV and Parquet, by pyarrow, which the extra ``data`` brings.

pyarrow divides a text into fields, and decodes a Parquet file.  Kernels make numbers of the fields,
to the bit those of Python, and ids of texts: see :mod:`pserver.table.xxh3`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from io import StringIO
from typing import Any

import numpy as np

from pserver.table.string_ids import string_ids
from pserver.table.xxh3 import hash_long, hashed
from trainer.data.batches import Array, Ragged, samples_at, samples_of
from trainer.data.lines import (
    LineFormat,
    Lines,
    Parsed,
    WrongLine,
    buffer_of,
    described,
    is_number,
    rows_with,
)
from trainer.data.pieces import (
    LONGEST_LINE,
    Piece,
    Slot,
    blocks_of,
    lines_before,
    opened,
    pieces_of,
    pyarrow,
    size_of,
    slots_of,
)
from trainer.data.text_kernels import float_cells, line_ends, rows_of, text_cells, whole_cells
from transpiler.files.files import shown

LABEL = re.compile(r"(.*[\W_])?(label|target)s?([\W_].*)?|clicks?|clicked|y", re.IGNORECASE)
Fill = Mapping[str, "float | str"]  # of a slot or a column: what an empty field is
EMPTY = np.empty(0, np.uint8)


def fills_of(format: str, fill: Fill | None, fields: Mapping[str, Slot]) -> dict[str, Any]:
    """The values of empty fields, by column, where the script gives them: numbers, or ids of texts.

    Args:
        format: for messages.
        fill: by the names of slots, or of their columns.
        fields: the slot of each column.

    Raises:
        TypeError: it is no dict, or a value is none of its slot's.
        ValueError: nothing has such a name.
    """
    if fill is not None and not isinstance(fill, Mapping):
        name = next(iter(fields))
        raise TypeError(
            f"{format}: fill: expected a dict from a slot's or a column's name to what an empty "
            f"field of it is, as {{{name!r}: 0}}, got {fill!r}: no label and no id is filled "
            "unless it is named"
        )
    found = dict[str, Any]()
    for name, value in (fill or {}).items():
        mine = {column: slot for column, slot in fields.items() if name in (column, slot.name)}
        if not mine:
            raise ValueError(f"{format}: fill: no slot or column of use_var is {name!r}")
        for column, slot in mine.items():
            if isinstance(value, str | bytes) or slot.text:
                right = isinstance(value, str | bytes) and slot.text
            elif slot.whole:
                right = isinstance(value, int) and -(2**63) <= value < 2**63
            else:
                most = float(np.finfo(slot.array).max)
                right = isinstance(value, int | float) and abs(value) <= most
            if not right or isinstance(value, bool):
                raise TypeError(f"{format}: fill: {name!r}: expected {slot.kind}, got {value!r}")
            found[column] = int(string_ids([value])[0]) if slot.text else value
    return found


def texts_of(array: Any) -> tuple[Array, Array]:
    """The bytes of an array of pyarrow's binary or string type, uint8 [bytes], and the bounds of
    its values, int32 or int64 [values + 1].
    """
    if not len(array):
        return EMPTY, np.zeros(1, np.int32)
    _, bounds, values = array.buffers()
    wide = np.int64 if str(array.type).startswith("large") else np.int32
    ends = np.frombuffer(bounds, wide, len(array) + 1, array.offset * np.dtype(wide).itemsize)
    return (EMPTY if values is None else np.frombuffer(values, np.uint8)), ends


# ---- csv ----


HEAD_BYTES = 2**16  # that have a file's first row
DELIMITERS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}  # the usual ones
LOOKED_AT = 2**20  # bytes at a file's beginning, which show whether fields have line breaks
BLOCK_BYTES = 2**20  # that pyarrow divides at once: they stay in a core's cache


class CsvLines(LineFormat):
    """Rows of fields, of which slots name those that are read.

    Fields may be quoted, and have delimiters, quotes (doubled) and line breaks then.  Lines without
    a byte are left out; spaces around a number are none of it.  Columns that no slot names may hold
    anything.  An empty field, an infinity and a NaN are wrong.

    A file is divided at the ends of its lines, and read in parallel.  One with line breaks between
    quotes is read as a whole.

    Args:
        slots: dense ones; a slot of width 0 is the column of its name.
        columns: the names of a file's columns, where its first line does not say them.
        delimiter: one character between fields: "\\t" for TSV.
        groups: for each slot of a width the names of its columns.
        fill: what an empty field is, by the name of its slot or column: a number, or a text in a
            slot of texts.
        quote: one character around fields; None: it is a character like any other.
        line_breaks: whether fields between quotes have line breaks; None: yes in files of at most
            16 MB, and in those whose first megabyte has one.

    Example::

        slots = [
            fleet.Slot("label", "float32"),
            fleet.Slot("numbers", "float32", 2),
            fleet.Slot("brand", "string"),
        ]
        parser = CsvLines(slots, groups={"numbers": ["a", "b"]}, fill={"numbers": 0.0})
        dataset = fleet.InMemoryDataset()
        dataset.init(batch_size=4, parser=parser)

    Raises:
        TypeError: ``slots`` is no list of slots, ``fill`` is no dict, or has a value that is none
            of its slot's.
        ValueError: there is no slot, one is ragged, or a slot has another number of columns than
            its width says; a name in ``groups`` or ``fill`` is none of theirs.
        ImportError: pyarrow is not installed.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        columns: Sequence[str] = (),
        delimiter: str = ",",
        groups: Mapping[str, Sequence[str]] | None = None,
        fill: Fill | None = None,
        quote: str | None = '"',
        line_breaks: bool | None = None,
    ) -> None:
        slots = slots_of(slots, "csv: slots")
        self.slots, self._columns, groups = slots, tuple(columns), dict(groups or {})
        if not slots:
            raise ValueError("csv: expected use_var, the columns to read, got none")
        if isinstance(columns, str) or not all(isinstance(each, str) for each in columns):
            raise TypeError(f"csv: columns: expected the names of columns, got {columns!r}")
        if not _is_byte(delimiter) or delimiter in '\r\n"':
            raise ValueError(f"csv: delimiter: expected one character, got {delimiter!r}")
        if quote is not None and (not _is_byte(quote) or quote in f"\r\n{delimiter}"):
            raise ValueError(f"csv: quote: expected one character or None, got {quote!r}")
        if line_breaks is not None and not isinstance(line_breaks, bool):
            raise TypeError(f"csv: line_breaks: expected True, False or None, got {line_breaks!r}")
        if unknown := set(groups) - {slot.name for slot in slots}:
            raise ValueError(f"csv: groups: no slot of use_var is {min(unknown)!r}")
        self._arrow = pyarrow("parser='csv'")
        self._delimiter, self._quote, self._breaks = delimiter, quote, line_breaks
        self._marks = ord(delimiter), ord(quote) if quote else -1
        self._wanted = [(slot, _names(slot, groups)) for slot in slots]
        fields = {name: slot for slot, names in self._wanted for name in names}
        for name in fields if columns else ():
            if self._columns.count(name) != 1:
                raise ValueError(
                    f"csv: columns: expected {name!r} once, got {', '.join(self._columns)}"
                )
        self._fill = fills_of("csv", fill, fields)
        self.head_lines = 0 if columns else 1

    # ---- rows ----

    def pieces(self, path: str) -> list[Piece]:
        """See :meth:`LineFormat.pieces`."""
        found = pieces_of(path)
        if len(found) < 2 or not self._quote:
            return found
        if self._breaks is None:
            first = next(blocks_of(Piece(path, 0, min(LOOKED_AT, found[-1].end or 0))), b"")
            broken = _is_broken(first, self._marks)
        else:
            broken = self._breaks
        return [Piece(path)] if broken else found

    def count(self, piece: Piece, skip: bool) -> int:
        """See :meth:`LineFormat.count`."""
        if skip:
            return self.read(piece, skip).samples
        return sum(self._rows(text) for text, _ in self._texts(piece))

    def _rows(self, text: bytes) -> int:
        """The number of rows of whole ones."""
        quoted = self._quote is not None and self._quote.encode() in text
        if quoted or b"\r" in text or b"\n\n" in text or text.startswith(b"\n"):
            return rows_of(buffer_of(text), *self._marks, -1)[0]
        return text.count(b"\n")

    def _texts(self, piece: Piece) -> Iterator[tuple[bytes, int]]:
        """Blocks of rows; see :meth:`LineFormat._texts`.

        Raises:
            ValueError: a row has line breaks where the file is divided at the ends of its lines, or
                a quote is not closed.
        """
        whole = self._breaks is not False and _is_whole(piece)
        number, rest, head = 0, b"", 0 if piece.begin else self.head_lines
        for block in blocks_of(piece):
            text = rest + block
            text, rest = self._cut(text, whole, piece, number)
            if head and text:
                rows, cut, _, second = rows_of(buffer_of(text), *self._marks, 1)
                cut = second if rows > 1 else cut
                number, text, head = (
                    number + text[:cut].count(b"\n"),
                    text[cut:],
                    head - min(rows, 1),
                )
            if text:
                yield text, number
            number += line_ends(buffer_of(text))
        if rest:
            self._refuse(piece, number, "which nothing closes")

    def _cut(self, text: bytes, whole: bool, piece: Piece, number: int) -> tuple[bytes, bytes]:
        """The whole rows of a text, and its rest: the beginning of a row with line breaks."""
        if self._quote is None or self._quote.encode() not in text:
            return text, b""
        _, cut, broken, _ = rows_of(buffer_of(text), *self._marks, -1)
        if broken >= 0 and not whole:
            self._refuse(piece, number + text[:broken].count(b"\n"), "which is open at its end")
        if len(text) - cut > LONGEST_LINE:
            self._refuse(piece, number + text[:cut].count(b"\n"), "which nothing closes soon")
        return text[:cut], text[cut:]

    def _refuse(self, piece: Piece, number: int, what: str) -> None:
        raise ValueError(
            f"{piece.shown}, line {1 + number + lines_before(piece)}: expected fields that end in "
            f"their line, got a quote, {what}: CsvLines(..., line_breaks=True) reads fields with "
            "line breaks, and quote=None takes quotes for characters like any others"
        )

    # ---- columns ----

    def _head(self, piece: Piece) -> bytes:
        """The rows at the beginning of the piece's file."""
        if not self.head_lines:
            return b""
        end = None if piece.end is None else min(HEAD_BYTES, piece.end)
        return next(blocks_of(Piece(piece.path, 0, end), HEAD_BYTES), b"")

    def _first_row(self, head: bytes) -> bytes:
        rows, cut, _, second = rows_of(buffer_of(head), *self._marks, 1)
        return head[: second if rows > 1 else cut or None].strip(b"\r\n")

    def _columns_of(self, head: bytes) -> list[str]:
        """The names of the columns.

        Raises:
            ValueError: they are not in UTF-8.
        """
        if self._columns:
            return list(self._columns)
        line = self._first_row(head)
        try:
            lines = StringIO(line.decode(), newline="")
        except UnicodeDecodeError:
            raise ValueError("expected the columns' names in UTF-8, got other bytes") from None
        names = csv.reader(
            lines,
            delimiter=self._delimiter,
            quotechar=self._quote,
            quoting=csv.QUOTE_MINIMAL if self._quote else csv.QUOTE_NONE,
        )
        return [name.strip() for name in next(names, [])]

    def parse(self, text: bytes, skip: bool, head: bytes) -> Lines:
        """See :meth:`LineFormat.parse`.

        Raises:
            ValueError: the file lacks a column, or has two of its name, or the names are no UTF-8.
        """
        columns = self._columns_of(head)
        places = {name: columns.index(name) for name in self._names_among(columns, head)}
        table, torn = self._table(text, len(columns), sorted(set(places.values())))
        rows = table.num_rows
        out = {slot: np.empty((rows, len(names)), slot.array) for slot, names in self._wanted}
        fields = [
            (places[name], name, slot, out[slot][:, at])
            for slot, names in self._wanted
            for at, name in enumerate(names)
        ]
        fields.sort(key=lambda field: field[0])
        wrong = np.zeros(rows, np.int32)
        at = 0
        for batch in table.to_batches():
            mine = slice(at, at + batch.num_rows)
            for mark, (place, name, slot, column) in enumerate(fields, 1):
                cells = texts_of(batch.column(str(place)))
                _put(cells, slot, self._fill.get(name), column[mine], wrong[mine], mark)
            at = mine.stop
        bad = np.flatnonzero(wrong)
        if torn or len(bad):
            right = wrong == 0
            out = {slot: values[right] for slot, values in out.items()}
        found = {slot.name: slot.column(out[slot].reshape(-1), EMPTY) for slot in self.slots}
        if not torn and not len(bad):
            return Lines(found)
        taken = np.setdiff1d(np.arange(rows + len(torn)), [row for row, _ in torn])
        row, why = min(
            [(row, self._why_torn(len(columns), got)) for row, got in torn[:1]]
            + [(int(taken[each]), _why(fields, table, wrong, each)) for each in bad[:1].tolist()]
        )
        begin = rows_of(buffer_of(text), *self._marks, row)[3]
        if (row, 1) in torn[:1]:  # of one field
            why += self._delimiter_of(self._first_row(text[begin:]))
        return Lines(found, len(torn) + len(bad), text[:begin].count(b"\n"), why)

    def _names_among(self, columns: Sequence[str], head: bytes) -> list[str]:
        """The names of the columns that are read.

        Args:
            head: the rows at the file's beginning, for messages.

        Raises:
            ValueError: the file lacks one, or has two of its name.
        """
        names = [name for _, names in self._wanted for name in names]
        for name in names:
            if (many := columns.count(name)) == 1:
                continue
            # others may be no names: a file whose first line has none begins with a sample
            near = [each for each in columns if each.lower() == name.lower()]
            near = near or get_close_matches(name, columns, 1, 0.8)
            got = f"{many} of this name" if many else f"{len(columns)} others"
            like = f" (one is {near[0]!r})" if near and not many else ""
            if len(columns) == 1 and (other := self._delimiter_of(self._first_row(head))):
                raise ValueError(
                    f"expected one column {name!r} in the first line, got one field{other}"
                )
            raise ValueError(
                f"expected one column {name!r} in the first line, got {got}{like}: columns=[...] "
                "names them where no line does; a file without labels is read with slots without "
                "the label"
            )
        return names

    def _table(
        self, text: bytes, columns: int, wanted: Sequence[int]
    ) -> tuple[Any, list[tuple[int, int]]]:
        """The wanted columns, named by their places; and the rows, from 0, that have another number
        of fields, each with that number.
        """
        torn, names = list[tuple[int, int]](), [str(place) for place in range(columns)]

        def left_out(row: Any) -> str:
            torn.append((row.number - 1, row.actual_columns))
            return "skip"

        mine = [str(place) for place in wanted]
        try:
            table = self._read(text, names, mine, left_out, BLOCK_BYTES)
        except self._arrow.ArrowInvalid:  # a row is longer than a block
            torn.clear()
            table = self._read(text, names, mine, left_out, len(text) + 1)
        return table, torn

    def _read(
        self,
        text: bytes,
        names: Sequence[str],
        wanted: Sequence[str],
        left_out: Callable[[Any], str],
        block: int,
    ) -> Any:
        read, quoted = self._arrow.csv, self._quote is not None and self._quote.encode() in text
        if quoted:  # pyarrow would look for line breaks between quotes once more
            block = len(text) + 1
        return read.read_csv(
            self._arrow.BufferReader(text),
            read.ReadOptions(use_threads=False, column_names=names, block_size=block),
            read.ParseOptions(
                delimiter=self._delimiter,
                quote_char=self._quote or False,
                newlines_in_values=quoted,
                invalid_row_handler=left_out,
            ),
            read.ConvertOptions(
                check_utf8=False,
                column_types={name: self._arrow.binary() for name in wanted},
                include_columns=wanted,
            ),
        )

    def _why_torn(self, expected: int, got: int) -> str:
        by = DELIMITERS.get(self._delimiter, repr(self._delimiter))
        return f"expected {expected} fields with {by} between them, got {got}"

    def _delimiter_of(self, line: bytes) -> str:
        """The delimiter that a line of one field seems to have, for a message; "" where there is
        none.
        """
        often = {each: line.count(each.encode()) for each in DELIMITERS if each != self._delimiter}
        found = max(often, key=lambda each: often[each])
        if not often[found]:
            return ""
        how = {",": "parser='csv'", "\t": "parser='tsv'"}.get(found)
        how = f"{f'{how}, or ' if how else ''}CsvLines(slots, delimiter={found!r})"
        return f": the line seems to have {DELIMITERS[found]} between its fields: {how}"


def _is_byte(given: Any) -> bool:
    return isinstance(given, str) and len(given.encode()) == 1


def _names(slot: Slot, groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The columns of a slot."""
    names = tuple(groups.get(slot.name, (slot.name,)))
    if slot.width is None or len(names) != max(slot.width, 1):
        raise ValueError(
            f"csv: slot {slot.name!r}: expected a dense slot with a column for each of its values, "
            f"got {slot.values} and the columns {', '.join(names)}"
            + (f": {_ragged(slot.name)}" if slot.width is None else "")
        )
    return names


def _is_whole(piece: Piece) -> bool:
    """Whether a piece is a whole file, which may then have line breaks between quotes."""
    return piece.end is None or (not piece.begin and piece.end >= size_of(piece.path))


def _is_broken(text: bytes, marks: tuple[int, int]) -> bool:
    """Whether a field has line breaks."""
    return rows_of(buffer_of(text), *marks, -1)[2] >= 0


def _chunk(column: Any) -> Any:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _put(
    cells: tuple[Array, Array], slot: Slot, fill: Any, out: Array, wrong: Array, mark: int
) -> None:
    """Writes the values of a column of cells into ``out``, and ``mark`` into ``wrong`` where one is
    wrong, unless another was wrong before.
    """
    text, ends = cells
    if slot.text:
        if text_cells(text, ends, fill is not None, int(fill or 0), out, wrong, mark):
            hash_long(text, ends, out)
    elif slot.whole:
        whole_cells(text, ends, fill is not None, int(fill or 0), out, wrong, mark)
    else:
        hard = np.empty(len(out), np.int64)
        args = text, ends, fill is not None, float(fill or 0), out, wrong, mark, hard
        for row in hard[: float_cells(*args)].tolist():
            with np.errstate(over="ignore"):  # it is an infinity then
                out[row] = _hard(text[ends[row] : ends[row + 1]].tobytes())
            if not np.isfinite(out[row]) and not wrong[row]:
                wrong[row] = mark


def _hard(cell: bytes) -> float:
    """A float that only Python reads exactly; a NaN where it is none."""
    cell = cell.strip(b" \t")
    return float(cell) if is_number(cell) else np.nan


def _why(fields: Sequence[tuple[int, str, Slot, Array]], table: Any, wrong: Array, row: int) -> str:
    """The reason why a row is wrong; never with what it holds."""
    place, name, slot, _ = fields[int(wrong[row]) - 1]
    cell = table.column(str(place))[row].as_py()
    if _is_list(cell):
        return f"{name}: expected {slot.kind}, got several in one field: {_ragged(slot.name)}"
    got = described(cell, slot.whole)
    return f"{name}: expected {slot.kind}, got {got}{_filled(name) if 'empty' in got else ''}"


def _is_list(cell: bytes) -> bool:
    """Whether a field holds several numbers: between brackets, or with bars, semicolons or spaces
    between them; not with commas alone, which a number may have.
    """
    cell = cell.strip()
    if bracketed := cell[:1] + cell[-1:] in (b"[]", b"()"):
        cell = cell[1:-1].strip()
    numbers = re.split(rb"[\s,;|]+" if bracketed else rb"[\s;|]+", cell)
    return len(numbers) > 1 - bracketed and all(map(is_number, numbers))


def _ragged(name: str) -> str:
    """How a slot of lists is read."""
    return (
        f"lists are read in fleet.Slot({name!r}, width=None), from Parquet or by a parser of the "
        f"script: a function from a line to {{{name!r}: [1, 2, 3]}}"
    )


def _filled(name: str) -> str:
    """Advises about an empty field, or a null; never to fill a label."""
    skip = "on_error='skip' leaves it out"
    if LABEL.fullmatch(name):
        return f"; a row without its label trains nothing: {skip}; to predict, name no slot for it"
    return f"; fill={{{name!r}: ...}} says what it stands for; where it is a label, {skip}"


# ---- parquet ----


class ParquetRows:
    """Rows of Parquet files: slots by the names of columns; lists are ragged, or dense where all
    have one length.

    A row is wrong, as a line of a text is, where it has an infinity, a NaN, another number of
    values than its slot, or a null, unless ``fill`` says what a null is.  A column of another type
    is an error.  Rows are numbered from 1 in messages.

    Args:
        slots: which columns to read.
        fill: what a null is, by the name of its slot: a number, or a text in a slot of texts.

    Example::

        slots = [fleet.Slot("label", "float32"), fleet.Slot("brand", "string")]
        dataset = fleet.QueueDataset()
        dataset.init(batch_size=4, parser=ParquetRows(slots, fill={"brand": ""}))

    Raises:
        TypeError: ``slots`` is no list of slots, ``fill`` is no dict, or has a value that is none
            of its slot's.
        ValueError: there is no slot, or none of a name in ``fill``.
        ImportError: pyarrow is not installed.
    """

    in_processes = False
    each_line = True

    def __init__(self, slots: Sequence[Slot], fill: Fill | None = None) -> None:
        self.slots = slots = slots_of(slots, "parquet: slots")
        if not slots:
            raise ValueError("parquet: expected use_var, the columns to read, got none")
        self._arrow = pyarrow("parser='parquet'")
        self._fill = fills_of("parquet", fill, {slot.name: slot for slot in slots})

    def pieces(self, path: str) -> list[Piece]:
        """One for each group of rows.

        Raises:
            OSError: the file cannot be read, or is no Parquet file.
            ValueError: it has no row.
        """
        size_of(path)  # there may be a folder, or nothing
        with self._file(path) as file:
            groups = file.num_row_groups
        if not groups:
            raise ValueError(f"{shown(path)}: expected rows, got a Parquet file without any")
        return [Piece(path, group, group + 1) for group in range(groups)]

    def read(self, piece: Piece, skip: bool) -> Parsed:
        """The samples of a group of rows.

        Args:
            skip: leave wrong rows out, and count them.

        Raises:
            WrongLine: a row is wrong, and ``skip`` is not set.
            OSError: the file cannot be read.
            ValueError: it lacks a column, or has two of its name, or one of another type.
        """
        names = [slot.name for slot in self.slots]
        with self._file(piece.path) as file:
            known = file.schema_arrow.names
            for name in names:
                if known.count(name) != 1:
                    raise ValueError(
                        f"{piece.shown}: expected one column {name!r}, got {', '.join(known)}"
                    )
            table = file.read_row_group(piece.begin, names, use_threads=False)
            before = sum(file.metadata.row_group(each).num_rows for each in range(piece.begin))
        wrong = _WrongRows(table.num_rows)
        found = [self._column(slot, table.column(slot.name), piece, wrong) for slot in self.slots]
        said = ""
        if wrong.first is not None:
            row, why = wrong.first
            said = f"{piece.shown}, row {1 + before + row}: {why}"
            if not skip:
                raise WrongLine(said)
            found = [_rows_of(*each, np.flatnonzero(~wrong.rows)) for each in found]
        columns = {
            slot.name: slot.column(*each) for slot, each in zip(self.slots, found, strict=True)
        }
        return Parsed([columns] if samples_of(columns) else [], int(wrong.rows.sum()), said)

    def why_nothing(self, path: str) -> str:
        """See :meth:`trainer.data.lines.LineFormat.why_nothing`."""
        for piece in self.pieces(path):
            try:
                self.read(piece, skip=False)
            except WrongLine as error:
                return f"no row is right; {str(error).removeprefix(f'{piece.shown}, ')}"
        return "its groups of rows are empty"

    def count(self, piece: Piece, skip: bool) -> int:
        """The number of samples of a group of rows; where a wrong row is an error, that of rows,
        from the file's metadata.

        Raises:
            OSError, ValueError: see :meth:`read`.
        """
        if skip:
            return self.read(piece, skip).samples
        with self._file(piece.path) as file:
            return int(file.metadata.row_group(piece.begin).num_rows)

    @contextmanager
    def _file(self, path: str) -> Iterator[Any]:
        """A Parquet file of pyarrow's.

        Raises:
            OSError: it cannot be read, or is none.
        """
        with opened(path) as file:
            try:
                yield self._arrow.parquet.ParquetFile(file)
            except self._arrow.ArrowException as error:
                raise OSError(f"expected a Parquet file, got: {error}") from None

    def _column(
        self, slot: Slot, chunked: Any, piece: Piece, wrong: _WrongRows
    ) -> tuple[Array, Array]:
        """The values of all rows, and int64 [rows], how many each has.

        Args:
            wrong: gets those that are wrong; what stands in their places does not matter.

        Raises:
            ValueError: the column has another type than the slot.
        """
        types, array, fill = self._arrow.types, _chunk(chunked), self._fill.get(slot.name)
        if types.is_fixed_size_list(array.type):
            array = array.cast(self._arrow.list_(array.type.value_type))
        counts, values = np.broadcast_to(np.int64(1), len(array)), array
        if types.is_large_list(array.type) or types.is_list(array.type):
            counts = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            counts, values = counts.astype(np.int64), array.flatten()
            wrong.add(_nulls(array), f"{slot.name}: expected {slot.values}, got a null")
        indices = None
        if types.is_dictionary(values.type):
            indices, values = values.indices, values.dictionary
        if types.is_null(values.type):  # a column where nothing is has no other type
            values = values.cast(self._arrow.string() if slot.text else self._arrow.int64())
        if not self._fits(slot, values.type):
            kind = "texts" if slot.text else "whole numbers" if slot.whole else "numbers"
            raise ValueError(
                f"{piece.shown}, column {slot.name!r}: expected {kind}, got {array.type}"
            )
        if slot.width is not None and (others := counts != max(slot.width, 1)).any():
            got = counts[others.argmax()]
            wrong.add(others, f"{slot.name}: expected {slot.values}, got {got}")
        numbers, empty = self._numbers(slot, values, fill), _nulls(values)
        if indices is not None:
            places = indices.fill_null(0).to_numpy(zero_copy_only=False)
            if not len(numbers):  # all are null
                numbers, empty = np.zeros(1, slot.array), np.ones(1, np.bool_)
            numbers, empty = numbers[places], empty[places] | _nulls(indices)
            numbers[empty] = fill or 0
        if fill is None and empty.any():
            why = f"{slot.name}: expected {slot.kind}, got a null{_filled(slot.name)}"
            wrong.add(rows_with(empty, counts), why)
        if slot.array != "int64" and not (finite := np.isfinite(numbers)).all():
            why = f"{slot.name}: expected {slot.kind}, got an infinity or a NaN"
            wrong.add(rows_with(~finite, counts), why)
        return numbers, counts

    def _numbers(self, slot: Slot, values: Any, fill: Any) -> Array:
        """The values of an array of pyarrow's, or the ids of its texts."""
        if slot.text:
            found = hashed(*texts_of(values))
        else:
            zero = self._arrow.scalar(0).cast(values.type)
            with np.errstate(over="ignore"):  # it is an infinity then
                found = np.array(values.fill_null(zero)).astype(slot.array)
        found[_nulls(values)] = fill or 0
        return found

    def _fits(self, slot: Slot, kind: Any) -> bool:
        """Whether a column of this type of pyarrow's has the values of a slot."""
        types = self._arrow.types
        if slot.text:
            names = "string", "large_string", "binary", "large_binary"
            return any(getattr(types, f"is_{name}")(kind) for name in names)
        return bool(
            types.is_integer(kind)
            or types.is_boolean(kind)
            or (not slot.whole and types.is_floating(kind))
        )


class _WrongRows:
    """The wrong rows of a group.

    Attributes:
        rows: bool [rows]: whether each is one.
        first: the first one, from 0, and the reason; None: all are right.
    """

    def __init__(self, rows: int) -> None:
        self.rows = np.zeros(rows, np.bool_)
        self.first: tuple[int, str] | None = None

    def add(self, rows: Array, why: str) -> None:
        """Adds rows, bool [rows]."""
        if not rows.any():
            return
        self.rows |= rows
        row = int(rows.argmax())
        if self.first is None or row < self.first[0]:
            self.first = row, why


def _rows_of(values: Array, counts: Array, rows: Array) -> tuple[Array, Array]:
    """The values of some rows, and the number of each one's."""
    found = samples_at({"": Ragged.of(values, counts)}, rows)[""]
    assert isinstance(found, Ragged), "as it was"
    return found.values, found.counts


def _nulls(array: Any) -> Array:
    found: Array = array.is_null().to_numpy(zero_copy_only=False)
    return found
