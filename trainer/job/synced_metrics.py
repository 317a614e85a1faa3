"""``fleet.sync``: merges a metric over the samples of all trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from trainer.collective.values import TrainerValues
from trainer.job.job import present
from trainer.job.shared_values import values_of

M = TypeVar("M")
# torchmetrics' reductions that an all_reduce computes, by the names of its functions
REDUCED = {
    "dim_zero_sum": "sum",
    "dim_zero_mean": "mean",
    "dim_zero_max": "max",
    "dim_zero_min": "min",
}
PUT_TOGETHER = "dim_zero_cat"


@runtime_checkable
class Merging(Protocol):
    """A metric of ``trainer.metrics``."""

    def merge(self, values: TrainerValues) -> None:
        """Takes in the samples of all trainers."""
        ...


def sync(metric: M) -> M:
    """Takes the samples of all trainers into a metric of torchmetrics, or of ``trainer.metrics``.

    All trainers call it with the same metric; afterwards ``metric.compute()`` gives the same on
    each of them, as after all samples of all trainers, and needs no other trainer.  A metric of
    torchmetrics is then synced in its own sense: it takes no samples before ``reset()`` or
    ``unsync()``, which restores this trainer's own samples.

    Args:
        metric: a ``torchmetrics.Metric``, also a wrapper or a ``MetricCollection``, on any device.

    Returns:
        The same metric.

    Raises:
        TypeError: it is not a metric.
        ValueError: the trainers' metrics differ.
        RuntimeError: it has been synced already; or there are servers, and
            ``distributed_optimizer`` has not been called.
        PServerError: another trainer is lost.

    Example::

        metric = torchmetrics.AUROC("binary")
        for x, y in fleet.shard(loader):
            metric.update(model(x).sigmoid(), y)
        print(fleet.sync(metric).compute())
        metric.reset()
    """
    return synced(metric, values_of(present()))


def synced(metric: M, values: TrainerValues) -> M:
    """See :func:`sync`."""
    if isinstance(metric, Merging):
        metric.merge(values)
        return metric
    found = _torchmetrics(metric)
    if not found:
        raise TypeError(
            "fleet.sync: expected a metric of torchmetrics or trainer.metrics, got "
            f"{type(metric).__name__}"
        )
    if any(each._is_synced for each in found):
        raise RuntimeError(
            f"fleet.sync: expected a {type(metric).__name__} of this trainer's samples, got one "
            "that is synced already: call reset() or unsync() first"
        )
    for each in found:
        _merge(each, values)
    return metric


def _torchmetrics(metric: Any) -> list[Any]:
    """The metrics in this one, including itself: a collection or a wrapper holds others."""
    if not isinstance(metric, nn.Module):
        return []
    if isinstance(metric, nn.ModuleDict) and hasattr(metric, "compute_groups"):
        list(metric.values())  # each of a group gets the group's states
    return [each for each in metric.modules() if hasattr(each, "_reductions")]


def _merge(metric: Any, values: TrainerValues) -> None:
    """Merges one metric's states, each by the metric's declared reduction."""
    metric._computed = None
    metric._update_count = max(metric._update_count, 1)  # some trainer has updated it
    if not metric._reductions:  # it computes with other metrics
        return
    cache = metric._copy_state_dict()
    for name, reduction in metric._reductions.items():
        setattr(metric, name, _merged(getattr(metric, name), reduction, values, metric.device))
    metric._cache, metric._is_synced = cache, True
    # it neither syncs by itself when it is computed, nor takes this one back afterwards
    metric._to_sync = metric._should_unsync = False


def _merged(
    state: Any,
    reduction: Callable[[Any], Any] | None,
    values: TrainerValues,
    device: torch.device,
) -> Any:
    """One state over all trainers: a tensor, or a list of tensors that grows with samples."""
    name = getattr(reduction, "__name__", "")
    if isinstance(state, list):
        # objects: the lists' lengths differ, and each tensor in them keeps its shape
        parts = values.all_gather_object(state)
        whole = [tensor.to(device) for part in parts for tensor in part]
        return whole if reduction is None or name == PUT_TOGETHER else reduction(whole)
    if name in REDUCED and state.dtype is not torch.bool:
        return values.all_reduce(state, REDUCED[name])
    parts = values.all_gather(state)
    if name == PUT_TOGETHER:
        return torch.cat([each if each.dim() else each[None] for each in parts])
    stacked = torch.stack(parts)
    return stacked if reduction is None else reduction(stacked)
