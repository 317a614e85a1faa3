"""What a server checks of a plan, and of its deployment, that came over the wire.

This is the part of the validation that needs no program; a part of untrusted_program.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from transpiler.ir.ops import check_rule
from transpiler.ir.rules import check_registered, is_dense
from transpiler.ir.schema import DTYPES
from transpiler.plan.lanes import applied, check_lane
from transpiler.plan.plan import COMPRESSIONS, Deployment, Placement, Plan, Slice, check_unique
from transpiler.plan.planner import check_table, row_rule
from transpiler.plan.settings import A_SYNC_CONFIGS

CLIPS = ("value", "norm", "global_norm")
MOST_PROCESSES = 65536  # of a kind
MOST_LANES = 65536
MOST_DIMENSIONS = 64  # torch's own limit
MOST_BYTES = 2**46  # of one variable: beyond any machine, and far from the end of 64 bits


def expect(holds: bool, what: str) -> None:
    """Raises a ValueError with the message ``what`` unless the condition holds."""
    if not holds:
        raise ValueError(what)


def check_extent(what: str, shape: Iterable[int | str], dtype: str) -> None:
    """Checks that a variable has a dtype of torch's, and fixed sizes that a machine could hold.

    Raises:
        ValueError: naming the variable.
    """
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    expect(dtype in DTYPES, f"{what}: expected a dtype among {', '.join(DTYPES)}; got {dtype!r}")
    expect(
        len(sizes) <= MOST_DIMENSIONS,
        f"{what}: expected {MOST_DIMENSIONS} dimensions or fewer, got {len(sizes)}",
    )
    expect(
        min(sizes, default=0) >= 0, f"{what}: expected fixed sizes of 0 or more, got {list(shape)}"
    )
    limit = f"{what}: expected {MOST_BYTES} bytes or fewer, got {dtype}{list(shape)}"
    expect(math.prod(size or 1 for size in sizes) * DTYPES[dtype].itemsize <= MOST_BYTES, limit)


def _check_slice(what: str, placement: Placement, slice_: Slice, begin: int, servers: int) -> None:
    expect(slice_.name != "", f"{what}: expected slices with names, got an empty one")
    what = f"{what}, slice {slice_.name!r}"
    expect(
        slice_.begin == begin <= slice_.end,
        f"{what}: expected elements from {begin} on, got [{slice_.begin}, {slice_.end})",
    )
    expect(
        0 <= slice_.server < servers,
        f"{what}: expected a server of 0 to {servers - 1}, got {slice_.server}",
    )
    check_extent(what, slice_.shape, placement.dtype)
    whole = placement.shape if len(placement.slices) == 1 else (slice_.end - slice_.begin,)
    rows = (slice_.shape[:1] or (0,)) + placement.shape[1:]
    fits = slice_.shape in (whole, rows) and math.prod(slice_.shape) == slice_.end - slice_.begin
    expect(
        fits,
        f"{what}: expected a shape for {slice_.end - slice_.begin} elements of "
        f"{list(placement.shape)}, got {list(slice_.shape)}",
    )


def _check_placement(placement: Placement, plan: Plan) -> None:
    expect(placement.name != "", "plan: expected variables with names, got an empty one")
    what = f"plan, variable {placement.name!r}"
    check_extent(what, placement.shape, placement.dtype)
    expect(
        placement.compression in COMPRESSIONS,
        f"{what}: expected a known compression, got {placement.compression!r}",
    )
    if placement.group is not None:
        expect(
            0 <= placement.group < len(plan.groups),
            f"{what}: expected a group below {len(plan.groups)}, got {placement.group}",
        )
        rule = plan.groups[placement.group].type
        expect(
            is_dense(rule),
            f"{what}: expected a group with a rule for dense parameters, got {rule!r}",
        )
        trainable = DTYPES[placement.dtype].is_floating_point or DTYPES[placement.dtype].is_complex
        expect(
            trainable,
            f"{what}: expected a floating-point dtype for what is trained, got {placement.dtype}",
        )
    expect(
        0 <= placement.lane < len(plan.lanes),
        f"{what}: expected a lane below {len(plan.lanes)}, got {placement.lane}",
    )
    _check_update(what, placement, plan)
    begin = 0
    for slice_ in placement.slices:
        _check_slice(what, placement, slice_, begin, plan.servers)
        begin = slice_.end
    total = math.prod(placement.shape)
    expect(
        len(placement.slices) > 0 and begin == total,
        f"{what}: expected slices of all {total} elements, got {begin}",
    )


def _check_update(what: str, placement: Placement, plan: Plan) -> None:
    """Whether a rule fits the variable: a registered one its dtype, and a whole tensor where the
    rule makes a number of it.
    """
    found = applied(plan, placement)
    if found is None:
        return
    try:
        if found[1].update is not None:
            check_registered(found[1], DTYPES[placement.dtype])
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    expect(
        not found[1].whole or len(placement.slices) == 1,
        f"{what}: expected one slice, because the rule {found[1].type!r} makes a number of the "
        f"whole tensor, got {len(placement.slices)}",
    )


def check_plan(plan: Plan) -> None:
    """Checks that a plan is consistent by itself.

    Raises:
        ValueError: naming the variable, slice, group or field, what was expected and what came.
    """
    expect(
        plan.collective is None, f"plan: expected one of a job with servers, got mode {plan.mode}"
    )
    expect(
        1 <= len(plan.lanes) <= MOST_LANES,
        f"plan: expected 1 to {MOST_LANES} lanes, got {len(plan.lanes)}",
    )
    for index, lane in enumerate(plan.lanes):
        check_lane(lane, f"plan, lane {index}")
    for what, count in (("trainers", plan.trainers), ("servers", plan.servers)):
        expect(
            1 <= count <= MOST_PROCESSES,
            f"plan: expected 1 to {MOST_PROCESSES} {what}, got {count}",
        )
    of_rows = {segment.group for table in plan.tables for segment in table.segments}
    of_rows -= {placement.group for placement in plan.placements if placement.group is not None}
    for index, rule in enumerate(plan.groups):
        try:
            if index not in of_rows:
                check_rule(rule)
            else:
                row_rule(rule, "rows")
        except ValueError as error:
            raise ValueError(f"plan, group {index}: {error}") from error
    if plan.clip is not None:
        expect(
            plan.clip.kind in CLIPS,
            f"plan, clip: expected a kind among {', '.join(CLIPS)}; got {plan.clip.kind!r}",
        )
        numbers = f"low {plan.clip.low}, high {plan.clip.high}"
        expect(
            not math.isnan(plan.clip.low + plan.clip.high),
            f"plan, clip: expected numbers, got {numbers}",
        )
    for placement in plan.placements:
        _check_placement(placement, plan)
    A_SYNC_CONFIGS["lost_trainer"].kind.check("plan, lost_trainer", plan.lost_trainer)
    for table in plan.tables:
        check_table(table, plan.groups, plan.lanes)
    check_unique(
        "plan, variable", [p.name for p in plan.placements] + [table.name for table in plan.tables]
    )
    check_unique(
        "plan, slice", (slice_.name for placement in plan.placements for slice_ in placement.slices)
    )


def check_deployment(deployment: Deployment | None) -> Deployment:
    """Checks that a deployment is a server's, and consistent by itself.

    Returns:
        The deployment.

    Raises:
        ValueError: there is none, it is a trainer's, its counts contradict each other, or its plan
            is inconsistent.
    """
    if deployment is None:
        raise ValueError("expected a pserver's program, which has a deployment, got one without")
    check_plan(deployment.plan)
    servers, index = deployment.plan.servers, deployment.server_index
    expect(
        len(deployment.endpoints) == servers,
        f"deployment: expected {servers} endpoints, got {len(deployment.endpoints)}",
    )
    expect(
        "" not in deployment.endpoints, "deployment: expected endpoints HOST:PORT, got an empty one"
    )
    expect(
        index is not None and 0 <= index < servers,
        f"deployment: expected a server_index of 0 to {servers - 1}, got {index}",
    )
    expect(
        deployment.trainer_id is None,
        f"deployment: expected a server's, got that of trainer {deployment.trainer_id}",
    )
    return deployment
