"""What ``capture`` is given, checked; and the names that the step and the optimizer give to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from transpiler.tracing.input_spec import InputSpec

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
