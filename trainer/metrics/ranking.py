"""How well scores put positives before negatives: AUC, over all samples or group by group."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.metrics.curve_area import area, group_areas
from trainer.metrics.metric import Metric
from trainer.metrics.samples import classes_like, flat, flat_like, probabilities, weights_like

BINS = 2**20


class AUC(Metric):
    """The area under the ROC curve: how often a positive has a higher score than a negative.

    By default predictions from 0 to 1 are counted in bins, and those of one bin are taken for
    equal: a trainer keeps and sends 16 bytes a bin, 16 MB, however many samples there are.  With
    ``exact`` it keeps 17 bytes a sample, and every trainer gets the samples of all.

    Args:
        bins: how many.
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
