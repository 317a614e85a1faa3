"""A module, a training step, an optimizer and one batch become a single-node program.

The road: check what was given, ``trace`` the step, ``write`` the graph as ops, ``rehearse`` the
result beside the eager step before anybody trusts it, and add clipping and optimizer ops.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradClip
from transpiler.ir import rules
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Ruled, Storage, Variable, freeze
from transpiler.ir.rules import Clip
from transpiler.ir.sparse_rows import SparseRows
from transpiler.lower import lower
from transpiler.program import Program
from transpiler.tracing.default_programs import set_defaults
from transpiler.tracing.embedding_tables import Captured, as_compared, find_tables
from transpiler.tracing.equivalence_check import Result, buffers, eager, rehearse, rows, unchanged

if TYPE_CHECKING:
    from transpiler.tracing.emit import Emitted
    from transpiler.tracing.guards import Variant
    from transpiler.tracing.trace import Trace

LOG = logging.getLogger(__name__)
Step = Callable[..., Any]
Scheduler = torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau


def capture(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Tensor],
    *,
    grad_clip: GradClip | None = None,
    scheduler: Scheduler | None = None,
) -> tuple[Program, Program]:
    """The single-node main program of a training step, and the startup program that gives its
    variables the module's values.

    Running the main program trains the module, whose tensors are the storage, as the eager step
    does: to the bit on the CPU. Capturing changes nothing: not the module, its gradients, the
    optimizer or a random generator.

    Args:
        step: ``step(model, *batch)`` returns a scalar loss, or a dict of tensors with the key
            "loss".
        example: one batch; dimension 0 of every tensor stays free, all other sizes are fixed to the
            example's.
        grad_clip: applied to the gradients before the optimizer ops.
        scheduler: of this optimizer; the caller goes on calling ``scheduler.step()``, and each run
            sees the numbers it left.

    Raises:
        TypeError, ValueError: something given does not fit together, or the step cannot be captured
            faithfully: control flow or sizes that depend on data, a branch on the batch size, a
            size in dimension 0 that cannot stay free, results that differ from the eager step's.
            The message names the line of the step.
    """
    batch = _check(model, optimizer, example, grad_clip, scheduler)
    # Tracing loads torch's compiler front end: a process that only runs programs, or serves, does
    # without.
    from transpiler.tracing.emit import write
    from transpiler.tracing.trace import trace

    names = _input_names(step, batch)
    tables, own = find_tables(model, optimizer)
    groups = _groups(model, optimizer)
    names_in_order = [name for name, _ in model.named_parameters() if name in groups]
    with _recurrent(model), unchanged(model) as restore:
        eager(
            model,
            step,
            names_in_order,
            rows(batch, [len(tensor) if tensor.dim() else None for tensor in batch]),
        )
        restore()
        found = trace(
            model,
            step,
            names_in_order,
            names,
            _at_least_two(batch),
            {each.name: each.modules for each in tables},
        )
        restore()
        minimum = _prove(model, step, restore, found, names, names_in_order, batch, tables)
    written = write(found, model, names, set(groups), minimum, tables)
    program, startup = _programs(model, optimizer, written, groups, grad_clip, tables, own)
    set_defaults(program, startup)
    return program, startup


def _check(
    model: Any, optimizer: Any, example: Any, grad_clip: Any, scheduler: Any
) -> list[Tensor]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"capture: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"capture: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if (
        isinstance(example, Tensor)
        or not isinstance(example, tuple | list)
        or not all(isinstance(t, Tensor) for t in example)
    ):
        raise TypeError(
            f"capture: expected a tuple of tensors as the example, got {type(example).__name__}"
        )
    for index, tensor in enumerate(example):
        if tensor.dim() and not len(tensor):
            raise ValueError(
                f"capture: expected at least one row in input {index} of the example, got none"
            )
    if grad_clip is not None and not isinstance(
        grad_clip, ClipGradByValue | ClipGradByNorm | ClipGradByGlobalNorm
    ):
        raise TypeError(
            f"capture: expected a ClipGradBy... object as grad_clip, got {type(grad_clip).__name__}"
        )
    if scheduler is not None:
        if not isinstance(
            scheduler,
            torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau,
        ):
            raise TypeError(
                f"capture: expected a torch.optim.lr_scheduler, got {type(scheduler).__name__}"
            )
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                "capture: expected a scheduler of the optimizer that is captured, got one of "
                "another optimizer"
            )
    _check_modules(model)
    return list(example)


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        lazy: Any = module if isinstance(module, nn.modules.lazy.LazyModuleMixin) else None
        if lazy is not None and lazy.has_uninitialized_params():
            raise ValueError(
                f"capture: {name or 'the model'} has parameters without a shape yet; run the "
                "model once first"
            )


def _input_names(step: Step, batch: Sequence[Tensor]) -> list[str]:
    """The names of the step's parameters after the model; ``input_0``, ... for those behind ``*``.

    Raises:
        ValueError: the step does not take so many tensors.
    """
    parameters = list(inspect.signature(step).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in positional[1:]]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        named += [f"input_{index}" for index in range(len(named), len(batch))]
    needed = sum(1 for p in positional[1:] if p.default is p.empty)
    if not needed <= len(batch) <= len(named):
        wanted = ", ".join(named) or "nothing"
        raise ValueError(
            f"capture: expected an example for the step's parameters ({wanted}), got {len(batch)} "
            "tensors"
        )
    return named[: len(batch)]


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Parameter name -> its group, for the parameters that are trained, in the optimizer's order.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
    """
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                if callable(getattr(parameter, "waiting", None)):
                    # the anchor of a table that another one stands for since two modules share it
                    continue
                shape = tuple(parameter.shape)
                where = f"parameter {place} of the optimizer's group {index}, of shape {shape}"
                raise ValueError(
                    f"capture: expected parameters of the model in the optimizer, but {where}, is "
                    "not the model's"
                )
            if parameter.requires_grad:
                found[known[id(parameter)]] = index
    if not found:
        raise ValueError(
            "capture: expected an optimizer with at least one parameter that requires a gradient, "
            "got none"
        )
    return found


@contextmanager
def _recurrent(model: nn.Module) -> Iterator[None]:
    """oneDNN's LSTM is one opaque kernel; without it torch runs, and tracing sees, ordinary ops."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if not recurrent or not torch.backends.mkldnn.enabled:
        yield
        return
    LOG.info(
        "capture: the model holds a recurrent layer, so it is captured with oneDNN off, and "
        "equals eager training run so"
    )
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def _at_least_two(batch: Sequence[Tensor]) -> list[Tensor]:
    """The batch to trace with: torch takes an extent of 1 for a constant, so an example of one row
    is doubled.
    """
    single = any(tensor.dim() and len(tensor) == 1 for tensor in batch)
    return rows(
        batch,
        [None if not tensor.dim() else len(tensor) * (2 if single else 1) for tensor in batch],
    )


def _prove(
    model: nn.Module,
    step: Step,
    restore: Callable[[], None],
    found: Trace,
    names: Sequence[str],
    trained: Sequence[str],
    batch: Sequence[Tensor],
    tables: Sequence[Captured],
) -> int:
    """Rehearses at every size that matters; returns the smallest batch for which the program holds.

    Raises:
        ValueError: the program differs from the eager step.
    """
    from transpiler.tracing import guards

    captured = _runner(model, found, names, trained, tables)

    def run(*of: Variant) -> tuple[str, float]:
        sizes = [guards.sizes_at(found, variant.values) for variant in of]
        batches = [rows(batch, size) for size in sizes if size is not None]
        return rehearse(
            model, restore, batches, lambda given: eager(model, step, trained, given), captured
        )

    variants = guards.variants(found)
    worst, minimum = run(*[variant for variant in variants if variant.guard is None]), 1
    for variant in variants:
        if variant.guard is None:
            continue
        try:
            worst = max(worst, run(variant), key=lambda result: result[1])
        except Exception as error:
            restore()
            _judge(variant, error)
            minimum = 2
    if worst[0]:
        LOG.warning(
            "capture: %s differs from eager training by %.1e (relative): some kernel rounds "
            "differently",
            *worst,
        )
    return minimum


def _runner(
    model: nn.Module,
    found: Trace,
    names: Sequence[str],
    trained: Sequence[str],
    tables: Sequence[Captured],
) -> Callable[[Sequence[Tensor]], Result]:
    """The captured step as a function of a batch, on the module's own tensors."""
    from transpiler.tracing.emit import write

    written = write(found, model, names, set(trained), 1, tables)
    of_rows = {table.anchor: table for table in tables}
    keys = {
        f"{name}@GRAD": of_rows[name].gradient if name in of_rows else f"{name}@GRAD"
        for name in found.gradients
    }
    keys = {**{name: name for name in found.outputs}, **keys}
    held = {table.name: table.rows() for table in tables}
    kernels = {"sparse_table": lambda op, **settings: held[op.outputs[0]]}
    lowered = lower(written.ops, list(keys.values()), _device(model), kernels)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def captured(given: Sequence[Tensor]) -> Result:
        with torch.no_grad():
            values = lowered({**tensors, **dict(zip(names, given, strict=True))})
        kept: dict[str, Tensor] = {}
        for key, value in zip(keys, values, strict=True):
            found = isinstance(value, SparseRows)
            kept |= (
                as_compared(key.removesuffix("@GRAD"), value)
                if found
                else {key: value.detach().clone()}
            )
        return Result({**kept, **buffers(model)})

    return captured


def _judge(variant: Variant, error: Exception) -> None:
    """What failed at a size where a decision falls otherwise: a batch of one row may be ruled out,
    nothing else.

    Raises:
        ValueError: naming the line of the decision.
    """
    from transpiler.tracing.guards import branch_error

    assert variant.guard is not None, "called for decisions only"
    eager_refused = "cannot capture" not in str(error)
    if 1 not in variant.values.values() or not (variant.guard.internal or eager_refused):
        raise branch_error(variant.guard) from error
    LOG.info("capture: batches of one row are ruled out: %s", str(error).partition("\n")[0])


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _programs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    written: Emitted,
    groups: Mapping[str, int],
    grad_clip: GradClip | None,
    tables: Sequence[Captured],
    own: Sequence[Ruled],
) -> tuple[Program, Program]:
    variables, ops = dict(written.variables), list(written.ops)
    anchors = {table.anchor: table for table in tables}
    named = {
        name: anchors[name].name if name in anchors else name
        for name, _ in model.named_parameters()
    }
    present = [name for name in named.values() if f"{name}@GRAD" in variables]
    final = {name: f"{name}@GRAD" for name in present}
    if grad_clip is not None:
        final = _clip(grad_clip.to_clip(), present, variables, ops)
    for name, index in groups.items():
        if named[name] not in final:
            continue
        if name in anchors:
            ops += anchors[name].updates(final[named[name]])
        else:
            ops.append(_update(optimizer, name, index, final[name], variables))
    dense = {name: each for name, each in model.named_parameters() if name not in anchors}
    storage = Storage(
        {**dense, **dict(model.named_buffers())},
        optimizer,
        {table.name: table.modules for table in tables},
        own,
    )
    held = {
        v.name: v for v in variables.values() if v.role in (Role.PARAMETER, Role.BUFFER, Role.TABLE)
    }
    startup = tuple(Op("init", {}, (name,)) for name in held)
    return (
        Program((Block(0, freeze(variables), tuple(ops)),), storage=storage),
        Program((Block(0, freeze(held), startup),), storage=storage),
    )


def _clip(
    clip: Clip, names: Sequence[str], variables: dict[str, Variable], ops: list[Op]
) -> dict[str, str]:
    """Adds the clip ops, in the order of the module's parameters, as
    ``clip_grad_norm_(model.parameters())`` adds norms up.
    """
    clipped = {name: f"{name}@GRAD@CLIP" for name in names}
    shared: dict[str, Argument] = {}
    op_type = {"value": "clip", "norm": "clip_by_norm", "global_norm": "scale_by"}[clip.kind]
    if clip.kind == "global_norm":
        variables["global_norm@SCALE"] = Variable("global_norm@SCALE", (), "float32")
        grads = tuple(Ref(f"{name}@GRAD") for name in names)
        ops.append(
            Op("global_norm_scale", {"x": grads, "max_norm": clip.high}, ("global_norm@SCALE",))
        )
        shared = {"coefficient": Ref("global_norm@SCALE")}
    elif clip.kind == "value":
        shared = {"min": clip.low, "max": clip.high}
    else:
        shared = {"max_norm": clip.high}
    for name in names:
        grad = variables[f"{name}@GRAD"]
        variables[clipped[name]] = Variable(
            clipped[name], grad.shape, grad.dtype, Role.GRADIENT, name
        )
        ops.append(Op(op_type, {"x": Ref(grad.name), **shared}, (clipped[name],)))
    return clipped


def _update(
    optimizer: torch.optim.Optimizer,
    name: str,
    index: int,
    grad: str,
    variables: dict[str, Variable],
) -> Op:
    """The optimizer op of a parameter, whose states become variables."""
    rule = rules.rule_of(optimizer, optimizer.param_groups[index])
    arguments: dict[str, Argument] = {"param": Ref(name), "grad": Ref(grad)}
    param = variables[name]
    for state, like in rules.state_of(rule).items():
        full = f"{name}@{state}"
        variables[full] = Variable(
            full, param.shape if like else (), param.dtype if like else "float32", Role.STATE, name
        )
        arguments[state] = Ref(full)
    return Op(rule.type, {**arguments, "group": index, **rule.hparams, **rule.flags}, (name,))
