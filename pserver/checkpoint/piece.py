"""Where a chunk of a table's rows is: a part of a file, as ``checkpoint.json`` names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk in a file.

    Attributes:
        file: its name.
        offset, size: where the chunk is in it, in bytes.
        blake2b: of these bytes, 16 bytes in hexadecimal.
        ids: how many ids the chunk names.
    """

    file: str
    offset: int
    size: int
    blake2b: str
    ids: int

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def pieces_of(tables: Any, files: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """The chunks of each table.

    Formats 1 to 3 name a table's files instead, each of which is a chunk.

    Args:
        tables: as ``checkpoint.json`` has them.
        files: that it lists.

    Raises:
        ValueError: they are something else, or a chunk is in no file that is listed.
    """
    try:
        found = {
            str(table): [_piece_of(each, files) for each in listed]
            for table, listed in tables.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected each table's chunks in files that are listed, got {tables!r}"
        ) from error
    if any(piece.file not in files for pieces in found.values() for piece in pieces):
        raise ValueError(f"expected each table's chunks in files that are listed, got {tables!r}")
    return found


def _piece_of(plain: Any, files: Mapping[str, Any]) -> Piece:
    if isinstance(plain, str):
        whole = files[plain]
        return Piece(plain, 0, int(whole["size"]), str(whole["blake2b"]), int(whole.get("ids", 0)))
    return Piece(
        str(plain["file"]),
        int(plain["offset"]),
        int(plain["size"]),
        str(plain["blake2b"]),
        int(plain["ids"]),
    )


def by_file(tables: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
    """The chunks of all tables by their files, in the order in which they are there."""
    found: dict[str, list[Piece]] = {}
    for pieces in tables.values():
        for piece in pieces:
            found.setdefault(piece.file, []).append(piece)
    return {name: sorted(pieces, key=lambda each: each.offset) for name, pieces in found.items()}


def is_whole(pieces: list[Piece], size: Any) -> bool:
    """Whether these chunks, in order, follow one another from the beginning of a file to its end.

    Args:
        size: of the file.
    """
    end = 0
    for piece in pieces:
        if piece.offset != end or piece.size < 0:
            return False
        end += piece.size
    return bool(end == size)
