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
from gzip import BadGzipFile
from typing import IO, Any, Protocol
from zipfile import BadZipFile

import numpy as np
from fsspec.compression import compr
from fsspec.core import has_magic
from fsspec.utils import infer_compression

from pserver.extras import extra
from pserver.storage.remote import driven, os_error, store_of
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.process_groups import ProcessGroups
from trainer.data.batches import Array, Column, Ragged
from transpiler.files.files import is_url, shown

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
        TypeError: the name is no text, or the width no whole number.
        ValueError: the dtype is another one, or the width is below 0.
    """

    name: str
    dtype: str = "int64"
    width: int | None = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"slot {self.name!r}: expected a column's name, got no text")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"slot {self.name!r}: dtype: expected one of {', '.join(DTYPES)}, got "
                f"{self.dtype!r}"
            )
        if isinstance(self.width, bool) or not isinstance(self.width, int | None):
            raise TypeError(
                f"slot {self.name!r}: width: expected a whole number or None, got {self.width!r}"
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
        with np.errstate(over="ignore"):  # it is an infinity then, which formats look for
            values = values.astype(self.array, copy=False)
        if self.width is None:
            return Ragged.of(values, counts)
        return values if self.width == 0 else values.reshape(-1, self.width)

    def empty(self) -> Column:
        """The column of no samples."""
        return self.column(np.empty(0, self.array), np.empty(0, np.int64))


def slots_of(use_var: Iterable[Any], whose: str = "use_var") -> tuple[Slot, ...]:
    """The slots that a script names.

    Args:
        use_var: of each slot a :class:`Slot`, a ``transpiler.data(...)``, or an input of a program:
            the size of dimension 0 is that of a batch, one further size is the width, and where
            that is free the slot is ragged.
        whose: they are, for messages.

    Raises:
        TypeError: it is no list of slots.
        ValueError: two have one name, or one has no name or more than 2 dimensions.
    """
    if isinstance(use_var, str | bytes | Slot) or not isinstance(use_var, Iterable):
        raise _no_slot(f"{whose}: expected a list of slots", use_var)
    found = tuple(_slot(each, whose) for each in use_var)
    names = [slot.name for slot in found]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"{whose}: expected slots with names of their own, got {names}")
    return found


def _no_slot(expected: str, given: Any) -> TypeError:
    """The error that says how a slot is written, by the name that was given, if one was."""
    name = given.name if isinstance(given, Slot) else given if isinstance(given, str) else "label"
    got = repr(given) if isinstance(given, str | Slot) else type(given).__name__
    return TypeError(
        f"{expected}, as [fleet.Slot({name!r}, 'float32')], got {got}: a slot has a column's name, "
        f"a dtype ({', '.join(DTYPES)}) and a width (0: one value, n: so many, None: any number)"
    )


def _slot(given: Any, whose: str) -> Slot:
    if isinstance(given, Slot):
        return given
    if not all(hasattr(given, part) for part in ("name", "shape", "dtype")):
        raise _no_slot(
            f"{whose}: expected slots, transpiler.data(...) or inputs of a program", given
        )
    sizes = tuple(given.shape[1:])
    if len(sizes) > 1:
        raise ValueError(
            f"{whose}: {given.name!r}: expected [batch] or [batch, values], got {list(given.shape)}"
        )
    free = sizes and not isinstance(sizes[0], int)
    return Slot(given.name, given.dtype, None if free else sizes[0] if sizes else 0)


# ---- pieces ----


PIECE_BYTES = 16 * 2**20
BLOCK_BYTES = 8 * 2**20  # that are parsed at once
BOM = b"\xef\xbb\xbf"  # the mark of the byte order of UTF-8, of which no sample is made
LONGEST_LINE = 2**26  # bytes: where more have no end of a line, there are no samples
_AHEAD = 2**16  # read at once to find the end of a piece's last line
_FETCHED = 2**21  # bytes that are fetched of a URL beyond what is wanted: for the next ones
_TORN = (EOFError, zlib.error, lzma.LZMAError, BadZipFile, OSError)  # of what is compressed


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
        ImportError: it ends in .zst, and pyarrow is not installed; or the package that reaches its
            URL is not installed.
    """
    arrow = pyarrow(f"{shown(path)}: a file that ends in .zst") if _is_zstd(path) else None
    unpacked = compr[None if arrow else infer_compression(path)]
    store, place = store_of(path)
    try:
        with (
            store.open(place, "rb", block_size=_FETCHED) as raw,
            unpacked(raw, mode="r") as file,
        ):
            yield file if arrow is None else arrow.CompressedInputStream(file, "zstd")
    except FileNotFoundError:
        raise _missing(path) from None
    except IsADirectoryError:
        raise _folder(path) from None
    except BadGzipFile:  # its text quotes bytes
        raise OSError(f"{shown(path)}: expected what gzip has made, got other bytes") from None
    except ValueError:  # of what is read, not of a driver
        raise
    except Exception as error:
        if "://" in path or isinstance(error, _TORN):
            raise os_error(path, error) from None
        raise


def _missing(path: str) -> FileNotFoundError:
    where = ": is its bucket or host there, and is the path right?" if "://" in path else ""
    return FileNotFoundError(f"{shown(path)}: there is no such file{where}")


def _folder(path: str) -> IsADirectoryError:
    each = f"{shown(path).rstrip('/')}/*"
    return IsADirectoryError(
        f"{shown(path)}: expected a file, got a folder: {each} names its files"
    )


def files_at(paths: Iterable[str]) -> list[str]:
    """The files that paths name: a path or a URL with ``*``, ``?`` or ``[`` is a pattern, unless a
    file has this name, and stands for the files that match it, in the order of their names.

    Stores are asked anew, whatever their drivers remember of earlier calls.

    Raises:
        FileNotFoundError: no file matches a pattern.
        ValueError: a path is empty, or a URL that has lost a slash, or is of an unknown protocol.
        ImportError, OSError: a URL's driver is not installed, or the store cannot be reached.
    """
    found = list[str]()
    for path in paths:
        if path.startswith(("http://", "https://")):  # "?" begins a query
            found.append(path)
            continue
        if not (is_url(path) or has_magic(path)):
            found.append(path)
            continue
        store, pattern = store_of(path)
        store.invalidate_cache()
        if not has_magic(path):
            found.append(path)
            continue
        try:
            with driven(path):
                if store.isfile(pattern):
                    found.append(path)
                    continue
                matches = [each for each in sorted(store.glob(pattern)) if store.isfile(each)]
        except FileNotFoundError as error:  # of a bucket
            raise FileNotFoundError(f"{error}: expected one with files that match") from None
        if not matches:
            raise FileNotFoundError(f"{shown(path)}: no file matches it")
        found += [_as_written(path, pattern, each) for each in matches]
    return found


def _as_written(path: str, pattern: str, match: str) -> str:
    """A file that matches, as the pattern was written: with its protocol, host and user; a path on
    this machine is absolute, or from the present folder on.

    Args:
        path: the pattern as the script gave it.
        pattern: the same for the store.
    """
    if "::" in path:
        raise ValueError(
            f"{shown(path)}: expected a pattern in one store, got a URL within a URL: list its "
            "files one by one"
        )
    if "://" in path:
        return path.removesuffix(pattern) + match
    return match if os.path.isabs(path) else match.removeprefix(os.getcwd() + os.sep)


def size_of(path: str) -> int:
    """The number of bytes of a file.

    Raises:
        OSError: it cannot be read; it is a folder, or its store does not tell its size.
    """
    store, place = store_of(path)
    try:
        with driven(path):
            found = store.info(place)
    except FileNotFoundError:
        raise _missing(path) from None
    if found["type"] == "directory":
        raise _folder(path)
    if found.get("size") is None:
        raise OSError(f"{shown(path)}: expected a file of a known size, got one without")
    return int(found["size"])


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
        ValueError: a line has more than ``LONGEST_LINE`` bytes.
    """
    with opened(piece.path) as opened_file:
        file = _Lines(opened_file, max(0, piece.begin - 1))
        rest, left = b"", None if piece.end is None else piece.end - piece.begin
        at_begin = not piece.begin
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
            if left == 0 and not block.endswith(b"\n"):
                block += _line_rest(file, piece)
            cut = block.rfind(b"\n") + 1
            # one copy, not two: they take as long as a part of the parsing
            text = b"".join((rest, memoryview(block)[: cut or None]))
            if at_begin and (len(text) >= len(BOM) or not BOM.startswith(text)):
                text, at_begin = text.removeprefix(BOM), False
            rest = block[cut:] if cut else text
            if len(rest) > LONGEST_LINE:
                raise _endless(piece)
            if cut:
                yield text
        if rest:
            yield rest + (b"" if rest.endswith(b"\n") else _line_rest(file, piece))


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


def _line_rest(file: _Lines, piece: Piece) -> bytes:
    """The rest of the line, with its end.

    Raises:
        ValueError: it has more than ``LONGEST_LINE`` bytes.
    """
    found, size = list[bytes](), 0
    while block := file.read(_AHEAD):
        place = block.find(b"\n")
        if place >= 0:
            return b"".join([*found, block[: place + 1]])
        found.append(block)
        size += len(block)
        if size > LONGEST_LINE:
            raise _endless(piece)
    return b"".join([*found, b"\n"])


def _endless(piece: Piece) -> ValueError:
    return ValueError(
        f"{piece.shown}: expected lines of at most {LONGEST_LINE >> 20} MB, got a longer one: is "
        "it a text, and is its name right?"
    )


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

    def leave_out(self, lines: int) -> None:
        """Counts wrong lines that a dataset has left out.  Any thread may call it."""

    def gathered(self, told: Any) -> list[Any]:
        """Each trainer's object, of plain values; all call this at the same time.

        Raises:
            RuntimeError: this trainer has not joined the others yet.
            PServerError: a trainer is lost, and the job does not continue without it.
        """

    def shows(self) -> bool:
        """Whether this process shows bars."""
