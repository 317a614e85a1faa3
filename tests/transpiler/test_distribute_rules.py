"""The rule and the clip that were asked for run, and where: on servers or on trainers."""

from typing import Any

import pytest
import torch

from tests.support.distributed import TWO, captured, plan_in, transpiled, types
from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from transpiler.distribute import plan_parameters, plan_program, pserver_program
from transpiler.ir.graph import Ref
from transpiler.ir.ops import check
from transpiler.ir.rules import RULES, Clip, rule_of, state_of
from transpiler.plan.plan import Deployment
from transpiler.verify.untrusted import check_server_program


@pytest.mark.parametrize("op_type", sorted(RULES))
def test_the_rule_that_was_asked_for_runs(op_type: str) -> None:
    """Every optimizer of the table becomes its own op on the servers, with its numbers, flags and
    states, and is admitted; where norms of whole tensors count the parameter is not cut.
    """
    extra = {"momentum": 0.9} if op_type == "momentum" else {}
    optimizer = RULES[op_type].cls([torch.zeros(4, 3)], lr=0.25, **extra)  # type: ignore[call-arg]
    rule = rule_of(optimizer, optimizer.param_groups[0])
    plan = plan_parameters(
        [("w", (4, 3), "float32", 0)], [rule], mode="sync", trainers=2, servers=2, min_block_size=1
    )
    server, part, rows = (0, "", 4) if rule.whole else (1, ".block1", 2)
    program = pserver_program(Deployment(plan, ("h:1", "h:2"), None, server))
    op = program.blocks[1].ops[-1]
    assert op.type == op_type and op.arguments["lr"] == 0.25
    assert {**op.arguments, **rule.hparams, **rule.flags} == op.arguments
    states = {key: Ref(f"w@{key}{part}") for key in state_of(rule)}
    assert {key: op.arguments[key] for key in states} == states
    shapes = {key: program.main.variables[f"w@{key}{part}"].shape for key in states}
    assert shapes == {key: (rows, 3) if shaped else () for key, shaped in state_of(rule).items()}
    for block in program.blocks:
        for each in block.ops:
            check(each)
    check_server_program(program)


CLIPS = [
    (ClipGradByValue(0.5, -0.25), "clip", "clip"),
    (ClipGradByNorm(2.0), "clip_by_norm", "norm_scale"),
    (ClipGradByGlobalNorm(3.0), "scale_by", "norm_scale"),
]


@pytest.mark.parametrize(
    ("clip", "on_trainer", "on_server"), CLIPS, ids=["value", "norm", "global_norm"]
)
def test_clipping_is_the_servers_where_gradients_merge_and_the_trainers_elsewhere(
    clip: Any, on_trainer: str, on_server: str
) -> None:
    """Sync with several trainers: servers clip merged slices.

    One trainer, or async: the trainer clips before it sends.
    """
    single = captured(clip)
    merged = transpiled(single)
    assert set(types(merged.get_trainer_program())) & {on_trainer, "global_norm_scale"} == set()
    assert not [
        name
        for name in merged.get_trainer_program().main.variables
        if "CLIP" in name or "SCALE" in name
    ]
    block = merged.get_pserver_program("h:1").blocks[1]
    assert [op.type for op in block.ops] == ["sum", "scale", on_server, "adam"]
    assert block.ops[-1].arguments["grad"] == Ref("fc.weight@GRAD@CLIP.block0")
    if on_server == "clip":
        assert (block.ops[2].arguments["min"], block.ops[2].arguments["max"]) == (-0.25, 0.5)
    else:
        assert block.ops[2].arguments["by"] == (
            "fc.weight" if isinstance(clip, ClipGradByNorm) else ""
        )
    for trainers, sync_mode in ((1, True), (2, False)):
        own = transpiled(single, TWO, trainers, sync_mode=sync_mode)
        ops = own.get_trainer_program().main.ops
        assert on_trainer in types(own.get_trainer_program())
        clipped = {name for op in ops if op.type == on_trainer for name in op.outputs}
        whole = [op.inputs[0] for op in ops if op.type == "split"]
        whole += [op.inputs[0] for op in ops if op.type == "send" and len(op.inputs) == 1]
        assert set(whole) == clipped
        assert on_server not in [
            op.type for block in own.get_pserver_program("h:1").blocks for op in block.ops
        ]
    assert plan_in(merged.get_trainer_program()).clip == clip.to_clip()


def test_clip_data_of_a_plan_is_that_of_the_program() -> None:
    """A global-norm clip is read from the program's ops, not from the optimizer or the user."""
    program = captured(ClipGradByGlobalNorm(3.0))[0]
    assert plan_program(program, mode="sync", trainers=2, servers=1).clip == Clip(
        "global_norm", 3.0
    )
