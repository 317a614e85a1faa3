"""The invariants of a trainer's main program whose updates are sharded over the trainers."""

from __future__ import annotations

from collections.abc import Iterator

from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import parameter_of
from transpiler.plan.placement import owners
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered


def updated_by_its_owner(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each trained parameter is updated on exactly one trainer: this program updates those that its
    trainer owns, once, and no others.
    """
    assert program.deployment is not None, "a trainer's program"
    mine = program.deployment.trainer_id
    due = {name for name, rank in owners(plan).items() if rank == mine}
    for index, op in enumerate(program.main.ops):
        if is_optimizer(op.type):
            name = parameter_of(op)
            if name not in due:
                why = f"trainer {mine} does not own it, or updates it a second time"
                yield Violation(at(0, index, op), name, why)
            due.discard(name)
    for name in sorted(due):
        yield Violation("", name, f"expected one update on trainer {mine}, got none")


def reduced_to_its_owner(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each trained parameter has one gradient, which is summed on its owner once and in place,
    after the op that produces it and before any clipping or update reads it.
    """
    wanted = sorted(owners(plan).values())
    roots, reduced = list[int](), set[str]()
    for index, op in enumerate(program.main.ops):
        if op.type == "c_reduce_sum":
            name = op.outputs[0]
            if op.inputs != (name,) or name in reduced:
                yield Violation(at(0, index, op), name, "expected one sum, in place")
            reduced.add(name)
            roots.append(int(str(op.arguments["root"])))
        elif op.type != "c_sync_comm_stream":
            for name in op.outputs:
                if name in reduced:
                    yield Violation(at(0, index, op), name, "it changes after its sum has begun")
    if sorted(roots) != wanted:
        yield Violation("", "", f"expected sums on the trainers {wanted}, got {sorted(roots)}")
    yield from _read_where_summed(program, reduced)


def _read_where_summed(program: Program, reduced: set[str]) -> Iterator[Violation]:
    """What clips and updates reads sums that this trainer has, or what was made of them."""
    assert program.deployment is not None, "a trainer's program"
    mine, begun = program.deployment.trainer_id, dict[str, object]()
    made = {
        name
        for op in program.main.ops
        if op.type in ("clip", "clip_by_norm")
        for name in op.outputs
    }
    for index, op in enumerate(program.main.ops):
        if op.type == "c_reduce_sum":
            begun[op.outputs[0]] = op.arguments["root"]
        elif op.type in ("clip", "clip_by_norm") or is_optimizer(op.type):
            name = op.inputs[0] if not is_optimizer(op.type) else _gradient(op.arguments["grad"])
            if name not in made and begun.get(name) != mine:
                yield Violation(
                    at(0, index, op), name, f"expected its sum on trainer {mine} before this"
                )


def _gradient(argument: object) -> str:
    return str(getattr(argument, "name", ""))


def broadcast_by_its_owner(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each trained parameter is broadcast by its owner once and in place, after its update."""
    missing, broadcast = dict(owners(plan)), set[str]()
    for index, op in numbered(program, "c_broadcast"):
        name = op.outputs[0]
        if op.inputs != (name,) or missing.pop(name, None) != op.arguments["root"]:
            yield Violation(
                at(0, index, op), name, "expected one broadcast of a parameter, from its owner"
            )
    for index, op in enumerate(program.main.ops):
        if op.type == "c_broadcast":
            broadcast.update(op.outputs)
        elif is_optimizer(op.type) and parameter_of(op) in broadcast:
            yield Violation(at(0, index, op), parameter_of(op), "it changes after its broadcast")
    for name in missing:
        yield Violation("", name, "its owner never broadcasts it")
