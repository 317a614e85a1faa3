"""Parts of files that are parsed by themselves, and the reading of their bytes.

A piece of a text has the lines that begin between two offsets.  A compressed file cannot be entered
in its middle: it is one piece.

[Note: the end of a line]  Lines end with a line feed, also behind a carriage return.  In a file of
old spreadsheets they end with a carriage return alone.  So where the first bytes of a file have
carriage returns and no line feed, each carriage return is read as a line feed.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Protocol
from zipfile import BadZipFile

import fsspec
import numpy as np
from fsspec.core import has_magic
from fsspec.utils import infer_compression

from pserver.extras import extra
from pserver.storage.remote import hidden, options_of
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.process_groups import ProcessGroups
from trainer.data.batches import Array, Column, Ragged
from transpiler.files.files import shown

# ---- slots ----
#
# The columns of a dataset.


DTYPES = ("int64", "float32", "float64", "string")


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: a column by its name.

    Example::

        labels, words = Slot("label", "float32"), Slot("words", width=None)
        brands = Slot("brand", "string")  # its column is int64: an id for each text

    Attributes:
        name: of the column.
        dtype: "int64", "float32", "float64"; or "string": texts, which become ids of int64, those
            that ``trainer.nn.functional.string_ids`` gives them on every machine.
        width: values of each sample; 0: one value, and the column is [samples]; None: any number
            of them, and the column is ragged.

    Raises:
        ValueError: the dtype is another one, or the width is below 0.
    """

    name: str
    dtype: str = "int64"
    width: int | None = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"slot {self.name!r}: dtype: expected one of {', '.join(DTYPES)}, got "
                f"{self.dtype!r}"
            )
        if self.width is not None and self.width < 0:
            raise ValueError(f"slot {self.name!r}: expected a width from 0, got {self.width}")

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.dtype == "int64"

    @property
    def text(self) -> bool:
        """Whether its values are texts in the files."""
        return self.dtype == "string"

    @property
    def array(self) -> str:
        """The dtype of its column."""
        return "int64" if self.text else self.dtype

    @property
    def kind(self) -> str:
        """A value of a file, in words."""
        return "text" if self.text else "a whole number of 64 bits" if self.whole else "a number"

    @property
    def values(self) -> str:
        """The number of values of a sample, in words."""
        if self.width is None:
            return "any number of values"
        return "1 value" if self.width <= 1 else f"{self.width} values"

    def column(self, values: Array, counts: Array) -> Column:
        """The column of these values, of which each sample has ``counts``."""
        values = values.astype(self.array, copy=False)
        if self.width is None:
            return Ragged.of(values, counts)
        return values if self.width == 0 else values.reshape(-1, self.width)

    def empty(self) -> Column:
        """The column of no samples."""
        return self.column(np.empty(0, self.array), np.empty(0, np.int64))


def slots_of(use_var: Iterable[Any]) -> tuple[Slot, ...]:
    """The slots that a script names.

    Args:
        use_var: of each slot a :class:`Slot`, a ``transpiler.data(...)``, or an input of a program:
            the size of dimension 0 is that of a batch, one further size is the width, and where
            that is free the slot is ragged.

    Raises:
        TypeError: something else is among them.
        ValueError: two have one name, or one has no name or more than 2 dimensions.
    """
    found = tuple(_slot(each) for each in use_var)
    names = [slot.name for slot in found]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"use_var: expected slots with names of their own, got {names}")
    return found


def _slot(given: Any) -> Slot:
    if isinstance(given, Slot):
        return given
    if not all(hasattr(given, part) for part in ("name", "shape", "dtype")):
        raise TypeError(
            "use_var: expected fleet.Slot(name, dtype, width), transpiler.data(...) or inputs of a "
            f"program, got {type(given).__name__}"
        )
    sizes = tuple(given.shape[1:])
    if len(sizes) > 1:
        raise ValueError(
            f"use_var: {given.name!r}: expected [batch] or [batch, values], got {list(given.shape)}"
        )
    free = sizes and not isinstance(sizes[0], int)
    return Slot(given.name, given.dtype, None if free else sizes[0] if sizes else 0)


# ---- pieces ----


PIECE_BYTES = 16 * 2**20
BLOCK_BYTES = 8 * 2**20  # that are parsed at once
_AHEAD = 2**16  # read at once to find the end of a piece's last line
TORN = (EOFError, zlib.error, lzma.LZMAError, BadZipFile, OSError)  # of what is compressed


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file.

    Attributes:
        path: of the file, or its URL.
        begin, end: its bytes; of a Parquet file its groups of rows.  None: to the file's end.
    """

    path: str
    begin: int = 0
    end: int | None = None

    @property
    def shown(self) -> str:
        """The path for messages, without a password."""
        return shown(self.path)


def pyarrow(what: str) -> Any:
    """The package pyarrow.

    Args:
        what: needs it.

    Raises:
        ImportError: it cannot be imported; the message names the extra, and what has failed.
    """
    with extra("data", f"{what} needs pyarrow"):
        import pyarrow.csv
        import pyarrow.parquet
    return pyarrow


def _is_zstd(path: str) -> bool:
    return path.endswith(".zst")


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed by the ending of its name.

    Raises:
        OSError: it cannot be read, or its compressed bytes are torn.
        ImportError: it ends in .zst, and pyarrow is not installed.
    """
    how = None if _is_zstd(path) else "infer"
    arrow = pyarrow(f"{shown(path)}: a file that ends in .zst") if _is_zstd(path) else None
    try:
        with fsspec.open(path, "rb", compression=how, **options_of(path)) as file:
            yield file if arrow is None else arrow.CompressedInputStream(file, "zstd")
    except FileNotFoundError:
        raise FileNotFoundError(f"{shown(path)}: there is no such file") from None
    except TORN as error:
        raise OSError(f"{shown(path)}: {hidden(str(error)) or type(error).__name__}") from None


def files_at(paths: Iterable[str]) -> list[str]:
    """The files that paths name: a path or a URL with ``*``, ``?`` or ``[`` is a pattern, unless a
    file has this name, and stands for the files that match it, in the order of their names.

    Raises:
        FileNotFoundError: no file matches a pattern.
    """
    found = list[str]()
    for path in paths:
        if not has_magic(path) or path.startswith(("http://", "https://")):  # "?" begins a query
            found.append(path)
            continue
        store, pattern = fsspec.core.url_to_fs(path, **options_of(path))
        if store.isfile(pattern):
            found.append(path)
            continue
        matches = [each for each in sorted(store.glob(pattern)) if store.isfile(each)]
        if not matches:
            raise FileNotFoundError(f"{shown(path)}: no file matches it")
        if "://" in path:
            found += [store.unstrip_protocol(each) for each in matches]
        else:  # as it is written: absolute, or from the present folder on
            here = "" if os.path.isabs(path) else os.getcwd() + os.sep
            found += [each.removeprefix(here) for each in matches]
    return found


def size_of(path: str) -> int:
    """The number of bytes of a file.

    Raises:
        OSError: it cannot be read.
    """
    if "://" not in path:
        return os.path.getsize(path)
    try:
        store, place = fsspec.core.url_to_fs(path, **options_of(path))
        return int(store.size(place))
    except FileNotFoundError:
        raise FileNotFoundError(f"{shown(path)}: there is no such file") from None


def is_compressed(path: str) -> bool:
    """Whether a file's name says that its bytes are compressed."""
    return _is_zstd(path) or infer_compression(path) is not None


def pieces_of(path: str, most: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a text, of about ``most`` bytes each.

    Raises:
        OSError: it cannot be read, or its name says that it is compressed, and it is empty.
    """
    size = size_of(path)
    if is_compressed(path):
        if not size:  # gzip takes it for one without lines
            raise OSError(f"{shown(path)}: expected compressed bytes, got an empty file")
        return [Piece(path)]
    return [Piece(path, begin, min(begin + most, size)) for begin in range(0, size, most)]


def files_of(pieces: Sequence[Piece], files: Sequence[str]) -> list[int]:
    """The number of each piece's file; a file without a byte has no piece, and a number."""
    numbers = {path: number for number, path in enumerate(files)}
    return [numbers[each.path] for each in pieces]


class _Lines:
    """The bytes of a file, whose lines end with a line feed; see [Note: the end of a line].

    Args:
        file: at its beginning.
        begin: the first byte that is read.
    """

    def __init__(self, file: IO[bytes], begin: int = 0) -> None:
        if begin:
            file.seek(begin)
        self._file, self._ahead = file, file.read(_AHEAD)
        self._returns = _ends_with_returns(self._ahead)
        if self._returns and begin:  # perhaps in the middle of one long line
            file.seek(0)
            self._returns = _ends_with_returns(file.read(_AHEAD))
            file.seek(begin + len(self._ahead))

    def read(self, most: int) -> bytes:
        """The next bytes; none at the end."""
        found = self._ahead[:most]
        self._ahead = self._ahead[len(found) :]
        if len(found) < most:
            found += self._file.read(most - len(found))
        return found.replace(b"\r", b"\n") if self._returns else found


def _ends_with_returns(text: bytes) -> bool:
    return b"\r" in text and b"\n" not in text


def blocks_of(piece: Piece, most: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The lines of a piece, some megabytes at a time; each block ends with the end of a line.

    Raises:
        OSError: it cannot be read, or ends before the piece does.
    """
    with opened(piece.path) as opened_file:
        file = _Lines(opened_file, max(0, piece.begin - 1))
        rest, left = b"", None if piece.end is None else piece.end - piece.begin
        if piece.begin:  # a line that began before belongs to the piece before
            before = _to_line_end(file, left)
            if before is None:
                return
            rest, left = before
        while left is None or left > 0:
            block = file.read(most if left is None else min(most, left))
            if not block:
                _check_end(left)
                break
            left = None if left is None else left - len(block)
            text = rest + block
            if left == 0 and not text.endswith(b"\n"):
                text += _line_rest(file)
            cut = text.rfind(b"\n") + 1
            if cut:
                yield text[:cut] if cut < len(text) else text
            rest = text[cut:]
        if rest:
            yield rest + (b"" if rest.endswith(b"\n") else _line_rest(file))


def _to_line_end(file: _Lines, left: int | None) -> tuple[bytes, int] | None:
    """Reads up to the first line that begins in the piece: what was read of it, and the number of
    bytes of the piece that are left; None: no line begins there.
    """
    assert left is not None, "a piece with a begin has an end"
    left += 1  # with the byte before it
    while left > 0:
        block = file.read(min(_AHEAD, left))
        _check_end(0 if block else left)
        left -= len(block)
        place = block.find(b"\n")
        if place >= 0:
            rest = block[place + 1 :]
            return (rest, left) if rest or left else None
    return None


def _check_end(left: int | None) -> None:
    """Checks that no byte of the piece is left where the file ends."""
    if left:
        raise OSError(f"expected {left} more bytes: it has become shorter since its size was read")


def _line_rest(file: _Lines) -> bytes:
    """The rest of the line, with its end."""
    found = b""
    while block := file.read(_AHEAD):
        place = block.find(b"\n")
        if place >= 0:
            return found + block[: place + 1]
        found += block
    return found + b"\n"


def lines_before(piece: Piece) -> int:
    """The number of lines of the file that begin before a piece: for messages."""
    if not piece.begin:
        return 0
    found, left = 0, piece.begin
    with opened(piece.path) as opened_file:
        file, last = _Lines(opened_file), b""
        while left > 0 and (block := file.read(min(BLOCK_BYTES, left))):
            found += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return found + (last != b"\n")


# ---- trainers ----
#
# The trainers that share the files of a dataset.


class Trainers(Protocol):
    """The job's trainers, as a dataset needs them."""

    def part(self) -> tuple[int, int]:
        """The part of the files that this trainer reads, and the number of parts."""

    def groups(self) -> ProcessGroups:
        """The process groups of the trainers; all call this at the same time.

        Raises:
            RuntimeError: this trainer has not joined the others yet.
            PServerError: a trainer does not arrive.
        """

    def elastic(self) -> ElasticGroup | None:
        """The group of the live trainers; None in a job that ends with a lost trainer."""

    def counted(self, dataset: Any) -> tuple[list[Piece], list[int]] | None:
        """The pieces of all files of a FileDataset, and the number of samples of each, where the
        trainers need no exchange to know; None: they need one.
        """

    def shows(self) -> bool:
        """Whether this process shows bars."""
