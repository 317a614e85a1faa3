"""Deep gradient compression among trainers without servers: positions and values in place of an
all-reduce.

Every trainer gathers what all have sent of the large parameters, and adds it up in the order of the
trainers: the mean is the same on all, to the bit.  A trainer receives N times what it sends, so
this pays while sparsity is well above 1 - 1/N.  Small gradients are averaged whole, in the same
call: nothing leaves during backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pserver.errors import FingerprintMismatch
from trainer.collective.fused_gradients import fused_allreduce_gradients
from trainer.collective.world import current_peers, naming_trainers
from trainer.gradients.dgc import DeepGradientCompression
from transpiler.optim.dgc import Compressed, Ramp


def check_alike(ramp: Ramp) -> None:
    """Compares the ramps of all trainers, who gather equally many elements.

    Raises:
        FingerprintMismatch: another trainer's differs.
    """
    peers = current_peers()
    for rank, other in enumerate(peers.exchange("dgc", str(ramp), range(peers.size))):
        if other != str(ramp):
            raise FingerprintMismatch(
                f"strategy.dgc_configs: trainer {rank} has {other}, trainer {peers.rank} has {ramp}"
            )


def means_of(
    dgc: DeepGradientCompression, parameters: Sequence[Tensor], step: int, overflow: bool
) -> dict[Tensor, Tensor] | None:
    """One step's means over all trainers; every trainer calls this.

    A trainer without a gradient for a parameter adds zeros to its mean, and keeps what it has.

    Args:
        dgc: this trainer's; its step is not ended.
        parameters: that are trained, in the same order on every trainer; ``.grad`` of the small
            ones becomes the mean.
        step: of the job.
        overflow: a gradient of this trainer is not finite.

    Returns:
        The means of the large ones that some trainer has a gradient for; None: some trainer's step
        overflowed.

    Raises:
        PServerError: another trainer is lost.
    """
    have = torch.tensor([*(p.grad is not None for p in parameters), overflow], dtype=torch.uint8)
    with naming_trainers():
        dist.all_reduce(have, dist.ReduceOp.MAX)
    if have[-1]:
        return None
    large = dgc.groups()
    fused_allreduce_gradients([p for p in parameters if p not in large])
    sent = dgc.compress({p: p.grad for p in parameters if p.grad is not None}, step)
    found = [p for p, anywhere in zip(parameters, have, strict=False) if anywhere and p in large]
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in found:
        alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    means: dict[Tensor, Tensor] = {}
    with naming_trainers():
        for own in alike.values():
            kept = {p: dgc.ramp.kept(p.numel(), step) for p in own}
            means |= (
                _of_elements(sent, kept) if dgc.ramp.stage(step) is not None else _whole(sent, own)
            )
    return means


def _whole(sent: Mapping[Tensor, Compressed], own: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The means before the ramp: an all-reduce."""
    parts = [sent[p].values if p in sent else torch.zeros_like(p) for p in own]
    flat = _flatten_dense_tensors(parts)  # type: ignore[no-untyped-call]  # torch's own
    flat = flat.clone() if len(parts) == 1 else flat  # of one tensor it is a view
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    means = _unflatten_dense_tensors(flat, parts)  # type: ignore[no-untyped-call]  # torch's own
    return dict(zip(own, means, strict=True))


def _of_elements(
    sent: Mapping[Tensor, Compressed], kept: Mapping[Tensor, int | None]
) -> dict[Tensor, Tensor]:
    """The means of elements: two gathers, of all positions and of all values."""
    indices, values = [], []
    for parameter, count in kept.items():
        one = sent.get(parameter)
        if one is None or one.indices is None:
            indices.append(torch.arange(count or 0, device=parameter.device, dtype=torch.int32))
            values.append(torch.zeros(count or 0, device=parameter.device, dtype=parameter.dtype))
        else:
            indices.append(one.indices.int())
            values.append(one.values)
    sizes = [len(each) for each in values]
    all_indices, all_values = _gathered(torch.cat(indices)), _gathered(torch.cat(values))
    means = {p: torch.zeros_like(p, memory_format=torch.contiguous_format) for p in kept}
    for theirs, there in zip(all_values, all_indices, strict=True):
        split = zip(torch.split(theirs, sizes), torch.split(there, sizes), strict=True)
        for mean, (part, where) in zip(means.values(), split, strict=True):
            mean.view(-1).index_add_(0, where.long(), part)
    return {p: mean.div_(len(all_values)) for p, mean in means.items()}


def _gathered(mine: Tensor) -> list[Tensor]:
    """Every trainer's, of one size."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return every
