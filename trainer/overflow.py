"""A step that overflowed on another trainer, told to this trainer's GradScaler.

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
from types import FrameType

import torch


def tell_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Makes the GradScaler whose ``step()`` is running see an overflow, as if it had found one.

    Args:
        optimizer: in whose ``step()`` this is called.

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
                    value.fill_(1.0)
                return True
        frame = frame.f_back
    return False
