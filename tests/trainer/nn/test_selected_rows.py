"""Row gradients as ids and rows: of torch's sparse embeddings, and of tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainer.nn.functional as FF
from trainer import DistributedEmbedding

IDS = torch.tensor([3, 7, 3, 1])


def loss(rows: torch.Tensor) -> torch.Tensor:
    return (rows * torch.arange(1.0, 5.0).unsqueeze(1)).sum()


def test_the_gradient_of_a_sparse_embedding() -> None:
    """Merged it has each id once; dense it is the gradient of a dense embedding."""
    sparse, dense = nn.Embedding(9, 2, sparse=True), nn.Embedding(9, 2)
    for each in (sparse, dense):
        loss(each(IDS)).backward()

    given = FF.selected_rows(sparse)
    merged = FF.merge_selected_rows(given)

    assert given.ids.tolist() == IDS.tolist() and merged.ids.tolist() == [1, 3, 7]
    assert FF.get_tensor_from_selected_rows(merged).tolist() == [[4, 4], [4, 4], [2, 2]]
    for each in (
        given,
        merged,
        FF.selected_rows(sparse.weight),
        FF.selected_rows(sparse.weight.grad),
    ):
        assert torch.equal(each.to_dense(), dense.weight.grad)
    with pytest.raises(ValueError, match="expected a sparse gradient of rows"):
        FF.selected_rows(dense)
    with pytest.raises(TypeError, match="got str"):
        FF.selected_rows("rows")


def test_the_gradient_of_a_table() -> None:
    """It is what the step takes: after clipping, what is left of it."""
    table = DistributedEmbedding(2)
    with pytest.raises(ValueError, match="expected a gradient, .* has none"):
        FF.selected_rows(table)
    loss(table(IDS)).backward()
    assert FF.merge_selected_rows(FF.selected_rows(table)).rows.tolist() == [[4, 4], [4, 4], [2, 2]]
    nn.utils.clip_grad_norm_(table.parameters(), 1.0)
    rows = FF.selected_rows(table)
    assert rows.rows.norm().item() == pytest.approx(1)
    before = table(rows.ids).detach()
    torch.optim.SGD(table.parameters(), lr=0.5).step()
    torch.testing.assert_close(table(rows.ids).detach(), before - 0.5 * rows.rows)
    with pytest.raises(ValueError, match="any int64 is an id"):
        rows.to_dense()
