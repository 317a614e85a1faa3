"""The area under the ROC curve, from counts of positives and negatives; pure arithmetic.

A positive and a negative of one score count as half a pair in the right order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def area(positives: Tensor, negatives: Tensor) -> float:
    """The area, of scores in descending order.

    Args:
        positives, negatives: how many there are of each score, int64 or float64 [scores].

    Returns:
        From 0 to 1; nan without a positive, or without a negative.
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
    """Where a value is another than the one before it; so is the first one."""
    found = torch.ones(len(values), dtype=torch.bool)
    found[1:] = values[1:] != values[:-1]
    return found


def _sums(values: Tensor, places: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype).index_add_(0, places, values)
