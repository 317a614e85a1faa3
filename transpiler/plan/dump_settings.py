"""What a trainer writes down of each step, for people to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DumpSettings:
    """What is dumped, and where; names are those of tensors.

    Attributes:
        path: a directory, or its URL; "" dumps nothing.
        fields: whose samples are written, a line each.
        params: parameters that are written whole.
        stats: of which the smallest, largest and mean values are written.
    """

    path: str = ""
    fields: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
