"""The metrics as functions of the whole job's samples: each trainer gives its own, all trainers
call the function, and get one number over all.  Where there is no job it is this process's own.

Predictions and labels have one shape, on any device; weights of samples go with them.  What a
metric takes, and what it raises, its class says.
"""

from __future__ import annotations

from typing import Any

from trainer.metrics.ranking import AUC, BINS, GroupedAUC
from trainer.metrics.ratios import (
    COPC,
    MAE,
    RMSE,
    Accuracy,
    LogLoss,
    Mean,
    Precision,
    Recall,
)


def auc(
    preds: Any, labels: Any, weights: Any = None, *, bins: int = BINS, exact: bool = False
) -> float:
    """See :class:`AUC`."""
    metric = AUC(bins, exact)
    metric.update(preds, labels, weights)
    return metric.compute()


def grouped_auc(preds: Any, labels: Any, groups: Any, weights: Any = None) -> float:
    """The mean over the groups; see :class:`GroupedAUC`."""
    metric = GroupedAUC()
    metric.update(preds, labels, groups, weights)
    return metric.compute()


def logloss(preds: Any, labels: Any, weights: Any = None) -> float:
    """See :class:`LogLoss`."""
    metric = LogLoss()
    metric.update(preds, labels, weights)
    return metric.compute()


def accuracy(preds: Any, labels: Any, weights: Any = None, *, threshold: float = 0.5) -> float:
    """See :class:`Accuracy`."""
    metric = Accuracy(threshold)
    metric.update(preds, labels, weights)
    return metric.compute()


def precision(preds: Any, labels: Any, weights: Any = None, *, threshold: float = 0.5) -> float:
    """See :class:`Precision`."""
    metric = Precision(threshold)
    metric.update(preds, labels, weights)
    return metric.compute()


def recall(preds: Any, labels: Any, weights: Any = None, *, threshold: float = 0.5) -> float:
    """See :class:`Recall`."""
    metric = Recall(threshold)
    metric.update(preds, labels, weights)
    return metric.compute()


def mae(preds: Any, labels: Any, weights: Any = None) -> float:
    """See :class:`MAE`."""
    metric = MAE()
    metric.update(preds, labels, weights)
    return metric.compute()


def rmse(preds: Any, labels: Any, weights: Any = None) -> float:
    """See :class:`RMSE`."""
    metric = RMSE()
    metric.update(preds, labels, weights)
    return metric.compute()


def copc(preds: Any, labels: Any, weights: Any = None) -> float:
    """See :class:`COPC`."""
    metric = COPC()
    metric.update(preds, labels, weights)
    return metric.compute()


def mean(values: Any, weights: Any = None) -> float:
    """See :class:`Mean`."""
    metric = Mean()
    metric.update(values, weights)
    return metric.compute()
