"""Tensors as the bytes of a safetensors file, one piece after the other.

[Note: no copy, no lock]  The library first makes bytes of all tensors and of the whole file, and
holds the interpreter's lock while it does.  A server that writes 1 GB beside its steps would stop
them for as long.  Here the pieces are the tensors' own memory, and writing and hashing them needs
no lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping

import torch

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
        wrote: told how many are written so far.

    Returns:
        How many bytes, and BLAKE2b of them, 16 bytes in hexadecimal.

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
