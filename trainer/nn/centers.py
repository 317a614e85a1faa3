"""The center loss: features of one class near to one another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.nn.labels import check_labels, check_matrix, single_label


def center_loss(
    input: Tensor, label: Tensor, centers: Tensor, alpha: float, update_center: bool = True
) -> Tensor:
    """Half the squared distance of each sample from its class's center, which moves towards it.

    A center c of a class with m samples x in the batch becomes c - alpha * sum(c - x) / (1 + m).
    The loss is that of the centers before.

    Wen, Zhang, Li, Qiao: A Discriminative Feature Learning Approach for Deep Face Recognition,
    ECCV 2016.

    Args:
        input: features, floats [n, size].
        label: the class of each, int64 [n] or [n, 1].
        centers: floats [classes, size]; written in place, and never given a gradient.
        alpha: how fast centers move.
        update_center: whether they do.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are no whole numbers.
        ValueError: shapes do not fit, or a label is out of range.
    """
    check_matrix("center_loss", "input", input)
    if centers.dim() != 2 or centers.shape[1] != input.shape[1]:
        raise ValueError(
            f"center_loss: centers: expected [classes, {input.shape[1]}], got {list(centers.shape)}"
        )
    label = single_label("center_loss", label, input.shape[0])
    check_labels("center_loss", label, centers.shape[0])
    away = input - centers.detach().index_select(0, label)
    if update_center:
        with torch.no_grad():
            moved = torch.zeros_like(centers).index_add(0, label, away.detach())
            seen = torch.zeros_like(centers[:, 0]).index_add(0, label, torch.ones_like(away[:, 0]))
            centers.add_(alpha * moved / (1 + seen).unsqueeze(1))
    return away.square().sum(1, keepdim=True) / 2


class CenterLoss(nn.Module):
    """:func:`center_loss` with centers of its own, which move while it trains.

    The centers are a buffer: part of ``state_dict()``, and no parameter.  In a job with servers
    buffers are as ``a_sync_configs["buffers"]`` says: "trainer0", if nothing else is, makes all
    centers those that trainer 0's samples move, "mean" the mean of what all trainers' do.

    Args:
        num_classes, feature_size: of the centers, which begin at zero.
        alpha: how fast they move.

    Attributes:
        centers: floats [num_classes, feature_size].
    """

    centers: Tensor

    def __init__(self, num_classes: int, feature_size: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = alpha
        self.register_buffer("centers", torch.zeros(num_classes, feature_size))

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """[n, feature_size] and [n] -> [n, 1]."""
        return center_loss(input, label, self.centers, self.alpha, self.training)
