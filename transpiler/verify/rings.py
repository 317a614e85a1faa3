"""Invariants of a trainer's startup program without servers: its rings, and what is broadcast."""

from __future__ import annotations

from collections.abc import Iterator

from transpiler.ir.graph import Op, Role
from transpiler.plan.plan import Collective, Plan, all_ids, ids_of
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered

STARTUP_OPS = frozenset({"init", "gen_nccl_id", "c_comm_init", "c_broadcast", "c_sync_comm_stream"})


def is_startup(program: Program) -> bool:
    """Whether a trainer's program is its startup program: the one that computes nothing."""
    return all(op.type in STARTUP_OPS for op in program.main.ops)


def _collective(plan: Plan) -> Collective:
    assert plan.collective is not None, "invariants of a job without servers"
    return plan.collective


def _source_and_result(op: Op) -> tuple[str, str]:
    """The variable that an all-reduce or broadcast reads, and the one that it writes."""
    return next(iter(op.inputs), ""), next(iter(op.outputs), "")


def ids_generated_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """One gen_nccl_id generates the ids of all rings, after every value is bound."""
    found = numbered(program, "gen_nccl_id")
    if len(found) != 1:
        yield Violation(
            at(0, *found[-1]) if found else "", "", f"expected one gen_nccl_id, got {len(found)}"
        )
        return
    index, op = found[0]
    if op.outputs != all_ids(_collective(plan)):
        expected = ", ".join(all_ids(_collective(plan)))
        yield Violation(at(0, index, op), ", ".join(op.outputs), f"expected the ids {expected}")
    assert program.deployment is not None
    if (
        len(program.deployment.endpoints) != plan.trainers
        or op.arguments["endpoints"] != program.deployment.endpoints
    ):
        yield Violation(
            at(0, index, op), "", f"expected the endpoints of all {plan.trainers} trainers"
        )
    for late, other in numbered(program, "init"):
        if late > index:
            yield Violation(
                at(0, late, other),
                ", ".join(other.outputs),
                "it is bound after the ids are generated",
            )


def rings_initialized_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each ring is initialised exactly once, with its ids."""
    collective = _collective(plan)
    found = numbered(program, "c_comm_init")
    expected = [(ring, ids_of(collective, ring), plan.trainers) for ring in range(collective.rings)]
    got = [(op.arguments["ring_id"], op.inputs, op.arguments["nranks"]) for _, op in found]
    if got != expected:
        yield Violation(
            at(0, *found[-1]) if found else "",
            "",
            f"expected {len(expected)} rings with their ids, got {got}",
        )


def parameters_broadcast(program: Program, plan: Plan) -> Iterator[Violation]:
    """Every parameter and buffer is broadcast from trainer 0 exactly once, in place, on a ring that
    is initialised.
    """
    missing = {v.name for v in program.main.variables_of(Role.PARAMETER, Role.BUFFER)}
    rings: set[object] = set()
    for index, op in numbered(program, "c_comm_init", "c_broadcast"):
        if op.type == "c_comm_init":
            rings.add(op.arguments["ring_id"])
            continue
        name, result = _source_and_result(op)
        if name != result or name not in missing:
            yield Violation(
                at(0, index, op),
                name,
                "it is broadcast a second time or elsewhere, or trainers do not hold it",
            )
        if op.arguments["root"] != 0 or op.arguments["ring_id"] not in rings:
            yield Violation(
                at(0, index, op),
                name,
                "expected trainer 0's value, over a ring that is initialised",
            )
        missing.discard(name)
    for name in sorted(missing):
        yield Violation("", name, "trainer 0's value is never broadcast")
