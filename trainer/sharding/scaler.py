"""A GradScaler for the optimizer of a sharded model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from trainer.sharding.optimizer import ShardedOptimizer


class SharedGradScaler(ShardedGradScaler):
    """Torch's sharded GradScaler: all ranks skip a step that one of them has to skip.

    If the optimizer has copies of the model's gradients on the host, the model's gradients are
    unscaled, too, so that a script may clip or read them.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale; see ``torch.amp.GradScaler``."""
        shards = optimizer.shards if isinstance(optimizer, ShardedOptimizer) else None
        if shards is not None:
            shards.refresh()
        super().unscale_(optimizer)
        if shards is not None and self._scale is not None:
            shards.multiply_gradients(self._scale.double().reciprocal().float())

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, Tensor]:
        """Unscales gradients on the host safely: torch's method copies the scale to the host
        without waiting for it, and reads it at once.
        """
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        if any(each is not None and each.device.type == "cpu" for each in gradients):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found: dict[torch.device, Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        return found
