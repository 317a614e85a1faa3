"""The mean of gradients over replicas, in the update instead of in backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average_over(shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gives each shard the mean of its gradients over a group, in one all-reduce for each dtype.

    A gradient that some ranks lack counts as zero there; one that all lack stays missing.  All
    ranks of the group call this.

    Args:
        shards: the same on all ranks.
        group: the replicas.
    """
    ranks = dist.get_world_size(group)
    if not shards or ranks == 1:
        return
    device = shards[0].device
    have = torch.tensor([shard.grad is not None for shard in shards], device=device).int()
    dist.all_reduce(have, op=dist.ReduceOp.MAX, group=group)
    present = [shard for shard, found in zip(shards, have.tolist(), strict=True) if found]
    for shard in present:
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
    for dtype in dict.fromkeys(shard.dtype for shard in present):
        gradients = [s.grad for s in present if s.dtype == dtype and s.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / ranks
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(
            gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(mean.view(gradient.shape))
