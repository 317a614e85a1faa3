"""Programs without servers whose updates are sharded over trainers, by ``strategy.sharding``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.collective_trainers import (
    GRAD,
    LOCAL,
    NCCL2,
    ROWS,
    Trainer,
    batches,
    fine,
    joined,
    ports,
    together,
)
from tests.support.collectives import captured
from trainer import Executor
from transpiler import (
    ClipGradByNorm,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
)
from transpiler.formats.text import plan_text
from transpiler.ir.graph import Op, freeze
from transpiler.plan.placement import owners
from transpiler.verify.verify import IllegalProgram, verify

TWO, FOUR = ["h:1", "h:2"], ["a:1", "a:2", "b:1", "b:2"]


def sharding(**configs: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.sharding, strategy.sharding_configs = True, configs
    return strategy


def trainers(endpoints: list[str], settings: dict[str, Any], **configs: Any) -> list[Trainer]:
    return [
        Trainer(endpoints, rank, settings, strategy=sharding(**configs))
        for rank in range(len(endpoints))
    ]


def types(trainer: Trainer) -> list[str]:
    return [op.type for op in trainer.main.main.ops]


@pytest.mark.observes("sharding", "sharding_configs.sharding_degree")
@pytest.mark.parametrize("rings", [1, 2])
def test_sharded_updates_equal_a_single_node(rings: int) -> None:
    """Each trainer keeps the momentum of its own parameters only; all have the parameters of plain
    training on all samples, within 1e-6.
    """
    data, endpoints = batches(2), ports(2)
    expected = Trainer([], 0, {}).train(joined(data))
    team = trainers(endpoints, {**GRAD, "nccl_comm_num": rings}, sharding_degree=2)
    results = fine(together(2, lambda rank: team[rank].train([row[rank] for row in data])))

    for result in results:
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert team[0].main.deployment is not None
    owner = owners(team[0].main.deployment.plan)
    for rank, each in enumerate(team):
        names = {parameter: name for name, parameter in each.model.named_parameters()}
        held = {names[p] for p, state in each.optimizer.state.items() if state}
        assert held == {name for name, root in owner.items() if root == rank}


def test_the_program_reduces_updates_and_broadcasts() -> None:
    """One sum and one broadcast for each parameter, updates of this trainer's own; the text says
    where each goes; a degree of 1 leaves the program as it is without.
    """
    first, second = trainers(TWO, GRAD)
    for each in (first, second):
        assert types(each).count("c_reduce_sum") == types(each).count("c_broadcast") == 6
        assert "c_allreduce_sum" not in types(each)
    assert types(first).count("momentum") + types(second).count("momentum") == 6
    text = str(first.main)
    assert "grad_allreduce, 1 ring, sharded updates" in text
    assert "c_reduce_sum(4.bias@GRAD, ring 0, to trainer" in text
    (off, _), (plain, _) = trainers(TWO, GRAD, sharding_degree=1), [Trainer(TWO, 0, GRAD), None]
    assert str(off.main) == str(plain.main)
    assert type(first.main).from_proto(first.main.to_proto()).deployment == first.main.deployment


def test_the_plan_says_who_updates_what() -> None:
    """One line a trainer, with the states that it holds: together those of one trainer without."""
    plan = trainers(TWO, GRAD)[0].main.deployment.plan  # type: ignore[union-attr]
    lines = plan_text(plan).splitlines()
    assert "updated by" in lines[2] and all("trainer" in line for line in lines[3:9])
    assert [line.split()[:2] for line in lines[-2:]] == [["trainer", "0"], ["trainer", "1"]]


def test_each_trainer_clips_its_own_gradients() -> None:
    """Clip ops stay with the updates that read them."""
    single, startup = captured(ClipGradByNorm(0.1))
    clipped = []
    for rank in range(2):
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
        transpiler.transpile(
            rank, single, trainers="h:1,h:2", startup_program=startup, strategy=sharding()
        )
        ops = transpiler.get_trainer_program().main.ops
        clipped.append([op.outputs[0] for op in ops if op.type == "clip_by_norm"])
        assert len(clipped[rank]) == len([op for op in ops if op.type == "sgd"]) > 0
    assert not set(clipped[0]) & set(clipped[1])


def drop(kind: str) -> Callable[[list[Op]], None]:
    return lambda ops: ops.remove(next(op for op in ops if op.type == kind))


def twice(kind: str) -> Callable[[list[Op]], None]:
    return lambda ops: ops.append(next(op for op in ops if op.type == kind))


def elsewhere(kind: str) -> Callable[[list[Op]], None]:
    def change(ops: list[Op]) -> None:
        index = next(i for i, op in enumerate(ops) if op.type == kind)
        moved = {**ops[index].arguments, "root": 1 - int(str(ops[index].arguments["root"]))}
        ops[index] = dataclasses.replace(ops[index], arguments=freeze(moved))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("momentum"), "expected one update on trainer 0, got none"),
        (twice("momentum"), "does not own it, or updates it a second time"),
        (drop("c_reduce_sum"), "expected sums on the trainers"),
        (elsewhere("c_reduce_sum"), "expected sums on the trainers"),
        (drop("c_broadcast"), "its owner never broadcasts it"),
        (elsewhere("c_broadcast"), "expected one broadcast of a parameter, from its owner"),
    ],
)
def test_a_broken_program_is_refused(change: Callable[[list[Op]], None], words: str) -> None:
    """The invariants of sharded updates name what is wrong."""
    program = trainers(TWO, GRAD)[0].main
    assert program.deployment is not None
    ops = list(program.main.ops)
    change(ops)
    broken = program.with_blocks(dataclasses.replace(program.main, ops=tuple(ops)))
    with pytest.raises(IllegalProgram, match=words):
        verify(broken, program.deployment.plan)


@pytest.mark.parametrize(
    ("settings", "clip", "configs", "words"),
    [
        (LOCAL, False, {}, "expected collective_mode='grad_allreduce'"),
        (NCCL2, False, {}, "expected collective_mode='grad_allreduce'"),
        ({**GRAD, **ROWS}, False, {}, "use_hierarchical_allreduce: has no effect with"),
        (GRAD, True, {}, "got ClipGradByGlobalNorm"),
        (GRAD, False, {"sharding_degree": 3}, "sharding_degree=3: expected the 2 trainers"),
        (GRAD, False, {"dp_degree": 2}, "dp_degree: acts only in a job without servers"),
    ],
)
def test_what_cannot_be_sharded_is_named(
    settings: dict[str, Any], clip: bool, configs: dict[str, Any], words: str
) -> None:
    """The error says what a program needs."""
    endpoints = FOUR if "use_hierarchical_allreduce" in settings else TWO
    with pytest.raises(ValueError, match=words):
        Trainer(endpoints, 0, settings, clip=clip, strategy=sharding(**configs))


def test_a_checkpoint_of_a_part_is_refused() -> None:
    """No trainer has all states, and the error says what to save."""
    with Executor() as executor, pytest.raises(ValueError, match="save the parameters alone"):
        executor.save("nowhere", trainers(TWO, GRAD)[0].main)
