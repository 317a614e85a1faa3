"""What a DistributedEmbedding takes: ids of any value and shape, settings; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.embeddings import DIM, FIVE, ROWS
from trainer import Constant, DistributedEmbedding, Normal, ShowClickEntry, row_optimizers


def test_ids_have_any_value_and_shape() -> None:
    """A table without a range takes every int64, in any shape, and reads the same row for the same
    id, whenever it is asked.
    """
    embedding = DistributedEmbedding(DIM, init=Normal(0.0, 0.5), seed=4)
    ids = torch.tensor([[0, -1, 2**63 - 1], [-(2**63), 12345678901, 0]])

    rows = embedding(ids)

    assert rows.shape == (2, 3, DIM) and torch.equal(rows[0, 0], rows[1, 2])
    assert torch.equal(embedding(ids.flip(0)), rows.flip(0)) and torch.equal(
        embedding(ids[0, 1]), rows[0, 1]
    )
    assert torch.equal(DistributedEmbedding(DIM, init=Normal(0.0, 0.5), seed=4)(ids), rows)
    assert not torch.equal(DistributedEmbedding(DIM, init=Normal(0.0, 0.5), seed=5)(ids), rows)
    assert torch.equal(embedding(ids.to(torch.int32)[:1, :2]), rows[:1, :2])
    assert DistributedEmbedding(1, init=Constant(3.0))(ids).eq(3).all()


def test_a_padding_id_reads_its_row_and_is_never_trained() -> None:
    """A padding_idx reads zeros (what it read before, in a module made of torch's), whatever else
    is in the batch.
    """
    embedding = DistributedEmbedding(DIM, padding_idx=-7)
    ids = torch.tensor([[-7, 3], [4, -7]])
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0, weight_decay=0.1)
    before = embedding(ids)
    before.sum().backward()
    assert embedding.gradient().ids.tolist() == [3, 4]
    optimizer.step()

    assert not embedding(ids)[0, 0].any() and not torch.equal(embedding(ids)[0, 1], before[0, 1])
    assert not embedding(torch.full((2,), -7)).any()
    pretrained = nn.Embedding.from_pretrained(torch.ones(ROWS, DIM), padding_idx=2)
    assert torch.equal(
        DistributedEmbedding.from_module(pretrained)(ids.abs() % 5), pretrained(ids.abs() % 5)
    )


def test_batches_without_ids_work() -> None:
    """No ids give no rows, empty bags zeros, and a backward and a step through them are those of a
    zero gradient.
    """
    for embedding, given, shape in (
        (DistributedEmbedding(DIM), (torch.empty(0, 3, dtype=torch.int64),), (0, 3, DIM)),
        (
            DistributedEmbedding(DIM, pooling="mean"),
            (torch.empty(2, 0, dtype=torch.int64),),
            (2, DIM),
        ),
        (
            DistributedEmbedding(DIM, pooling="sum"),
            (torch.empty(0, dtype=torch.int64), torch.zeros(3).long()),
            (3, DIM),
        ),
        (
            DistributedEmbedding(DIM, pooling="sqrtn", padding_idx=1),
            (torch.ones(2, 2).long(),),
            (2, DIM),
        ),
        (
            DistributedEmbedding(DIM, pooling="sum"),
            (torch.empty(0, dtype=torch.int64), torch.empty(0).long()),
            (0, DIM),
        ),
    ):
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        out = embedding(*given)
        out.sum().backward()

        assert out.shape == shape and not out.any()
        assert len(embedding.gradient().ids) == 0
        optimizer.step()


def test_ten_million_ids_in_one_batch() -> None:
    """A batch may be as large as memory: forward, backward and step of ten million ids."""
    embedding = DistributedEmbedding(1, init=Constant(0.0))
    ids = torch.arange(10_000_000).remainder_(1000).mul_(10**15)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(ids).sum().backward()
    optimizer.step()

    assert embedding(ids[:1000]).eq(-10_000).all()


WHOLE, BAGGED = (
    DistributedEmbedding(DIM, num_embeddings=ROWS, name="words"),
    DistributedEmbedding(DIM, pooling="sum", name="words"),
)


@pytest.mark.parametrize(
    ("embedding", "given", "error", "message"),
    [
        (
            WHOLE,
            (torch.ones(3),),
            TypeError,
            "table 'words': ids: expected a tensor of int64, got torch.float32",
        ),
        (WHOLE, ([1, 2],), TypeError, "ids: expected a tensor of int64, got list"),
        (WHOLE, (torch.tensor([True]),), TypeError, "got torch.bool"),
        (
            WHOLE,
            (torch.tensor([[1, 2], [ROWS, -1]]),),
            ValueError,
            f"expected 0 to {ROWS - 1}, got {ROWS} at position 2",
        ),
        (WHOLE, (torch.tensor([3, -4]),), ValueError, "got -4 at position 1"),
        (
            WHOLE,
            (FIVE, FIVE),
            ValueError,
            "offsets and per_sample_weights are for a table with pooling",
        ),
        (
            BAGGED,
            (FIVE,),
            ValueError,
            "expected ids .bags, size., or .n. with offsets; got shape .5.",
        ),
        (BAGGED, (FIVE.view(1, 5), FIVE), ValueError, "expected ids .n. and offsets"),
        (
            BAGGED,
            (FIVE, torch.tensor([0, 3, 2])),
            ValueError,
            "expected them to go up, got 2 after 3 at 2",
        ),
        (BAGGED, (FIVE, torch.tensor([1, 3])), ValueError, "expected 0 as the first, got 1"),
        (BAGGED, (FIVE, torch.tensor([0, 6])), ValueError, "expected at most 5 as the last, got 6"),
        (
            BAGGED,
            (FIVE, torch.tensor([], dtype=torch.int64)),
            ValueError,
            "expected at least one for 5 ids",
        ),
        (BAGGED, (FIVE, torch.zeros(1)), TypeError, "offsets: expected int64, got torch.float32"),
        (
            BAGGED,
            (FIVE, torch.tensor([0]), FIVE),
            TypeError,
            "per_sample_weights: expected floats, got torch.int64",
        ),
        (BAGGED, (FIVE, torch.tensor([0]), torch.ones(4)), ValueError, "expected the ids' shape"),
    ],
)
def test_bad_input_is_named(
    embedding: nn.Module, given: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """What a table cannot look up is refused in words, with the first id that is wrong."""
    with pytest.raises(error, match=message):
        embedding(*given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embedding_dim": 0}, ValueError, "embedding_dim: expected 1 to"),
        ({"embedding_dim": 2.5}, TypeError, "embedding_dim: expected a whole number"),
        ({"num_embeddings": 0}, ValueError, "num_embeddings: expected 1 or more"),
        (
            {"pooling": "max"},
            ValueError,
            "pooling: expected None or one of 'sum', 'mean', 'sqrtn', got 'max'",
        ),
        ({"dtype": torch.int8}, ValueError, "dtype: expected one of torch.float32, torch.float64"),
        ({"init": 0.5}, TypeError, "init: expected Normal"),
        ({"entry": 3}, TypeError, "entry: expected CountFilterEntry"),
        ({"ttl": 0}, ValueError, "ttl: expected a number above 0"),
        ({"eviction": "fifo"}, ValueError, "eviction: expected one of lru, lfu"),
        (
            {"num_embeddings": 4, "padding_idx": 4},
            ValueError,
            "padding_idx: expected -4 to 3, got 4",
        ),
        ({"cache_staleness": 2}, ValueError, "cache_staleness: expected cache_rows with it"),
        ({"cache_rows": -1}, ValueError, "cache_rows: expected 0 or more"),
        ({"optimizer": 0.1}, TypeError, "optimizer: expected one of trainer.row_optimizers"),
        ({"padding": 0}, TypeError, "unexpected keyword 'padding': did you mean 'padding_idx'?"),
        ({"max_norm": 1.0}, TypeError, "unexpected keyword 'max_norm': it has 'num_embeddings', "),
        (
            {"optimizer": row_optimizers.Segments([(1, torch.optim.Adagrad)])},
            ValueError,
            "parts of 5 columns together, got 1",
        ),
    ],
)
def test_bad_settings_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A setting that makes no sense is refused when the module is made."""
    with pytest.raises(error, match=message):
        DistributedEmbedding(**{"embedding_dim": DIM, **options})


def test_a_row_without_its_width_is_refused() -> None:
    """Under another name, too: the message has the argument's."""
    with pytest.raises(TypeError, match="'embedding_dim'"):
        DistributedEmbedding(dim=4)


@pytest.mark.parametrize("given", [(1000, 16), (1000, 16, 0), (16, 1000)])
def test_arguments_in_torchs_order_are_refused(given: tuple[Any, ...]) -> None:
    """nn.Embedding has num_embeddings first: the message says how to write it here; also where they
    stand in our order.
    """
    with pytest.raises(
        TypeError,
        match=f"only argument by position, got {len(given)}: write "
        r"DistributedEmbedding\(16, num_embeddings=1000\)$",
    ):
        DistributedEmbedding(*given)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.Embedding(3, 2, max_norm=1.0), ValueError, "max_norm: a lookup would write"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), ValueError, "scale_grad_by_freq"),
        (nn.EmbeddingBag(3, 2, mode="max"), ValueError, "mode 'max'"),
        (nn.Embedding(3, 2).to(torch.float8_e5m2), ValueError, "dtype: expected one of"),
        (nn.Linear(3, 2), TypeError, "expected an nn.Embedding or nn.EmbeddingBag, got Linear"),
    ],
)
def test_what_an_embedding_cannot_be_made_of_is_named(
    module: Any, error: type[Exception], message: str
) -> None:
    """Forms of torch's embeddings that a table has no equal of are refused."""
    with pytest.raises(error, match=message):
        DistributedEmbedding.from_module(module)


def test_shows_and_clicks_are_summed_by_id() -> None:
    """The two keyword arguments that a ShowClickEntry names travel with the gradient, summed by id;
    others are refused.
    """
    embedding = DistributedEmbedding(DIM, entry=ShowClickEntry("seen", "bought"), padding_idx=0)
    ids = torch.tensor([[5, 5, 0], [7, 5, 7]])
    embedding(ids, bought=torch.tensor([[1.0], [0.5]])).sum().backward()
    embedding(ids[0], seen=torch.tensor([2, 3, 4])).sum().backward()

    gradient = embedding.gradient()

    assert dict(zip(gradient.ids.tolist(), gradient.statistics.tolist(), strict=True)) == {
        5: [8.0, 2.5],
        7: [2.0, 1.0],
    }
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'show': its entry names seen and bought"
    ):
        embedding(ids, show=ids)
    with pytest.raises(TypeError, match="it has no ShowClickEntry"):
        DistributedEmbedding(DIM)(ids, show=ids)
    with pytest.raises(
        ValueError, match="seen: expected a shape that broadcasts to .2, 3., got .2."
    ):
        embedding(ids, seen=torch.ones(2))
