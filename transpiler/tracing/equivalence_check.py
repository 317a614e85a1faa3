"""The equivalence check: a captured step runs beside the eager step and must give the same bits.

``capture`` returns a program only after this check has passed at two batch sizes or more.  The
check finds what tracing cannot see: a checkpointed dropout, a number that the module counts in
Python, a hook on a parameter.  Afterwards the module, its gradients, the optimizer and every random
generator are as they were.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transpiler.ir.sparse_rows import SparseRows
from transpiler.tracing.tables import comparable, eager_gradient

# relative difference allowed where eager runs one kernel and the program several (GRU)
CLOSE = 1e-6
CLOSE_ON_A_GPU = 1e-4  # the same on a GPU, which adds sums up in no fixed order


@dataclass(frozen=True)
class StepResult:
    """The results of one step.

    Attributes:
        values: outputs and gradients, then the buffers after the step, by name and in the order in
            which they are compared.
    """

    values: Mapping[str, Tensor]


def resized(batch: Sequence[Tensor], sizes: Sequence[Sequence[int | None]]) -> list[Tensor]:
    """Copies of a batch's tensors with other extents: rows are repeated or left out.

    Args:
        sizes: the extents of each tensor; None leaves one as it is.
    """
    copies = []
    for tensor, extents in zip(batch, sizes, strict=True):
        copy = tensor.detach()
        for dim, size in enumerate(extents):
            if size is not None:
                places = torch.arange(size, device=copy.device) % copy.shape[dim]
                copy = copy.index_select(dim, places)
        copies.append(copy.clone())
    return copies


def results_of(result: Any) -> dict[str, Tensor]:
    """The results of a step that trains nothing, by name: "output" for a tensor alone.

    Raises:
        TypeError, ValueError: it is neither a tensor nor a dict of tensors.
    """
    found = {"output": result} if isinstance(result, Tensor) else result
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise TypeError(
            f"step: expected a tensor or a dict of tensors, got {type(result).__name__}"
        )
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"step: expected a dict of tensors, got {type(value).__name__} for {key!r}"
            )
    if not found:
        raise ValueError("step: expected at least one tensor, got none")
    return dict(found)


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The results of a step, as a dict with ``"loss"`` first.

    Raises:
        TypeError, ValueError: it is neither a tensor nor a dict of tensors with a scalar "loss".
    """
    found = {"loss": result} if isinstance(result, Tensor) else result
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise TypeError(
            "step: expected a scalar loss or a dict of tensors with the key 'loss', got "
            f"{type(result).__name__}"
        )
    if "loss" not in found:
        raise ValueError(
            f"step: expected a dict with the key 'loss', got the keys {', '.join(found) or 'none'}"
        )
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"step: expected a dict of tensors, got {type(value).__name__} for {key!r}"
            )
    loss = found["loss"]
    if loss.dim() and any(size != 1 for size in loss.shape):
        raise ValueError(f"step: expected a scalar loss, got a tensor of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            "step: expected a loss that depends on a trainable parameter, got one without gradient"
        )
    return {"loss": loss, **{key: value for key, value in found.items() if key != "loss"}}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restores the module, its gradients and the random generators at the end.

    Yields:
        A function that restores them in between.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    members = [(vars(each), _members(each)) for each in (*model.modules(), *model.parameters())]
    devices = sorted({tensor.get_device() for tensor in tensors.values() if tensor.is_cuda})
    generators = (torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices])
    others = (random.getstate(), np.random.get_state())

    def restore() -> None:
        for present, found in members:
            _restore_members(present, found)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if not _same(tensor.detach(), copies[name]):
                    tensor.detach().copy_(copies[name])
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name]
        torch.set_rng_state(generators[0])
        for device, state in zip(devices, generators[1], strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(others[0])
        np.random.set_state(others[1])

    try:
        yield restore
    finally:
        restore()


def _members(owner: Any) -> dict[str, tuple[Any, Any]]:
    """The attributes of a module or parameter, each with a copy if it is a plain container (the
    dict of a module's parameters, say).
    """
    containers = (dict, OrderedDict, list, set)
    return {
        key: (value, value.copy() if type(value) in containers else None)
        for key, value in vars(owner).items()
    }


def _restore_members(present: dict[str, Any], found: Mapping[str, tuple[Any, Any]]) -> None:
    for key in set(present) - set(found):
        del present[key]
    for key, (value, copy) in found.items():
        present[key] = value
        if isinstance(copy, list):
            value[:] = copy
        elif copy is not None:
            value.clear()
            value.update(copy)


def plain_members(model: nn.Module) -> dict[str, Any]:
    """The numbers and texts that the modules hold as Python attributes."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def eager(
    model: nn.Module, step: Callable[..., Any], trained: Sequence[str], batch: Sequence[Tensor]
) -> StepResult:
    """Runs the eager step: forward and, where something is trained, backward.

    Raises:
        ValueError: it draws from ``random`` or ``numpy.random``.
    """
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    before = _python_generators()
    with torch.enable_grad():
        result = step(model, *batch)
        outputs = outputs_of(result) if trained else results_of(result)
        kept = {name: value.detach().clone() for name, value in outputs.items()}
        if trained:
            outputs["loss"].backward()  # type: ignore[no-untyped-call]  # torch's stubs
    if before != _python_generators():
        raise ValueError(
            "cannot capture this step: it draws from random or numpy.random; draw from torch's "
            "generator instead"
        )
    for name in trained:
        grad = eager_gradient(parameters[name])
        if isinstance(grad, SparseRows):
            kept |= comparable(name, grad)
        elif grad is not None:
            kept[f"{name}@GRAD"] = grad.detach().clone()
    return StepResult({**kept, **buffers(model)})


def _python_generators() -> tuple[object, ...]:
    """The states of ``random`` and of numpy's global generator, in a form that can be compared."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict), "asked for as a dict"
    return (random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"])


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers and frozen parameters, which a step may change without training."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    return {
        name: value.detach().clone()
        for name, value in {**frozen, **dict(model.named_buffers())}.items()
    }


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    if not left.is_floating_point():
        return False
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(), right.nan_to_num()
    )


def _distance(left: Tensor, right: Tensor) -> float:
    if left.shape != right.shape or left.dtype != right.dtype or not left.is_floating_point():
        return float("inf")
    norm = float(left.double().norm())
    distance = float((left.double() - right.double()).norm())
    return distance / norm if norm else float("inf")


def _bound(tensor: Tensor) -> float:
    return CLOSE_ON_A_GPU if tensor.is_cuda else CLOSE


def _noise(result: StepResult) -> float:
    """The 2-norm that rounding alone may leave in any one gradient.

    Some gradients are zero in exact arithmetic (the bias of attention's keys has such a one).  They
    hold only rounding errors, which no relative bound fits.
    """
    gradients = [
        value
        for name, value in result.values.items()
        if name.endswith("@GRAD") and value.is_floating_point()
    ]
    if not gradients:
        return 0.0
    norm = float(torch.stack([value.double().norm() for value in gradients]).norm())
    return norm * min(torch.finfo(value.dtype).eps for value in gradients)


def difference(expected: StepResult, came: StepResult) -> tuple[str, float]:
    """The first variable that differs, and by how much (relative, 2-norm); ("", 0.0) where the bits
    are the same.
    """
    names = dict.fromkeys([*expected.values, *came.values])
    first, largest, noise = "", 0.0, _noise(expected)
    for name in names:
        left, right = expected.values.get(name), came.values.get(name)
        if left is None or right is None:
            return name, float("inf")
        if not _same(left, right):
            distance = _distance(left, right)
            if name.endswith("@GRAD") and distance * float(left.double().norm()) <= noise:
                distance = min(distance, _bound(left))
            if distance > _bound(left):
                return name, distance
            first, largest = first or name, max(largest, distance)
    return first, largest


def check_equivalence(
    model: nn.Module,
    restore: Callable[[], None],
    batches: Sequence[Sequence[Tensor]],
    eagerly: Callable[[Sequence[Tensor]], StepResult],
    captured: Callable[[Sequence[Tensor]], StepResult],
) -> tuple[str, float]:
    """Runs the same batches, one after the other, through both forms of the step.

    The parameters change a little in between.

    Args:
        restore: restores the module and the random generators, as given by :func:`unchanged`.
        eagerly: the eager step, as a function of a batch.
        captured: the captured step, as a function of a batch.

    Returns:
        A variable that differs by no more than rounding, and by how much; ("", 0.0) where the bits
        are the same.

    Raises:
        ValueError: the two differ by more, or the module changes one of its Python attributes at
            every call; the message names the variable or the attribute.
    """
    expected, members = [], []
    for batch in batches:
        expected.append(eagerly([tensor.clone() for tensor in batch]))
        members.append(plain_members(model))
        _perturb(model)
    restore()
    for key, value in members[-1].items():
        if len(members) > 1 and members[-2].get(key, value) != value:
            raise ValueError(
                f"cannot capture this step: it changes the module's attribute {key} at every "
                "call; make it a buffer"
            )
    worst = ("", 0.0)
    for batch, wanted in zip(batches, expected, strict=True):
        name, by = difference(wanted, captured([tensor.clone() for tensor in batch]))
        if by > (_bound(wanted.values[name]) if name in wanted.values else 0.0):
            raise ValueError(_explain(name, by, batch))
        worst = max(worst, (name, by), key=lambda found: found[1])
        _perturb(model)
    restore()
    return worst


def _perturb(model: nn.Module) -> None:
    """Scales every parameter a little, so that a value that tracing took for a constant shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1.015625)


def _explain(name: str, by: float, batch: Sequence[Tensor]) -> str:
    size = next((len(tensor) for tensor in batch if tensor.dim()), 0)
    return (
        f"cannot capture this step: {name} differs from the eager step by {by:.1e} (relative) "
        f"with {size} rows. Likely causes: "
        "activation checkpointing together with dropout, a hook that changes gradients, a branch "
        "on a size, "
        "or a number that the module or the step keeps in Python"
    )
