"""Exports of rows in fewer bits, and of rows that are held in 16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.exported_tables import DIM, exported, trained
from trainer.embedding.embedding import DistributedEmbedding
from trainer.serving import load_embedding
from transpiler.ir.tables import Constant, Initial, Normal, Uniform


@pytest.mark.parametrize("size", [None, 60], ids=["any id", "range"])
@pytest.mark.parametrize(
    ("form", "apart"), [("int8", 0.5 / 127), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)]
)
def test_shorter_rows_are_as_near_as_their_numbers(
    tmp_path: Path, size: int | None, form: str, apart: float
) -> None:
    """By the largest number of each row; of int8 the scale is a row's own; what is looked up is
    float32, and pools as before.
    """
    embedding = DistributedEmbedding(DIM, num_embeddings=size, seed=3, pooling="mean")
    ids = torch.tensor([[1, 2, 3], [50, 7, 1], [8, 8, 9]])
    trained(embedding, ids)
    exported(embedding, tmp_path / "model.pt", rows=form)
    short = load_embedding(str(tmp_path / "model.pt"), "emb")
    pooled = load_embedding(str(tmp_path / "model.pt"), "emb", "mean")

    expected = embedding(ids.flatten().unsqueeze(1)).detach()
    found = short(ids.flatten())
    assert found.dtype is torch.float32 and short.weight.dtype is getattr(torch, form)
    assert ((found - expected).abs() <= 1.01 * apart * expected.abs().amax(1, True)).all()
    assert torch.allclose(pooled(ids), found.view(3, 3, DIM).mean(1))
    program = torch.export.export(short, (ids,)).module()
    assert torch.equal(program(ids), short(ids))


def test_rows_of_zeros_and_unknown_forms(tmp_path: Path) -> None:
    """A scale of 0 divides nothing; an unknown form is named before anything is written."""
    embedding = DistributedEmbedding(DIM, num_embeddings=5, init=Constant(0.0))
    exported(embedding, tmp_path / "model.pt", rows="int8")

    assert not load_embedding(str(tmp_path / "model.pt"), "emb")(torch.arange(5)).any()
    with pytest.raises(ValueError, match="rows: expected None or one of 'float32'.*got 'int4'"):
        exported(embedding, tmp_path / "other.pt", rows="int4")
    assert not (tmp_path / "other.pt").exists()


@pytest.mark.parametrize("init", [Uniform(-1.0, 1.0), Normal(), Constant(0.3)], ids=str)
def test_rows_of_16_bits_are_served_as_they_are_held(tmp_path: Path, init: Initial) -> None:
    """Unknown ids too: their initial values are rounded as the table rounds them."""
    embedding = DistributedEmbedding(DIM, seed=8, init=init, dtype=torch.bfloat16)
    trained(embedding, torch.tensor([[1, 2, 3]]))
    exported(embedding, tmp_path / "model.pt")
    ids = torch.tensor([1, 2, 3, -4, 2**40])

    assert torch.equal(load_embedding(str(tmp_path / "model.pt"), "emb")(ids), embedding(ids))
