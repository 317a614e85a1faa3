"""Losses that compare scores with one another: what is better goes first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.nn.labels import check_labels, check_matrix, check_same_shape, single_label


def bpr_loss(input: Tensor, label: Tensor) -> Tensor:
    """Bayesian personalized ranking: the item that was chosen against each other one of its row.

    Of a row with scores x and chosen item i it is the mean over j != i of -log sigmoid(x_i - x_j).

    Rendle, Freudenthaler, Gantner, Schmidt-Thieme: BPR: Bayesian Personalized Ranking from Implicit
    Feedback, UAI 2009; over the rows of a batch as in Hidasi, Karatzoglou, Baltrunas, Tikk:
    Session-based Recommendations with Recurrent Neural Networks, ICLR 2016.

    Example::

        bpr_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))    # [[0.1269]]

    Args:
        input: scores, floats [n, items], items at least 2.
        label: the chosen item of each row, int64 [n] or [n, 1].

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are no whole numbers.
        ValueError: shapes do not fit, or a label is out of range.
    """
    check_matrix("bpr_loss", "input", input)
    if input.shape[1] < 2:
        raise ValueError(f"bpr_loss: input: expected two items or more, got {input.shape[1]}")
    label = single_label("bpr_loss", label, input.shape[0])
    check_labels("bpr_loss", label, input.shape[1])
    chosen = label.unsqueeze(1)
    losses = F.softplus(input - input.gather(1, chosen))
    others = torch.ones_like(input).scatter(1, chosen, 0.0)  # the item against itself is no pair
    return (losses * others).sum(1, keepdim=True) / (input.shape[1] - 1)


def rank_loss(label: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """RankNet's loss of pairs: log(1 + exp(left - right)) - label * (left - right).

    Burges, Shaked, Renshaw, Lazier, Deeds, Hamilton, Hullender: Learning to Rank using Gradient
    Descent, ICML 2005.

    Args:
        label: how likely left is to be ranked higher: 0 to 1, floats of the scores' shape.
        left, right: scores, floats of any shape.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("rank_loss", label=label, left=left, right=right)
    difference = left - right
    return F.softplus(difference) - label * difference


def margin_rank_loss(label: Tensor, left: Tensor, right: Tensor, margin: float = 0.1) -> Tensor:
    """The hinge of pairs: max(0, margin - label * (left - right)).

    Herbrich, Graepel, Obermayer: Large Margin Rank Boundaries for Ordinal Regression, 2000.

    Args:
        label: 1 where left is to be ranked higher, -1 where right is; of the scores' shape.
        left, right: scores, floats of any shape.
        margin: the difference from which on a pair costs nothing.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("margin_rank_loss", label=label, left=left, right=right)
    return F.relu(margin - label * (left - right))


class BPRLoss(nn.Module):
    """:func:`bpr_loss` as a module."""

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """[n, items] and [n] -> [n, 1]."""
        return bpr_loss(input, label)


class RankLoss(nn.Module):
    """:func:`rank_loss` as a module."""

    def forward(self, label: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Three tensors of one shape -> a tensor of this shape."""
        return rank_loss(label, left, right)


class MarginRankLoss(nn.Module):
    """:func:`margin_rank_loss` as a module.

    Args:
        margin: the difference from which on a pair costs nothing.
    """

    def __init__(self, margin: float = 0.1) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, label: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Three tensors of one shape -> a tensor of this shape."""
        return margin_rank_loss(label, left, right, self.margin)
