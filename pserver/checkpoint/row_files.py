"""The rows of all tables of a checkpoint in few files, one chunk after the other.

[Note: few files]  A server has many tables, and writes each chunk by chunk, beside the steps.  A
file for each chunk is hundreds of files a save: slow to make, to list and to remove in a store, and
each costs a request.  So chunks of all tables follow one another in one file, as they come; the
manifest says where each is.  Each chunk is the bytes of a safetensors file of its own, with a
checksum of its own: a reader takes one chunk at a time, and nothing larger is ever in memory.  A
file that has reached ``FILE_BYTES`` is followed by another one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from pserver.checkpoint import table_chunks
from pserver.checkpoint.piece import Piece
from pserver.checkpoint.table_chunks import Chunk
from pserver.storage.new_file import NewFile
from pserver.storage.place import Place
from transpiler.files.tensor_stream import write_pieces

FILE_BYTES = 2**32  # a file of rows that has so many is followed by another one


class RowFiles:
    """Writes chunks of rows to files.  One thread uses it.

    Args:
        place: of the checkpoint.
        files: what its manifest will list: name -> "size".  Files are added as they begin, and the
            sizes grow.
    """

    def __init__(self, place: Place, files: dict[str, Any]) -> None:
        self._place, self._files = place, files
        self._name = ""
        self._file: NewFile | None = None

    def add(self, chunk: Mapping[str, np.ndarray]) -> Piece:
        """Writes a chunk.

        Raises:
            ValueError: a column's length is not that of its ids.
            OSError: the disk is full, or refuses.
        """
        table_chunks.check(chunk)
        file = self._open()
        columns = {key: torch.from_numpy(np.ascontiguousarray(each)) for key, each in chunk.items()}
        begin = self._files[self._name]["size"]
        size, checksum = write_pieces(columns, file.write)
        self._files[self._name]["size"] += size
        return Piece(self._name, begin, size, checksum, table_chunks.rows(chunk))

    def _open(self) -> NewFile:
        """The file that is written now."""
        if self._file is not None and self._files[self._name]["size"] >= FILE_BYTES:
            self.finish()
        if self._file is None:
            self._name = f"rows-{secrets.token_hex(8)}.chunks"
            self._files[self._name] = {"size": 0}
            self._file = self._place.create(self._name)
        return self._file

    def finish(self) -> None:
        """Returns when all of it is on the disk, or in the store.

        Raises:
            OSError: the disk is full, or refuses.
        """
        if self._file is not None:
            self._file.finish()
            self._file = None

    def give_up(self) -> None:
        """Writes no more; the caller removes the files."""
        if self._file is not None:
            self._file.give_up()
            self._file = None


def read(place: Place, piece: Piece) -> Chunk:
    """The chunk in a part of a file.

    Raises:
        ValueError: the file is missing, torn or changed.
    """
    path = f"{place}/{piece.file}"
    try:
        content = place.read(piece.file, piece.offset, piece.size)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: it is missing, and was there when the checkpoint was opened"
        ) from error
    found = hashlib.blake2b(content, digest_size=16).hexdigest()
    if len(content) != piece.size or found != piece.blake2b:
        raise ValueError(f"{path}: its bytes are not those that were saved (checksum)")
    try:
        chunk: Chunk = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path}: expected a safetensors file of a table's rows ({error})"
        ) from error
    table_chunks.check(chunk)
    return chunk
