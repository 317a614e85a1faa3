"""A directory on this machine's disks."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from pserver.storage import plain_file
from pserver.storage.digest import digest_of
from pserver.storage.new_file import DiskFile, NewFile
from pserver.storage.path_lock import PathLock
from pserver.undone import or_undone
from transpiler.files.named_errors import naming
from transpiler.files.tensor_stream import write_pieces
from transpiler.files.whole_file import flush

PARTIAL = "writing-"  # begins the names of what is being written


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A directory.  What a method has written is on the disk when it returns.

    Every method raises OSError where the disk is full or refuses, FileNotFoundError where there is
    no such file.

    Attributes:
        directory: resolved.
    """

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def path(self) -> str:
        """By which a process finds it again."""
        return str(self.directory)

    def at(self, relative: str) -> LocalPlace:
        """The place at a path relative to this one."""
        return LocalPlace((self.directory / relative).resolve())

    def relative(self, other: LocalPlace) -> str:
        """The path of another place relative to this one."""
        return os.path.relpath(other.directory, self.directory)

    def lock(self) -> PathLock | None:
        """Keeps other writers out.

        Raises:
            InUse: there is one.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        return PathLock(self.directory)

    def writable(self) -> bool:
        """Whether files can be written here."""
        return os.access(self.directory, os.W_OK)

    # ---- reading ----

    def names(self) -> list[str]:
        """The files that are here."""
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if not path.is_dir()]

    def directories(self) -> list[str]:
        """The directories that are here."""
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if path.is_dir()]

    def size(self, name: str) -> int | None:
        """In bytes; None where there is no such file."""
        return plain_file.size(self.directory / name)

    def read(self, name: str, begin: int = 0, size: int = -1) -> bytes:
        """A file, or so many bytes of it from ``begin`` on; fewer, where it ends before."""
        with plain_file.reading(self.directory / name) as file:
            file.seek(begin)
            return file.read(size)

    def checksums(self, name: str, sizes: Iterable[int]) -> list[str]:
        """BLAKE2b, 16 bytes in hexadecimal, of parts of a file that follow one another.

        Args:
            sizes: of the parts, in bytes.
        """
        with plain_file.reading(self.directory / name) as file:
            return [digest_of(file, size) for size in sizes]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file."""
        with plain_file.reading(self.directory / name) as file:
            # by the descriptor: what has this name may be another file by now
            return safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")

    # ---- writing ----

    def write(self, name: str, content: bytes) -> None:
        """Makes a new file; after an error there is none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        with naming(path):
            plain_file.write_bytes(path, content)
        with or_undone(lambda: path.unlink(missing_ok=True)):
            flush(path)

    def create(self, name: str) -> NewFile:
        """Begins a new file, to be written piece by piece."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return DiskFile(self.directory / name)

    def write_tensors(
        self,
        name: str,
        tensors: MutableMapping[str, torch.Tensor],
        wrote: Callable[[int], None] = lambda size: None,
    ) -> tuple[int, str]:
        """Makes a new safetensors file of contiguous tensors on the CPU; gives its size and its
        checksum.

        Args:
            tensors: taken out as they are written.
            wrote: told the bytes that are written so far.
        """
        file = self.create(name)
        try:
            written = write_pieces(tensors, file.write, wrote)
            file.finish()
        except BaseException:
            file.give_up()
            self.remove(name)
            raise
        return written

    def replace(self, name: str, content: bytes, before: bytes | None = None) -> bool:
        """Puts a file in place of the one that may be there, in one moment; True."""
        temporary = self.directory / f"{PARTIAL}{secrets.token_hex(8)}"
        self.write(temporary.name, content)
        with or_undone(lambda: temporary.unlink(missing_ok=True)):
            os.replace(temporary, self.directory / name)
        return True

    def flush(self) -> None:
        """Returns when the names of all files are on the disk."""
        flush(self.directory)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        (self.directory / name).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes what stopped writers have left."""
        for path in self.directory.glob(f"{PARTIAL}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
