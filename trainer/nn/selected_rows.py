"""Row gradients as data: the ids of some rows, and a gradient for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.embedding.embedding import DistributedEmbedding


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """A gradient that has some rows of a table, and zeros elsewhere.

    Attributes:
        ids: int64 [u]; one may stand there several times, until they are merged.
        rows: [u, dim], the gradient of each.
        height: how many rows the table has; None: any int64 is an id.
    """

    ids: Tensor
    rows: Tensor
    height: int | None

    def to_dense(self) -> Tensor:
        """[height, dim], with the rows of equal ids added up.

        Raises:
            ValueError: any int64 is an id.
        """
        if self.height is None:
            raise ValueError("to_dense: expected a table of some height; any int64 is an id here")
        return self.rows.new_zeros(self.height, self.rows.shape[1]).index_add(
            0, self.ids, self.rows
        )


def selected_rows(source: Any) -> SelectedRows:
    """The row gradient of a table, as it stands before the optimizer's step.

    That of a :class:`~trainer.DistributedEmbedding` is what its step will take: the sum over all
    lookups since ``zero_grad``, times what the script has done to its proxy's gradient.  It is a
    copy: changing it changes no step.

    Example::

        table = nn.Embedding(1000, 16, sparse=True)
        table(torch.tensor([3, 7, 3])).sum().backward()
        merge_selected_rows(selected_rows(table)).ids    # [3, 7]

    Args:
        source: a DistributedEmbedding; an nn.Embedding or nn.EmbeddingBag with ``sparse=True``; a
            parameter with a sparse gradient; or a sparse tensor of torch.

    Raises:
        TypeError: it is something else.
        ValueError: it has no gradient, or a dense one.
    """
    if isinstance(source, DistributedEmbedding):
        waiting = source.proxy.waiting()
        if waiting is None:
            raise ValueError(f"selected_rows: expected a gradient, {source.whose()} has none")
        return SelectedRows(waiting.ids, waiting.rows, source.num_embeddings)
    if isinstance(source, nn.Embedding | nn.EmbeddingBag):
        source = source.weight
    if not isinstance(source, Tensor):
        raise TypeError(
            "selected_rows: expected a DistributedEmbedding, an embedding of torch, a parameter or "
            f"a sparse tensor, got {type(source).__name__}"
        )
    gradient = source.grad if isinstance(source, nn.Parameter) else source
    if gradient is None:
        raise ValueError("selected_rows: expected a parameter with a gradient, got none")
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1 or gradient.dim() != 2:
        raise ValueError(
            "selected_rows: expected a sparse gradient of rows, as of an embedding with "
            f"sparse=True, got {gradient.layout} {list(gradient.shape)}"
        )
    return SelectedRows(
        gradient._indices()[0].clone(), gradient._values().detach().clone(), gradient.shape[0]
    )


def merge_selected_rows(x: SelectedRows) -> SelectedRows:
    """The same gradient with each id once, in ascending order; rows of equal ids are added up."""
    ids, inverse = torch.unique(x.ids, return_inverse=True)
    rows = x.rows.new_zeros(len(ids), x.rows.shape[1]).index_add(0, inverse, x.rows)
    return SelectedRows(ids, rows, x.height)


def get_tensor_from_selected_rows(x: SelectedRows) -> Tensor:
    """The rows alone, [u, dim]; row i is of ``x.ids[i]``."""
    return x.rows
