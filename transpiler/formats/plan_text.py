"""A plan for people: the split, the bytes of a step and the memory of each server."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from transpiler.ir.rules import state_of
from transpiler.plan.lanes import applied, describe
from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Placement, Plan, Slice

SCALAR_BYTES = 4  # of a state that is one number


def plan_text(plan: Plan) -> str:
    """Who holds what, and what it costs: one line per variable and one per server.

    Bytes of a step are those that one trainer sends and receives in one message of all lanes; in
    the k-step modes there is one every k steps.  Memory is that of slices, optimizer states and, in
    the modes that wait for all trainers, their gradients.
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
    return "\n".join([*head, "", *_table(variables), "", *_table(servers)])


def _without_servers(plan: Plan) -> str:
    """Every trainer holds everything; what is summed over all of them at every step is as large as
    what is trained.
    """
    variables: list[tuple[str, ...]] = [("variable", "shape", "update")]
    parameters = states = summed = 0
    for placement in plan.placements:
        whole = Slice(placement.name, 0, prod(placement.shape), placement.shape, 0)
        variables.append(_variable(plan, placement)[:3])
        parameters += _bytes(placement, whole)
        if placement.group is not None:
            summed += _bytes(placement, whole)
            shaped = state_of(plan.groups[placement.group]).values()
            states += sum(_bytes(placement, whole) if each else SCALAR_BYTES for each in shaped)
    rows = [("each of", "parameters", "states", "summed", "memory")]
    memory = size(parameters + states + summed)  # gradients, too
    rows.append((f"{plan.trainers} trainers", size(parameters), size(states), size(summed), memory))
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
        f"{piece.server}: {piece.end - piece.begin}" if placement.split else str(piece.server)
        for piece in placement.slices
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
    held = [(p, piece) for p in plan.placements for piece in p.slices if piece.server == server]
    updated = [(p, piece) for p, piece in held if p.group is not None]
    parameters = sum(_bytes(p, piece) for p, piece in held)
    states = sum(_state_bytes(plan, p, piece) for p, piece in updated)
    travels = sum(_bytes(p, piece) for p, piece in updated)
    sent = sum(_sent_bytes(p, piece) for p, piece in updated)
    buffers = plan.trainers * travels
    return (
        str(server),
        str(len(held)),
        size(parameters),
        size(states),
        size(sent),
        size(travels),
        size(parameters + states + buffers),
    )


def _bytes(placement: Placement, piece: Slice) -> int:
    return (piece.end - piece.begin) * element_bytes(placement.dtype)


def _sent_bytes(placement: Placement, piece: Slice) -> int:
    """Of a slice's gradient, compressed as it travels."""
    elements = piece.end - piece.begin
    per_element = {"bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 1024}
    return (
        round(elements * per_element[placement.compression])
        if placement.compression
        else _bytes(placement, piece)
    )


def _state_bytes(plan: Plan, placement: Placement, piece: Slice) -> int:
    """Of the states that the slice's rule keeps on the server."""
    found = applied(plan, placement)
    if found is None:
        return 0
    shaped = state_of(found[1]).values()
    return sum(_bytes(placement, piece) if whole else SCALAR_BYTES for whole in shaped)


def size(count: int) -> str:
    """Bytes for people: ``"1.5 MB"``."""
    value, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
