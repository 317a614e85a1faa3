"""``strategy.amp`` in a program: casts in the forward, and a loss scale where it is float16.

The step is captured again, with the model's forward in 16 bits: so the casts, and what they do in
backward, are those of an eager job.  With float16 the program is then::

    forward
    backward              of the loss's gradient times loss_scaling
    check_finite_and_unscale
                          the gradients without the scale, and whether one is not finite
    clipping, updates     skipped where one is not
    update_loss_scaling   the next scale; not where it is fixed

The scale and its counters are buffers, which are saved with the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from transpiler.inference.inference import renamed
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Storage, Variable, freeze, refs
from transpiler.ir.loss_scale import ScaleCourse
from transpiler.ir.ops import is_optimizer
from transpiler.ir.scaling_ops import CHECK, UPDATE
from transpiler.ir.updates import gradient_of, optimizer_ops, row_updates
from transpiler.plan.plan import Plan
from transpiler.precision.mixed_forward import MixedForward
from transpiler.precision.ops import MixedPrecision, precision_of
from transpiler.program import Program
from transpiler.rewrites.rewrites import Programs
from transpiler.strategy.strategy import DistributedStrategy

SCALE, GOOD, BAD, FOUND = (
    "loss_scaling",
    "loss_scaling@good_steps",
    "loss_scaling@bad_steps",
    "found_infinite",
)
_CLIPS = frozenset({"clip", "clip_by_norm", "scale_by"})


def in_16_bits(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """The programs with mixed precision.

    Raises:
        ValueError: this process did not capture the program, or it was changed since; or the step
            does not call the model.
    """
    main, precision = programs.main, precision_of(strategy)
    storage = main.storage
    if storage is None or storage.again is None or storage.captured != main.main:
        raise ValueError(
            "strategy.amp: expected a program as this process has captured it, whose step can be "
            "captured again with mixed precision; got one that was loaded, or changed"
        )
    made = list[MixedForward]()
    block = storage.again(partial(_mixed, replace(precision, course=None), made))
    if not made[0].calls:
        raise ValueError(
            "strategy.amp: expected a step that calls model(...), which runs in 16 bits; this one "
            "calls none, or only parts of it"
        )
    found = Programs(main.with_blocks(block), programs.startup)
    return found if precision.course is None else _scaled(found, storage, precision.course)


def check_scales(mains: Sequence[Program], plan: Plan) -> None:
    """Checks that a job's trainers can skip a step together.

    Raises:
        ValueError: there are several programs with a loss scale, or gradients that trainers
            average beside servers.
    """
    if not any(SCALE in program.main.variables for program in mains):
        return
    hint = "set amp_configs['use_pure_bf16'], which needs no loss scale"
    if len(mains) > 1:
        raise ValueError(f"strategy.amp: expected one program, got a list of {len(mains)}; {hint}")
    if plan.averaged:
        raise ValueError(
            f"strategy.amp: expected no parameters in mode 'collective', got {plan.averaged[0]!r}: "
            f"it is updated before the servers tell of an overflow on another trainer; {hint}"
        )


@contextmanager
def _mixed(precision: MixedPrecision, made: list[MixedForward], model: nn.Module) -> Iterator[None]:
    former = model.__dict__.pop("forward", None)
    made.append(MixedForward(model, precision))
    model.forward = made[-1]
    try:
        yield
    finally:
        del model.forward
        if former is not None:
            model.forward = former


# ---- the loss scale ----


def _scaled(programs: Programs, storage: Storage, course: ScaleCourse) -> Programs:
    """The programs with a loss scale."""
    main, startup = programs
    values = {SCALE: torch.tensor(course.init)}
    if course.dynamic:
        values |= {GOOD: torch.tensor(0), BAD: torch.tensor(0)}
    held = {
        name: Variable(name, (), str(value.dtype).removeprefix("torch."), Role.BUFFER)
        for name, value in values.items()
    }
    device = next((each.device for each in storage.tensors.values()), torch.device("cpu"))
    other = copy.copy(storage)
    other.tensors = {**storage.tensors, **{k: v.to(device) for k, v in values.items()}}
    other.together = (other,)
    inits = tuple(Op("init", {}, (name,)) for name in values)
    first = startup.main
    first = replace(first, variables=freeze({**first.variables, **held}), ops=(*first.ops, *inits))
    block = _with_scale(main.main, held)
    if course.dynamic:
        block = replace(block, ops=(*block.ops, _update(course)))
    return Programs(_program(main, block, other), _program(startup, first, other))


def _program(program: Program, block: Block, storage: Storage) -> Program:
    return replace(program.with_blocks(block, *program.blocks[1:]), storage=storage)


def _with_scale(block: Block, held: dict[str, Variable]) -> Block:
    """The block whose backward is scaled, and whose gradients are checked and unscaled."""
    raw = _raw_gradients(block)
    other = {name: f"{name}@SCALED" for name in raw}
    variables = {**block.variables, **held, FOUND: Variable(FOUND, (), "bool")}
    variables |= {
        other[name]: replace(block.variables[name], name=other[name], role=Role.TEMPORARY, of="")
        for name in raw
    }
    ops, seed, checked = list[Op](), _seed(block), False
    for number, op in enumerate(block.ops):
        follows = op.type in _CLIPS or op.type == "global_norm_scale" or is_optimizer(op.type)
        if follows and not checked:
            scaled: tuple[Argument, ...] = tuple(Ref(other[name]) for name in raw)
            ops.append(Op(CHECK, {"x": scaled, "scale": Ref(SCALE)}, (*raw, FOUND)))
            checked = True
        if follows:
            ops.append(op)
            continue
        op = renamed(op, other)
        ops.append(replace(op, outputs=tuple(other.get(name, name) for name in op.outputs)))
        if number == seed:
            name = op.outputs[0]
            other[name] = f"{name}@SCALED"
            variables[other[name]] = replace(variables[name], name=other[name])
            ops.append(
                Op("aten.mul.Tensor", {"self": Ref(name), "other": Ref(SCALE)}, (other[name],))
            )
    return replace(block, variables=freeze(variables), ops=tuple(ops))


def _raw_gradients(block: Block) -> list[str]:
    """The gradients that backward computes and updates use, clipped or not, in order."""
    clipped = {
        op.outputs[0]: next(refs(op.arguments["x"])) for op in block.ops if op.type in _CLIPS
    }
    used = [gradient_of(op) for op in (*optimizer_ops(block), *row_updates(block))]
    return list(dict.fromkeys(clipped.get(name, name) for name in used))


def _seed(block: Block) -> int:
    """The number of the op with which backward begins: ones in the shape of the loss."""
    return max(
        number
        for number, op in enumerate(block.ops)
        if op.type == "aten.ones_like" and op.arguments.get("self") == Ref("loss")
    )


def _update(course: ScaleCourse) -> Op:
    arguments: dict[str, Argument] = {
        "found_infinite": Ref(FOUND),
        "scale": Ref(SCALE),
        "good_steps": Ref(GOOD),
        "bad_steps": Ref(BAD),
        "incr_every_n_steps": course.incr_every,
        "decr_every_n_nan_or_inf": course.decr_every,
        "incr_ratio": course.incr_ratio,
        "decr_ratio": course.decr_ratio,
    }
    return Op(UPDATE, arguments, (SCALE, GOOD, BAD))
