"""Programs of trainers without servers: the invariants that hold, and what breaks each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.collectives import FOUR, GRAD, KINDS, Single, pair
from transpiler.ir.graph import Argument, Op, Ref
from transpiler.program import Program
from transpiler.verify import collective as main_invariants
from transpiler.verify import collective as startup_invariants
from transpiler.verify.verify import IllegalProgram, Invariant, invariants_of, verify

CAST = "aten._to_copy"


def edited(program: Program, change: Callable[[list[Op]], None]) -> Program:
    ops = list(program.main.ops)
    change(ops)
    return program.with_blocks(replace(program.main, ops=tuple(ops)))


def where(ops: list[Op], kind: str, last: bool = False) -> int:
    found = [index for index, op in enumerate(ops) if op.type == kind]
    return found[-1 if last else 0]


def drop(kind: str, last: bool = False) -> Callable[[list[Op]], None]:
    def change(ops: list[Op]) -> None:
        del ops[where(ops, kind, last)]

    return change


def alter(kind: str, **arguments: Argument) -> Callable[[list[Op]], None]:
    def change(ops: list[Op]) -> None:
        index = where(ops, kind)
        ops[index] = replace(ops[index], arguments={**ops[index].arguments, **arguments})

    return change


def twice(kind: str) -> Callable[[list[Op]], None]:
    return lambda ops: ops.insert(where(ops, kind) + 1, ops[where(ops, kind)])


def early_wait(ops: list[Op]) -> None:
    """The wait after its first reader."""
    index = where(ops, "c_sync_comm_stream")
    ops.insert(index + 1, ops.pop(index))


def changed_in_flight(ops: list[Op]) -> None:
    index = where(ops, "c_allreduce_sum")
    name = ops[index].outputs[0]
    ops.insert(index + 1, Op("scale", {"x": Ref("loss"), "scale": 1.0}, (name,)))


def used_while_away(ops: list[Op]) -> None:
    """The first cast back after the ops that read its gradient."""
    index = next(i for i, op in enumerate(ops) if op.type == CAST and "@FP16" in op.inputs[0])
    ops.append(ops.pop(index))


def not_cast(ops: list[Op]) -> None:
    """The first sum is of the gradient itself."""
    index = where(ops, "c_allreduce_sum")
    name = ops[index].outputs[0].removesuffix("@FP16")
    arguments = {**ops[index].arguments, "x": Ref(name)}
    ops[index] = replace(ops[index], arguments=arguments, outputs=(name,))


BREAKS: list[tuple[str, int, Callable[[list[Op]], None], str]] = [
    (
        "nccl2",
        0,
        lambda ops: ops.append(
            Op("c_broadcast", {"x": Ref("fc.bias"), "root": 0, "ring_id": 0}, ("fc.bias",))
        ),
        "shares_nothing",
    ),
    ("nccl2", 0, drop("sgd"), "updated_once"),
    ("local_sgd", 0, twice("sgd"), "updated_once"),
    ("grad_allreduce", 0, drop("scale"), "loss_gradient_scaled"),
    ("grad_allreduce", 0, alter("scale", scale=1.0), "loss_gradient_scaled"),
    ("grad_allreduce", 0, twice("scale"), "loss_gradient_scaled"),
    ("grad_allreduce", 0, drop("c_allreduce_sum"), "summed_exactly_once"),
    ("grad_allreduce", 0, twice("c_allreduce_sum"), "summed_exactly_once"),
    ("grad_allreduce", 0, alter("c_allreduce_sum", x=Ref("loss")), "summed_exactly_once"),
    ("grad_allreduce", 0, changed_in_flight, "summed_exactly_once"),
    ("local_sgd", 0, drop("scale"), "averaged_exactly_once"),
    ("local_sgd", 0, alter("scale", scale=1.0), "averaged_exactly_once"),
    ("local_sgd", 0, alter("scale", k_steps=3), "averaged_exactly_once"),
    ("local_sgd", 0, alter("c_allreduce_sum", k_steps=3), "averaged_exactly_once"),
    ("local_sgd", 0, alter("c_allreduce_sum", x=Ref("loss")), "averaged_exactly_once"),
    ("float16", 0, used_while_away, "cast_both_ways"),
    ("float16", 0, not_cast, "cast_both_ways"),
    ("float16", 0, drop(CAST, last=True), "cast_both_ways"),
    ("float16", 0, alter("c_allreduce_sum", x=Ref("loss")), "summed_exactly_once"),
    ("float16", 0, alter("c_allreduce_sum", bucket=7), "buckets_in_bounds"),
    ("adaptive", 0, alter("c_allreduce_sum", begin_step=3), "averaged_exactly_once"),
    ("adaptive", 0, drop("c_adapt_k_steps"), "adapted_once"),
    ("adaptive", 0, alter("c_adapt_k_steps", k_steps=4), "adapted_once"),
    ("adaptive", 0, alter("c_adapt_k_steps", ring_id=1), "adapted_once"),
    ("adaptive", 0, lambda ops: ops.insert(0, ops.pop()), "adapted_once"),
    ("grad_allreduce", 0, alter("c_allreduce_sum", bucket=7), "buckets_in_bounds"),
    ("grad_allreduce", 0, alter("c_allreduce_sum", ring_id=1), "buckets_in_bounds"),
    ("grad_allreduce", 0, drop("c_sync_comm_stream"), "awaited_before_use"),
    ("grad_allreduce", 0, early_wait, "awaited_before_use"),
    ("grad_allreduce", 0, twice("c_sync_comm_stream"), "awaited_before_use"),
    ("grad_allreduce", 0, alter("c_sync_comm_stream", ring_id=1), "awaited_before_use"),
    ("grad_allreduce", 1, drop("gen_nccl_id"), "ids_generated_once"),
    ("nccl2", 1, twice("gen_nccl_id"), "ids_generated_once"),
    ("nccl2", 1, alter("gen_nccl_id", endpoints=("h:1",)), "ids_generated_once"),
    ("nccl2", 1, lambda ops: ops.append(ops.pop(0)), "ids_generated_once"),
    ("grad_allreduce", 1, drop("c_comm_init"), "rings_initialized_once"),
    ("grad_allreduce", 1, alter("c_comm_init", nranks=3), "rings_initialized_once"),
    ("grad_allreduce", 1, twice("c_broadcast"), "parameters_broadcast"),
    ("grad_allreduce", 1, alter("c_broadcast", root=1), "parameters_broadcast"),
]


# of updates that are sharded over trainers
SHARDED = {"broadcast_by_its_owner", "reduced_to_its_owner", "updated_by_its_owner"}
INVARIANTS: dict[str, Invariant] = {
    name: invariant
    for module in {main_invariants, startup_invariants}
    for name, invariant in vars(module).items()
    if inspect.isgeneratorfunction(invariant) and not name.startswith("_")
    if name not in SHARDED
}


@pytest.mark.parametrize(("kind", "number", "change", "invariant"), BREAKS)
def test_a_broken_law_is_named(
    single: Single, kind: str, number: int, change: Callable[[list[Op]], None], invariant: str
) -> None:
    """verify refuses the program, and the message begins with where it is and ends in the
    invariant.
    """
    program = pair(single, FOUR, **KINDS[kind])[number]
    assert program.deployment is not None
    plan = program.deployment.plan
    broken = edited(program, change)
    verify(program, plan)
    said = inspect.getdoc(INVARIANTS[invariant]) or ""
    sentence = " ".join(said.split("\n\n")[0].split()).rstrip(".")
    violations = list(INVARIANTS[invariant](broken, plan))
    assert violations and all(violation.why for violation in violations)
    with pytest.raises(IllegalProgram) as caught:
        verify(broken, plan)
    if not any(
        list(other(broken, plan)) for other in invariants_of(broken) if other.__name__ != invariant
    ):
        assert caught.value.invariant == sentence


def test_every_law_has_a_program_that_breaks_it() -> None:
    """No invariant stands untested."""
    assert set(INVARIANTS) == {invariant for *_, invariant in BREAKS}


def test_a_bucket_that_is_too_full_breaks_the_law(single: Single) -> None:
    """Bytes and dtypes of a bucket are held against the plan, not only its number."""
    main = pair(single, FOUR, **GRAD)[0]
    assert main.deployment is not None and main.deployment.plan.collective is not None
    plan = replace(
        main.deployment.plan, collective=replace(main.deployment.plan.collective, bucket_bytes=8)
    )
    violations = list(main_invariants.buckets_in_bounds(main, plan))
    assert "expected 8 bytes a bucket at most" in violations[0].why
