"""The invariants of a server's programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from transpiler.ir.graph import Block, Op, Role, refs
from transpiler.ir.ops import allowed_on_server, is_optimizer
from transpiler.ir.python_functions import PY_FUNC, WHY_NOT
from transpiler.plan.lanes import applied, backup_names, delta_name
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Placement, Plan, Slice
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, table_of_block


def _index(program: Program) -> int:
    assert program.deployment is not None and program.deployment.server_index is not None, (
        "a server's program"
    )
    return program.deployment.server_index


def _held(program: Program, plan: Plan) -> dict[str, tuple[Placement, Slice]]:
    """The slices that the plan gives to this server, by name."""
    index = _index(program)
    return {
        slice_.name: (placement, slice_)
        for placement in plan.placements
        for slice_ in placement.slices
        if slice_.server == index
    }


def slices_held(program: Program, plan: Plan) -> Iterator[Violation]:
    """Block 0 of a server defines exactly the slices that the plan gives to it, in their shapes and
    dtypes.
    """
    held = _held(program, plan)
    defined = {
        variable.name: variable
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER)
    }
    for name in sorted(defined.keys() - held.keys()):
        yield Violation("", name, f"it is not on server {_index(program)}")
    for name, (placement, slice_) in held.items():
        if name not in defined:
            yield Violation("", name, f"server {_index(program)} owns it and does not define it")
            continue
        found, expected = defined[name], (slice_.shape, placement.dtype, placement.name)
        if (found.shape, found.dtype, found.of) != expected:
            yield Violation(
                "", name, f"expected {expected}, got {(found.shape, found.dtype, found.of)}"
            )


def only_server_ops(program: Program, plan: Plan) -> Iterator[Violation]:
    """A server's program holds only ops that servers run: no op that computes or sends."""
    for block in program.blocks:
        for index, op in enumerate(block.ops):
            if not allowed_on_server(op.type):
                yield Violation(
                    at(block.index, index, op),
                    next(iter(op.outputs), ""),
                    f"servers do not run this op{_why(op)}",
                )


def _why(op: Op) -> str:
    return f": {WHY_NOT}" if op.type == PY_FUNC else ""


def _types(block: Block) -> list[str]:
    return [op.type for op in block.ops]


def listens_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Block 0 of a server's main program holds exactly one op, a listen_and_serv for this server
    and all blocks after it.
    """
    types = [op.type for op in program.main.ops]
    if types != ["listen_and_serv"]:
        yield Violation(
            "", "", f"expected one op listen_and_serv in block 0, got {', '.join(types) or 'none'}"
        )
        return
    op = program.main.ops[0]
    expected = {
        "server_index": _index(program),
        "trainers": plan.trainers,
        "mode": plan.mode,
        "optimize_blocks": tuple(
            block.index for block in program.blocks[1:] if "lookup_table" not in _types(block)
        ),
        "prefetch_blocks": tuple(b.index for b in program.blocks[1:] if "lookup_table" in _types(b))
        if plan.tables
        else None,
    }
    for key, value in expected.items():
        if op.arguments.get(key) != value:
            yield Violation(
                at(0, 0, op), "", f"{key}: expected {value!r}, got {op.arguments.get(key)!r}"
            )
    for block in program.blocks[1:]:
        for index, inner in enumerate(block.ops):
            if inner.type == "listen_and_serv":
                yield Violation(at(block.index, index, inner), "", "it is outside block 0")


def _expected_types(placement: Placement, plan: Plan) -> list[str]:
    lane, found = plan.lane_of(placement), applied(plan, placement)
    if found is None:
        return ["sum"]
    merging = (
        ["sum", "scale"] if lane.kind.waits_for_all else ["dc_compensate"] if lane.dc_asgd else []
    )
    merging = merging if lane.averages else ["sum"]
    clipping = (
        []
        if not plan.clips_on_servers or plan.clip is None
        else ["clip" if plan.clip.kind == "value" else "norm_scale"]
    )
    return [*merging, *clipping, found[1].type]


def _expected_arguments(
    op: Op, placement: Placement, slice_: Slice, plan: Plan
) -> dict[str, object]:
    """The arguments that a merging op must have; variables are given by name."""
    lane = plan.lane_of(placement)
    arriving = (
        delta_name(slice_) if lane.kind.steps_on_trainer else name_beside(placement, slice_, "GRAD")
    )
    if op.type == "sum" and lane.kind.servers_add:
        return {"x": (slice_.name, arriving)}
    if op.type == "sum":
        several = tuple(f"{arriving}.trainer_{trainer}" for trainer in range(plan.trainers))
        return {"x": several if plan.trainers > 1 else (arriving,)}
    if op.type == "scale":
        return {
            "x": (arriving,),
            "scale": (-1.0 if lane.kind.steps_on_trainer else 1.0) / plan.trainers,
        }
    if op.type == "dc_compensate":
        backups = backup_names(slice_, plan.trainers)
        return {
            "grad": (arriving,),
            "param": (slice_.name,),
            "backups": backups,
            "factor": lane.dc_asgd,
        }
    return {}


def _block_violations(
    block: Block, placement: Placement, slice_: Slice, plan: Plan
) -> Iterator[Violation]:
    types, expected = [op.type for op in block.ops], _expected_types(placement, plan)
    if types != expected:
        yield Violation(
            f"block {block.index}",
            slice_.name,
            f"expected {', '.join(expected)}; got {', '.join(types)}",
        )
        return
    found = applied(plan, placement)
    if found is not None and block.ops[-1].arguments.get("group") != found[0]:
        yield Violation(
            at(block.index, len(types) - 1, block.ops[-1]),
            slice_.name,
            f"expected group {found[0]}",
        )
    for index, op in enumerate(block.ops):
        for key, wanted in _expected_arguments(op, placement, slice_, plan).items():
            argument = op.arguments.get(key)
            got = tuple(refs(argument)) or argument
            if got != wanted:
                yield Violation(
                    at(block.index, index, op),
                    slice_.name,
                    f"{key}: expected {wanted} in a lane of mode "
                    f"{plan.lane_of(placement).mode}, got {got}",
                )
    for before, (index, op) in zip(block.ops, list(enumerate(block.ops))[1:], strict=False):
        if before.outputs[0] not in op.inputs:
            yield Violation(
                at(block.index, index, op),
                before.outputs[0],
                "it does not read what the op before it gives",
            )


def optimize_blocks_complete(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each slice that a server updates has exactly one block, complete for the mode; without any
    there is one empty block.
    """
    due = {name: pair for name, pair in _held(program, plan).items() if pair[0].group is not None}
    blocks, trained = (
        [block for block in program.blocks[1:] if not table_of_block(block, program.main)],
        set(due),
    )
    if not due and not plan.tables and (len(blocks) != 1 or blocks[0].ops):
        yield Violation(
            "", "", f"a server that updates nothing has one empty block; got {len(blocks)} blocks"
        )
        return
    for block in blocks if due or plan.tables else []:
        updates = [
            (i, op)
            for i, op in enumerate(block.ops)
            if is_optimizer(op.type) or trained & set(op.outputs)
        ]
        if len(updates) != 1:
            yield Violation(
                f"block {block.index}",
                "",
                f"expected one optimizer op, got {len(updates)} (or one sum into a parameter)",
            )
            continue
        index, op = updates[0]
        name = next(iter(op.outputs), "")
        if name not in due:
            yield Violation(
                at(block.index, index, op),
                name,
                "it is updated a second time, or this server does not update it",
            )
            continue
        yield from _block_violations(block, *due.pop(name), plan)
    for name in due:
        yield Violation("", name, "no block updates it")


def slices_initialised(program: Program, plan: Plan) -> Iterator[Violation]:
    """A server's startup program initialises each of its slices, and each table, exactly once."""
    counts = Counter(name for op in program.main.ops if op.type == "init" for name in op.outputs)
    held = {**_held(program, plan), **{table.name: table for table in plan.tables}}
    for name in {**held, **counts}:
        if counts[name] != 1 or name not in held:
            yield Violation(
                "", name, f"expected one init of a slice of this server, got {counts[name]}"
            )


def owned_once(programs: Sequence[Program], plan: Plan) -> Iterator[Violation]:
    """Every slice of the plan is defined by exactly one server's program, and every server has one
    program.
    """
    if [_index(program) for program in programs] != list(range(plan.servers)):
        yield Violation(
            "",
            "",
            f"expected one program for each of {plan.servers} servers, got "
            f"{[_index(p) for p in programs]}",
        )
    owners: dict[str, list[int]] = {
        slice_.name: [] for placement in plan.placements for slice_ in placement.slices
    }
    for program in programs:
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
            owners.setdefault(variable.name, []).append(_index(program))
    for name, servers in owners.items():
        if len(servers) != 1:
            yield Violation("", name, f"expected one owner, got servers {servers}")
