"""Ids of strings: 64 bits of a hash that is the same on every machine.

The hash is xxHash's XXH3 with 64 bits and the seed 0 (Collet, https://xxhash.com) over a string's
UTF-8 bytes.  Of n strings that differ about n * n / 2^65 pairs have one id: of a billion, one pair
in 37 such sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from transpiler.files import bounded_json

HASHES = ("xxh3",)


def string_ids(given: Any, rows: int | None = None) -> torch.Tensor:
    """An id for each string.

    Example::

        string_ids(["cat", "dog"])                                    # int64 [2]
        string_ids(np.array([[b"a", b"b"]]))                          # int64 [1, 2]
        string_ids((b"catdog", torch.tensor([0, 3, 6])))              # int64 [2], of cat and dog

    Args:
        given: strings, as str or bytes: a list of them, lists of equal length in a list, an array
            of numpy's kinds S, U or O; or a column of bytes, as Arrow has it: (bytes, offsets),
            where n strings have n + 1 offsets.  numpy's kind S has no zeros at the end of a string.
        rows: ids are below it, as remainders of the hash; None: all 64 bits count.

    Returns:
        int64, on the CPU, of the shape of what was given.

    Raises:
        TypeError: something else was given.
        ValueError: lists of several lengths, or offsets that do not fit.
    """
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[1], str | bytes):
        strings, shape = _column(*given)
    else:
        strings, shape = _flat(given)
    try:
        digests = [_digest(each) for each in strings]
    except TypeError as error:
        raise TypeError(f"ids: expected strings of str or bytes: {error}") from None
    if rows is not None:
        digests = [digest % rows for digest in digests]
    return torch.from_numpy(np.array(digests, np.uint64).view(np.int64)).reshape(shape)


def _digest(string: Any) -> int:
    return xxhash.xxh3_64_intdigest(string.encode() if isinstance(string, str) else string)


def _flat(given: Any) -> tuple[Sequence[Any], tuple[int, ...]]:
    """All strings in order, and their shape."""
    if isinstance(given, np.ndarray) and given.dtype.kind in "SUO":
        return given.reshape(-1).tolist(), given.shape
    if isinstance(given, str | bytes) or not isinstance(given, list | tuple):
        kind = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
        raise TypeError(f"ids: expected strings in a list, an array or a column, got {kind}")
    if not given or not isinstance(given[0], list | tuple):
        return given, (len(given),)
    parts = [_flat(each) for each in given]
    shape = parts[0][1]
    for at, (_, other) in enumerate(parts):
        if other != shape:
            raise ValueError(
                f"ids: expected lists of one length, got {list(shape)} at 0 and {list(other)} at "
                f"{at}: give lists of several lengths as one list, with offsets"
            )
    return [each for strings, _ in parts for each in strings], (len(parts), *shape)


def _column(values: Any, offsets: Any) -> tuple[Sequence[Any], tuple[int, ...]]:
    """The strings of a column of bytes."""
    buffer: Any = values.numpy() if isinstance(values, torch.Tensor) else values
    try:
        data = memoryview(buffer).cast("B")
    except TypeError:
        raise TypeError(
            "ids: expected a column, (bytes, offsets) with an offset for each string and the end, "
            f"got {type(values).__name__} and offsets: those of bags are an argument by themselves"
        ) from None
    ends = np.asarray(offsets)
    if ends.dtype.kind not in "iu" or ends.ndim != 1:
        raise TypeError(f"ids: offsets: expected int64 [n + 1], got {ends.dtype} {ends.shape}")
    if not len(ends) or ends[0] != 0 or (ends[1:] < ends[:-1]).any() or ends[-1] > len(data):
        raise ValueError(
            "ids: offsets: expected n + 1 of them for n strings, from 0 on, never going down, at "
            f"most {len(data)}"
        )
    return [data[begin:end] for begin, end in pairwise(ends.tolist())], (len(ends) - 1,)


def described(name: str, rows: int | None) -> torch.Tensor:
    """A hash as a file has it: uint8 [m], JSON in ASCII."""
    return torch.frombuffer(
        bytearray(json.dumps({"hash": name, "rows": rows}).encode()), dtype=torch.uint8
    ).clone()


def rows_of(description: torch.Tensor) -> int | None:
    """The ``rows`` of :func:`string_ids` that a description says.

    Raises:
        ValueError: it is of another hash.
    """
    said = bounded_json.loads(bytes(description.tolist()))
    if said.get("hash") not in HASHES:
        raise ValueError(f"hash: expected one of {', '.join(HASHES)}, got {said.get('hash')!r}")
    rows = said["rows"]
    return None if rows is None else int(rows)
