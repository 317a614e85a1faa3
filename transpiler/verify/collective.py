"""The invariants of a trainer's programs in a job without servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from transpiler.ir.graph import Op, Ref, Role
from transpiler.ir.ops import COLLECTIVE, is_optimizer
from transpiler.ir.scaling_ops import CHECK, unscaled_from
from transpiler.ir.updates import parameter_of
from transpiler.plan.placement import owners, tensor_bytes
from transpiler.plan.plan import Collective, Plan, all_ids, ids_of
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered

# ---- rings ----
#
# Invariants of a trainer's startup program without servers: its rings, and its broadcasts.


STARTUP_OPS = frozenset({"init", "gen_nccl_id", "c_comm_init", "c_broadcast", "c_sync_comm_stream"})


def is_startup(program: Program) -> bool:
    """Whether a trainer's program is its startup program, which computes nothing."""
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


# ---- sharded ----
#
# The invariants of a trainer's main program whose updates are sharded over the trainers.


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
    """Ops that clip and update read sums that this trainer has, or clipped ones."""
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


# ---- collective ----


_STARTS = ("c_allreduce_sum", "c_reduce_sum", "c_broadcast")
_CAST = "aten._to_copy"


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
                    "it is updated a second time, or is not a trained parameter",
                )
            due.discard(name)
    for name in sorted(due):
        yield Violation("", name, "expected one update on this trainer, got none")


def loss_gradient_scaled(program: Program, plan: Plan) -> Iterator[Violation]:
    """The gradient of the loss, with which backward begins, is scaled by 1 / trainers, once and
    before anything reads it; where gradients are sums it is not scaled.
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
    if plan.collective is not None and plan.collective.gradient_scale != "avg":
        if scales:
            yield Violation("", name, f"expected no scale, for sums, got {len(scales)}")
        return
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
    """Gradient that backward computes -> the parameter whose update, clipping or check reads it."""
    found: dict[str, str] = {}
    clipped: dict[str, str] = {}
    scaled: dict[str, str] = {}
    for op in program.main.ops:
        if op.type == CHECK:
            scaled |= unscaled_from(op)
        elif op.type in ("clip", "clip_by_norm", "scale_by"):
            clipped[op.outputs[0]] = op.inputs[0]
        elif is_optimizer(op.type):
            grad = getattr(op.arguments["grad"], "name", "")
            raw = clipped.get(grad, grad)
            found[scaled.get(raw, raw)] = op.outputs[0]
    return found


def summed_exactly_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """The gradient of every trained parameter, or its cast, is summed over all trainers exactly
    once and in place, after the op that produces it, and no op of backward reads it but the sum.
    """
    gradients, halves = _final_gradients(program), _halves(program)
    missing = dict(gradients)
    for index, op in numbered(program, "c_allreduce_sum"):
        name, result = _source_and_result(op)
        name, result = halves.get(name, name), halves.get(result, result)
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
            name, _ = _source_and_result(op)
            begun |= {name, halves.get(name, name)}
        elif not _is_cast(op, halves) and op.type not in (
            "c_sync_comm_stream",
            CHECK,
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


def _halves(program: Program) -> dict[str, str]:
    """The variable that is summed in place of a gradient -> that gradient.  Backward may itself end
    in a cast, as under amp: the result of that is the gradient.
    """
    gradients = _final_gradients(program)
    summed = {op.outputs[0] for _, op in numbered(program, "c_allreduce_sum")}
    return {
        op.outputs[0]: op.inputs[0]
        for op in program.main.ops
        if op.type == _CAST and op.outputs[0] in summed - gradients.keys()
    }


def _is_cast(op: Op, halves: Mapping[str, str]) -> bool:
    """Whether the op casts a gradient to the variable summed in its place, or back."""
    if op.type != _CAST:
        return False
    name, result = op.inputs[0], op.outputs[0]
    return name == halves.get(result) or result == halves.get(name)


def cast_both_ways(program: Program, plan: Plan) -> Iterator[Violation]:
    """If gradients travel as another dtype, every sum of a gradient of more than 16 bits is one of
    its cast, and after the sum the gradient is cast back once, before anything reads it.
    """
    dtype, halves = _collective(plan).dtype, _halves(program)
    away: set[str] = set()  # gradients whose sum is not cast back yet
    for index, op in enumerate(program.main.ops):
        if op.type == "c_allreduce_sum":
            name = op.outputs[0]
            got = program.main.variables[name].dtype
            if dtype and got != dtype and got in ("float32", "float64"):
                yield Violation(at(0, index, op), name, f"expected it to travel as {dtype}")
            away.update({halves[name]} if name in halves else ())
        elif op.type == _CAST and op.outputs[0] in away and op.inputs[0] in halves:
            away.discard(op.outputs[0])
        else:
            for name in (*op.inputs, *op.outputs):
                if name in away:
                    yield Violation(at(0, index, op), name, "it is used before its sum is back")
    for name in sorted(away):
        yield Violation("", name, "its sum is never cast back")


def averaged_exactly_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Every trained parameter is summed over all trainers exactly once, after its update, and
    becomes the sum / trainers; with k_steps all of this happens in the same runs.
    """
    collective = _collective(plan)
    always = collective.steps == 1 and not collective.adaptive
    runs = (None, None) if always else (collective.steps, collective.begin or None)
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
            yield from _in_the_same_runs(index, op, name, runs)
        elif op.type == "scale" and op.inputs[0] in totals:
            name = totals[op.inputs[0]]
            if op.outputs != (name,) or op.arguments["scale"] != 1.0 / plan.trainers:
                yield Violation(
                    at(0, index, op),
                    name,
                    f"expected it to become {op.inputs[0]} times {1.0 / plan.trainers!r}",
                )
            missing.discard(name)
            yield from _in_the_same_runs(index, op, name, runs)
    for name in sorted(missing):
        yield Violation("", name, "it never becomes the trainers' mean")


def _in_the_same_runs(
    index: int, op: Op, name: str, runs: tuple[int | None, int | None]
) -> list[Violation]:
    got = op.arguments.get("k_steps"), op.arguments.get("begin_step")
    why = f"expected k_steps {runs[0]} and begin_step {runs[1]}, got {got[0]} and {got[1]}"
    return [] if got == runs else [Violation(at(0, index, op), name, why)]


def adapted_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """If the averages follow the loss, one op after all sums reads it, with the plan's first number
    of steps; otherwise there is none.
    """
    due = [_collective(plan).steps] if _collective(plan).adaptive else []
    found = numbered(program, "c_adapt_k_steps")
    if [op.arguments["k_steps"] for _, op in found] != due:
        yield Violation("", "loss", f"expected {len(due)} c_adapt_k_steps, got {len(found)}")
    sums = [index for index, _ in numbered(program, "c_allreduce_sum")]
    for index, op in found:
        if op.arguments["x"] != Ref("loss") or op.arguments["ring_id"] != 0:
            yield Violation(at(0, index, op), "loss", "expected the loss, on ring 0")
        if sums and index < sums[-1]:
            yield Violation(at(0, index, op), "loss", "it is read before the last sum")


def buckets_in_bounds(program: Program, plan: Plan) -> Iterator[Violation]:
    """A bucket holds sums that follow one another, of one dtype, on one ring, no more of them than
    the plan says, and no more bytes unless it holds a single one; buckets are numbered from 0, and
    take the rings in turn.
    """
    collective, dtypes, last = _collective(plan), dict[int, str](), -1
    sizes, counts = dict[int, int](), Counter[int]()
    sums = numbered(program, "c_allreduce_sum")
    final = max((int(str(op.arguments["bucket"])) for _, op in sums), default=0)
    for index, op in sums:
        bucket = int(str(op.arguments["bucket"]))
        ring, name = op.arguments["ring_id"], op.outputs[0]
        variable = program.main.variables[name]
        size = tensor_bytes(variable.shape, variable.dtype)
        counts[bucket] += 1
        if 0 < collective.most < counts[bucket]:
            why = f"expected {collective.most} sums a bucket at most, got {counts[bucket]}"
            yield Violation(at(0, index, op), name, why)
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
        most = collective.bucket_bytes
        if bucket == final:
            most = collective.last_bytes or most
        if bucket in sizes and sizes[bucket] + size > most:
            over = sizes[bucket] + size
            yield Violation(
                at(0, index, op), name, f"expected {most} bytes a bucket at most, got {over}"
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
