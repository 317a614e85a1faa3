"""Sums of gradients after a backward, in a few large tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from trainer.collective.all_reduce import AllReduce, all_reduce_over
from trainer.collective.buckets import buckets
from trainer.collective.world import current_peers, naming_trainers
from transpiler.strategy.exchange import GradientExchange

FUSED = GradientExchange(size_mb=25, last_mb=25)


def fused_allreduce_gradients(
    parameters: Iterable[torch.Tensor], hcg: HybridGroups | dist.ProcessGroup | None = None
) -> None:
    """Averages gradients that a backward inside ``no_sync()`` has left on each trainer, in a few
    large tensors.

    A gradient that only some trainers have counts as zero on the others; one that no trainer has
    stays None.

    Example::

        with model.no_sync():
            model(torch.ones(3, 4)).sum().backward()
        fused_allreduce_gradients(model.parameters())

    Args:
        parameters: the same, in the same order, on every trainer.
        hcg: None: over all trainers; or a group; or an object with ``get_data_parallel_group()``.

    Raises:
        ValueError: a gradient is sparse.
        PServerError: another trainer is lost.
    """
    current_peers()
    group = hcg.get_data_parallel_group() if isinstance(hcg, HybridGroups) else hcg
    share_gradients(parameters, group, 1.0 / dist.get_world_size(group))


def share_gradients(
    parameters: Iterable[torch.Tensor],
    group: dist.ProcessGroup | None,
    factor: float,
    exchange: GradientExchange = FUSED,
    sums: AllReduce | None = None,
) -> None:
    """Sums gradients over trainers, times a factor; see :func:`fused_allreduce_gradients`.

    Args:
        factor: multiplies each gradient before it is summed.
        exchange: which gradients travel together.
        sums: over these trainers; None: they are made here.

    Raises:
        ValueError: a gradient is sparse.
        PServerError: another trainer is lost.
    """
    chosen = [parameter for parameter in parameters if parameter.requires_grad]
    for number, parameter in enumerate(chosen):
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(
                "fused_allreduce_gradients: expected dense gradients, got a sparse one of "
                f"parameter {number}"
            )
    if not chosen:
        return
    with torch.no_grad(), naming_trainers():
        present = torch.tensor(
            [p.grad is not None for p in chosen], dtype=torch.uint8, device=chosen[0].device
        )
        dist.all_reduce(present, dist.ReduceOp.MAX, group)
        gradients = []
        for parameter, anywhere in zip(chosen, present.tolist(), strict=True):
            if anywhere:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
                gradients.append(parameter.grad)
        sizes = exchange.size_mb, exchange.last_mb, exchange.most
        order, _ = buckets(gradients, [False] * len(gradients), *sizes) if gradients else ([], [])
        sums = sums or all_reduce_over(group, exchange, chosen[0].device, "")
        sums.scale_and_sum(gradients, order, factor)


@runtime_checkable
class HybridGroups(Protocol):
    """An object with the group of the trainers that have the same part of a model."""

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group of the trainers with the same part of the model."""
        ...
