"""The state of a table besides its rows, where several servers have a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def joint(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The metadata of a whole table: the last part's, because all servers have taken the same
    steps, with the counts of all of them.

    Where servers differ in the turn of rows to catch up (see updater.py), the turn begins anew.

    Args:
        parts: each server's.
    """
    known: dict[str, Any] = {}
    for part in parts:
        before = known.get("counts", {})
        counts = {name: before.get(name, 0) + count for name, count in part["counts"].items()}
        swept = part.get("swept", 0)
        same = not known or known["swept"] == swept
        known = dict(part) | {"counts": counts, "swept": swept if same else 0}
    return known


def part(metadata: Mapping[str, Any], server: int) -> dict[str, Any]:
    """A server's part of a whole table's metadata: the counts are server 0's from here on, so that
    their sum stays what it was.
    """
    if server == 0:
        return dict(metadata)
    return dict(metadata) | {"counts": dict.fromkeys(metadata["counts"], 0)}
