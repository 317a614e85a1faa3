"""The bytes of a plan: what each server holds, and what a message of each lane brings."""

from __future__ import annotations

from dataclasses import dataclass

from transpiler.formats.table_text import server_bytes
from transpiler.ir.rules import state_of
from transpiler.plan.lanes import applied
from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Placement, Plan, Slice

SCALAR_BYTES = 4  # of a scalar state


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What one server of a plan holds and exchanges.

    Attributes:
        slices: how many it holds.
        parameters, states: bytes of them, and of their optimizer states.
        sent, received: bytes that one trainer exchanges with it in one message, by lane.
        memory: bytes of slices, states, every trainer's gradients, and the most that rows of tables
            take.
        unbounded: some tables have no bound, and are not in ``memory``.
    """

    slices: int
    parameters: int
    states: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    memory: int
    unbounded: bool


def server_load(plan: Plan, server: int) -> ServerLoad:
    """The load of one server of a plan."""
    held = [(p, slice_) for p in plan.placements for slice_ in p.slices if slice_.server == server]
    updated = [(p, slice_) for p, slice_ in held if p.group is not None]
    parameters = sum(slice_bytes(p, slice_) for p, slice_ in held)
    states = sum(_state_bytes(plan, p, slice_) for p, slice_ in updated)
    sent, received = [0] * len(plan.lanes), [0] * len(plan.lanes)
    for placement, slice_ in updated:
        sent[placement.lane] += _sent_bytes(placement, slice_)
        received[placement.lane] += slice_bytes(placement, slice_)
    tables = [server_bytes(plan, table) for table in plan.tables]
    buffers = plan.trainers * sum(received)
    return ServerLoad(
        len(held),
        parameters,
        states,
        tuple(sent),
        tuple(received),
        parameters + states + buffers + sum(each or 0 for each in tables),
        None in tables,
    )


def slice_bytes(placement: Placement, slice_: Slice) -> int:
    """The bytes of a slice's values."""
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
        else slice_bytes(placement, slice_)
    )


def _state_bytes(plan: Plan, placement: Placement, slice_: Slice) -> int:
    """Of the states that the slice's rule keeps on the server."""
    found = applied(plan, placement)
    if found is None:
        return 0
    shaped = state_of(found[1]).values()
    return sum(slice_bytes(placement, slice_) if whole else SCALAR_BYTES for whole in shaped)
