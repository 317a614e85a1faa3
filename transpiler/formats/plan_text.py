"""A plan as readable text: the split, the bytes of a step and the memory of each server."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from transpiler.formats.plan_bytes import SCALAR_BYTES, server_load, slice_bytes
from transpiler.formats.table_text import size, table_rows
from transpiler.ir.rules import state_of
from transpiler.plan.lanes import describe
from transpiler.plan.placement import owners
from transpiler.plan.plan import Placement, Plan, Slice


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
        parameters += slice_bytes(placement, whole)
        if placement.group is not None:
            summed += slice_bytes(placement, whole)
            shaped = state_of(plan.groups[placement.group]).values()
            states[owner.get(name, 0)] += sum(
                slice_bytes(placement, whole) if each else SCALAR_BYTES for each in shaped
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
    load = server_load(plan, server)
    return (
        str(server),
        str(load.slices),
        size(load.parameters),
        size(load.states),
        size(sum(load.sent)),
        size(sum(load.received)),
        size(load.memory) + (" + rows" if load.unbounded else ""),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
