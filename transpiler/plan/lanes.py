"""Lanes: the values that a lane may have, what belongs to a slice in it, and a lane in one line of
text.
"""

from __future__ import annotations

from dataclasses import fields

from transpiler.ir.ops import check_rule
from transpiler.ir.rules import Rule
from transpiler.plan.modes import MODES
from transpiler.plan.plan import Lane, Placement, Plan, Slice
from transpiler.plan.settings import LANE_SETTINGS, ValueKind, count, optional, text

MERGES = ("sum", "mean")
# Of a lane's field, where a key of a strategy may have further values.
# of merged gradients; where a step is one trainer's alone there is nothing to divide
SCALES = ("avg", "sum", "customized")
_NARROWER: dict[str, ValueKind] = {"merge": text(*MERGES), "staleness": optional(count())}
_DEFAULTS = {field.name: field.default for field in fields(Lane)}


def _expect(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{what}: expected {expected}, got {got!r}")


def check_lane(lane: Lane, what: str = "lane") -> None:
    """Checks a lane by itself: every field that its mode reads is in range, and every other one has
    its default, so that nothing is set without effect.

    Args:
        lane: any, also one from the network.
        what: the lane's name in an error.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    _expect(lane.mode in MODES, f"{what}, mode", f"one of {', '.join(MODES)}", lane.mode)
    _expect(lane.merge in MERGES, f"{what}, merge", " or ".join(MERGES), lane.merge)
    for setting in LANE_SETTINGS:
        name, value = f"{what}, {setting.lane}", getattr(lane, setting.lane)
        if lane.mode not in setting.modes:
            default = _DEFAULTS[setting.lane]
            _expect(
                value == default or setting.lane == "merge",  # of which every lane has one
                name,
                f"{default!r}, because {lane.mode} mode does not read it",
                value,
            )
        elif setting.lane != "outer":
            _NARROWER.get(setting.lane, setting.kind).check(name, value)
    if lane.outlier_push == "off":
        default = _DEFAULTS["outlier_factor"]
        reason = f"{default!r}, because outlier_push is 'off'"
        _expect(
            lane.outlier_factor == default,
            f"{what}, outlier_factor",
            reason,
            got=lane.outlier_factor,
        )
    scales = SCALES if lane.kind.merges_gradients else SCALES[:1]
    _expect(
        lane.gradient_scale in scales,
        f"{what}, gradient_scale",
        f"{' or '.join(scales)} in {lane.mode} mode",
        lane.gradient_scale,
    )
    if lane.kind.steps_on_trainer:
        _expect(lane.k_steps > 0, f"{what}, k_steps", "1 or more", lane.k_steps)
    if lane.kind.outer_optimizer:
        _expect(lane.outer is not None, f"{what}, outer", "an update rule", lane.outer)
    if lane.outer is not None:
        try:
            check_rule(lane.outer)
        except ValueError as error:
            raise ValueError(f"{what}, outer: {error}") from error


def applied(plan: Plan, placement: Placement) -> tuple[int, Rule] | None:
    """The rule by which servers update a variable, with the number of its group; None if they apply
    none.

    The number of an outer optimizer comes after those of the parameter groups: no step brings
    hyper-parameters for it.
    """
    lane = plan.lane_of(placement)
    if placement.group is None or lane.kind.servers_add:
        return None
    if lane.outer is not None:
        return len(plan.groups) + placement.lane, lane.outer
    return placement.group, plan.groups[placement.group]


def delta_name(slice_: Slice) -> str:
    """The name of the change of a slice in k steps: ``fc.weight.block0.delta``."""
    return f"{slice_.name}.delta"


def backup_names(slice_: Slice, trainers: int) -> tuple[str, ...]:
    """The names of a slice as each trainer last received it, where delays are compensated."""
    return tuple(f"{slice_.name}.trainer_{trainer}_bak" for trainer in range(trainers))


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _rule(rule: Rule) -> str:
    said = {**rule.hparams, **{name: flag for name, flag in rule.flags.items() if flag}}
    return f"{rule.type}({', '.join(f'{name}={value}' for name, value in said.items() if value)})"


def _bounds(lane: Lane) -> list[str]:
    """The bounds of an asynchronous lane."""
    said = (
        [f"at most {lane.send_queue_size} on the way"]
        if lane.send_queue_size > 1
        else ["each waits for its own result"]
    )
    if lane.max_merge_var_num > 1:
        said.append(f"{lane.send_wait_times} waits for a further one")
    if lane.independent_recv_thread:
        said.append("a receiving thread of its own")
    if lane.min_send_grad_num_before_recv > 1:
        said.append(f"received after {lane.min_send_grad_num_before_recv} messages")
    if lane.staleness is not None:
        steps = "1 step" if lane.staleness == 1 else f"{lane.staleness} steps"
        said.append(f"at most {steps} ahead of the slowest")
    if lane.dc_asgd:
        said.append(f"delay compensation {lane.dc_asgd:g}")
    return said


def describe_plan(plan: Plan) -> list[str]:
    """The merge rules of a job with servers: of its one lane, or a line for each lane, and one for
    what trainers average.
    """
    lines = [describe(lane, plan.trainers) for lane in plan.lanes]
    if len(lines) > 1 or plan.averaged:
        lines = [f"lane {i}: {plan.lanes[i].mode}, {line}" for i, line in enumerate(lines)]
    if plan.averaged:
        lines.append(f"collective: mean over trainers, of {', '.join(plan.averaged)}")
    return lines


def describe(lane: Lane, trainers: int) -> str:
    """The merge rule and the bounds of a lane: ``"sum of up to 4 steps, at most 16 on the
    way"``.

    Args:
        lane: one that :func:`check_lane` accepts.
        trainers: of the job.
    """
    most = lane.max_merge_var_num
    words = lane.kind.words.format(
        merged="each gradient as it comes" if most == 1 else f"{lane.merge} of up to {most} steps",
        collected="each step" if most == 1 else f"{lane.merge} of {most} own steps",
        bounds=", ".join(_bounds(lane)),
        pool=f", to {lane.thread_pool_size} servers at a time" if lane.thread_pool_size > 1 else "",
        over="mean" if lane.averages else "sum",
        every=f"every {_steps(lane.k_steps)}",
        trainers=trainers,
        outer="" if lane.outer is None else _rule(lane.outer),
    )
    return words + (f", of optimizer {lane.optimizer}" if lane.optimizer else "")
