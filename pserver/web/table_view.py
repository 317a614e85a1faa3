"""Tables as the page shows them: rows by tier, hit rates, admissions, evictions, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pserver.web.sightings import Change
from pserver.wire_pb2 import StatusReply

REMOVED = ("evicted", "expired", "shrunk")


def tables(replies: Iterable[StatusReply], change: Change) -> list[dict[str, Any]]:
    """Each table, summed over servers, by name.

    "hit_rate" is the part of the ids that were looked up lately whose row was in memory; None where
    nothing was looked up.
    """
    totals: dict[str, dict[str, int]] = {}
    held: dict[str, int] = {}
    for reply in replies:
        for table in reply.tables:
            counted = totals.setdefault(table.name, {})
            held[table.name] = held.get(table.name, 0) + table.bytes_held
            for name, count in {**table.counters, "rows": table.rows}.items():
                counted[name] = counted.get(name, 0) + count
    lately = change.tables()
    return [
        {
            "name": name,
            "memory_rows": counted.get("rows", 0) - counted.get("cold", 0),
            "disk_rows": counted.get("cold", 0),
            "waiting": counted.get("waiting", 0),
            "admitted": counted.get("admitted", 0),
            "refused": counted.get("refused", 0),
            "removed": sum(counted.get(each, 0) for each in REMOVED),
            "bytes": held[name],
            **_lookups(*lately.get(name, ({}, 0.0))),
        }
        for name, counted in sorted(totals.items())
    ]


def _lookups(counted: Mapping[str, float], seconds: float) -> dict[str, Any]:
    asked = counted.get("lookups", 0.0)
    missed = counted.get("lookups_disk", 0.0) + counted.get("lookups_new", 0.0)
    return {
        "lookups_per_second": asked / seconds if seconds else 0.0,
        "hit_rate": (asked - missed) / asked if asked > 0 else None,
    }
