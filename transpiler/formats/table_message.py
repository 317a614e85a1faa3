"""Sparse tables as protobuf messages, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transpiler import program_pb2 as pb
from transpiler.ir.tables import (
    CountFilterEntry,
    Initial,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    TableEntry,
)

_ENTRIES: dict[str, tuple[type[Any], type[Any]]] = {
    "count": (CountFilterEntry, pb.CountFilterEntry),
    "probability": (ProbabilityEntry, pb.ProbabilityEntry),
    "show_click": (ShowClickEntry, pb.ShowClickEntry),
}
_PLAIN = (
    "name",
    "dim",
    "dtype",
    "rows",
    "lane",
    "seed",
    "ttl",
    "capacity",
    "eviction",
    "memory_bytes",
    "compression",
)
_OPTIONAL = ("rows", "ttl", "capacity", "memory_bytes")


def table_to_proto(table: Table) -> pb.Table:
    """The message of a table."""
    plain = {name: getattr(table, name) for name in _PLAIN}  # a field that is None stays absent
    message = pb.Table(
        **plain,
        segments=[pb.Segment(begin=s.begin, end=s.end, group=s.group) for s in table.segments],
        initial=pb.Initial(kind=table.initial.kind, low=table.initial.low, high=table.initial.high),
    )
    for name, (plain_type, message_type) in _ENTRIES.items():
        if isinstance(table.entry, plain_type):
            settings = {
                field.name: getattr(table.entry, field.name) for field in fields(plain_type)
            }
            getattr(message, name).CopyFrom(message_type(**settings))
    return message


def table_from_proto(message: pb.Table) -> Table:
    """The table of a message.

    Raises:
        ValueError: a setting is out of range, or two contradict each other.
    """
    plain = {
        name: getattr(message, name)
        for name in _PLAIN
        if name not in _OPTIONAL or message.HasField(name)
    }
    segments = tuple(Segment(s.begin, s.end, s.group) for s in message.segments)
    initial = Initial(message.initial.kind, message.initial.low, message.initial.high)
    return Table(**plain, segments=segments, initial=initial, entry=_entry_from_proto(message))


def _entry_from_proto(message: pb.Table) -> TableEntry | None:
    name = message.WhichOneof("entry")
    if name is None:
        return None
    plain_type = _ENTRIES[name][0]
    entry: TableEntry = plain_type(
        **{field.name: getattr(getattr(message, name), field.name) for field in fields(plain_type)}
    )
    return entry
