"""A plan as readable text: the split, the bytes of a step and the memory of each server."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from transpiler.formats.table_text import server_bytes, size, table_rows
from transpiler.ir.rules import state_of
from transpiler.plan.lanes import applied, describe
from transpiler.plan.owners import owners
from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Placement, Plan, Slice

SCALAR_BYTES = 4  # of a scalar state


def plan_text(plan: Plan) -> str:
    """The tables of ``pserver plan``: one line per variable, per sparse table and per server.

    "sent to it" and "received" are the bytes that one trainer exchanges with a server in one
    message of each lane; a k-step lane sends one every k steps.  "memory" is that of slices,
    optimizer states and every trainer's gradients, and with sparse tables the most that their rows
    take; "+ rows" stands for tables that have no bound.
    """
    if plan.collective is not None:
        return _without_servers(plan)
    head = [f"{plan.mode}: {plan.trainers} trainers, {plan.servers} servers"]
    head += [
        f"  lane {index}: {lane.mode}, {describe(lane, plan.trainers)}"
        for index, lane in enumerate(plan.lanes)
    ]
    variables: list[tuple[str, ...]] = [("variable", "shape", "update", "lane", "held by")]
    variables += [_variable(plan, placement) for placement in plan.placements]
    servers: list[tuple[str, ...]] = [
        ("server", "slices", "parameters", "states", "sent to it", "received", "memory")
    ]
    servers += [_server(plan, index) for index in range(plan.servers)]
    tables = ["", *_table(table_rows(plan))] if plan.tables else []
    return "\n".join([*head, "", *_table(variables), *tables, "", *_table(servers)])


def _without_servers(plan: Plan) -> str:
    """The tables of a job without servers, in which every trainer holds everything; where updates
    are sharded, of the optimizer's states only those of the parameters that it updates.

    The bytes that are summed over the trainers at every step are those of the trained parameters.
    """
    assert plan.collective is not None, "a plan without servers"
    owner = owners(plan) if plan.collective.sharded else {}
    variables: list[tuple[str, ...]] = [("variable", "shape", "update")]
    variables[0] += ("updated by",) if owner else ()
    parameters = summed = 0
    states = [0] * (plan.trainers if owner else 1)
    for placement in plan.placements:
        name = placement.name
        whole = Slice(name, 0, prod(placement.shape), placement.shape, 0)
        by = (f"trainer {owner[name]}" if name in owner else "",) if owner else ()
        variables.append(_variable(plan, placement)[:3] + by)
        parameters += _bytes(placement, whole)
        if placement.group is not None:
            summed += _bytes(placement, whole)
            shaped = state_of(plan.groups[placement.group]).values()
            states[owner.get(name, 0)] += sum(
                _bytes(placement, whole) if each else SCALAR_BYTES for each in shaped
            )
    rows = [("" if owner else "each of", "parameters", "states", "summed", "memory")]
    for rank, held in enumerate(states):
        memory = size(parameters + held + summed)  # gradients, too
        who = f"trainer {rank}" if owner else f"{plan.trainers} trainers"
        rows.append((who, size(parameters), size(held), size(summed), memory))
    return "\n".join(
        [
            f"{plan.mode}: {plan.trainers} trainers, no servers",
            "",
            *_table(variables),
            "",
            *_table(rows),
        ]
    )


def _variable(plan: Plan, placement: Placement) -> tuple[str, ...]:
    where = ", ".join(
        f"{slice_.server}: {slice_.end - slice_.begin}" if placement.split else str(slice_.server)
        for slice_ in placement.slices
    )
    rule = "held" if placement.group is None else plan.groups[placement.group].type
    shape = f"{placement.dtype}{list(placement.shape)}"
    rule += f", {placement.compression}" if placement.compression else ""
    return (
        placement.name,
        shape,
        rule,
        "" if placement.group is None else str(placement.lane),
        where,
    )


def _server(plan: Plan, server: int) -> tuple[str, ...]:
    held = [(p, slice_) for p in plan.placements for slice_ in p.slices if slice_.server == server]
    updated = [(p, slice_) for p, slice_ in held if p.group is not None]
    parameters = sum(_bytes(p, slice_) for p, slice_ in held)
    states = sum(_state_bytes(plan, p, slice_) for p, slice_ in updated)
    travels = sum(_bytes(p, slice_) for p, slice_ in updated)
    sent = sum(_sent_bytes(p, slice_) for p, slice_ in updated)
    buffers = plan.trainers * travels
    tables = [server_bytes(plan, table) for table in plan.tables]
    memory = size(parameters + states + buffers + sum(each or 0 for each in tables))
    return (
        str(server),
        str(len(held)),
        size(parameters),
        size(states),
        size(sent),
        size(travels),
        memory + (" + rows" if None in tables else ""),
    )


def _bytes(placement: Placement, slice_: Slice) -> int:
    return (slice_.end - slice_.begin) * element_bytes(placement.dtype)


def _sent_bytes(placement: Placement, slice_: Slice) -> int:
    """The bytes of a slice's gradient, compressed as it is sent; at most, where that differs from
    step to step.
    """
    elements = slice_.end - slice_.begin
    per_element = {"bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 1024}
    return (
        round(elements * per_element[placement.compression])
        if placement.compression in per_element
        else _bytes(placement, slice_)
    )


def _state_bytes(plan: Plan, placement: Placement, slice_: Slice) -> int:
    """Of the states that the slice's rule keeps on the server."""
    found = applied(plan, placement)
    if found is None:
        return 0
    shaped = state_of(found[1]).values()
    return sum(_bytes(placement, slice_) if whole else SCALAR_BYTES for whole in shaped)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
