"""Metrics that are one weighted sum over another: means of losses and errors, COPC, and shares of
right decisions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.metrics.metric import Metric
from trainer.metrics.samples import (
    check_classes,
    check_numbers,
    classes_like,
    flat,
    flat_like,
    probabilities,
    weights_like,
)


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

    A prediction of 0 or 1 counts as one that is nearer to the middle by its dtype's epsilon, as in
    scikit-learn, so that no loss is infinite; predictions of 16 bits have that of float32.
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
