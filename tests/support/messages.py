"""Fields of protobuf's messages, read with every protobuf that pyproject.toml permits."""

from __future__ import annotations

from google.protobuf.message import Message


def is_repeated(value: object) -> bool:
    """Whether a field's value is a list or a map.

    A descriptor says it too: the oldest protobuf's by ``label``, the newest's by ``is_repeated``.
    """
    return not isinstance(value, Message | str | bytes | int | float)
