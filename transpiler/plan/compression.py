"""Which compression the gradients of a parameter or of a table have, by patterns of names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from transpiler.ir.tables import ROW_COMPRESSIONS, Table
from transpiler.plan.plan import COMPRESSIONS, Lane, Placement
from transpiler.plan.table_planner import first_group

Compressed = TypeVar("Compressed", Placement, Table)


def compressed(
    placements: tuple[Placement, ...],
    tables: tuple[Table, ...],
    lanes: Sequence[Lane],
    asked: Sequence[tuple[Mapping[str, str], Collection[int]]],
) -> tuple[tuple[Placement, ...], tuple[Table, ...]]:
    """The placements and tables with the compression that the first matching pattern asks for.

    Rows of tables travel as ``ROW_COMPRESSIONS``: a pattern with a wildcard and another scheme is
    not for them.

    Args:
        placements, tables: without compression.
        lanes: of the plan.
        asked: by optimizer, pattern of names -> scheme, one of ``COMPRESSIONS``; and the groups
            whose parameters and tables these are for.

    Raises:
        ValueError: an unknown scheme, a pattern that decides for nothing, or one for gradients that
            do not travel or have no dtype to compress.
    """
    for patterns, groups in asked:
        schemes = _schemes(placements, tables, lanes, patterns, groups)
        placements = tuple(_with(each, schemes) for each in placements)
        tables = tuple(_with(each, schemes) for each in tables)
    return placements, tables


def _schemes(
    placements: Sequence[Placement],
    tables: Sequence[Table],
    lanes: Sequence[Lane],
    patterns: Mapping[str, str],
    groups: Collection[int],
) -> dict[str, str]:
    """By name, the compression that one optimizer's patterns choose."""
    own: list[Placement | Table] = [each for each in placements if each.group in groups]
    own += [table for table in tables if first_group(table) in groups]
    chosen = {each.name: _pattern(each, patterns) for each in own}
    for pattern, scheme in patterns.items():
        if scheme not in COMPRESSIONS:
            raise ValueError(
                f"compression[{pattern!r}]: expected one of {', '.join(map(repr, COMPRESSIONS))}, "
                f"got {scheme!r}"
            )
        if pattern not in chosen.values():
            raise ValueError(
                "compression: expected patterns that match a parameter which none before them "
                f"matches, got {pattern!r}"
            )
    schemes = {name: patterns.get(pattern or "", "") for name, pattern in chosen.items()}
    for each in own:
        if schemes[each.name]:
            _check_compressed(each, lanes[each.lane])
    return schemes


def _pattern(each: Placement | Table, patterns: Mapping[str, str]) -> str | None:
    """The first pattern for a parameter or a table."""
    for pattern, scheme in patterns.items():
        of_rows = isinstance(each, Placement) or scheme in ROW_COMPRESSIONS or pattern == each.name
        if of_rows and fnmatchcase(each.name, pattern):
            return pattern
    return None


def _check_compressed(each: Placement | Table, lane: Lane) -> None:
    """Returns if the gradients of a parameter or a table can be compressed.

    Raises:
        ValueError: there are none, or they have no dtype to compress.
    """
    if lane.kind.steps_on_trainer:
        raise ValueError(
            f"compression: {each.name!r} is in mode {lane.mode}, where no gradients travel"
        )
    if isinstance(each, Placement) and each.dtype not in ("float32", "float64"):
        raise ValueError(f"compression: {each.name!r} is {each.dtype}; expected float32 or float64")


def _with(each: Compressed, schemes: Mapping[str, str]) -> Compressed:
    return replace(each, compression=schemes[each.name]) if each.name in schemes else each
