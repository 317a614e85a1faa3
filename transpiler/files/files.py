"""Files that appear whole or not at all, and tensors in them.

[Note: no copy, no lock]  The library first makes bytes of all tensors and of the whole file, and
holds the interpreter's lock while it does.  A server that writes 1 GB beside its steps would stop
them for as long.  Here the pieces are the tensors' own memory, and writing and hashing them needs
no lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError

from transpiler.files.named_errors import naming

# ---- local path ----
#
# A caller's path: a place on this machine, or a URL.
#
# A URL that is taken for a path makes a folder named ``s3:`` in the working directory, which goes
# unnoticed until the machine is gone.  So every call that takes a path checks it here first.


_FILE = re.compile(r"(file|local)://")
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")  # two letters: C:/ is a disk
_NOWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/+\Z")
_USER = re.compile(r"://[^/@\s]*@")


class PathLike(Protocol):
    """An argument of ``os.fspath`` that gives text."""

    def __fspath__(self) -> str: ...


def is_url(path: str | PathLike) -> bool:
    """Whether a path leads to another place than this machine's disks.

    Raises:
        TypeError: it is not a path.
        ValueError: it was a URL before pathlib took a slash away, or it names nothing: it is empty,
            or a protocol only; or it contains a zero byte.

    Example:
        >>> is_url("s3://bucket/job"), is_url("runs/job"), is_url("file:///tmp/job")
        (True, False, False)
    """
    text = path if isinstance(path, str) else getattr(path, "__fspath__", lambda: path)()
    if not isinstance(text, str):
        raise TypeError(f"expected a path as text, got {path!r}")
    if "\0" in text:
        raise ValueError(f"expected a path, or a URL, without a zero byte, got {text!r}")
    if not text or _NOWHERE.match(text):
        raise ValueError(f"expected a path, or a URL with a name behind its slashes, got {text!r}")
    if _ONE_SLASH.match(text):
        raise ValueError(
            f"expected a path, or a URL with two slashes, got {text!r}: pathlib takes a slash of a "
            "URL away, so give it as a str; where it is a folder, write './' before it"
        )
    return "://" in text and not _FILE.match(text)


def local_path(path: str | PathLike, what: str) -> Path:
    """A path on this machine.

    Args:
        what: the call or the flag, for messages.

    Raises:
        TypeError: it is not a path.
        ValueError: it is a URL, or names nothing.

    Example:
        >>> local_path("runs/job", "draw").name
        'job'
    """
    try:
        url = is_url(path)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{what}: {error}") from None
    if url:
        raise ValueError(f"{what}: expected a path on this machine, got the URL {shown(path)!r}")
    return Path(_FILE.sub("", str(path), count=1))


def shown(path: str | PathLike) -> str:
    """A path or a URL for a message: without a user and a password.

    Example:
        >>> shown("sftp://ann:sesame@host/job")
        'sftp://***@host/job'
    """
    return _USER.sub("://***@", str(path))


# ---- tensor file ----
#
# Tensors in a file.  The libraries that write them have exceptions of their own for a full disk,
# which become OSError here.


_NUMBER = re.compile(r"\(os error (\d+)\)")


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file.

    Args:
        tensors: contiguous, on the CPU, none in the memory of another.

    Raises:
        OSError: the disk is full, or refuses.
    """
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        said = str(error).partition("I/O error: ")[2] or str(error)
        raise OSError(int(number[1]), _NUMBER.sub("", said).strip(), str(path)) from error


class _Remembering:
    """A file that remembers why a write failed: ``torch.save`` forgets it."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_object(value: Any, path: Path) -> None:
    """``torch.save``.

    Raises:
        OSError: the disk is full, or refuses.
    """
    with naming(path), path.open("wb") as file:
        remembering = _Remembering(file)
        try:
            torch.save(value, remembering)  # type: ignore[arg-type]  # it writes and flushes
        except RuntimeError:
            if remembering.error is not None:
                raise remembering.error from None
            raise


# ---- tensor stream ----
#
# Tensors as the bytes of a safetensors file, one piece after the other.


PIECE = 1 << 22  # bytes
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pieces(tensors: MutableMapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, at most 4 MB at a time.

    Args:
        tensors: contiguous, on the CPU.  Each is taken out when its bytes were given, so that a
            caller who holds it no longer has its memory back while the next is written.

    Raises:
        TypeError: a dtype that such a file cannot have.
    """
    # elements of many bytes first: so each tensor begins at a multiple of its element's size
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    yield memoryview(_header({name: tensors[name] for name in names}))
    for name in names:
        tensor = tensors.pop(name)
        if tensor.nbytes:
            # one element may have any stride
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            content = flat.view(torch.uint8).numpy().data
            for at in range(0, tensor.nbytes, PIECE):
                yield content[at : at + PIECE]
            del flat, content
        del tensor


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The beginning of a file in which these tensors follow one another."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name!r}: a safetensors file has no tensors of {tensor.dtype}")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_pieces(
    tensors: MutableMapping[str, torch.Tensor],
    write: Callable[[memoryview], object],
    wrote: Callable[[int], None] = lambda size: None,
) -> tuple[int, str]:
    """Writes the bytes of a safetensors file.

    Args:
        tensors: contiguous, on the CPU; taken out as they are written.
        write: writes some of the bytes.
        wrote: receives the number of bytes written so far.

    Returns:
        The number of bytes, and their BLAKE2b digest, 16 bytes in hexadecimal.

    Raises:
        OSError: the disk is full, or refuses.
        TypeError: as :func:`pieces`.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    for piece in pieces(tensors):
        write(piece)
        digest.update(piece)
        size += len(piece)
        wrote(size)
    return size, digest.hexdigest()


# ---- whole file ----
#
# Files that appear whole or not at all: written under another name, flushed, renamed.


READABLE, PRIVATE = 0o644, 0o600


@contextmanager
def whole_file(target: Path, mode: int = READABLE) -> Iterator[Path]:
    """A file to be written beside ``target``, which becomes ``target`` when this ends without an
    error.  Until then only its owner can read it.

    Args:
        target: of a symbolic link, the file that it leads to is replaced; a special file, like
            ``/dev/stdout``, is written in place.
        mode: the permissions of the finished file.

    Raises:
        OSError: the disk is full, or refuses; the old file stays.
    """
    target = target.resolve()
    if target.exists() and not target.is_file() and not target.is_dir():
        with naming(target):
            yield target
        return
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
        with naming(target):
            yield partial
        partial.chmod(mode)
        flush(partial)
        os.replace(partial, target)
        flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Returns when a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
