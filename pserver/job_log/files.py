"""The log of a job as files: what server 0 writes ahead, and recorded logs.

[Note: a torn end]  A process that is killed leaves the beginning of an entry at the end of its
file.  That is no damage: what stands before it is whole.  Any other entry whose checksum is wrong,
or whose number is not the next one, is damage, and no reader goes past it.

[Note: what a process leaves behind]  What a process has written to a file stays when it is killed:
the kernel has it.  So nothing waits for a disk, and a process that takes the place of this one on
the same host reads all of it.  Where the host dies, too, the job goes back to a checkpoint.

In the file that server 0 writes ahead each entry is a line of JSON, a list whose first element is
the entry's kind.  The last line may be torn: it was being written, so no other process has received
it.  A recorded log is binary; the comment above :data:`MAGIC` draws its form.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pserver.job_log_pb2 import Entry
from pserver.storage import plain_file
from transpiler.files import bounded_json
from transpiler.files.named_errors import naming

# ---- entries ----
#
# The form of a recorded log: a file of entries, each with its number, its length and a checksum.
#
# ::
#
#   MAGIC
#   entry:   number, length, length of the message, checksum of all that follows; checksum of these
#            message (Entry of protos/pserver/job_log.proto)
#            the bytes of the arrays that it names, one behind the other
#   entry:   ...


MAGIC = b"pserver log 1\n"
_HEAD = struct.Struct("<QQII")  # number, bytes that follow, those of the message, their checksum
_CHECK = struct.Struct("<I")  # of the head
HEAD_BYTES = _HEAD.size + _CHECK.size
PIECE_BYTES = 2**24  # read at a time


class Damaged(ValueError):
    """An entry differs from the one that was written."""


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """An entry, where it stands.

    Attributes:
        number: from 1.
        end: the bytes of the file up to its end.
        payload: the bytes of its arrays.
    """

    number: int
    end: int
    entry: Entry
    payload: memoryview


def head_of(number: int, message: bytes, payload: Sequence[memoryview]) -> bytes:
    """The header of an entry, with the checksums of header and contents.

    Args:
        number: of the entry.
        payload: the bytes of its arrays.
    """
    checksum, size = zlib.crc32(message), len(message)
    for piece in payload:
        checksum = zlib.crc32(piece, checksum)
        size += piece.nbytes
    head = _HEAD.pack(number, size, len(message), checksum)
    return head + _CHECK.pack(zlib.crc32(head))


class EntryReader:
    """Reads the entries of a file, one after the other.

    Args:
        name: of the file, for messages.
        read: gives the next so many bytes; fewer at the end.

    Attributes:
        torn: the file ends within an entry.  See [Note: a torn end].
    """

    def __init__(self, name: str, read: Callable[[int], bytes]) -> None:
        self._name, self._read = name, read
        self.torn = False

    def entries(self) -> Iterator[EntryPlace]:
        """All whole entries, from the first.

        Raises:
            Damaged: one is not what was written, or is missing; or the file is no recorded log.
        """
        magic = self._read(len(MAGIC))
        if magic != MAGIC[: len(magic)]:
            raise Damaged(f"{self._name}: expected a recorded log, got another file")
        self.torn = len(magic) < len(MAGIC)
        number, end = 0, len(MAGIC)
        while not self.torn and (head := self._read(HEAD_BYTES)):
            number += 1
            found = self._entry(number, end, head)
            if found is not None:
                end = found.end
                yield found

    def _entry(self, number: int, begin: int, head: bytes) -> EntryPlace | None:
        where = f"{self._name}: entry {number} at byte {begin}"
        if len(head) < HEAD_BYTES:
            self.torn = True
            return None
        if zlib.crc32(head[: _HEAD.size]) != _CHECK.unpack_from(head, _HEAD.size)[0]:
            raise Damaged(f"{where} is damaged")
        found, size, of_message, checksum = _HEAD.unpack_from(head)
        if found != number:
            raise Damaged(f"{where}: expected this number, got {found}: entries are missing")
        body = self._body(size)
        if len(body) < size:
            self.torn = True
            return None
        if zlib.crc32(body) != checksum or of_message > size:
            raise Damaged(f"{where} is damaged")
        try:
            entry = Entry.FromString(bytes(body[:of_message]))
        except Exception as error:  # protobuf's DecodeError has another base in each implementation
            raise Damaged(f"{where} is none of this version: {error}") from error
        return EntryPlace(number, begin + HEAD_BYTES + size, entry, body[of_message:])

    def _body(self, size: int) -> memoryview:
        """Reads so many bytes, or those that there are: a wrong number takes no memory."""
        pieces = bytearray()
        while len(pieces) < size:
            piece = self._read(min(size - len(pieces), PIECE_BYTES))
            if not piece:
                break
            pieces += piece
        return memoryview(pieces)


# ---- write ahead log ----
#
# The file to which server 0 writes its own state of the job, before any other process receives it.


SHORT = 2**14  # entries behind those that it begins with, from which on it may begin anew


class WriteAheadLog:
    """Appends entries to a file.  One thread at a time calls it.

    Args:
        path: of the file; one that is there is replaced by the first :meth:`begin`.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = Path(path), -1
        self._first = self._later = 0  # entries: it has begun with, and behind them

    @property
    def is_open(self) -> bool:
        """Whether it can be appended to."""
        return self._file >= 0

    @property
    def is_long(self) -> bool:
        """Whether it should begin anew, with the state that follows from its entries."""
        return self._later > max(SHORT, 4 * self._first)

    def begin(self, entries: Iterable[list[Any]]) -> None:
        """Replaces the file's entries: at each moment it has the old ones or the new ones.

        Raises:
            OSError: the file cannot be written.
        """
        lines = [_line(each) for each in entries]
        beside = self._path.with_name(self._path.name + ".new")
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # of a process that died here
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = plain_file.descriptor(beside, flags, 0o600)
        _write(self._path, self._file, b"".join(lines))
        beside.replace(self._path)
        self._first, self._later = len(lines), 0

    def append(self, entry: list[Any]) -> None:
        """Adds an entry.

        Raises:
            OSError: the file cannot be written.
        """
        _write(self._path, self._file, _line(entry))
        self._later += 1

    def close(self) -> None:
        """Ends the writing; harmless when called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """Removes the file, so that no process reads it."""
        with suppress(OSError):
            self._path.unlink()


def read(path: str) -> Iterator[list[Any]]:
    """The entries of a file.

    Raises:
        OSError: there is none.
        ValueError: it is no write-ahead log.
    """
    with plain_file.reading(Path(path)) as file:
        for line in file:
            if line.endswith(b"\n"):
                entry = bounded_json.loads(line)
                if not (isinstance(entry, list) and entry and isinstance(entry[0], str)):
                    raise ValueError(f"{path}: expected a write-ahead log")
                yield entry


def _line(entry: list[Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _write(path: Path, file: int, data: bytes) -> None:
    left = memoryview(data)
    with naming(path):
        while left:
            left = left[os.write(file, left) :]
