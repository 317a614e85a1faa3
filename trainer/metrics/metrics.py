"""The metrics: areas under curves, rankings, ratios, and each in one call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.metrics.metric import (
    Metric,
    check_classes,
    check_numbers,
    classes_like,
    flat,
    flat_like,
    probabilities,
    weights_like,
)

# ---- curve area ----
#
# The area under the ROC curve, from counts of positives and negatives; pure arithmetic.
#
# A positive and a negative of one score count as half a pair in the right order.


def area(positives: Tensor, negatives: Tensor) -> float:
    """The area, of scores in descending order.

    Args:
        positives, negatives: their numbers for each score, int64 or float64 [scores].

    Returns:
        The area, from 0 to 1; nan without a positive, or without a negative.
    """
    above = positives.cumsum(0) - positives
    twice = (negatives * (2 * above + positives)).sum().item()
    pairs = positives.sum().item() * negatives.sum().item()
    return twice / (2 * pairs) if pairs else math.nan


def group_areas(
    scores: Tensor, positive: Tensor, weights: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The area of each group of samples.

    Args:
        scores: float64 [n].
        positive: bool [n].
        weights: float64 [n].
        groups: int64 [n].

    Returns:
        The groups, int64 [g], ascending; their areas, float64 [g], nan where a group has one class
        only; the weight of each group's samples, float64 [g].
    """
    order = scores.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]
    scores, positive, weights, groups = (
        each[order] for each in (scores, positive, weights, groups)
    )
    # the samples of one group and score are one bucket
    first = _changes(groups) | _changes(scores)
    bucket, groups = first.cumsum(0) - 1, groups[first]
    begins = _changes(groups)
    group, ids = begins.cumsum(0) - 1, groups[begins]
    up = _sums(weights.where(positive, 0.0), bucket, len(group))
    down = _sums(weights.where(~positive, 0.0), bucket, len(group))
    ups, downs = _sums(up, group, len(ids)), _sums(down, group, len(ids))
    above = up.cumsum(0) - up - (ups.cumsum(0) - ups)[group]
    twice = _sums(down * (2 * above + up), group, len(ids))
    return ids, twice / (2 * ups * downs), ups + downs


def _changes(values: Tensor) -> Tensor:
    """The mask of values that differ from the one before; the first one counts as different."""
    found = torch.ones(len(values), dtype=torch.bool)
    found[1:] = values[1:] != values[:-1]
    return found


def _sums(values: Tensor, places: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype).index_add_(0, places, values)


# ---- ranking ----
#
# The quality of the order of scores: AUC, over all samples or group by group.


BINS = 2**20


class AUC(Metric):
    """The area under the ROC curve: the probability that a positive has a higher score than a
    negative.

    By default predictions from 0 to 1 are counted in bins, and those of one bin count as equal: a
    trainer keeps and sends 16 bytes a bin, 16 MB, for any number of samples.  With ``exact`` it
    keeps 17 bytes a sample, and every trainer gets the samples of all.

    Args:
        bins: their number.
        exact: no bins; scores may be any numbers.

    Raises:
        ValueError: fewer than 2 bins.

    Example::

        auc = AUC()
        for x, y in fleet.shard(loader):
            auc.update(model(x).sigmoid(), y)
        print(auc.compute())
    """

    def __init__(self, bins: int = BINS, exact: bool = False) -> None:
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
            raise ValueError(f"bins: expected a number of 2 or more, got {bins!r}")
        self.bins, self.exact = bins, exact
        super().__init__()

    def update(self, preds: Any, labels: Any, weights: Any = None) -> None:
        """Adds samples.

        Args:
            preds: probabilities, of any shape; with ``exact`` any scores.
            labels: 0 and 1, in the same shape.
            weights: of the samples, in the same shape; None: each counts once.

        Raises:
            ValueError: a prediction is nan or outside of 0 to 1, a label is neither 0 nor 1, or the
                shapes differ.
        """
        self._check_own("update")
        positive = classes_like(labels, "preds", preds)
        if self.exact:
            weight = weights_like(weights, "preds", preds)
            self._append(preds=flat("preds", preds), positive=positive, weights=weight)
            return
        place = (probabilities(preds) * self.bins).long().clamp_(max=self.bins - 1)
        place += positive * self.bins
        shape = (2 * self.bins,)
        if weights is None:
            counts = self._sum("counts", shape, torch.int64)
            counts.index_add_(0, place, torch.ones_like(place))
        else:
            weight = weights_like(weights, "preds", preds)
            self._sum("weights", shape, torch.float64).index_add_(0, place, weight)

    def _value(self) -> float:
        if self.exact:
            return self._exact()
        counts = sum(self._sums.values(), torch.zeros(2 * self.bins, dtype=torch.int64))
        negatives, positives = counts.view(2, self.bins).flip(1)
        return area(positives, negatives)

    def _exact(self) -> float:
        scores = self._all("preds", torch.float64)
        one = torch.zeros(len(scores), dtype=torch.int64)
        positive, weights = self._all("positive", torch.bool), self._all("weights", torch.float64)
        _, areas, _ = group_areas(scores, positive, weights, one)
        return float(areas[0]) if len(areas) else math.nan

    def __repr__(self) -> str:
        return "AUC(exact=True)" if self.exact else f"AUC(bins={self.bins})"


class GroupedAUC(Metric):
    """The exact AUC within each group of samples: ``compute()`` gives their mean, weighted by the
    samples of each group (GAUC, where the groups are users), ``groups()`` the AUC of each (of each
    slot, where they are slots).

    Groups that have one class only have no AUC, and are left out of the mean.  A trainer keeps 25
    bytes a sample, and every trainer gets the samples of all.

    Example::

        gauc = GroupedAUC()
        gauc.update([0.1, 0.7, 0.2, 0.9], [0, 1, 1, 0], groups=[7, 7, 8, 8])
        gauc.compute()    # 0.5
        gauc.groups()     # {7: 1.0, 8: 0.0}
    """

    def update(self, preds: Any, labels: Any, groups: Any, weights: Any = None) -> None:
        """Adds samples.

        Args:
            preds: scores, of any shape.
            labels: 0 and 1, in the same shape.
            groups: any integers of 64 bits, in the same shape.
            weights: of the samples, in the same shape; None: each counts once.

        Raises:
            ValueError: a prediction is nan, a label is neither 0 nor 1, or the shapes differ.
            TypeError: a group is no integer.
        """
        self._check_own("update")
        ids = torch.as_tensor(groups).detach().cpu().reshape(-1)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype in (torch.bool, torch.uint64):
            raise TypeError(f"groups: expected integers of at most int64, got {ids.dtype}")
        flat_like("groups", groups, "preds", preds)
        self._append(
            preds=flat("preds", preds),
            positive=classes_like(labels, "preds", preds),
            weights=weights_like(weights, "preds", preds),
            groups=ids.long(),
        )

    def groups(self) -> dict[int, float]:
        """The AUC of each group over all samples of all trainers; nan where it has one class only.

        All trainers call it.
        """
        ids, areas, _ = self._everywhere()._areas()
        return dict(zip(ids.tolist(), areas.tolist(), strict=True))

    def _value(self) -> float:
        _, areas, weights = self._areas()
        defined = ~areas.isnan()
        areas, weights = areas[defined], weights[defined]
        return float((areas * weights).sum() / weights.sum())

    def _areas(self) -> tuple[Tensor, Tensor, Tensor]:
        return group_areas(
            self._all("preds", torch.float64),
            self._all("positive", torch.bool),
            self._all("weights", torch.float64),
            self._all("groups", torch.int64),
        )


# ---- ratios ----
#
# Metrics that are one weighted sum over another: means of losses and errors, COPC, and shares of
# right decisions.


class Ratio(Metric):
    """One weighted sum over another; nan where the lower one is 0.

    Both are float64: counts are exact.
    """

    def _add(self, upper: Tensor, lower: Tensor) -> None:
        self._check_own("update")
        self._sum("ratio", (2,), torch.float64).add_(torch.stack([upper.sum(), lower.sum()]))

    def _value(self) -> float:
        upper, lower = self._sums["ratio"].tolist() if self._sums else (0.0, 0.0)
        return float(upper / lower) if lower else math.nan


class Mean(Ratio):
    """The weighted mean of any numbers, as of losses.

    Example::

        loss = Mean()
        loss.update([0.5, 1.5])
        loss.compute()    # 1.0
    """

    def update(self, values: Any, weights: Any = None) -> None:
        """Adds numbers, of any shape, with a weight each.

        Raises:
            ValueError: one is nan, or the shapes differ.
        """
        weight = weights_like(weights, "values", values)
        self._add(weight * flat("values", values), weight)


class MAE(Ratio):
    """The mean absolute error."""

    def update(self, preds: Any, labels: Any, weights: Any = None) -> None:
        """Adds samples: predictions and labels of one shape, with a weight each.

        Raises:
            ValueError: one is nan, or the shapes differ.
        """
        weight = weights_like(weights, "preds", preds)
        errors = flat("preds", preds) - flat_like("labels", labels, "preds", preds)
        self._add(weight * self._error(errors), weight)

    def _error(self, errors: Tensor) -> Tensor:
        return errors.abs()


class RMSE(MAE):
    """The square root of the mean squared error."""

    def _error(self, errors: Tensor) -> Tensor:
        return errors.square()

    def _value(self) -> float:
        return math.sqrt(super()._value())


class COPC(Ratio):
    """Observed over predicted: the sum of the labels over the sum of the predictions, 1 for a model
    that is right on average; nan where the predictions add up to 0.
    """

    def update(self, preds: Any, labels: Any, weights: Any = None) -> None:
        """Adds samples: predictions and labels of one shape, with a weight each.

        Raises:
            ValueError: one is nan, or the shapes differ.
        """
        weight = weights_like(weights, "preds", preds)
        observed = flat_like("labels", labels, "preds", preds)
        self._add(weight * observed, weight * flat("preds", preds))


class LogLoss(Ratio):
    """The mean binary cross entropy, in natural logarithms.

    Predictions of 0 and 1 are clamped by their dtype's epsilon, as in scikit-learn, so that no loss
    is infinite; predictions of 16 bits by that of float32.
    """

    def update(self, preds: Any, labels: Any, weights: Any = None) -> None:
        """Adds samples: probabilities, labels 0 and 1 of the same shape, and a weight each.

        Raises:
            ValueError: a prediction is nan or outside of 0 to 1, a label is neither 0 nor 1, or the
                shapes differ.
        """
        weight = weights_like(weights, "preds", preds)
        positive = classes_like(labels, "preds", preds)
        double = torch.as_tensor(preds).dtype is torch.float64
        least = torch.finfo(torch.float64 if double else torch.float32).eps
        preds = probabilities(preds).clamp_(least, 1 - least)
        self._add(-weight * preds.where(positive, 1 - preds).log(), weight)


class Accuracy(Ratio):
    """The share of samples whose class is predicted.

    Args:
        threshold: a score above it predicts class 1.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def update(self, preds: Any, labels: Any, weights: Any = None) -> None:
        """Adds samples.

        Args:
            preds: [n, classes]: scores, of which the highest counts; or in the shape of the labels:
                classes, where they are integers, or scores of class 1.
            labels: classes, integers; of [n, classes] they are [n] or [n, 1].
            weights: of the samples, in the shape of the labels.

        Raises:
            ValueError: a number is nan, the shapes differ, or a label is none of the classes.
        """
        scores, shape = torch.as_tensor(preds), torch.as_tensor(labels).shape
        of_classes = scores.dim() > 0 and scores.shape[-1] != 1
        if of_classes and shape in (scores.shape[:-1], (*scores.shape[:-1], 1)):
            check_numbers("preds", scores)
            check_classes("labels", labels, scores.shape[-1])
            scores = scores.argmax(-1)
        weight = weights_like(weights, "labels", labels)
        found = flat_like("preds", _decided(scores, self.threshold), "labels", labels)
        self._add(weight * (found == flat("labels", labels)), weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(threshold={self.threshold:g})"


class Precision(Ratio):
    """The share of positives among the samples that are predicted as positive; nan where none is.

    Args:
        threshold: a score above it predicts class 1.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def update(self, preds: Any, labels: Any, weights: Any = None) -> None:
        """Adds samples.

        Args:
            preds: scores of class 1, or classes 0 and 1 where they are integers.
            labels: 0 and 1, in the same shape.
            weights: of the samples, in the same shape.

        Raises:
            ValueError: a score is nan, a class is neither 0 nor 1, or the shapes differ.
        """
        weight = weights_like(weights, "preds", preds)
        positive = classes_like(labels, "preds", preds)
        decided = _decided(torch.as_tensor(preds), self.threshold)
        found = flat("preds", decided)
        if not bool(((found == 0) | (found == 1)).all()):
            raise ValueError(f"preds: expected classes 0 and 1, got {float(found.max()):g}")
        self._add(weight * found * positive, weight * self._among(found, positive))

    def _among(self, found: Tensor, positive: Tensor) -> Tensor:
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}(threshold={self.threshold:g})"


class Recall(Precision):
    """The share of the positives that are predicted as positive; nan where there is none.

    Args:
        threshold: a score above it predicts class 1.
    """

    def _among(self, found: Tensor, positive: Tensor) -> Tensor:
        return positive


def _decided(preds: Tensor, threshold: float) -> Tensor:
    """Classes, where these are scores."""
    if not preds.is_floating_point():
        return preds
    check_numbers("preds", preds)
    return preds > threshold


# ---- functions ----
#
# The metrics as functions of the whole job's samples: each trainer gives its own, all trainers call
# the function, and get one number over all.  Where there is no job it is over this process's
# samples.
#
# Predictions and labels have one shape, on any device, and so have weights.  Each class documents
# the arguments of its metric, and its errors.


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
