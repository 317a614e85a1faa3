"""What a lane may be: which of its fields its mode reads, their ranges, and the lane in one line
for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

from transpiler.ir.ops import check_rule
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Lane, Placement, Plan, Slice

_QUEUE = ("merge", "max_merge_var_num", "thread_pool_size")
# The fields that each mode reads.  Whatever it does not read has its default: nothing is set
# without effect.
READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sync": (),
        "async": (
            *_QUEUE,
            "send_queue_size",
            "send_wait_times",
            "independent_recv_thread",
            "min_send_grad_num_before_recv",
            "staleness",
            "dc_asgd",
        ),
        "half_async": _QUEUE,
        "geo": ("k_steps", "send_queue_size", "thread_pool_size"),
        "diloco": ("k_steps", "outer"),
        "collective": (),
    }
)
# no lane: trainers average these gradients among themselves, and step by themselves
COLLECTIVE = "collective"
MODES = tuple(mode for mode in READ if mode != COLLECTIVE)
MERGES = ("sum", "mean")
_MOST = 2**31 - 1
_LEAST = {
    "max_merge_var_num": 1,
    "send_queue_size": 1,
    "thread_pool_size": 1,
    "min_send_grad_num_before_recv": 1,
}
_DEFAULTS = {field.name: field.default for field in fields(Lane)}


def _expect(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{what}: expected {expected}, got {got!r}")


def check_lane(lane: Lane, what: str = "lane") -> None:
    """Whether a lane makes sense by itself.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    _expect(lane.mode in MODES, f"{what}, mode", f"one of {', '.join(MODES)}", lane.mode)
    _expect(lane.merge in MERGES, f"{what}, merge", " or ".join(MERGES), lane.merge)
    for name, least in {**_LEAST, "send_wait_times": 0, "k_steps": int(lane.local)}.items():
        value = getattr(lane, name)
        _expect(least <= value <= _MOST, f"{what}, {name}", f"{least} to {_MOST}", value)
    _expect(
        lane.staleness is None or 1 <= lane.staleness <= _MOST,
        f"{what}, staleness",
        "1 or more, or none",
        lane.staleness,
    )
    _expect(
        math.isfinite(lane.dc_asgd) and lane.dc_asgd >= 0,
        f"{what}, dc_asgd",
        "a number of 0 or more",
        lane.dc_asgd,
    )
    for name, default in _DEFAULTS.items():
        value = getattr(lane, name)
        kept = name in ("mode", "merge", *READ[lane.mode]) or value == default
        _expect(
            kept,
            f"{what}, {name}",
            f"{default!r}, because {lane.mode} mode does not read it",
            value,
        )
    if lane.mode == "diloco":
        _expect(lane.outer is not None, f"{what}, outer", "an update rule", lane.outer)
    if lane.outer is not None:
        try:
            check_rule(lane.outer)
        except ValueError as error:
            raise ValueError(f"{what}, outer: {error}") from error


def applied(plan: Plan, placement: Placement) -> tuple[int, Rule] | None:
    """The rule by which servers update a variable, with its number; None where they apply none.

    An outer optimizer's number comes after those of the parameter groups: no step brings a row for
    it.
    """
    lane = plan.lane_of(placement)
    if placement.group is None or lane.mode == "geo":
        return None
    if lane.outer is not None:
        return len(plan.groups) + placement.lane, lane.outer
    return placement.group, plan.groups[placement.group]


def delta_name(piece: Slice) -> str:
    """The name of what k steps changed of a slice: ``fc.weight.block0.delta``."""
    return f"{piece.name}.delta"


def backup_names(piece: Slice, trainers: int) -> tuple[str, ...]:
    """The names of a slice as each trainer last received it, where delays are compensated."""
    return tuple(f"{piece.name}.trainer_{trainer}_bak" for trainer in range(trainers))


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _rule(rule: Rule) -> str:
    said = {**rule.hparams, **{name: flag for name, flag in rule.flags.items() if flag}}
    return f"{rule.type}({', '.join(f'{name}={value}' for name, value in said.items() if value)})"


def _queue(lane: Lane) -> list[str]:
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
        said.append(f"at most {_steps(lane.staleness)} ahead of the slowest")
    if lane.dc_asgd:
        said.append(f"delay compensation {lane.dc_asgd:g}")
    return said


def describe(lane: Lane, trainers: int) -> str:
    """The merge rule and the bounds of a lane: ``"sum of up to 4 steps, at most 16 on the
    way"``.
    """
    if lane.mode == "sync":
        return "mean over trainers"
    most = lane.max_merge_var_num
    several = "each gradient as it comes" if most == 1 else f"{lane.merge} of up to {most} steps"
    pool = [f"to {lane.thread_pool_size} servers at a time"] if lane.thread_pool_size > 1 else []
    if lane.mode == "async":
        return ", ".join([several, *_queue(lane), *pool])
    if lane.mode == "half_async":
        own = "each step" if most == 1 else f"{lane.merge} of {most} own steps"
        return ", ".join([own, "waits for its own result", *pool])
    every = f"every {_steps(lane.k_steps)}"
    if lane.mode == "geo":
        return ", ".join([f"{every} what changed, divided by {trainers}, is added", *pool])
    assert lane.outer is not None, "checked with the plan"
    return f"{every} the mean of what changed is the gradient of {_rule(lane.outer)}"
