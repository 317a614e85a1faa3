"""Captures a module, a step, an optimizer and one batch as a single-node program.

In order::

    check_arguments        the caller's arguments fit together        capture.py
    made_inputs            the sizes that stay free                   input_spec.py
    trace                  the step becomes an fx graph               trace.py
    smallest_batch         the graph computes what eager computes     smallest_batch.py
    emit                   the graph becomes variables and ops        emit.py
    single_node_programs   clipping and optimizer ops are added       programs.py
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradClip
from transpiler.ir.graph import PERSISTENT, Around, Block, Storage, freeze
from transpiler.program import Program
from transpiler.tracing.default_programs import set_defaults
from transpiler.tracing.equivalence_check import eager, resized, unchanged
from transpiler.tracing.input_spec import Inputs, InputSpec, made_inputs
from transpiler.tracing.programs import single_node_programs
from transpiler.tracing.tables import find_tables

# ---- capture arguments ----
#
# Checks of the arguments of ``capture``; the names that the step and the optimizer give to them.


Step = Callable[..., Any]


def check_arguments(
    model: Any, optimizer: Any, example: Any, inputs: Any, grad_clip: Any, scheduler: Any
) -> list[Tensor | InputSpec]:
    """Checks the arguments of ``capture`` by themselves and against each other.

    Returns:
        The example.

    Raises:
        TypeError: an argument has another type.
        ValueError: an input of the example has no row, the scheduler belongs to another optimizer,
            there is clipping or a scheduler without an optimizer, or a module has parameters
            without a shape.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"capture: expected an nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"capture: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if optimizer is None and (grad_clip is not None or scheduler is not None):
        odd = "scheduler" if grad_clip is None else "grad_clip"
        raise ValueError(f"capture: {odd}: expected none where there is no optimizer")
    _check_example(example, inputs)
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


def _check_example(example: Any, inputs: Any) -> None:
    if not isinstance(example, tuple | list) or not all(
        isinstance(each, Tensor | InputSpec) for each in example
    ):
        raise TypeError(
            "capture: expected a tuple of tensors (or InputSpecs) as the example, got "
            f"{type(example).__name__}"
        )
    if inputs is not None and (
        not isinstance(inputs, tuple | list)
        or not all(isinstance(each, InputSpec) for each in inputs)
    ):
        raise TypeError(f"capture: inputs: expected InputSpecs, got {type(inputs).__name__}")
    for index, tensor in enumerate(example):
        if isinstance(tensor, Tensor) and tensor.dim() and not len(tensor):
            raise ValueError(
                f"capture: expected at least one row in input {index} of the example, got none"
            )


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        lazy: Any = module if isinstance(module, nn.modules.lazy.LazyModuleMixin) else None
        if lazy is not None and lazy.has_uninitialized_params():
            raise ValueError(
                f"capture: {name or 'the model'} has parameters without a shape yet; run the "
                "model once first"
            )


def input_names(step: Step, batch: Sequence[Tensor | InputSpec]) -> list[str]:
    """The names of the program's inputs, one for each tensor of the batch.

    They are those of the step's parameters after the model; ``input_0``, ... for those behind
    ``*``.

    Raises:
        ValueError: the step takes fewer or more tensors than the batch has.
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


def parameter_groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """The index of each trained parameter's group, by the parameter's name, in the optimizer's
    order; none where there is no optimizer.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
    """
    if optimizer is None:
        return {}
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                if callable(getattr(parameter, "waiting", None)):
                    # a proxy parameter that another one has replaced: two modules share a table
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


# ---- capture ----


LOG = logging.getLogger(__name__)
Scheduler = torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau


def capture(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None = None,
    example: Sequence[Tensor | InputSpec] = (),
    *,
    inputs: Sequence[InputSpec] | None = None,
    grad_clip: GradClip | None = None,
    scheduler: Scheduler | None = None,
) -> tuple[Program, Program]:
    """Captures a step: the single-node main program and its startup program.

    Running the main program trains the module as the eager step does, to the bit on the CPU: the
    module's own tensors are the program's storage.  Without an optimizer the program is a forward
    one: it computes what the step computes, in the mode (``train()`` or ``eval()``) in which the
    module is now.  Capturing itself changes nothing: not the module, its gradients, the optimizer
    or a random generator.  The two programs become the default programs.

    Args:
        model: the module that is trained.
        step: ``step(model, *batch)`` returns a scalar loss, or a dict of tensors with the key
            "loss"; without an optimizer any tensor, which is called "output", or dict of tensors.
        optimizer: a torch.optim.Optimizer over parameters of ``model``; None: nothing is trained.
        example: one batch, a tuple of tensors.  Dimension 0 of every tensor stays free; all other
            sizes are fixed to the example's.  An :class:`InputSpec` in a tensor's place says what
            stays free, and an example is made up for it.
        inputs: an :class:`InputSpec` for each tensor of ``example``, which says what stays free.
        grad_clip: how gradients are clipped before the optimizer ops; None: they are not.
        scheduler: a torch.optim.lr_scheduler of this optimizer.  The caller keeps calling
            ``scheduler.step()``, and each run of the program reads the present hyper-parameters.

    Returns:
        The main program (forward, backward, clipping, optimizer ops), and the startup program,
        which gives the main program's variables the module's present values.

    Raises:
        TypeError: an argument has another type.
        ValueError: the arguments do not fit together, or the step cannot be captured faithfully:
            control flow or a size depends on data, the step branches on a free size or fixes one,
            or results differ from the eager step's.  The message names the line of the step.

    Example:
        >>> import torch
        >>> from pserver import InputSpec, capture
        >>> model = torch.nn.Linear(3, 1)
        >>> def step(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> main, startup = capture(model, step, optimizer, (torch.ones(4, 3), torch.ones(4, 1)))
        >>> [op.type for op in startup.main.ops]
        ['init', 'init']
        >>> [op.type for op in main.main.ops][-2:]
        ['sgd', 'sgd']
        >>> forward, _ = capture(model, lambda model, x: model(x), example=[InputSpec([None, 3])])
        >>> [op.type for op in forward.main.ops]
        ['aten.t', 'aten.addmm']
    """
    batch = check_arguments(model, optimizer, example, inputs, grad_clip, scheduler)
    given = made_inputs(input_names(step, batch), batch, inputs)
    program, startup = _captured(model, step, optimizer, given, grad_clip)
    assert program.storage is not None, "captured in this process"
    alone = "output" if optimizer is None else "loss"
    program.storage.evaluation = partial(
        _evaluation, program.main, program.storage, model, step, alone, given
    )
    program.storage.captured = program.main
    program.storage.again = partial(_again, model, step, optimizer, given, grad_clip)
    set_defaults(program, startup)
    return program, startup


def _captured(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    inputs: Inputs,
    grad_clip: GradClip | None = None,
) -> tuple[Program, Program]:
    """:func:`capture` with checked arguments."""
    # Tracing loads torch's compiler front end, which a process that only runs programs or serves
    # does not need: so these three stay function-level imports.
    from transpiler.tracing.emit import emit
    from transpiler.tracing.smallest_batch import smallest_batch
    from transpiler.tracing.trace import trace

    tables, own = find_tables(model, optimizer)
    groups = parameter_groups(model, optimizer)
    trained = [name for name, _ in model.named_parameters() if name in groups]
    with _without_onednn_lstm(model), unchanged(model) as restore:
        eager(model, step, trained, resized(inputs.batch, inputs.extents()))
        restore()
        of_tables = {table.name: table.modules for table in tables}
        found = trace(model, step, trained, _at_least_two(inputs), of_tables)
        restore()
        above_one = smallest_batch(model, step, restore, found, inputs, trained, tables)
    learnt = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = learnt if optimizer is None else set(groups)
    emitted = emit(found, model, inputs.names, parameters, above_one, tables)
    made = single_node_programs(model, optimizer, emitted, groups, grad_clip, tables, own)
    assert made[0].storage is not None, "captured in this process"
    made[0].storage.opaque = found.opaque
    return made


def _again(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    inputs: Inputs,
    grad_clip: GradClip | None,
    around: Around,
) -> Block:
    """The step again, captured inside ``around(model)``: block 0 of a program."""
    with around(model):
        return _captured(model, step, optimizer, inputs, grad_clip)[0].main


def _evaluation(
    main: Block, storage: Storage, model: nn.Module, step: Step, alone: str, inputs: Inputs
) -> Block:
    """The step in the module's evaluation mode: block 0 of a forward program.

    Args:
        main, storage: of the program that was captured first.
        alone: the name of the step's result, if that is a tensor.
    """

    def returning(model: nn.Module, *batch: Tensor) -> Any:
        result = step(model, *batch)
        return {alone: result} if isinstance(result, Tensor) else result

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        program, _ = _captured(model, returning, None, inputs)
    finally:
        for module, mode in modes:
            module.training = mode
    assert program.storage is not None, "captured in this process"
    storage.opaque = program.storage.opaque
    kept = {
        name: main.variables.get(name, variable) if variable.role in PERSISTENT else variable
        for name, variable in program.main.variables.items()
    }
    return replace(program.main, variables=freeze(kept))


@contextmanager
def _without_onednn_lstm(model: nn.Module) -> Iterator[None]:
    """Turns oneDNN off while a model with recurrent layers is captured.

    oneDNN's LSTM is one opaque kernel; without it torch runs, and tracing sees, ordinary ops.
    """
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


def _at_least_two(inputs: Inputs) -> Inputs:
    """The inputs to trace with: if a free dimension has an extent of 1, all free extents are
    doubled, because torch takes an extent of 1 for a constant.
    """
    if not any(extent == 1 for extents in inputs.extents() for extent in extents):
        return replace(inputs, batch=tuple(resized(inputs.batch, inputs.extents())))
    return replace(inputs, batch=tuple(resized(inputs.batch, inputs.extents(factor=2))))
