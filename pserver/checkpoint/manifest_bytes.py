"""The bytes of a ``checkpoint.json``: JSON that carries a checksum of itself.

[Note: the checksum of the metadata]  The checksum is over the bytes of the whole file, in which
zeros stand where it is written itself: its last entry.  So every changed bit is noticed, spaces
among them.  Formats 1 and 2, of older versions, have no checksum and are read as they are; a file
that has one is checked whatever its format says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from transpiler.files import bounded_json

FORMAT = 4
_OLD, _WITHOUT_CHECKSUM = (1, 2, 3), (1, 2)
_KEY, _BLANK = "checksum", "0" * 32


def packed(content: Mapping[str, Any]) -> bytes:
    """The bytes of a file with this content.

    Raises:
        TypeError: it holds something that is not JSON.
    """
    blank = (json.dumps({"format": FORMAT, **content, _KEY: _BLANK}, indent=1) + "\n").encode()
    before, _, after = blank.rpartition(_BLANK.encode())
    return before + identity_of(blank).encode() + after


def unpacked(content: bytes, where: str) -> dict[str, Any]:
    """The content of a file; it has the keys "files" and "meta", which are objects.

    Args:
        where: the file, for messages.

    Raises:
        ValueError: the bytes are no such file, or were changed.
    """
    try:
        found = bounded_json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), dict) for key in ("files", "meta")
    ):
        raise ValueError(f"{where}: expected an object with the keys format, meta and files")
    kind = found.get("format")
    if kind not in (*_OLD, FORMAT):
        raise ValueError(f"{where}: expected format 1, 2, 3 or {FORMAT}, got {kind!r}")
    if kind not in _WITHOUT_CHECKSUM or _KEY in found:
        said = str(found.get(_KEY))
        before, _, after = content.rpartition(said.encode())
        if len(said) != len(_BLANK) or identity_of(before + _BLANK.encode() + after) != said:
            raise ValueError(f"{where}: its bytes are not those that were saved (checksum)")
    return found


def identity_of(content: bytes) -> str:
    """The identity of the checkpoint with these bytes as its ``checkpoint.json``: BLAKE2b, 16 bytes
    in hexadecimal.
    """
    return hashlib.blake2b(content, digest_size=16).hexdigest()
