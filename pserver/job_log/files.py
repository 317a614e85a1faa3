"""The form of a recorded log: a file of entries, each with its number, its length and a checksum.

::

    MAGIC
    entry:   number, length, length of the message, checksum of all that follows; checksum of these
             message (Entry of protos/pserver/job_log.proto)
             the bytes of the arrays that it names, one behind the other
    entry:   ...

[Note: a torn end]  A process that is killed leaves the beginning of an entry at the end of its
file.  That is no damage: what stands before it is whole.  Any other entry whose checksum is wrong,
or whose number is not the next one, is damage, and no reader goes past it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pserver.job_log_pb2 import Entry

MAGIC = b"pserver log 1\n"
_HEAD = struct.Struct("<QQII")  # number, bytes that follow, those of the message, their checksum
_CHECK = struct.Struct("<I")  # of the head
HEAD_BYTES = _HEAD.size + _CHECK.size
PIECE_BYTES = 2**24  # read at a time


class Damaged(ValueError):
    """An entry is not what was written."""


@dataclass(frozen=True, slots=True)
class Place:
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
    """What stands before an entry's message.

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
        read: the next so many bytes; fewer at the end.

    Attributes:
        torn: the file ends within an entry.  See [Note: a torn end].
    """

    def __init__(self, name: str, read: Callable[[int], bytes]) -> None:
        self._name, self._read = name, read
        self.torn = False

    def entries(self) -> Iterator[Place]:
        """All whole ones, from the first.

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

    def _entry(self, number: int, begin: int, head: bytes) -> Place | None:
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
        return Place(number, begin + HEAD_BYTES + size, entry, body[of_message:])

    def _body(self, size: int) -> memoryview:
        """So many bytes, or what there is of them: a number that is wrong takes no memory."""
        pieces = bytearray()
        while len(pieces) < size:
            piece = self._read(min(size - len(pieces), PIECE_BYTES))
            if not piece:
                break
            pieces += piece
        return memoryview(pieces)
