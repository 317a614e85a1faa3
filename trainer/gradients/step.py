"""Gradients of a step before they are sent: overflow, clipping, division.

[Note: whose overflow]  Each trainer's GradScaler checks its own gradients before ``step()``, and
keeps its findings until ``update()``, which lowers the scale or lets it grow.  In sync mode no
trainer takes a step that overflowed on one of them, and the servers' answer reports that: all
scalers must take it for an overflow, or their scales will differ.  torch gives ``step()`` a copy,
the sum of the findings; its keyword ``grad_scaler``, which would give the scaler, is deprecated and
warns.  But the scaler is the caller: its frame is on the stack, with its findings in tensors that
``update()`` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor

from trainer.embedding.proxy import ProxyParameter
from transpiler.clip import ClipGradByValue, GradClip, apply
from transpiler.plan.plan import Plan

# ---- clipping ----
#
# Clipping on a trainer: its own gradients, in place.


def clip_in_place(
    clip: GradClip | None, gradients: Mapping[Tensor, Tensor], named: Collection[Tensor]
) -> None:
    """Clips the gradients of a step together.

    Args:
        clip: None clips nothing.
        gradients: by parameter.
        named: the parameters among them that are dense; a table's proxy stands for its rows, each
            of which clipping by value clamps.
    """
    clipped = dict(gradients)
    if isinstance(clip, ClipGradByValue):
        for parameter in [p for p in gradients if p not in named]:
            clipped.pop(parameter).clamp_(clip.min, clip.max)
    if clip is not None and clipped:
        results = apply(clip.to_clip(), list(clipped.values()))
        for gradient, result in zip(clipped.values(), results, strict=True):
            gradient.copy_(result)


# ---- division ----
#
# The division of a step's gradients between this process and the servers.


Gradients = dict[torch.Tensor, torch.Tensor]  # by parameter


@contextmanager
def hidden(gradients: Gradients) -> Iterator[None]:
    """Removes the gradients of these parameters in this context."""
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def tables_in(plan: Plan, lanes: Sequence[int]) -> list[str]:
    """The tables whose rows the steps of these lanes update."""
    return [table.name for table in plan.tables if table.lane in lanes]


def stepped_here(plan: Plan) -> dict[str, bool]:
    """Whether this process updates each parameter that servers hold by itself (the k-step
    modes).
    """
    lanes = {index for index, lane in enumerate(plan.lanes) if lane.kind.steps_on_trainer}
    return {each.name: each.lane in lanes for each in plan.placements if each.group is not None}


def divided(
    gradients: Gradients, names: Mapping[torch.Tensor, str], plan: Plan, held: Mapping[str, bool]
) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """The gradients of parameters that this process updates by itself, and of those that the
    servers update, by the parameter's name.

    Args:
        held: of the plan, see :func:`stepped_here`.

    Raises:
        ValueError: a gradient is of a parameter that was in no group when the trainers joined.
    """
    here: Gradients = {}
    there: dict[str, torch.Tensor] = {}
    for parameter, gradient in gradients.items():
        name = names.get(parameter)
        if name is not None and name in held and (held[name] or name not in plan.averaged):
            if held[name]:
                here[parameter] = gradient
            else:
                there[name] = gradient
        elif name not in plan.averaged and not isinstance(parameter, ProxyParameter):
            said = f"of shape {list(parameter.shape)}" if name is None else repr(name)
            raise ValueError(
                f"optimizer.step(): parameter {said} has a gradient, and was in no group of the "
                "optimizer when the trainers joined: give the optimizer its group from the start, "
                "frozen by requires_grad_(False), and unfreeze it when it is to be trained"
            )
    return here, there


# ---- changes ----
#
# Signs of a write to a gradient that moves no version.


FIRST_STEPS, EVERY = 3, 1000  # elements are compared at steps 1 to 3, and at every 1,000th
ELEMENTS = 1024  # of each gradient


def compares(step: int) -> bool:
    """Whether elements of gradients are compared in a step; the first is 1."""
    return step <= FIRST_STEPS or not step % EVERY


def elements_of(gradient: Tensor) -> Tensor:
    """Some elements of a gradient, [n], of real numbers: a view, where it can be."""
    flat = gradient.detach()._values() if gradient.is_sparse else gradient.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)]


# ---- overflow ----
#
# A torch.amp.GradScaler beside a distributed optimizer: its scale is taken out of the gradients,
# and a step that overflowed on another trainer is reported to it.


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler takes the step, which says so in the optimizer."""
    said = vars(optimizer)
    return said.get("grad_scale") is not None or said.get("found_inf") is not None


def unscale(optimizer: torch.optim.Optimizer, gradients: Iterable[torch.Tensor]) -> bool:
    """Takes GradScaler's scale out of the gradients, if they are scaled.

    Args:
        optimizer: the optimizer whose ``step()`` calls this.

    Returns:
        Whether a gradient is not finite.
    """
    said = vars(optimizer)  # where GradScaler writes
    scale, found = said.get("grad_scale"), said.get("found_inf")
    overflow = found is not None and bool(found.item())
    if scale is not None and not overflow:
        inverse = scale.double().reciprocal().float()
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))
    return overflow


def tell_scaler(optimizer: torch.optim.Optimizer, overflow: bool = True) -> bool:
    """Makes the GradScaler whose ``step()`` is running record an overflow, as if it had found one.

    Args:
        optimizer: the optimizer whose ``step()`` calls this.
        overflow: False clears an overflow that it has found.

    Returns:
        Whether there is such a scaler; without one the script does not scale.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler, stepped = frame.f_locals["self"], frame.f_locals["optimizer"]
            found = scaler._per_optimizer_states[id(stepped)]["found_inf_per_device"]
            if stepped is optimizer and found:
                for value in found.values():
                    value.fill_(float(overflow))
                return True
        frame = frame.f_back
    return False
