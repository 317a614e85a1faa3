"""The invariants of a trainer's programs in a job with servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from transpiler.ir.graph import Op, Role, refs
from transpiler.ir.ops import COLLECTIVE, is_optimizer
from transpiler.ir.scaling_ops import UPDATE
from transpiler.ir.table_ops import updates_rows
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.lanes import delta_name
from transpiler.plan.modes import Barrier
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Placement, Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered

# ---- averaged ----
#
# The invariants of gradients that trainers average among themselves, beside servers.


_STAGES = ("c_allreduce_avg", "c_sync_comm_stream")


def gradients_averaged_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each gradient of mode collective, and no other, is averaged over the trainers exactly once,
    when it is final, and waited for; its update reads the result.
    """
    wanted = {
        gradient_of(op): parameter_of(op)
        for op in optimizer_ops(program.main)
        if parameter_of(op) in plan.averaged
    }
    stages: dict[str, int] = dict.fromkeys(wanted, 0)  # the stages that each has passed
    for index, op in enumerate(program.main.ops):
        for name in op.outputs:
            if name not in wanted and op.type in _STAGES:
                yield Violation(at(0, index, op), name, "no trainer averages it")
            elif name in wanted:
                yield from _next(stages, index, op, name)
        done = len(_STAGES)
        if is_optimizer(op.type) and stages.get(gradient_of(op), done) != done:
            yield Violation(at(0, index, op), gradient_of(op), "it is used before it is the mean")


def _next(stages: dict[str, int], index: int, op: Op, name: str) -> Iterator[Violation]:
    """Checks a write of a gradient: by the op that produces it, or by the next of the two ops."""
    stage = stages[name]
    if op.type not in _STAGES:
        if stage:
            yield Violation(at(0, index, op), name, "it changes after it was averaged")
    elif stage == len(_STAGES) or op.type != _STAGES[stage]:
        due = _STAGES[stage] if stage < len(_STAGES) else "its update"
        yield Violation(at(0, index, op), name, f"expected {due} next")
    else:
        stages[name] = stage + 1


def averaged_before_barriers(program: Program, plan: Plan) -> Iterator[Violation]:
    """A trainer has its averages before it closes a step; where servers decide the step, they count
    after fetch_barrier.
    """
    closes = numbered(program, "send_barrier", "recv", "fetch_barrier")
    first = min((index for index, _ in closes), default=len(program.main.ops))
    last = max((index for index, _ in closes), default=-1)
    for index, op in numbered(program, *_STAGES):
        if op.type == "c_allreduce_avg" and index > first:
            yield Violation(at(0, index, op), op.outputs[0], f"expected it before op {first}")
        elif op.type == "c_sync_comm_stream" and plan.averages_follow_servers and index < last:
            yield Violation(at(0, index, op), op.outputs[0], f"expected it after op {last}")


# ---- merging ----
#
# The invariant of gradients that are merged over runs.


_LEAVES = COLLECTIVE | {"send", "send_barrier"}


def merged_once(program: Program, plan: Plan | None = None) -> Iterator[Violation]:
    """Gradients are merged over runs once or not at all, and the ops that update or communicate
    come after that.
    """
    merges = numbered(program, "gradient_merge")
    for index, op in merges[1:]:
        yield Violation(at(0, index, op), op.outputs[0], "a run would end at two ops")
    for index, op in enumerate(program.main.ops[: merges[0][0]] if merges else ()):
        if is_optimizer(op.type) or op.type in _LEAVES:
            name = next(iter((*op.outputs, *op.inputs)), "")
            yield Violation(at(0, index, op), name, "it acts in every run")


# ---- trainer ----


_LAST = {*"recv fetch_barrier concat send_barrier send c_sync_comm_stream".split(), UPDATE}
STARTUP_OPS = frozenset({"init", "fake_init", "recv", "fetch_barrier", "concat"})


def is_startup(program: Program) -> bool:
    """Whether a trainer's program is its startup program, which computes and sends nothing."""
    return all(op.type in STARTUP_OPS for op in program.main.ops)


def _updated(plan: Plan, local: bool) -> list[Placement]:
    """The parameters that trainers update (``local``), or those that servers update."""
    return [
        placement
        for placement in plan.placements
        if placement.group is not None and plan.lane_of(placement).kind.steps_on_trainer == local
    ]


def _expected_endpoints(program: Program, placement: Placement) -> tuple[str, ...]:
    assert program.deployment is not None
    return tuple(program.deployment.endpoints[slice_.server] for slice_ in placement.slices)


def _servers(program: Program) -> tuple[str, ...]:
    assert program.deployment is not None
    return program.deployment.endpoints


def _sections(placement: Placement) -> tuple[int, ...]:
    return tuple(slice_.end - slice_.begin for slice_ in placement.slices)


def updated_in_one_place(program: Program, plan: Plan) -> Iterator[Violation]:
    """A trainer runs exactly one optimizer op for each parameter of a k-step lane or of mode
    collective, and has no other op or state of an optimizer, nor a clip op where the servers clip.
    """
    due = {*(placement.name for placement in _updated(plan, local=True)), *plan.averaged}
    local = set(due)
    for index, op in enumerate(program.main.ops):
        if is_optimizer(op.type) and not updates_rows(op):
            name = next(iter(op.outputs), "")
            if name not in due:
                yield Violation(
                    at(0, index, op),
                    name,
                    "a second update" if name in local else "the servers update this parameter",
                )
            due.discard(name)
        if plan.clips_on_servers and op.type in (
            "clip",
            "clip_by_norm",
            "global_norm_scale",
            "scale_by",
        ):
            yield Violation(
                at(0, index, op), next(iter(op.outputs), ""), "the servers clip the merged gradient"
            )
    for name in sorted(due):
        yield Violation("", name, "expected one update on this trainer, got none")
    for variable in program.main.variables_of(Role.STATE):
        if variable.of not in local:
            yield Violation("", variable.name, "the servers hold this state")


def _is_sent_as(program: Program, op: Op, placement: Placement) -> bool:
    """Whether a send has a placement's gradient: in slices, or unsliced with the sections."""
    names = tuple(refs(op.arguments["x"]))
    if placement.split and "sections" not in op.arguments:
        return names == tuple(name_beside(placement, slice_, "GRAD") for slice_ in placement.slices)
    variable = program.main.variables.get(names[0]) if len(names) == 1 else None
    return (
        variable is not None
        and variable.role is Role.GRADIENT
        and (variable.of, variable.shape) == (placement.name, placement.shape)
    )


def sent_exactly_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each gradient is sent exactly once, every slice to the server that holds it; nothing else is
    sent.
    """
    unsent = {placement.name: placement for placement in _updated(plan, local=False)}
    for index, op in numbered(program, "send"):
        if "delta" in op.arguments or "table" in op.arguments:
            continue  # changes_sent_once, row_gradients_sent_once
        names = tuple(refs(op.arguments["x"]))
        owner = (
            program.main.variables[names[0]].of
            if names and names[0] in program.main.variables
            else ""
        )
        placement = unsent.pop(owner, None)
        if placement is None:
            yield Violation(
                at(0, index, op),
                ", ".join(names),
                "it is sent a second time, or is not the gradient of an updated parameter",
            )
        elif not _is_sent_as(program, op, placement):
            yield Violation(
                at(0, index, op),
                ", ".join(names),
                f"expected the gradient of {owner} in {len(placement.slices)} slices",
            )
        elif op.arguments["endpoints"] != _expected_endpoints(program, placement):
            why = (
                f"expected {_expected_endpoints(program, placement)}, got "
                f"{op.arguments['endpoints']}"
            )
            yield Violation(at(0, index, op), ", ".join(names), why)
    for name in unsent:
        yield Violation("", f"{name}@GRAD", "it is never sent")


def changes_sent_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """The deltas of a k-step lane are sent in exactly one send, after the lane's last update: every
    slice of every parameter to the server that holds it, and the touched rows of every table to all
    servers.
    """
    found = [(index, op) for index, op in numbered(program, "send") if "delta" in op.arguments]
    lanes = [index for index, lane in enumerate(plan.lanes) if lane.kind.steps_on_trainer]
    if len(found) != len(lanes):
        where = at(0, *found[-1]) if found else ""
        yield Violation(
            where,
            "",
            f"expected {len(lanes)} sends of deltas, one for each k-step lane, got {len(found)}",
        )
        return
    for lane, (index, op) in zip(lanes, found, strict=True):
        for key, wanted in _expected_delta_send(program, plan, lane).items():
            got = op.inputs if key == "x" else op.arguments.get(key)
            if got != wanted:
                yield Violation(
                    at(0, index, op), ", ".join(op.inputs), f"{key}: expected {wanted}, got {got}"
                )
        names = {*(placement.name for placement in _in_lane(plan, lane)), *_tables(plan, lane)}
        for later, update in list(enumerate(program.main.ops))[index:]:
            if is_optimizer(update.type) and names & set(update.outputs):
                yield Violation(
                    at(0, later, update), update.outputs[0], f"it changes after {at(0, index, op)}"
                )


def _in_lane(plan: Plan, lane: int) -> list[Placement]:
    """The parameters that trainers update in a k-step lane."""
    return [placement for placement in _updated(plan, local=True) if placement.lane == lane]


def _tables(plan: Plan, lane: int) -> list[str]:
    return [table.name for table in plan.tables if table.lane == lane]


def _expected_delta_send(program: Program, plan: Plan, lane: int) -> dict[str, object]:
    """The arguments of a k-step lane's send: parameters slice by slice, then tables by server."""
    placements, tables, servers = _in_lane(plan, lane), _tables(plan, lane), _servers(program)
    slices = [slice_ for placement in placements for slice_ in placement.slices]
    return {
        "x": (*(placement.name for placement in placements), *tables),
        "delta": (
            *(delta_name(slice_) for slice_ in slices),
            *(f"{name}.delta.server_{server}" for name in tables for server in range(len(servers))),
        ),
        "endpoints": (
            *(e for placement in placements for e in _expected_endpoints(program, placement)),
            *(servers * len(tables)),
        ),
        "sections": (
            *(size for placement in placements for size in _sections(placement)),
            *((0,) * len(servers) * len(tables)),
        ),
        "mode": plan.lanes[lane].mode,
        "k_steps": plan.lanes[lane].k_steps,
    }


def sent_when_final(program: Program, plan: Plan) -> Iterator[Violation]:
    """A gradient is split and sent after the op that produces it, in its slices' sizes, and nothing
    writes it after that.
    """
    writes: dict[str, list[int]] = {}
    for index, op in enumerate(program.main.ops):
        for name in op.outputs:
            writes.setdefault(name, []).append(index)
    gradients = [
        (index, op)
        for index, op in numbered(program, "split", "send")
        if "delta" not in op.arguments
    ]
    for index, op in gradients:
        for name in op.inputs:
            last = max(writes.get(name, [len(program.main.ops)]))
            if last > index:
                yield Violation(
                    at(0, index, op), name, "it is sent before the op that produces it has run"
                )
    sizes = {
        placement.name: _sections(placement) for placement in plan.placements if placement.split
    }
    for index, op in gradients:
        name = next(iter(op.inputs), "")
        wanted = (
            sizes.get(program.main.variables[name].of) if name in program.main.variables else None
        )
        if "sections" in op.arguments and op.arguments["sections"] != wanted:
            yield Violation(
                at(0, index, op),
                name,
                f"expected sections {wanted}, got {op.arguments['sections']}",
            )


def _arrives_as(op: Op, placement: Placement) -> bool:
    """Whether a recv has a placement's slices, or the variable unsliced with the sections."""
    if "sections" in op.arguments:
        return op.outputs == (placement.name,) and op.arguments["sections"] == _sections(placement)
    return op.outputs == tuple(slice_.name for slice_ in placement.slices)


def parameters_received_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each parameter that servers update (at startup: each variable on servers) is received exactly
    once, from the servers that hold it.
    """
    due = plan.placements if is_startup(program) else _updated(plan, local=False)
    missing = {placement.name: placement for placement in due}
    for index, op in numbered(program, "recv"):
        name = str(op.arguments["param"])
        placement = missing.pop(name, None)
        if placement is None:
            yield Violation(
                at(0, index, op),
                name,
                "it is received a second time, or servers do not update it",
            )
        elif not _arrives_as(op, placement):
            yield Violation(
                at(0, index, op),
                name,
                f"expected {len(placement.slices)} slices, got {', '.join(op.outputs)}",
            )
        elif op.arguments["endpoints"] != _expected_endpoints(program, placement):
            why = (
                f"expected {_expected_endpoints(program, placement)}, got "
                f"{op.arguments['endpoints']}"
            )
            yield Violation(at(0, index, op), name, why)
    for name in missing:
        yield Violation("", name, "it is never received")


def received_after_sending(program: Program, plan: Plan) -> Iterator[Violation]:
    """Parameters are received after every gradient has been sent, and after the last op that reads
    them; the loss scale and averaged parameters, which follow the step's outcome, are updated at
    the end.
    """
    receives = numbered(program, "recv")
    if not receives:
        return
    first, first_op = receives[0]
    for index, op in numbered(program, "send"):
        if index > first:
            yield Violation(
                at(0, first, first_op),
                str(first_op.arguments["param"]),
                f"it is received before {at(0, index, op)}",
            )
    for index, op in list(enumerate(program.main.ops))[first:]:
        averages = is_optimizer(op.type) and bool({*op.outputs} & {*plan.averaged})
        if not (averages or op.type in _LAST):
            yield Violation(
                at(0, index, op),
                "",
                "it computes with parameters that may be those of the next step",
            )


def _barriers(program: Program, kind: str, wanted: int, own: bool = False) -> Iterator[Violation]:
    found = [
        (index, op)
        for index, op in numbered(program, kind)
        if bool(op.arguments.get("half_async")) == own
    ]
    if len(found) != wanted:
        where = at(0, *found[-1]) if found else ""
        what = f"{kind} of the trainer's own" if own else kind
        yield Violation(where, "", f"expected {wanted} {what}, got {len(found)}")


def barriers_exactly_where_due(program: Program, plan: Plan) -> Iterator[Violation]:
    """A program with a sync lane has one send_barrier between sends and receives and one
    fetch_barrier after them; one with a half_async lane a send_barrier of the trainer's own; others
    have none (a startup program has the fetch_barrier in every mode, and no send_barrier).
    """
    startup, barriers = is_startup(program), {lane.kind.send_barrier for lane in plan.lanes}
    fetches = any(lane.kind.fetch_barrier for lane in plan.lanes)
    yield from _barriers(program, "send_barrier", int(Barrier.ALL in barriers and not startup))
    yield from _barriers(
        program, "send_barrier", int(Barrier.LOCAL in barriers and not startup), own=True
    )
    yield from _barriers(program, "fetch_barrier", int(fetches or startup))
    order = {"send": 0, "send_barrier": 1, "recv": 2, "fetch_barrier": 3}
    latest = 0
    for index, op in numbered(program, *order):
        if order[op.type] < latest:
            yield Violation(
                at(0, index, op), "", "expected the order send, send_barrier, recv, fetch_barrier"
            )
        latest = max(latest, order[op.type])


def _concat_violations(
    index: int, op: Op, placement: Placement, arrived: set[str]
) -> Iterator[Violation]:
    expected = tuple(slice_.name for slice_ in placement.slices)
    if tuple(refs(op.arguments["x"])) != expected or op.arguments["axis"] != 0:
        yield Violation(
            at(0, index, op),
            placement.name,
            f"expected the slices {', '.join(expected)} in this order, along axis 0",
        )
    for name in expected:
        if name not in arrived:
            yield Violation(
                at(0, index, op),
                name,
                "it is concatenated before it has been received and fetch_barrier has passed",
            )


def concatenated_after_arrival(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each sliced parameter that is received is concatenated exactly once, from its slices in
    order, after they have arrived.
    """
    received = {
        str(op.arguments["param"])
        for _, op in numbered(program, "recv")
        if "sections" not in op.arguments
    }
    sliced = {
        placement.name: placement
        for placement in plan.placements
        if placement.split and placement.name in received
    }
    counts = Counter(
        op.outputs[0]
        for _, op in numbered(program, "concat")
        if op.outputs and op.outputs[0] in sliced
    )
    for name in sliced:
        if counts[name] != 1:
            yield Violation("", name, f"expected one concat of its slices, got {counts[name]}")
    waits = max((index for index, _ in numbered(program, "fetch_barrier")), default=-1)
    arrived: set[str] = set()
    for index, op in numbered(program, "recv", "concat"):
        if op.type == "recv":
            arrived.update(op.outputs)
        elif op.outputs and op.outputs[0] in sliced:
            yield from _concat_violations(
                index, op, sliced[op.outputs[0]], arrived if index > waits else set()
            )
