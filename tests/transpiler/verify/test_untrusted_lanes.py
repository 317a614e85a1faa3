"""What a server refuses of a program whose ops are not those of its lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.server_programs import (
    DEPLOYMENT,
    LISTEN,
    OPS,
    PLACED,
    PLAN,
    SLICES,
    UPDATE,
    placed,
    planned,
    server,
    slice_variable,
)
from transpiler.cluster_programs import pserver_program
from transpiler.ir.graph import Op, Ref, Role
from transpiler.ir.rules import RULES, Clip, Rule, rule_of
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program
from transpiler.verify.untrusted import check_server_program

OUTER = Rule(
    "sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {"nesterov": False}
)
LANES = {
    "sync": Lane("sync"),
    "async": Lane("async"),
    "half_async": Lane("half_async", max_merge_var_num=2),
    "stale": Lane("async", staleness=3),
    "dc": Lane("async", dc_asgd=0.5),
    "geo": Lane("geo", k_steps=5),
    "diloco": Lane("diloco", k_steps=5, outer=OUTER),
}


def made(mode: str, **fields: Any) -> Program:
    """What the transpiler makes for one lane; ``fields`` change its only block's ops, by type:
    arguments or outputs.
    """
    plan = replace(PLAN, lanes=(LANES[mode],), clip=None)
    program = pserver_program(replace(DEPLOYMENT, plan=plan))
    ops = [
        replace(op, outputs=fields[op.type]["outputs"])
        if "outputs" in fields.get(op.type, {})
        else replace(op, arguments={**op.arguments, **fields.get(op.type, {})})
        for op in program.blocks[1].ops
        if fields.get(op.type, {}) is not None
    ]
    return program.with_blocks(program.main, replace(program.blocks[1], ops=tuple(ops)))


def in_lane(mode: str, **fields: Any) -> Callable[[], Program]:
    """The same, later."""
    return lambda: made(mode, **fields)


def relaned(*lanes: Lane) -> Callable[[], Program]:
    """A program whose plan has these lanes, and no block for them."""
    return lambda: planned(lanes=lanes)


def told(mode: str, *ops: Op) -> Callable[[], Program]:
    """A program of this mode whose one block has these ops."""
    listen = replace(LISTEN, arguments={**LISTEN.arguments, "mode": mode})
    delta = slice_variable("w.block0.delta", Role.DELTA)
    return lambda: server({delta.name: delta}, ops, listen, deployment=made(mode).deployment)


ADDING = Op("sum", {"x": (Ref("w.block0"), Ref("w.block0.delta"))}, ("w.block0",))
BACKUPS = tuple(Ref(f"w.block0.trainer_{trainer}_bak") for trainer in range(2))
LANE_ATTACKS: dict[str, tuple[Callable[[], Program], str]] = {
    "no lanes": (relaned(), "expected 1 to 65536 lanes, got 0"),
    "a variable in a missing lane": (lambda: placed(lane=1), "expected a lane below 1, got 1"),
    "a lane with a setting of another mode": (relaned(Lane("sync", k_steps=3)), "lane 0, k_steps"),
    "a lane without its rule": (relaned(Lane("diloco", k_steps=3)), "lane 0, outer"),
    "an outer rule that is none": (
        relaned(Lane("diloco", k_steps=3, outer=Rule("exec", {}))),
        "lane 0, outer: rule 'exec'",
    ),
    "a staleness of nothing": (relaned(Lane("async", staleness=0)), "lane 0, staleness"),
    "an infinite compensation": (relaned(Lane("async", dc_asgd=float("inf"))), "lane 0, dc_asgd"),
    "a merge over trainers without rounds": (told("async", *OPS), "does not run it in async mode"),
    "a scale without rounds": (
        told("async", *OPS[1:]),
        "'scale': a server does not run it, because the plan clips by None",
    ),
    "a compensation that nobody asked for": (
        lambda: made("async").with_blocks(*made("dc").blocks),
        "op 'dc_compensate': a server does not run it, because the plan clips by None",
    ),
    "another factor": (
        in_lane("dc", dc_compensate={"factor": 1.0}),
        "'factor': expected 0.5 as the plan says",
    ),
    "one trainer's backup for all": (
        in_lane("dc", dc_compensate={"backups": (BACKUPS[0], BACKUPS[0])}),
        "'backups': expected 2, one a trainer, got 1",
    ),
    "a gradient as backup": (
        in_lane("dc", dc_compensate={"backups": (BACKUPS[0], Ref("w@GRAD.block0"))}),
        "'backups': expected a STATE, got 'w@GRAD.block0', a GRADIENT",
    ),
    "an optimizer's state as backup": (
        in_lane("dc", dc_compensate={"backups": (BACKUPS[0], Ref("w@momentum_buffer.block0"))}),
        "state 'w@momentum_buffer.block0': expected once",
    ),
    "a compensation against something else": (
        in_lane("dc", dc_compensate={"param": BACKUPS[0]}),
        "'param': expected a PARAMETER",
    ),
    "a compensation of the parameter": (
        in_lane("dc", dc_compensate={"outputs": ("w.block0",)}),
        "expected to write a gradient",
    ),
    "a sum into a gradient in geo": (
        in_lane("geo", sum={"outputs": ("w.block0.delta",)}),
        "expected to write the parameter",
    ),
    "a sum of the parameter with itself": (
        in_lane("geo", sum={"x": (Ref("w.block0"), Ref("w.block0"))}),
        "expected the parameter 'w.block0' and a DELTA",
    ),
    "a sum that forgets the parameter": (
        in_lane("geo", sum={"x": (Ref("w.block0.delta"), Ref("w.block0.delta"))}),
        "expected the parameter 'w.block0' and a DELTA",
    ),
    "no sum in geo": (in_lane("geo", sum=None), "expected an update by group sum, got None"),
    "an optimizer op in geo": (
        told("geo", UPDATE),
        "expected an update by group None of 'w', got 0",
    ),
    "a sum in place of the rule": (told("async", ADDING), "expected to write a gradient"),
    "an outer update by the trainers' rule": (
        told("diloco", UPDATE),
        "'group': expected 1 as the plan says, got 0",
    ),
    "another outer rate": (in_lane("diloco", sgd={"lr": 2.0}), "expected the rule of group 1"),
    "an outer gradient uphill": (
        in_lane("diloco", scale={"scale": 0.5}),
        "'scale': expected -0.5 as the plan says",
    ),
    "too few deltas": (
        in_lane("diloco", sum={"x": (Ref("w.block0.delta.trainer_0"),)}),
        "'x': expected 2, one a trainer, got 1",
    ),
    "a mode of another plan": (
        lambda: replace(made("geo"), deployment=made("diloco").deployment),
        "'mode': expected 'diloco' as the plan says, got 'geo'",
    ),
}


@pytest.mark.parametrize("attack", LANE_ATTACKS)
def test_a_server_refuses_what_a_lane_does_not_say(attack: str) -> None:
    """Whatever contradicts the mode of a slice's lane is refused in words."""
    program, message = LANE_ATTACKS[attack]
    with pytest.raises(ValueError, match=message):
        check_server_program(program())


@pytest.mark.parametrize("mode", LANES)
def test_the_lanes_that_attacks_start_from_are_sound(mode: str) -> None:
    """Before each change above the program passes."""
    assert check_server_program(made(mode)) is None


@pytest.mark.parametrize(
    "clip", [None, Clip("value", 1.0, -1.0), Clip("norm", 1.0), Clip("global_norm", 1.0)]
)
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("mode", LANES)
def test_what_the_transpiler_makes_is_accepted(mode: str, trainers: int, clip: Clip | None) -> None:
    """Every server's program of a plan passes as it arrives, for every rule and every kind of
    variable.
    """
    for op_type, spec in RULES.items():
        w = torch.zeros(2, requires_grad=True)
        optimizer = spec.cls([w], momentum=0.9) if op_type == "momentum" else spec.cls([w])
        rule = rule_of(optimizer, optimizer.param_groups[0])
        slices = (Slice("w", 0, 12, (4, 3), 0),) if rule.whole else SLICES
        placements = (
            Placement("w", (4, 3), "float32", 0, slices),
            Placement("b", (3,), "bfloat16", 0, (Slice("b", 0, 3, (3,), 1),)),
            Placement("e", (0, 4), "float32", 0, (Slice("e", 0, 0, (0, 4), 0),)),
            PLACED[1],
        )
        plan = Plan((LANES[mode],), trainers, 3, (rule,), placements, clip)
        for index in range(3):
            program = pserver_program(Deployment(plan, ("h:1", "h:2", "h:3"), server_index=index))

            assert check_server_program(Program.from_proto(program.to_proto())) is None
