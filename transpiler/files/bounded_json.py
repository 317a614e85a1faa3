"""JSON of files and peers: a text that is too deep or too long is a ValueError.

Python's own reader raises a RecursionError, which does not look like a mistake in a file; and a
value that it has read at a depth just below that is too deep for the writer.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100  # lists and objects within one another
MOST_BYTES = 2**28

_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BYTE_TEXTS = re.compile(_TEXTS.pattern.encode(), re.DOTALL)


def loads(content: str | bytes | bytearray) -> Any:
    """Parses a text of JSON.

    Raises:
        ValueError: the text is not JSON, is nested deeper than ``DEEPEST``, or is longer than
            ``MOST_BYTES``.

    Example:
        >>> loads('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> loads("[" * 1000 + "]" * 1000)
        Traceback (most recent call last):
        ValueError: expected JSON of up to 100 lists and objects within one another, got more
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"expected JSON of up to {MOST_BYTES} bytes, got {len(content)}")
    if _is_deep(content):
        raise ValueError(
            f"expected JSON of up to {DEEPEST} lists and objects within one another, got more"
        )
    return json.loads(content)


def _is_deep(content: str | bytes | bytearray) -> bool:
    if isinstance(content, str):
        if content.count("[") + content.count("{") <= DEEPEST:
            return False
        brackets = re.sub(r"[^\[\]{}]+", "", _TEXTS.sub("", content)).encode()
    else:
        if content.count(b"[") + content.count(b"{") <= DEEPEST:
            return False
        brackets = re.sub(rb"[^\[\]{}]+", b"", _BYTE_TEXTS.sub(b"", content))
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            return True
    return False
