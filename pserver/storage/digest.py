"""The checksum of a part of a file."""

from __future__ import annotations

import hashlib
from typing import Any

_CHUNK = 1 << 22


def digest_of(file: Any, size: int) -> str:
    """BLAKE2b of the next bytes of a file, 16 bytes in hexadecimal.

    Args:
        file: open for reading.
        size: how many bytes; fewer, where the file ends before.
    """
    digest = hashlib.blake2b(digest_size=16)
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()
