"""What a server asks of a program that came over the wire before it believes a word of it.

The message has been parsed and every op held against the catalogue (``serialize.from_proto``).  Here the rest: the plan makes
sense by itself, the blocks are the shape of a pserver's program, every name is defined, and tensors that meet have the same
shape.  A program that passes allocates what its variables say and reads nothing else.

[Note: the shape of a pserver's program]  Block 0 defines variables and ends in its only op, ``listen_and_serv``, whose
``optimize_blocks`` name every other block once.  Other blocks refer to no block, so there is no cycle.  Each slice that the plan
gives to this server is a variable of its shape and dtype; each trained one is updated by exactly one optimizer op, by the rule
of its group.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping

from transpiler.ops import allowed_on_server, check, check_rule, is_optimizer, rule_of_op, states_of_op
from transpiler.plan import Deployment, Placement, Plan, Slice
from transpiler.program import Block, Op, Program, Ref, Role, Variable
from transpiler.schema import DTYPES, where

MODES = ("sync", "async")
CLIPS = ("value", "norm", "global_norm")
MOST_PROCESSES = 65536  # of a kind
MOST_DIMENSIONS = 64  # torch's own limit
MOST_BYTES = 2**46  # of one variable: beyond any machine, and far from the end of 64 bits

# ---- plans ----


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _check_extent(what: str, shape: Iterable[int | str], dtype: str) -> None:
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    _expect(dtype in DTYPES, f"{what}: expected a dtype among {', '.join(DTYPES)}; got {dtype!r}")
    _expect(len(sizes) <= MOST_DIMENSIONS, f"{what}: expected {MOST_DIMENSIONS} dimensions or fewer, got {len(sizes)}")
    _expect(min(sizes, default=0) >= 0, f"{what}: expected fixed sizes of 0 or more, got {list(shape)}")
    limit = f"{what}: expected {MOST_BYTES} bytes or fewer, got {dtype}{list(shape)}"
    _expect(math.prod(size or 1 for size in sizes) * DTYPES[dtype].itemsize <= MOST_BYTES, limit)


def _check_slice(what: str, placement: Placement, piece: Slice, begin: int, servers: int) -> None:
    _expect(piece.name != "", f"{what}: expected slices with names, got an empty one")
    what = f"{what}, slice {piece.name!r}"
    _expect(piece.begin == begin <= piece.end, f"{what}: expected elements from {begin} on, got [{piece.begin}, {piece.end})")
    _expect(0 <= piece.server < servers, f"{what}: expected a server of 0 to {servers - 1}, got {piece.server}")
    _check_extent(what, piece.shape, placement.dtype)
    whole = placement.shape if len(placement.slices) == 1 else (piece.end - piece.begin,)
    rows = (piece.shape[:1] or (0,)) + placement.shape[1:]
    fits = piece.shape in (whole, rows) and math.prod(piece.shape) == piece.end - piece.begin
    _expect(
        fits,
        f"{what}: expected a shape for {piece.end - piece.begin} elements of {list(placement.shape)}, got {list(piece.shape)}",
    )


def _check_placement(placement: Placement, plan: Plan) -> None:
    _expect(placement.name != "", "plan: expected variables with names, got an empty one")
    what = f"plan, variable {placement.name!r}"
    _check_extent(what, placement.shape, placement.dtype)
    if placement.group is not None:
        _expect(
            0 <= placement.group < len(plan.groups), f"{what}: expected a group below {len(plan.groups)}, got {placement.group}"
        )
        trainable = DTYPES[placement.dtype].is_floating_point or DTYPES[placement.dtype].is_complex
        _expect(trainable, f"{what}: expected a floating-point dtype for what is trained, got {placement.dtype}")
    begin = 0
    for piece in placement.slices:
        _check_slice(what, placement, piece, begin, plan.servers)
        begin = piece.end
    total = math.prod(placement.shape)
    _expect(len(placement.slices) > 0 and begin == total, f"{what}: expected slices of all {total} elements, got {begin}")


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        _expect(name not in seen, f"{what} {name!r}: expected once, got twice")
        seen.add(name)


def check_plan(plan: Plan) -> None:
    """Whether a plan makes sense by itself.

    Raises:
        ValueError: naming the variable, slice, group or field, what was expected and what came.
    """
    _expect(len(plan.lanes) > 0, "plan: expected a lane or more, got none")
    for lane in plan.lanes:
        _expect(lane.mode in MODES, f"plan: expected a mode among {', '.join(MODES)}; got {lane.mode!r}")
    for what, count in (("trainers", plan.trainers), ("servers", plan.servers)):
        _expect(1 <= count <= MOST_PROCESSES, f"plan: expected 1 to {MOST_PROCESSES} {what}, got {count}")
    for index, rule in enumerate(plan.groups):
        try:
            check_rule(rule)
        except ValueError as error:
            raise ValueError(f"plan, group {index}: {error}") from error
    if plan.clip is not None:
        _expect(plan.clip.kind in CLIPS, f"plan, clip: expected a kind among {', '.join(CLIPS)}; got {plan.clip.kind!r}")
        numbers = f"low {plan.clip.low}, high {plan.clip.high}"
        _expect(not math.isnan(plan.clip.low + plan.clip.high), f"plan, clip: expected numbers, got {numbers}")
    for placement in plan.placements:
        _check_placement(placement, plan)
    _check_unique("plan, variable", (placement.name for placement in plan.placements))
    _check_unique("plan, slice", (piece.name for placement in plan.placements for piece in placement.slices))


def check_deployment(deployment: Deployment | None) -> Deployment:
    """Whether a deployment makes sense for a server.

    Raises:
        ValueError: there is none, it is a trainer's, its numbers contradict each other, or its plan does not make sense.
    """
    if deployment is None:
        raise ValueError("expected a program with a deployment, got one without: it is no pserver's program")
    check_plan(deployment.plan)
    servers, index = deployment.plan.servers, deployment.server_index
    _expect(len(deployment.endpoints) == servers, f"deployment: expected {servers} endpoints, got {len(deployment.endpoints)}")
    _expect("" not in deployment.endpoints, "deployment: expected endpoints HOST:PORT, got an empty one")
    _expect(index is not None and 0 <= index < servers, f"deployment: expected a server_index of 0 to {servers - 1}, got {index}")
    _expect(deployment.trainer_id is None, f"deployment: expected a server's, got that of trainer {deployment.trainer_id}")
    return deployment


# ---- blocks ----


def _check_listen(program: Program, deployment: Deployment) -> None:
    ops = program.main.ops
    _expect(len(ops) == 1 and ops[0].type == "listen_and_serv", "block 0: expected one op, listen_and_serv, got "
            + (", ".join(op.type for op in ops[:8]) or "none"))  # fmt: skip
    plan, arguments = deployment.plan, ops[0].arguments
    facts = {"server_index": deployment.server_index, "trainers": plan.trainers, "mode": plan.mode}
    for name, value in facts.items():
        got = arguments[name]
        _expect(
            got == value, f"block 0, op 'listen_and_serv', argument {name!r}: expected {value!r} as the plan says, got {got!r}"
        )
    named = arguments["optimize_blocks"]
    indices = [index for index in named if isinstance(index, int)] if isinstance(named, tuple) else []
    expected = list(range(1, len(program.blocks)))
    what = f"expected each of the {len(expected)} other blocks once, got {indices[:8]}"
    _expect(sorted(indices) == expected, f"block 0, op 'listen_and_serv', argument 'optimize_blocks': {what}")


def _check_variables(block: Block) -> None:
    for name, variable in block.variables.items():
        what = f"block {block.index}, variable {name!r}"
        _expect(name != "" and name == variable.name, f"{what}: expected its own name, got {variable.name!r}")
        _check_extent(what, variable.shape, variable.dtype)


def _alike(
    op: Op, scope: Mapping[str, Variable], argument: str, names: Iterable[str], like: Variable, shape: object = None
) -> None:
    """Each of the names has the shape and dtype of ``like`` (or the shape given)."""
    shape = like.shape if shape is None else shape
    for name in names:
        got = scope[name]
        fits = got.shape == shape and got.dtype == like.dtype
        expected = f"expected {like.dtype}{list(like.shape)} like {like.name!r}, got {got.dtype}{list(got.shape)}"
        _expect(fits, f"{where(op)}, argument {argument!r}, variable {name!r}: {expected}")


def _named(op: Op, argument: str) -> str:
    value = op.arguments[argument]
    assert isinstance(value, Ref), "checked against the schema"
    return value.name


def _check_update(op: Op, scope: Mapping[str, Variable], plan: Plan) -> None:
    param, grad, states = scope[_named(op, "param")], scope[_named(op, "grad")], states_of_op(op)
    for argument, role in {"param": Role.PARAMETER, "grad": Role.GRADIENT, **dict.fromkeys(states, Role.STATE)}.items():
        got = scope[_named(op, argument)]
        _expect(
            got.role is role, f"{where(op)}, argument {argument!r}: expected a {role.name}, got {got.name!r}, a {got.role.name}"
        )
    _alike(op, scope, "grad", [grad.name], param)
    for state, shaped in states.items():
        got, shape = scope[_named(op, state)], param.shape if shaped else ()
        _expect(got.shape == shape, f"{where(op)}, argument {state!r}: expected the shape {list(shape)}, got {list(got.shape)}")
    group, rule = op.arguments["group"], rule_of_op(op)
    planned = plan.groups[group] if isinstance(group, int) and group < len(plan.groups) else None
    _expect(planned is not None, f"{where(op)}, argument 'group': expected one below {len(plan.groups)}, got {group}")
    _expect(rule == planned, f"{where(op)}: expected the rule of group {group}, {planned}; got {rule}")


def _merge_of(op: Op, plan: Plan, parameter: str) -> dict[str, object]:
    """The arguments that an op on gradients must have by the plan; none where the plan knows no such op."""
    clip = plan.clip
    if op.type == "scale":
        return {"scale": 1.0 / plan.trainers}
    if op.type == "clip" and clip is not None and clip.kind == "value":
        return {"min": clip.low, "max": clip.high}
    if op.type == "norm_scale" and clip is not None and clip.kind != "value":
        return {"by": parameter if clip.kind == "norm" else ""}
    return {}


def _check_merge(op: Op, scope: Mapping[str, Variable], plan: Plan) -> None:
    result = scope[op.outputs[0]]
    got = f"{result.name!r}, a {result.role.name}"
    _expect(result.role in (Role.GRADIENT, Role.TEMPORARY), f"{where(op)}: expected to write a gradient, got {got}")
    _alike(op, scope, "x", op.inputs, result)
    if op.type == "sum":
        count = len(op.inputs)
        _expect(count == plan.trainers, f"{where(op)}, argument 'x': expected {plan.trainers}, one a trainer, got {count}")
        return
    expected = _merge_of(op, plan, result.of)
    _expect(bool(expected), f"{where(op)}: the plan clips by {plan.clip}, so a server does not run it")
    for name, value in expected.items():
        given = op.arguments[name]
        _expect(given == value, f"{where(op)}, argument {name!r}: expected {value!r} as the plan says, got {given!r}")


def _check_op(op: Op, scope: Mapping[str, Variable], plan: Plan) -> None:
    _expect(allowed_on_server(op.type) and op.type not in ("init", "listen_and_serv"), f"{where(op)}: a server runs no such op")
    check(op)
    for name in (*op.inputs, *op.outputs):
        _expect(name in scope, f"{where(op)}: expected variables of its block or of block 0, got {name!r}")
    if is_optimizer(op.type):
        _check_update(op, scope, plan)
        return
    _check_merge(op, scope, plan)


def _check_block(block: Block, scope: Mapping[str, Variable], plan: Plan) -> None:
    _check_unique(f"block {block.index}: op", ("optimizer" if is_optimizer(op.type) else op.type for op in block.ops))
    written: set[str] = set()
    for number, op in enumerate(block.ops):
        try:
            _check_op(op, scope, plan)
            for name in op.inputs:
                known = name in written or scope[name].role is not Role.TEMPORARY
                _expect(known, f"{where(op)}: expected variables that an earlier op wrote, got {name!r}")
        except ValueError as error:
            raise ValueError(f"block {block.index}, op {number}: {error}") from error
        written.update(op.outputs)


def _check_slices(program: Program, deployment: Deployment) -> None:
    """What the plan places here is defined, and updated once if it is trained."""
    scope = program.main.variables
    updates = [(op, _named(op, "param")) for block in program.blocks for op in block.ops if is_optimizer(op.type)]
    _check_unique("optimizer ops of parameter", (name for _, name in updates))
    _check_unique("state", (_named(op, state) for op, _ in updates for state in states_of_op(op)))
    groups = {name: op.arguments["group"] for op, name in updates}
    placed: set[str] = set()
    for placement in deployment.plan.placements:
        for piece in placement.slices:
            if piece.server == deployment.server_index:
                placed.add(piece.name)
                what = f"slice {piece.name!r} of server {piece.server}"
                held = scope.get(piece.name)
                _expect(held is not None, f"{what}: expected a variable of block 0, got none")
                role = held.role if held else Role.TEMPORARY
                _expect(role in (Role.PARAMETER, Role.BUFFER), f"{what}: expected a PARAMETER or a BUFFER, got a {role.name}")
                of = held.of if held else ""
                _expect(of in ("", placement.name), f"{what}: expected a slice of {placement.name!r}, got one of {of!r}")
                got = (held.shape, held.dtype) if held else ((), "")
                _expect(
                    got == (piece.shape, placement.dtype),
                    f"{what}: expected {placement.dtype}{list(piece.shape)}, got {got[1]}{list(got[0])}",
                )
                group = groups.get(piece.name)
                _expect(group == placement.group, f"{what}: expected an update by group {placement.group}, got {group}")
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
        _expect(variable.name in placed, f"variable {variable.name!r}: the plan places no such slice on this server")


def check_server_program(program: Program) -> None:
    """Holds a pserver's main program against everything above.

    Raises:
        ValueError: naming block, op and argument, what was expected and what came.
    """
    deployment = check_deployment(program.deployment)
    _expect(len(program.blocks) >= 1, "expected a program with one block or more, got none")
    for index, block in enumerate(program.blocks):
        _expect(block.index == index, f"block {index}: expected its own index, got {block.index}")
        _check_variables(block)
    _check_unique("variable", (name for block in program.blocks for name in block.variables))
    for op in program.main.ops:
        check(op)
    _check_listen(program, deployment)
    shared = dict(program.main.variables)
    for block in program.blocks[1:]:
        _check_block(block, ChainMap(dict(block.variables), shared), deployment.plan)
    # Blocks may run in any order or together.
    _check_unique(
        "variable that blocks write,", (name for b in program.blocks for name in {n for op in b.ops for n in op.outputs})
    )
    _check_slices(program, deployment)
