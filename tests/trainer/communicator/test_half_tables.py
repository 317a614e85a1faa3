"""Tables of 16 bits in a job of several servers, and rows that travel in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers
from tests.support.eager_modes import strategy_of
from trainer import DistributedEmbedding, Uniform, fleet
from trainer.checkpoint.export import MAX_BYTES

DIM = 64
HALVES = [torch.bfloat16, torch.float16]
MODES = [{"modes": {"*": "sync"}}, {"send_queue_size": 1}, {"k_steps": 4}]


class Clicks(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, rows: int | None = 1000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = DistributedEmbedding(
            DIM, num_embeddings=rows, dtype=dtype, init=Uniform(-0.3, 0.3)
        )
        self.deep = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.deep(self.rows(ids).sum(1)).squeeze(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> float:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 1000, (32, 8), generator=generator)
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), (ids.sum(1) % 2).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def begun(endpoints: str, model: nn.Module, **options: Any) -> Any:
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(adagrad(model), **options)


EVERY = torch.arange(1000)


@pytest.mark.parametrize("dtype", HALVES)
def test_servers_learn_what_one_process_learns(servers: Servers, dtype: torch.dtype) -> None:
    """To the bit, on two servers; forward gives float32, and all rows can be held in 16 bits."""
    alone, shared = Clicks(dtype), Clicks(dtype)
    train(alone, adagrad(alone))

    train(shared, begun(servers(2), shared))

    found = shared.rows(EVERY)
    assert found.dtype is torch.float32 and torch.equal(found, found.to(dtype).float())
    assert torch.equal(found, alone.rows(EVERY))
    assert torch.equal(shared.deep.weight, alone.deep.weight)
    fleet.finish()


@pytest.mark.parametrize("configs", MODES, ids=str)
def test_every_mode_trains_them(servers: Servers, configs: dict[str, Any]) -> None:
    """As near to one process as the numbers are."""
    alone, shared = Clicks(torch.float32), Clicks()
    expected = train(alone, adagrad(alone))
    optimizer = begun(servers(2), shared, strategy=strategy_of(**configs))

    loss = train(shared, optimizer)
    optimizer.flush()

    assert loss == pytest.approx(expected, abs=0.02)
    apart = shared.rows(EVERY) - alone.rows(EVERY)
    assert apart.abs().mean() < 0.005
    fleet.finish()


def test_lookups_and_gradients_take_half_of_the_bytes(servers: Servers) -> None:
    """1.9 times fewer, ids included, each way; so is the memory of rows."""

    def travelled(dtype: torch.dtype) -> tuple[float, float, float]:
        model = Clicks(dtype)
        model.deep.requires_grad_(False)
        optimizer = begun(servers(2), model)
        train(model, optimizer, 2)
        before = fleet.metrics()
        train(model, optimizer, 10)
        after = fleet.metrics()
        held = fleet.table_status()["rows"]["bytes_held"]
        fleet.finish()
        return *(after[key] - before[key] for key in ("bytes_in", "bytes_out")), held

    whole, half = travelled(torch.float32), travelled(torch.bfloat16)

    assert whole[0] / half[0] > 1.9
    # of each row 8 bytes of its id go out twice: with the lookup, and with the gradient
    assert (whole[1] - half[1]) / whole[1] > 0.45
    assert half[2] < whole[2]


def test_a_checkpoint_goes_on_with_other_servers(servers: Servers, tmp_path: Path) -> None:
    """From two to three, to the bit; and into a file for torch alone."""
    model = Clicks()
    optimizer = begun(servers(2), model)
    train(model, optimizer)
    fleet.save(str(tmp_path / "saved"))
    train(model, optimizer, 3)
    expected = model.rows(EVERY)
    fleet.export(str(tmp_path / "model.pt"))
    fleet.finish()

    again = Clicks()
    optimizer = begun(servers(3), again)
    fleet.load(str(tmp_path / "saved"))
    train(again, optimizer, 3)

    assert torch.equal(again.rows(EVERY), expected)
    assert torch.equal(torch.load(tmp_path / "model.pt")["rows.weight"], expected)
    assert expected.nbytes < MAX_BYTES
    fleet.finish()


@pytest.mark.parametrize("pattern", ["rows", "*"])
def test_gradients_of_whole_rows_travel_in_fewer_bits(servers: Servers, pattern: str) -> None:
    """By the table's name or a wildcard; lookups stay float32."""

    def travelled(compression: dict[str, str] | None) -> tuple[float, float, torch.Tensor]:
        model = Clicks(torch.float32)
        optimizer = begun(servers(2), model, compression=compression)
        before = fleet.metrics()
        train(model, optimizer, 10)
        after = fleet.metrics()
        rows = model.rows(EVERY).detach()
        fleet.finish()
        return *(after[key] - before[key] for key in ("bytes_in", "bytes_out")), rows

    whole, shorter = travelled(None), travelled({pattern: "bfloat16"})

    assert shorter[0] == pytest.approx(whole[0], rel=0.01)
    assert shorter[1] < 0.58 * whole[1]
    assert not torch.equal(shorter[2], whole[2])
    assert torch.allclose(shorter[2], whole[2], atol=0.02)


@pytest.mark.parametrize(
    ("compression", "strategy", "message"),
    [
        ({"rows": "int8"}, {}, "table 'rows': compression: expected one of '', 'bfloat16'"),
        ({"rows": "bfloat16"}, {"k_steps": 4}, "'rows' is in mode geo, where no gradients travel"),
    ],
)
def test_what_rows_cannot_travel_as_is_refused(
    servers: Servers, compression: dict[str, str], strategy: dict[str, Any], message: str
) -> None:
    """A wildcard of such a scheme is for parameters only."""
    model = Clicks(torch.float32)
    with pytest.raises(ValueError, match=message):
        begun(
            servers(1),
            model,
            compression=compression,
            strategy=strategy_of(**strategy) if strategy else None,
        )
    fleet.finish()


def test_int8_for_everything_leaves_rows_whole(servers: Servers) -> None:
    """Parameters alone are compressed."""
    model = Clicks(torch.float32)
    train(model, begun(servers(1), model, compression={"*": "int8"}), 2)
    fleet.finish()


def test_the_auc_is_that_of_float32() -> None:
    """Within 0.001, on samples that were not trained on."""

    def clicks(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        truth = torch.randn(3000, generator=torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(seed)
        ids = (torch.rand(count, 6, generator=generator) ** 2 * 3000).long()
        clicked = torch.rand(count, generator=generator) < truth[ids].sum(1).mul(0.7).sigmoid()
        return ids, clicked.float()

    def auc(dtype: torch.dtype) -> float:
        model = Clicks(dtype, rows=None)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
        for ids, clicked in zip(*(part.split(256) for part in clicks(40_000, 1)), strict=True):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(ids), clicked).backward()
            optimizer.step()
        ids, clicked = clicks(20_000, 2)
        with torch.no_grad():
            ranks = model(ids).argsort().argsort().double() + 1
        of_clicked = clicked.sum()
        above = ranks[clicked > 0].sum() - of_clicked * (of_clicked + 1) / 2
        return float(above / (of_clicked * (len(clicked) - of_clicked)))

    expected = auc(torch.float32)

    assert expected > 0.75
    assert all(auc(dtype) == pytest.approx(expected, abs=0.001) for dtype in HALVES)


def test_a_moved_embedding_gives_what_it_gave(servers: Servers) -> None:
    """nn.Embedding of 16 bits: forward's dtype, its rows and its gradient."""
    torch.manual_seed(0)
    plain = nn.Embedding(20, 4).to(torch.bfloat16)
    moved = DistributedEmbedding.from_module(plain)

    assert moved(torch.arange(20)).dtype is torch.bfloat16
    assert torch.equal(moved(torch.arange(20)), plain(torch.arange(20)))
