"""Tensors in a file.  The libraries that write them have exceptions of their own for a full disk,
which become OSError here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from transpiler.files.named_errors import naming

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
