"""Embeddings whose rows are on servers, real ones in this process: what trains, against plain torch
in the same test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import DistributedEmbedding, Normal, fleet, row_optimizers
from transpiler import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, DistributedStrategy

Servers = Callable[[int], str]
ROWS, DIM = 50, 8


class Plain(nn.Module):
    """Two lookups of one embedding, one of another, a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.emb = nn.Embedding(ROWS, DIM)
        self.other = nn.Embedding(ROWS, 4)
        self.fc = nn.Linear(2 * DIM + 4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [self.emb(ids[:, 0]), self.emb(ids[:, 1]), self.other(ids[:, 2])]
        out: torch.Tensor = self.fc(torch.cat(rows, 1))
        return out


def batches(count: int, size: int = 12, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, ROWS, (size, 3), generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, clip: Any = None) -> None:
    for ids, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(ids), y).backward()
        if clip is not None:
            clip(model)
        optimizer.step()


def strategy_of(**configs: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync = configs.pop("a_sync", True)
    strategy.a_sync_configs = configs
    return strategy


def joined(
    endpoints: str, model: nn.Module, strategy: DistributedStrategy | None = None
) -> nn.Module:
    fleet.init(
        fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")),
        strategy=strategy,
    )
    for module in (model.emb, model.other):
        fleet.distribute_embedding(module)
    return fleet.distributed_model(model)


def rows_of(model: nn.Module, table: str) -> torch.Tensor:
    """A table as its servers hold it."""
    with torch.no_grad():
        rows: torch.Tensor = getattr(model, table)(torch.arange(ROWS))
    return rows


def assert_close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    for table in ("emb", "other"):
        difference = (rows_of(model, table) - getattr(reference, table).weight).abs().max()
        assert difference <= tolerance, f"{table}: {difference}"
    for one, other in zip(model.fc.parameters(), reference.fc.parameters(), strict=True):
        assert (one - other).abs().max() <= tolerance


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 3])
def test_moved_embeddings_train_as_they_would_have_here(
    servers: Servers, name: str, count: int
) -> None:
    """One trainer in sync mode: every row of every table, touched or not, is that of plain torch;
    the trainer holds none.
    """
    mine, reference = Plain(), Plain()
    model = joined(servers(count), mine)
    train(model, fleet.distributed_optimizer(OPTIMIZERS[name](model.parameters())), batches(10))
    train(reference, OPTIMIZERS[name](reference.parameters()), batches(10))

    assert all(isinstance(module, DistributedEmbedding) for module in (model.emb, model.other))
    # two anchors
    assert (
        sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in reference.fc.parameters()) + 2
    )
    assert_close(model, reference)


MODES: dict[str, dict[str, Any]] = {
    "async with one slot": {"send_queue_size": 1},
    "half-async of one step": {"half_async": True, "max_merge_var_num": 1},
    "bounded staleness": {"staleness": 2},
    "by name": {"modes": {"emb": "async", "*": "sync"}, "send_queue_size": 1},
    "k-step": {"k_steps": 3},
}


@pytest.mark.parametrize("name", MODES)
def test_with_one_trainer_every_mode_gives_what_plain_torch_gives(
    servers: Servers, name: str
) -> None:
    """Tables too, where the trainer waits for its own results."""
    mine, reference = Plain(), Plain()
    model = joined(servers(2), mine, strategy_of(**MODES[name]))
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    train(model, optimizer, batches(12))
    optimizer.flush()
    train(reference, torch.optim.Adagrad(reference.parameters(), lr=0.1), batches(12))

    assert_close(model, reference)


CLIPS = {
    "value": (
        ClipGradByValue(0.01),
        lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    ),
    "norm": (
        ClipGradByNorm(0.05),
        lambda m: [torch.nn.utils.clip_grad_norm_([p], 0.05) for p in m.parameters()],
    ),
    "global norm": (
        ClipGradByGlobalNorm(0.1),
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    ),
}


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_of_tables_are_clipped_with_the_others(servers: Servers, name: str) -> None:
    """By value, by their own norm, by the norm of all: as torch clips those of an nn.Embedding."""
    clip, by_hand = CLIPS[name]
    mine, reference = Plain(), Plain()
    model = joined(servers(2), mine)
    train(
        model,
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), grad_clip=clip),
        batches(6),
    )
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.5), batches(6), by_hand)

    assert_close(model, reference, 2e-6)


def test_users_own_clipping_by_norm_counts_tables(servers: Servers) -> None:
    """clip_grad_norm_ over the model's parameters sees the norm of the rows' gradients, and scales
    them.
    """
    mine, reference = Plain(), Plain()
    clip = CLIPS["global norm"][1]
    model = joined(servers(2), mine)
    train(
        model,
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5)),
        batches(6),
        clip,
    )
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.5), batches(6), clip)

    assert_close(model, reference, 2e-6)


# ---- files ----


def sparse_model() -> nn.Module:
    """One table of any ids, with an optimizer of its own; one that follows the script's."""
    torch.manual_seed(7)
    model = nn.Module()
    model.emb = DistributedEmbedding(
        DIM, init=Normal(0, 0.1), optimizer=row_optimizers.Adagrad(lr=0.1)
    )
    model.other = DistributedEmbedding(4, num_embeddings=ROWS, seed=3)
    model.fc = nn.Linear(2 * DIM + 4, 3)
    model.forward = Plain.forward.__get__(model)  # type: ignore[method-assign]
    return model


def begun(
    endpoints: str | None, model: nn.Module, strategy: DistributedStrategy | None = None
) -> torch.optim.Optimizer:
    role = (
        None
        if endpoints is None
        else fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    )
    fleet.init(role, strategy=strategy)
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def values(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        ids = torch.arange(ROWS)
        return [model.emb(ids), model.other(ids), *(p.clone() for p in model.fc.parameters())]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right), (left - right).abs().max()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, None), (None, 2)])
def test_a_resumed_job_equals_one_that_was_never_interrupted(
    servers: Servers, tmp_path: Any, before: int | None, after: int | None
) -> None:
    """To the bit in sync mode, on any number of servers or none; deltas of tables included."""
    path, data = str(tmp_path / "checkpoint"), batches(9)
    whole = sparse_model()
    train(whole, begun(servers(2), whole), data)
    expected = values(whole)
    fleet.finish()
    first = sparse_model()
    optimizer = begun(None if before is None else servers(before), first)
    train(first, optimizer, data[:3])
    fleet.save(path)
    train(first, optimizer, data[3:6])
    fleet.save(path + ".delta", delta=True)
    fleet.finish()
    second = sparse_model()
    optimizer = begun(None if after is None else servers(after), second)
    fleet.load(path + ".delta")
    train(second, optimizer, data[6:])

    assert_same(values(second), expected)


def test_a_checkpoint_of_another_table_is_refused(servers: Servers, tmp_path: Any) -> None:
    """By the table's name and width; nothing is changed."""
    path, model = str(tmp_path), sparse_model()
    train(model, begun(servers(1), model), batches(2))
    fleet.save(path)
    fleet.finish()
    other = sparse_model()
    other.emb, other.fc = DistributedEmbedding(DIM + 1), nn.Linear(2 * DIM + 4, 3)
    begun(servers(1), other)

    with pytest.raises(ValueError, match="table 'emb': dim: expected 9, got a checkpoint with 8"):
        fleet.load(path)


def test_an_export_is_plain_torch(servers: Servers, tmp_path: Any) -> None:
    """A weight where there is a range of ids, ids and rows where there is none; a module without
    servers looks rows up.
    """
    from trainer.serving import load_embedding

    path, model = str(tmp_path / "model.pt"), sparse_model()
    train(model, begun(servers(2), model), batches(4))
    fleet.export(path)
    rows = values(model)
    plain = torch.load(path, weights_only=True)

    assert torch.equal(plain["other.weight"], rows[1]) and torch.equal(
        plain["fc.weight"], model.fc.weight
    )
    assert torch.equal(load_embedding(path, "emb")(torch.arange(ROWS)), rows[0])


def test_an_embedding_that_is_the_whole_model_trains(servers: Servers, tmp_path: Any) -> None:
    """It has no name in the model: its table is "unnamed", in files too."""
    endpoints = servers(2).split(",")
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints))
    mine = fleet.distributed_model(DistributedEmbedding(4, num_embeddings=9))
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(mine.parameters(), lr=0.1))
    mine(torch.arange(5)).sum().backward()
    optimizer.step()
    fleet.save(str(tmp_path / "saved"))
    trained = mine(torch.arange(9)).detach().clone()
    fleet.finish()

    fleet.init()
    alone = fleet.distributed_model(DistributedEmbedding(4, num_embeddings=9))
    fleet.distributed_optimizer(torch.optim.Adagrad(alone.parameters(), lr=0.1))
    fleet.load(str(tmp_path / "saved"))
    assert torch.equal(alone(torch.arange(9)), trained)
