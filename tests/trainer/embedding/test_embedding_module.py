"""DistributedEmbedding as a module: saved, copied, cast, frozen, moved, connected."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.support.embeddings import DIM, FIVE, ROWS, Net, pair, some_ids, values
from trainer import CountFilterEntry, DistributedEmbedding, row_optimizers
from trainer.embedding.rows import Arrived


def steps_of(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(some_ids(step)).backward()
        optimizer.step()


def test_a_state_dict_resumes_to_the_bit(tmp_path: Any) -> None:
    """Rows and their states are in the state_dict, which torch loads with weights only; training
    goes on as if never stopped.
    """
    mine, make = pair()[1], partial(torch.optim.Adagrad, lr=0.1)
    optimizer = make(mine.parameters())
    steps_of(mine, optimizer, range(3))
    torch.save(
        {"model": mine.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt"
    )
    steps_of(mine, optimizer, range(3, 6))

    resumed, saved = (
        Net(DistributedEmbedding(DIM, num_embeddings=ROWS)),
        torch.load(tmp_path / "saved.pt", weights_only=True),
    )
    resumed.load_state_dict(saved["model"])
    optimizer = make(resumed.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    steps_of(resumed, optimizer, range(3, 6))

    assert torch.equal(values(resumed), values(mine))


def test_ids_wait_for_admission_here_too() -> None:
    """With a count of 3 the third step of an id is the first that is applied, also where the state
    was saved before it.
    """
    runs = []
    for stop in (False, True):
        embedding = DistributedEmbedding(
            DIM, entry=CountFilterEntry(3), optimizer=row_optimizers.Adagrad(lr=1.0)
        )
        reads = []
        for step in range(5):
            if stop and step == 2:
                state, embedding = (
                    embedding.state_dict(),
                    DistributedEmbedding(DIM, entry=CountFilterEntry(3)),
                )
                embedding.load_state_dict(state)
                embedding.optimizer = row_optimizers.Adagrad(lr=1.0)
            optimizer = torch.optim.SGD(embedding.parameters())
            optimizer.zero_grad()
            embedding(FIVE).sum().backward()
            optimizer.step()
            reads.append(values(embedding)[:5])
        runs.append(torch.stack(reads))

        assert torch.equal(reads[0], reads[1]) and not torch.equal(reads[1], reads[2])
    assert torch.equal(*runs)


def test_a_state_dict_of_other_rows_is_refused() -> None:
    """Another dim or dtype, and missing or torn rows, are named, and what was there stays."""
    embedding = DistributedEmbedding(DIM, name="words")
    state, before = embedding.state_dict(), values(embedding)
    for other, message in (
        (
            DistributedEmbedding(DIM + 1).state_dict(),
            "table 'words': expected rows of 5 numbers, got an array of shape .0, 6.",
        ),
        (
            DistributedEmbedding(DIM, dtype=torch.float64).state_dict(),
            "expected rows of float32, got float64",
        ),
        (
            {key: value for key, value in state.items() if key != "table.values"},
            "Missing key.*table.values",
        ),
        ({**state, "table.metadata": state["table.metadata"][:5]}, "metadata: expected JSON"),
    ):
        with pytest.raises(RuntimeError, match=message):
            embedding.load_state_dict(other)
        assert torch.equal(values(embedding), before)


def test_copies_are_whole_and_apart(tmp_path: Any) -> None:
    """deepcopy and torch.save take rows and states along; training one leaves the other."""
    mine = pair()[1]
    steps_of(mine, torch.optim.Adagrad(mine.parameters(), lr=0.1), range(2))
    torch.save(mine, tmp_path / "whole.pt")
    for copied in (copy.deepcopy(mine), torch.load(tmp_path / "whole.pt", weights_only=False)):
        before = values(mine)
        assert torch.equal(values(copied), before)
        steps_of(copied, torch.optim.Adagrad(copied.parameters(), lr=0.1), range(2, 4))

        assert torch.equal(values(mine), before) and not torch.equal(values(copied), before)


def test_lower_precision_is_that_of_the_output() -> None:
    """half() and the like change what forward returns, as for nn.Embedding; rows and what they
    learn stay as they are.
    """
    theirs, mine = (net.embedding for net in pair())

    assert (
        torch.equal(mine.bfloat16()(FIVE), theirs.bfloat16()(FIVE))
        and mine.proxy.dtype == torch.float32
    )
    mine(FIVE).float().sum().backward()
    assert mine.gradient().rows.dtype == torch.float32
    assert (
        mine.double()(FIVE).dtype == torch.float64 and values(mine.float()).dtype == torch.float32
    )


def test_a_frozen_table_stays() -> None:
    """A module whose parameters need no gradient gives none, and one made of a frozen nn.Embedding
    is frozen.
    """
    frozen = DistributedEmbedding.from_module(nn.Embedding.from_pretrained(torch.ones(ROWS, DIM)))
    assert not frozen(FIVE).requires_grad
    frozen.requires_grad_(True)
    frozen(FIVE).sum().backward()

    assert frozen.proxy.grad is not None and frozen.gradient().ids.tolist() == FIVE.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pooling", [None, "mean", "sqrtn"])
def test_ids_on_a_gpu_are_looked_up_there(pooling: str | None) -> None:
    """What is returned is on the ids' device, and a step with ids there is one with ids here,
    within rounding.
    """
    found = []
    for device in ("cpu", "cuda:0"):
        net = Net(DistributedEmbedding(DIM, pooling=pooling, padding_idx=3)).to(device)
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(some_ids(step).to(device)).backward()
            clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        found.append(net.embedding(some_ids(4).to(device)))

    assert found[1].device.type == "cuda" and torch.allclose(found[0], found[1].cpu(), atol=1e-5)


class Served:
    """Rows that something else holds: those of ids, plus what is told."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.more = 0.0

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        return ids

    def pull(self, ids: Tensor, arrived: Arrived | None = None) -> Tensor:
        self.asked.append(ids.tolist())
        return ids[:, None].float().expand(-1, DIM) + self.more


def test_connected_rows_are_anothers() -> None:
    """Once connected, a module pulls each id once, holds no rows, saves none, and no optimizer here
    steps them.
    """
    net = pair()[1]
    embedding, start, source = net.embedding, values(pair()[1]), Served()
    ids, rows = embedding.initial_rows
    assert torch.equal(rows, start[ids])

    embedding.connect(source)

    assert torch.equal(embedding.initial_rows[1], rows) and list(embedding.state_dict()) == [
        "proxy"
    ]
    out = embedding(torch.tensor([[4, 4], [9, 2]]))
    assert torch.equal(out[..., 0], torch.tensor([[4.0, 4], [9, 2]])) and source.asked == [
        [4, 9, 2]
    ]
    out.sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    gradient = embedding.gradient()
    assert gradient.ids.tolist() == [4, 9, 2] and gradient.rows[:, 0].tolist() == [2.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="its rows are on servers"):
        copy.deepcopy(embedding)
    with pytest.raises(RuntimeError, match="cannot be written whole"):
        embedding.load_state_dict(pair()[1].embedding.state_dict())


def test_cached_rows_are_pulled_again_after_the_bound() -> None:
    """With a cache, training pulls a row again after cache_staleness steps, not before; evaluation
    always does.
    """
    embedding, source = DistributedEmbedding(DIM, cache_rows=100, cache_staleness=1), Served()
    embedding.connect(source)
    for step in range(4):
        source.more = 10.0 * step
        out = embedding(torch.tensor([1, 2]))
        out.sum().backward()
        embedding.gradient()

        assert out[0, 0] == 1 + 10.0 * (step - step % 2)
    assert source.asked == [[1, 2], [1, 2]]
    embedding(torch.tensor([5]))
    source.more = 40.0
    assert (
        embedding(torch.tensor([5]))[0, 0] == 5 + 30.0 and embedding.cache.counters()["hits"] == 5
    )
    assert embedding.eval()(torch.tensor([5]))[0, 0] == 5 + 40.0


def test_a_table_is_a_plans() -> None:
    """What a plan needs of a table stands in one place, and two modules say in words why they are
    not one table.
    """
    segments = row_optimizers.Segments([(2, row_optimizers.SGD()), (3, row_optimizers.SGD())])
    embedding = DistributedEmbedding(
        DIM, num_embeddings=ROWS, optimizer=segments, name="words", seed=9, ttl=60.0
    )

    table = embedding.settings.table(segments=[(0, 2, 4), (2, 5, 6)], lane=1)

    assert (table.name, table.rows, table.seed, table.ttl, table.lane) == (
        "words",
        ROWS,
        9,
        60.0,
        1,
    )
    assert [segment.group for segment in table.segments] == [4, 6]
    assert embedding.settings.differs(copy.deepcopy(embedding).settings) is None
    assert (
        embedding.settings.differs(
            DistributedEmbedding(DIM, num_embeddings=ROWS, optimizer=segments, seed=9).settings
        )
        == "ttl 60.0 and None"
    )
    plain, own = (
        DistributedEmbedding(DIM, optimizer=each).settings for each in (None, row_optimizers.SGD())
    )
    assert "optimizer" in str(plain.differs(own))
    assert "30 -> 5, name='words'" in repr(embedding) and "rows in this process" in repr(embedding)
