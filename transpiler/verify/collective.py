"""The invariants of a trainer's programs in a job without servers."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from transpiler.ir.graph import Op, Ref, Role
from transpiler.ir.ops import COLLECTIVE, is_optimizer
from transpiler.plan.comm_rings import all_ids, ids_of
from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Collective, Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered

STARTUP_OPS = frozenset({"init", "gen_nccl_id", "c_comm_init", "c_broadcast", "c_sync_comm_stream"})
_STARTS = ("c_allreduce_sum", "c_broadcast")


def is_startup(program: Program) -> bool:
    """Whether a trainer's program is its startup program: the one that computes nothing."""
    return all(op.type in STARTUP_OPS for op in program.main.ops)


def _collective(plan: Plan) -> Collective:
    assert plan.collective is not None, "invariants of a job without servers"
    return plan.collective


def _updated(plan: Plan) -> list[str]:
    return [placement.name for placement in plan.placements if placement.group is not None]


def shares_nothing(program: Program, plan: Plan) -> Iterator[Violation]:
    """The program is the single-node one: no op in it talks to other trainers."""
    for index, op in enumerate(program.main.ops):
        if op.type in COLLECTIVE:
            yield Violation(
                at(0, index, op),
                ", ".join(op.outputs),
                "expected no communication before ParallelExecutor adds it",
            )


def updated_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each trained parameter is updated exactly once, by its optimizer op on this trainer."""
    due = set(_updated(plan))
    for index, op in enumerate(program.main.ops):
        if is_optimizer(op.type):
            name = next(iter(op.outputs), "")
            if name not in due:
                yield Violation(
                    at(0, index, op),
                    name,
                    "it is updated a second time, or is no trained parameter",
                )
            due.discard(name)
    for name in sorted(due):
        yield Violation("", name, "expected one update on this trainer, got none")


def loss_gradient_scaled(program: Program, plan: Plan) -> Iterator[Violation]:
    """The gradient of the loss, with which backward begins, is scaled by 1 / trainers, once and
    before anything reads it.
    """
    ops = program.main.ops
    seeds = [
        index
        for index, op in enumerate(ops)
        if op.type == "aten.ones_like" and op.arguments.get("self") == Ref("loss")
    ]
    if not seeds:
        yield Violation(
            "", "loss", "expected its gradient to begin with aten.ones_like(loss), got none"
        )
        return
    name = ops[seeds[-1]].outputs[0]
    readers = [
        (index, op) for index, op in enumerate(ops) if name in op.inputs and index > seeds[-1]
    ]
    scales = [op for _, op in readers if op.type == "scale"]
    for index, op in readers[:1]:
        if op.type != "scale" or op.outputs != (name,):
            yield Violation(at(0, index, op), name, "it is read before it is scaled")
        elif op.arguments["scale"] != 1.0 / plan.trainers:
            yield Violation(
                at(0, index, op),
                name,
                f"expected {1.0 / plan.trainers!r}, got {op.arguments['scale']!r}",
            )
    if len(scales) != 1:
        yield Violation("", name, f"expected one scale, got {len(scales)}")


def _final_gradients(program: Program) -> dict[str, str]:
    """Raw gradient -> the parameter whose update or clipping reads it."""
    found: dict[str, str] = {}
    clipped: dict[str, str] = {}
    for op in program.main.ops:
        if op.type in ("clip", "clip_by_norm", "scale_by"):
            clipped[op.outputs[0]] = op.inputs[0]
        elif is_optimizer(op.type):
            grad = getattr(op.arguments["grad"], "name", "")
            found[clipped.get(grad, grad)] = op.outputs[0]
    return found


def _source_and_result(op: Op) -> tuple[str, str]:
    """The variable that an all-reduce or broadcast reads, and the one that it writes."""
    return next(iter(op.inputs), ""), next(iter(op.outputs), "")


def summed_exactly_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """The gradient of every trained parameter is summed over all trainers exactly once and in
    place, after the op that produces it, and no op of backward reads it but the sum.
    """
    gradients = _final_gradients(program)
    missing = dict(gradients)
    for index, op in numbered(program, "c_allreduce_sum"):
        name, result = _source_and_result(op)
        if name != result or missing.pop(name, None) is None:
            yield Violation(
                at(0, index, op),
                name,
                "expected one sum, in place, of the gradient of a trained parameter",
            )
    for name in missing:
        yield Violation("", name, "it is never summed over the trainers")
    begun: set[str] = set()
    for index, op in enumerate(program.main.ops):
        if op.type == "c_allreduce_sum":
            begun.add(_source_and_result(op)[0])
        elif op.type not in (
            "c_sync_comm_stream",
            "clip",
            "clip_by_norm",
            "global_norm_scale",
            "scale_by",
        ):
            for name in op.outputs:
                if name in begun:
                    yield Violation(at(0, index, op), name, "it changes after its sum has begun")
            for name in op.inputs:
                if name in gradients and not is_optimizer(op.type):
                    yield Violation(
                        at(0, index, op), name, "backward reads a gradient that is summed in place"
                    )


def averaged_exactly_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Every trained parameter is summed over all trainers exactly once, after its update, and
    becomes the sum / trainers; with k_steps all of this in the same runs.
    """
    steps = None if _collective(plan).steps == 1 else _collective(plan).steps
    missing, totals, updated = set(_updated(plan)), dict[str, str](), set[str]()
    for index, op in enumerate(program.main.ops):
        if is_optimizer(op.type):
            updated.update(op.outputs)
        elif op.type == "c_allreduce_sum":
            name, result = _source_and_result(op)
            if name not in updated or name == result or name in totals.values():
                yield Violation(
                    at(0, index, op),
                    name,
                    "expected one sum of an updated parameter, under another name",
                )
            totals[result] = name
            yield from _in_the_same_runs(index, op, name, steps)
        elif op.type == "scale" and op.inputs[0] in totals:
            name = totals[op.inputs[0]]
            if op.outputs != (name,) or op.arguments["scale"] != 1.0 / plan.trainers:
                yield Violation(
                    at(0, index, op),
                    name,
                    f"expected it to become {op.inputs[0]} times {1.0 / plan.trainers!r}",
                )
            missing.discard(name)
            yield from _in_the_same_runs(index, op, name, steps)
    for name in sorted(missing):
        yield Violation("", name, "it never becomes the trainers' mean")


def _in_the_same_runs(index: int, op: Op, name: str, steps: int | None) -> list[Violation]:
    got = op.arguments.get("k_steps")
    why = f"expected k_steps {steps}, got {got}"
    return [] if got == steps else [Violation(at(0, index, op), name, why)]


def buckets_in_bounds(program: Program, plan: Plan) -> Iterator[Violation]:
    """A bucket holds sums that follow one another, of one dtype, on one ring, and no more bytes
    than the plan says unless it holds a single one; buckets are numbered from 0, and take the rings
    in turn.
    """
    collective, sizes, dtypes, last = _collective(plan), dict[int, int](), dict[int, str](), -1
    for index, op in numbered(program, "c_allreduce_sum"):
        bucket, ring, name = (
            int(str(op.arguments["bucket"])),
            op.arguments["ring_id"],
            op.outputs[0],
        )
        variable = program.main.variables[name]
        size = prod(extent for extent in variable.shape if isinstance(extent, int)) * element_bytes(
            variable.dtype
        )
        if bucket not in (last, last + 1):
            yield Violation(
                at(0, index, op),
                name,
                f"expected bucket {max(last, 0)} or {last + 1}, got {bucket}",
            )
        if ring != bucket % collective.rings:
            yield Violation(
                at(0, index, op),
                name,
                f"expected ring {bucket % collective.rings} for bucket {bucket}, got {ring}",
            )
        if dtypes.setdefault(bucket, variable.dtype) != variable.dtype:
            yield Violation(
                at(0, index, op),
                name,
                f"expected {dtypes[bucket]} as the rest of bucket {bucket}, got {variable.dtype}",
            )
        if bucket in sizes and sizes[bucket] + size > collective.bucket_bytes:
            over = sizes[bucket] + size
            yield Violation(
                at(0, index, op),
                name,
                f"expected {collective.bucket_bytes} bytes a bucket at most, got {over}",
            )
        sizes[bucket] = sizes.get(bucket, 0) + size
        last = bucket


def awaited_before_use(program: Program, plan: Plan) -> Iterator[Violation]:
    """A result in flight is waited for exactly once, on its ring, and no op reads or writes it
    before.
    """
    flying: dict[str, object] = {}
    for index, op in enumerate(program.main.ops):
        if op.type == "c_sync_comm_stream":
            for name in op.inputs:
                if name not in flying:
                    yield Violation(at(0, index, op), name, "it is not in flight")
                elif flying.pop(name) != op.arguments["ring_id"]:
                    yield Violation(at(0, index, op), name, "it is in flight on another ring")
            continue
        for name in (*op.inputs, *op.outputs):
            if name in flying:
                yield Violation(at(0, index, op), name, "it is used while it is in flight")
        if op.type in _STARTS:
            flying[op.outputs[0]] = op.arguments["ring_id"]
    for name in flying:
        yield Violation("", name, "it is never waited for")


# ---- startup ----


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
