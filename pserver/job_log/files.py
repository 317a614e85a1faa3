"""The log of a job as files: what server 0 writes ahead, and recorded logs.

[Note: a torn end]  A process that is killed leaves the beginning of an entry at the end of its
file.  That is no damage: what stands before it is whole.  Any other entry whose checksum is wrong,
or whose number is not the next one, is damage, and no reader goes past it.

[Note: what a process leaves behind]  What a process has written to a file stays when it is killed:
the kernel has it.  So nothing waits for a disk, and a process that takes the place of this one on
the same host reads all of it.  Where the host dies, too, the job goes back to a checkpoint.

Both kinds of files have one form, which the comment above :data:`MAGIC` draws.  A torn end of what
server 0 writes ahead was being written, so no other process has received it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from pserver.job_log_pb2 import Entry, OwnEntry
from pserver.storage import plain_file
from pserver.undone import or_undone
from transpiler.files.named_errors import naming

# ---- entries ----
#
# The form of a file of entries, each with its number, its length and a checksum.
#
# ::
#
#   MAGIC, or OWN of what server 0 writes ahead
#   entry:   number, length, length of the message, checksum of all that follows; checksum of these
#            message (Entry, or OwnEntry, of protos/pserver/job_log.proto)
#            the bytes of the arrays that an Entry names, one behind the other
#   entry:   ...


MAGIC = b"pserver log 1\n"
OWN = b"pserver own 2\n"
_HEAD = struct.Struct("<QQII")  # number, bytes that follow, those of the message, their checksum
_CHECK = struct.Struct("<I")  # of the head
HEAD_BYTES = _HEAD.size + _CHECK.size
PIECE_BYTES = 2**24  # read at a time


class Damaged(ValueError):
    """An entry differs from the one that was written."""


Kind = TypeVar("Kind", Entry, OwnEntry)


@dataclass(frozen=True)
class Place(Generic[Kind]):
    """An entry, where it stands.

    Attributes:
        number: from 1.
        end: the bytes of the file up to its end.
        payload: the bytes of its arrays.
    """

    number: int
    end: int
    entry: Kind
    payload: memoryview


EntryPlace = Place[Entry]


def head_of(number: int, message: bytes, payload: Sequence[memoryview] = ()) -> bytes:
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


class EntryReader(Generic[Kind]):
    """Reads the entries of a file, one after the other.

    Args:
        name: of the file, for messages.
        read: gives the next so many bytes; fewer at the end.
        kind: of the entries.

    Attributes:
        torn: the file ends within an entry.  See [Note: a torn end].
    """

    def __init__(self, name: str, read: Callable[[int], bytes], kind: type[Kind]) -> None:
        self._name, self._read = name, read
        self._kind: type[Kind] = kind
        self.torn = False

    def entries(self) -> Iterator[Place[Kind]]:
        """All whole entries, from the first.

        Raises:
            Damaged: one is not what was written, or is missing; or the file has none of this kind.
        """
        expected, what = _KINDS[self._kind]
        magic = self._read(len(expected))
        if magic != expected[: len(magic)]:
            form, _, _ = expected.rpartition(b" ")
            if magic.startswith(form):
                raise Damaged(
                    f"{self._name}: expected a {what} of this version "
                    f"({expected.decode().rstrip()}), got another version's ({magic!r}): read it "
                    "with the pserver that has written it"
                )
            raise Damaged(f"{self._name}: expected a {what}, got another file")
        self.torn = len(magic) < len(expected)
        number, end = 0, len(expected)
        while not self.torn and (head := self._read(HEAD_BYTES)):
            number += 1
            found = self._entry(number, end, head)
            if found is not None:
                end = found.end
                yield found

    def _entry(self, number: int, begin: int, head: bytes) -> Place[Kind] | None:
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
            entry = self._kind.FromString(bytes(body[:of_message]))
        except Exception as error:  # protobuf's DecodeError has another base in each implementation
            raise Damaged(f"{where} is none of this version: {error}") from error
        return Place(number, begin + HEAD_BYTES + size, entry, body[of_message:])

    def _body(self, size: int) -> memoryview:
        """Reads so many bytes, or those that there are: a wrong number takes no memory."""
        pieces = bytearray()
        while len(pieces) < size:
            piece = self._read(min(size - len(pieces), PIECE_BYTES))
            if not piece:
                break
            pieces += piece
        return memoryview(pieces)


_KINDS: Mapping[type, tuple[bytes, str]] = {
    Entry: (MAGIC, "recorded log"),
    OwnEntry: (OWN, "write-ahead log"),
}


# ---- write ahead log ----
#
# The file to which server 0 writes its own state of the job, before any other process receives it.


SHORT = 2**14  # entries behind those that it begins with, from which on it may begin anew


class WriteAheadLog:
    """Appends entries to a file.  One thread at a time calls it, but for :meth:`write_beside`.

    Where it is long, it is written anew while entries are appended::

        log.keep_tail()                       # under the caller's lock, with the state's entries
        file = log.write_beside(entries)      # without it
        log.put_in_place(file, len(entries))  # under it

    Args:
        path: of the file; one that is there is replaced by the first :meth:`begin`.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = Path(path), -1
        self._first = self._later = 0  # entries: it has begun with, and behind them
        self._tail: list[OwnEntry] | None = None  # appended since it is written anew
        self._least = 0  # entries behind the first ones that it needs to be long, after a failure

    @property
    def is_open(self) -> bool:
        """Whether it can be appended to."""
        return self._file >= 0

    @property
    def is_long(self) -> bool:
        """Whether it should be written anew, with the state that follows from its entries."""
        return self._tail is None and self._later > max(SHORT, 4 * self._first, self._least)

    def begin(self, entries: Iterable[OwnEntry]) -> None:
        """Replaces the file's entries: at each moment it has the old ones or the new ones.

        Raises:
            OSError: the file cannot be written.
        """
        self.close()
        known = list(entries)
        self._put(self.write_beside(known), len(known))

    def append(self, entry: OwnEntry) -> None:
        """Adds an entry.

        Raises:
            OSError: the file cannot be written.
        """
        self._add(entry)
        if self._tail is not None:
            self._tail.append(entry)

    def keep_tail(self) -> None:
        """From now on what is appended is kept, for :meth:`put_in_place`."""
        self._tail = []

    def drop_tail(self) -> None:
        """Keeps the present file, as it could not be written anew; it is long again when it has
        twice as many entries.
        """
        self._tail, self._least = None, 2 * self._later

    def write_beside(self, entries: Sequence[OwnEntry]) -> int:
        """Writes entries beside the present file; returns the descriptor.

        Raises:
            OSError: the file cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._beside.unlink(missing_ok=True)  # of a process that died here
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        file = plain_file.descriptor(self._beside, flags, 0o600)
        data = (_bytes(number, each) for number, each in enumerate(entries, 1))
        with or_undone(partial(os.close, file)):
            _write(self._path, file, b"".join((OWN, *data)))
        return file

    def put_in_place(self, file: int, first: int) -> None:
        """Puts a file of :meth:`write_beside`, and what was appended meanwhile, in the place of
        the present one; closes it where the log is closed.

        Args:
            first: how many entries it has.

        Raises:
            OSError: the file cannot be written.
        """
        if self.is_open:
            os.close(self._file)
            self._put(file, first)
            return
        with suppress(FileNotFoundError):  # it may be that of a later job
            if os.path.samestat(os.fstat(file), os.stat(self._beside)):
                self._beside.unlink()
        os.close(file)

    def close(self) -> None:
        """Ends the writing; harmless when called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._tail = -1, None

    def remove(self) -> None:
        """Removes the file, so that no process reads it."""
        with suppress(OSError):
            self._path.unlink()

    def _put(self, file: int, first: int) -> None:
        self._file, self._first, self._later, self._least = file, first, 0, 0
        tail, self._tail = self._tail or [], None
        for entry in tail:
            self._add(entry)
        self._beside.replace(self._path)

    def _add(self, entry: OwnEntry) -> None:
        _write(self._path, self._file, _bytes(self._first + self._later + 1, entry))
        self._later += 1

    @property
    def _beside(self) -> Path:
        return self._path.with_name(self._path.name + ".new")


def read(path: str) -> Iterator[OwnEntry]:
    """The entries of a file, without a torn end.

    Raises:
        OSError: there is none.
        Damaged: it is no write-ahead log, or an entry is not what was written.
    """
    with plain_file.reading(Path(path)) as file:
        for place in EntryReader(path, file.read, OwnEntry).entries():
            yield place.entry


def _bytes(number: int, entry: OwnEntry) -> bytes:
    message = entry.SerializeToString()
    return head_of(number, message) + message


def _write(path: Path, file: int, data: bytes) -> None:
    left = memoryview(data)
    with naming(path):
        while left:
            left = left[os.write(file, left) :]
