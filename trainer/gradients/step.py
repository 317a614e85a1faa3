"""A torch.amp.GradScaler beside an optimizer of ours: its scale is taken out of the gradients, and
it is told of a step that overflowed on another trainer.

[Note: whose overflow]  Each trainer's GradScaler looks at its own gradients before ``step()``, and
keeps what it found until ``update()``, which lowers the scale or lets it grow.  In sync mode a step
that overflowed on one trainer is nobody's step, and the servers' answer says so: all scalers must
take it for an overflow, or their scales part.  torch gives ``step()`` the sum of what was found, a
copy; its keyword ``grad_scaler``, which would give the scaler, is deprecated and warns.  But the
scaler is the caller: its frame is on the stack, and in it what it found, in tensors that
``update()`` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch


def unscale(
    optimizer: torch.optim.Optimizer, gradients: Iterable[torch.Tensor], left: bool
) -> bool:
    """Takes GradScaler's scale out of the gradients, where they come scaled.

    Args:
        optimizer: in whose ``step()`` this is called.
        left: whether some gradients have left already.

    Returns:
        Whether one is not finite.

    Raises:
        RuntimeError: gradients have left with the scale in them.
    """
    scale = getattr(optimizer, "grad_scale", None)
    found = getattr(optimizer, "found_inf", None)
    overflow = found is not None and bool(found.item())
    if left and scale is not None:
        raise RuntimeError(
            "overlap: the gradients have left with GradScaler's scale in them; leave overlap off"
        )
    if scale is not None and not overflow:
        inverse = scale.double().reciprocal().float()
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))
    return overflow


def tell_scaler(optimizer: torch.optim.Optimizer, overflow: bool = True) -> bool:
    """Makes the GradScaler whose ``step()`` is running see an overflow, as if it had found one.

    Args:
        optimizer: in whose ``step()`` this is called.
        overflow: False makes it see none, where it has found one.

    Returns:
        Whether there is such a scaler; without one the script scales nothing.
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
