"""Which trainer updates each parameter of a job without servers that shards its updates."""

from __future__ import annotations

from math import prod

from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Plan


def owners(plan: Plan) -> dict[str, int]:
    """The trainer that updates each trained parameter, by name, in the plan's order.

    The largest parameters are given away first, each to the trainer that has the fewest bytes, of
    several to the first.
    """
    trained = [placement for placement in plan.placements if placement.group is not None]
    sizes = {p.name: prod(p.shape) * element_bytes(p.dtype) for p in trained}
    held = [0] * plan.trainers
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: ties in the plan's order
        found[name] = min(range(plan.trainers), key=held.__getitem__)
        held[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}
