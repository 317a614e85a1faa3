"""The laws of a trainer's programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from transpiler.laws import Fault, at, numbered
from transpiler.ops import is_optimizer
from transpiler.placement import name_beside
from transpiler.plan import Placement, Plan
from transpiler.program import Op, Program, Role, refs


def is_startup(program: Program) -> bool:
    """Whether a trainer's program is its startup program: the one that initialises."""
    return any(op.type in ("init", "fake_init") for op in program.main.ops)


def _updated(plan: Plan) -> list[Placement]:
    return [placement for placement in plan.placements if placement.group is not None]


def _expected_endpoints(program: Program, placement: Placement) -> tuple[str, ...]:
    assert program.deployment is not None
    return tuple(program.deployment.endpoints[piece.server] for piece in placement.slices)


def no_update_on_a_trainer(program: Program, plan: Plan) -> Iterator[Fault]:
    """No optimizer op and no optimizer state is left on a trainer, nor a clip op where the servers clip."""
    for index, op in enumerate(program.main.ops):
        if is_optimizer(op.type):
            yield Fault(at(0, index, op), next(iter(op.outputs), ""), "the servers update this parameter")
        if plan.clips_on_servers and op.type in ("clip", "clip_by_norm", "global_norm_scale", "scale_by"):
            yield Fault(at(0, index, op), next(iter(op.outputs), ""), "the servers clip the merged gradient")
    for variable in program.main.variables_of(Role.STATE):
        yield Fault("", variable.name, "the servers hold this state")


def _is_sent_as(program: Program, names: tuple[str, ...], placement: Placement) -> bool:
    """Whether these are the variables in which a placement's gradient is sent."""
    if placement.split:
        return names == tuple(name_beside(placement, piece, "GRAD") for piece in placement.slices)
    variable = program.main.variables.get(names[0]) if len(names) == 1 else None
    return variable is not None and variable.role is Role.GRADIENT and variable.of == placement.name


def sent_exactly_once(program: Program, plan: Plan) -> Iterator[Fault]:
    """Each gradient is sent exactly once, whole, every slice to the server that holds it; nothing else is sent."""
    unsent = {placement.name: placement for placement in _updated(plan)}
    for index, op in numbered(program, "send"):
        names = tuple(refs(op.arguments["x"]))
        owner = program.main.variables[names[0]].of if names and names[0] in program.main.variables else ""
        placement = unsent.pop(owner, None)
        if placement is None:
            yield Fault(at(0, index, op), ", ".join(names), "it is sent a second time, or is no gradient of an updated parameter")
        elif not _is_sent_as(program, names, placement):
            yield Fault(at(0, index, op), ", ".join(names), f"expected the gradient of {owner} in {len(placement.slices)} slices")
        elif op.arguments["endpoints"] != _expected_endpoints(program, placement):
            why = f"expected {_expected_endpoints(program, placement)}, got {op.arguments['endpoints']}"
            yield Fault(at(0, index, op), ", ".join(names), why)
    for name in unsent:
        yield Fault("", f"{name}@GRAD", "it is never sent")


def sent_when_final(program: Program, plan: Plan) -> Iterator[Fault]:
    """A gradient is split and sent after the op that produces it, and nothing writes it after that."""
    writes: dict[str, list[int]] = {}
    for index, op in enumerate(program.main.ops):
        for name in op.outputs:
            writes.setdefault(name, []).append(index)
    for index, op in numbered(program, "split", "send"):
        for name in op.inputs:
            last = max(writes.get(name, [len(program.main.ops)]))
            if last > index:
                yield Fault(at(0, index, op), name, "it leaves before the op that produces it has run")
    for index, op in numbered(program, "split"):
        elements = [piece.end - piece.begin for placement in plan.placements for piece in placement.slices if placement.split
                    and name_beside(placement, piece, "GRAD") in op.outputs]  # fmt: skip
        if op.arguments["sections"] != tuple(elements):
            yield Fault(at(0, index, op), ", ".join(op.inputs), f"expected sections {elements}, got {op.arguments['sections']}")


def parameters_received_once(program: Program, plan: Plan) -> Iterator[Fault]:
    """Each updated parameter (at startup: each variable on servers) is received exactly once, from the servers that hold it."""
    missing = {placement.name: placement for placement in (plan.placements if is_startup(program) else _updated(plan))}
    for index, op in numbered(program, "recv"):
        name = str(op.arguments["param"])
        placement = missing.pop(name, None)
        if placement is None:
            yield Fault(at(0, index, op), name, "it is received a second time, or is nothing that servers update")
        elif op.outputs != tuple(piece.name for piece in placement.slices):
            yield Fault(at(0, index, op), name, f"expected {len(placement.slices)} slices, got {', '.join(op.outputs)}")
        elif op.arguments["endpoints"] != _expected_endpoints(program, placement):
            why = f"expected {_expected_endpoints(program, placement)}, got {op.arguments['endpoints']}"
            yield Fault(at(0, index, op), name, why)
    for name in missing:
        yield Fault("", name, "it is never received")


def received_after_sending(program: Program, plan: Plan) -> Iterator[Fault]:
    """Parameters are received after every gradient has been sent, and after the last op that reads them."""
    receives = numbered(program, "recv")
    if not receives:
        return
    first, first_op = receives[0]
    for index, op in numbered(program, "send"):
        if index > first:
            yield Fault(at(0, first, first_op), str(first_op.arguments["param"]), f"it is received before {at(0, index, op)}")
    for index, op in list(enumerate(program.main.ops))[first:]:
        if op.type not in ("recv", "fetch_barrier", "concat", "send_barrier", "send"):
            yield Fault(at(0, index, op), "", "it computes with parameters that may be of the next step")


def _barriers(program: Program, kind: str, wanted: int) -> Iterator[Fault]:
    found = numbered(program, kind)
    if len(found) != wanted:
        where = at(0, *found[-1]) if found else ""
        yield Fault(where, "", f"expected {wanted} {kind}, got {len(found)}")


def barriers_exactly_in_sync(program: Program, plan: Plan) -> Iterator[Fault]:
    """In sync mode one send_barrier stands between sends and receives, one fetch_barrier after them; in async mode there is none
    (a startup program has the fetch_barrier in every mode, and no send_barrier)."""
    startup = is_startup(program)
    yield from _barriers(program, "send_barrier", int(plan.mode == "sync" and not startup))
    yield from _barriers(program, "fetch_barrier", int(plan.mode == "sync" or startup))
    order = {"send": 0, "send_barrier": 1, "recv": 2, "fetch_barrier": 3}
    latest = 0
    for index, op in numbered(program, *order):
        if order[op.type] < latest:
            yield Fault(at(0, index, op), "", "expected the order send, send_barrier, recv, fetch_barrier")
        latest = max(latest, order[op.type])


def _concat_faults(index: int, op: Op, placement: Placement, arrived: set[str]) -> Iterator[Fault]:
    expected = tuple(piece.name for piece in placement.slices)
    if tuple(refs(op.arguments["x"])) != expected or op.arguments["axis"] != 0:
        yield Fault(at(0, index, op), placement.name, f"expected the slices {', '.join(expected)} in this order, along axis 0")
    for name in expected:
        if name not in arrived:
            yield Fault(at(0, index, op), name, "it is put together before it has been received and fetch_barrier has passed")


def concatenated_after_arrival(program: Program, plan: Plan) -> Iterator[Fault]:
    """Each sliced parameter that is received is put together exactly once, from its slices in order, after they have arrived."""
    received = {str(op.arguments["param"]) for _, op in numbered(program, "recv")}
    sliced = {placement.name: placement for placement in plan.placements if placement.split and placement.name in received}
    counts = Counter(op.outputs[0] for _, op in numbered(program, "concat") if op.outputs and op.outputs[0] in sliced)
    for name in sliced:
        if counts[name] != 1:
            yield Fault("", name, f"expected one concat of its slices, got {counts[name]}")
    waits = max((index for index, _ in numbered(program, "fetch_barrier")), default=-1)
    arrived: set[str] = set()
    for index, op in numbered(program, "recv", "concat"):
        if op.type == "recv":
            arrived.update(op.outputs)
        elif op.outputs and op.outputs[0] in sliced:
            yield from _concat_faults(index, op, sliced[op.outputs[0]], arrived if index > waits else set())


def parameters_initialised(program: Program, plan: Plan) -> Iterator[Fault]:
    """A startup program initialises each variable that servers hold exactly once: trainer 0 gives these values to them."""
    counts = Counter(name for _, op in numbered(program, "init", "fake_init") for name in op.outputs)
    for placement in plan.placements:
        if counts[placement.name] != 1:
            yield Fault("", placement.name, f"expected one init, got {counts[placement.name]}")
