"""Hierarchical sigmoid: a class as the way to its leaf in a binary tree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.nn.labels import check_labels, check_matrix, single_label


def hsigmoid_loss(
    input: Tensor,
    label: Tensor,
    num_classes: int,
    weight: Tensor,
    bias: Tensor | None = None,
    path_table: Tensor | None = None,
    path_code: Tensor | None = None,
    is_sparse: bool = False,
) -> Tensor:
    """The log loss of each decision on the way from the root to the label's leaf, summed.

    A step costs about log2(num_classes) rows of the weight.  Without paths the tree is a complete
    binary one, in which class c is node c + num_classes, and node k has the children 2k and 2k + 1;
    node k's weight is row k - 1, and its decision is the last bit of the child.

    Morin, Bengio: Hierarchical Probabilistic Neural Network Language Model, AISTATS 2005.

    Args:
        input: features, floats [n, size].
        label: int64 [n] or [n, 1].
        num_classes: 2 or more.
        weight: of the inner nodes, [num_classes - 1, size]; with paths [nodes, size].
        bias: of the inner nodes, [nodes, 1].
        path_table: the nodes on the way of each sample, int64 [n, depth]; below 0: none.
        path_code: the decision at each, 0 or 1, int64 [n, depth].
        is_sparse: whether the gradients of weight and bias are sparse.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are no whole numbers.
        ValueError: shapes do not fit, or a label is out of range.
    """
    check_matrix("hsigmoid_loss", "input", input)
    if num_classes < 2:
        raise ValueError(f"hsigmoid_loss: num_classes: expected 2 or more, got {num_classes}")
    label = single_label("hsigmoid_loss", label, input.shape[0])
    if (path_table is None) != (path_code is None):
        raise ValueError("hsigmoid_loss: expected path_table and path_code, or none of the two")
    if path_table is None or path_code is None:
        check_labels("hsigmoid_loss", label, num_classes)
        nodes, codes = _complete_tree(label, num_classes)
        _check_weights(weight, bias, num_classes - 1, input.shape[1])
    else:
        nodes, codes = path_table.long(), path_code
        if nodes.dim() != 2 or nodes.shape != codes.shape or nodes.shape[0] != input.shape[0]:
            raise ValueError(
                f"hsigmoid_loss: expected path_table and path_code [{input.shape[0]}, depth], got "
                f"{list(nodes.shape)} and {list(codes.shape)}"
            )
        _check_weights(weight, bias, weight.shape[0], input.shape[1])
    rows = nodes.clamp(min=0)
    scores = torch.einsum("nd,nkd->nk", input, F.embedding(rows, weight, sparse=is_sparse))
    if bias is not None:
        scores = scores + F.embedding(rows, bias, sparse=is_sparse).squeeze(2)
    losses = F.softplus(scores) - scores * codes.to(scores.dtype)
    return (losses * (nodes >= 0)).sum(1, keepdim=True)


def _complete_tree(label: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Nodes, below 0 for none, and decisions on the way of each label: int64 [n, depth]."""
    depth = (2 * classes - 1).bit_length() - 1
    steps = torch.arange(depth, device=label.device)
    leaf = (label + classes).unsqueeze(1)
    return (leaf >> (steps + 1)) - 1, (leaf >> steps) & 1


def _check_weights(weight: Tensor, bias: Tensor | None, nodes: int, size: int) -> None:
    if tuple(weight.shape) != (nodes, size):
        raise ValueError(
            f"hsigmoid_loss: weight: expected [{nodes}, {size}], got {list(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (nodes, 1):
        raise ValueError(f"hsigmoid_loss: bias: expected [{nodes}, 1], got {list(bias.shape)}")


class HSigmoidLoss(nn.Module):
    """:func:`hsigmoid_loss` with the nodes' weights and biases as parameters.

    Args:
        feature_size: of the samples.
        num_classes: 2 or more; with ``is_custom`` the number of inner nodes.
        bias: whether nodes have one.
        is_custom: whether forward is given paths; otherwise the tree is the complete one.
        is_sparse: whether gradients are sparse.

    Attributes:
        weight: [nodes, feature_size]; nodes are num_classes - 1, or num_classes with ``is_custom``.
        bias: [nodes, 1], or None.
    """

    def __init__(
        self,
        feature_size: int,
        num_classes: int,
        bias: bool = True,
        is_custom: bool = False,
        is_sparse: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"HSigmoidLoss: num_classes: expected 2 or more, got {num_classes}")
        nodes = num_classes if is_custom else num_classes - 1
        self.num_classes = num_classes
        self.is_custom = is_custom
        self.is_sparse = is_sparse
        self.weight = nn.Parameter(torch.empty(nodes, feature_size))
        self.bias = nn.Parameter(torch.zeros(nodes, 1)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self,
        input: Tensor,
        label: Tensor,
        path_table: Tensor | None = None,
        path_code: Tensor | None = None,
    ) -> Tensor:
        """[n, feature_size] and [n] -> [n, 1]; paths are for ``is_custom``, and needed there."""
        if self.is_custom != (path_table is not None):
            raise ValueError("HSigmoidLoss: expected paths with is_custom=True, and only there")
        return hsigmoid_loss(
            input,
            label,
            self.num_classes,
            self.weight,
            self.bias,
            path_table,
            path_code,
            self.is_sparse,
        )
