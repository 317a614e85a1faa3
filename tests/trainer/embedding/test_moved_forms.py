"""Embeddings of torch's own on servers: each form trains as torch's does, or is refused with its
reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.table_programs import transpiled
from tests.support.table_trainers import Servers
from trainer import DistributedEmbedding, Executor, fleet
from transpiler import DistributedStrategy, capture

ROWS, DIM, STEPS = 9, 4, 4
PADDINGS = [0, 5, -1]


class Words(nn.Module):
    """One embedding, or bags, and a layer that stays as it is."""

    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb = emb
        self.fc = nn.Linear(DIM, 2)
        with torch.no_grad():
            self.fc.weight.copy_(torch.linspace(-1, 1, 2 * DIM).view(2, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.emb(ids)
        out: torch.Tensor = self.fc(rows).flatten(1)
        return out


def pretrained(padding: int, sparse: bool = False) -> nn.Embedding:
    """Its padding row is not zeros: torch reads it, and does not train it."""
    rows = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    return nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=padding, sparse=sparse)


def fresh(padding: int, sparse: bool = False) -> nn.Embedding:
    return nn.Embedding(ROWS, DIM, padding_idx=padding, sparse=sparse)


def bag(padding: int, sparse: bool = False) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=padding, sparse=sparse)


def batches() -> list[torch.Tensor]:
    """Every row twice, the padding among them."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randperm(2 * ROWS, generator=generator).view(6, 3) % ROWS for _ in range(STEPS)]


def far(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = (model(ids) - 1).square().mean()
    return out


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def learn(model: nn.Module, optimizer: Any) -> None:
    for ids in batches():
        optimizer.zero_grad()
        far(model, ids).backward()
        optimizer.step()


def scores(model: nn.Module) -> torch.Tensor:
    """Of each row, and of bags with and without padding."""
    with torch.no_grad():
        each = torch.arange(ROWS)[:, None]
        found: torch.Tensor = torch.cat([model(each).view(-1), model(batches()[0]).view(-1)])
    return found


@pytest.fixture
def begun(servers: Servers) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """The model of a job of one trainer and two servers, whose embedding ``emb`` moves."""

    def made(model: nn.Module) -> nn.Module:
        strategy = DistributedStrategy()
        strategy.a_sync_configs = {"embeddings": ["emb"], "send_queue_size": 1}
        endpoints = servers(2).split(",")
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints)
        fleet.init(role, strategy=strategy)
        return fleet.distributed_model(model)

    yield made
    fleet.finish()


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("make", [fresh, pretrained, bag])
def test_padding_of_a_moved_embedding_is_torchs(begun: Any, make: Any, padding: int) -> None:
    """It reads its own row, which nothing trains; a bag leaves it out."""
    plain = Words(make(padding))
    model = begun(copy.deepcopy(plain))
    assert isinstance(model.emb, DistributedEmbedding)
    learn(model, fleet.distributed_optimizer(adagrad(model)))
    learn(plain, adagrad(plain))

    assert (scores(model) - scores(plain)).abs().max() <= 1e-6


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("make", [fresh, pretrained, bag])
def test_padding_of_a_programs_table_is_torchs(servers: Servers, make: Any, padding: int) -> None:
    """So is that of an embedding with sparse=True in an Executor's program."""
    plain = Words(make(padding, sparse=True))
    model = copy.deepcopy(plain)
    main, startup = capture(model, far, adagrad(model), batches()[:1])
    job = transpiled(main, startup, servers(2))
    learn(plain, adagrad(plain))
    with Executor() as executor:
        executor.run(job.get_startup_program())
        for ids in batches():
            executor.run(job.get_trainer_program(), feed=(ids,))

    assert (scores(model) - scores(plain)).abs().max() <= 1e-6


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "max_norm": (nn.Embedding(ROWS, DIM, max_norm=1.0), "max_norm: a lookup would write to rows"),
    "a norm of 0": (nn.Embedding(ROWS, DIM, max_norm=0.0), "max_norm: a lookup would write"),
    "scale_grad_by_freq": (
        nn.Embedding(ROWS, DIM, scale_grad_by_freq=True),
        "scale_grad_by_freq: a gradient would depend on how often",
    ),
    "bags by max": (nn.EmbeddingBag(ROWS, DIM, mode="max"), "mode 'max': .* sum, mean or sqrtn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_servers_cannot_do_is_refused_by_name(begun: Any, name: str) -> None:
    """The message names the embedding and says why."""
    module, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"embedding 'emb': {words}.*: it cannot move"):
        begun(Words(module))


# ---- two of one name ----


class Pair(nn.Module):
    """Two embeddings in different modules."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.left, self.right = nn.ModuleDict({"emb": first}), nn.ModuleDict({"emb": second})


def named(weight: torch.Tensor) -> nn.Module:
    made = nn.Embedding.from_pretrained(weight, freeze=False)
    return fleet.distribute_embedding(made, name="user")


def test_two_of_one_name_share_a_table(begun: Any) -> None:
    """A step of the one is a step of the other."""
    model = Pair(*(DistributedEmbedding(DIM, name="user") for _ in range(2)))
    model.emb = nn.Embedding(2, DIM)  # the strategy names it
    model = begun(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.right["emb"](torch.tensor([3])).detach()
    model.left["emb"](torch.tensor([3])).sum().backward()
    optimizer.step()

    assert fleet.table_status().keys() == {"user", "emb"}
    assert torch.equal(model.right["emb"](torch.tensor([3])).detach(), before - 1)


def test_two_of_one_name_that_have_other_rows_are_refused(begun: Any) -> None:
    """One would lose its rows: the message names both."""
    model = Pair(named(torch.zeros(ROWS, DIM)), named(torch.ones(ROWS, DIM)))
    model.emb = nn.Embedding(2, DIM)
    model = begun(model)
    with pytest.raises(
        ValueError, match="called 'user' and differ: the rows of 'left.emb' and 'right.emb'; those"
    ):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="capture: two .* the rows of 'left.emb' and 'right.emb'"):
        capture(
            model,
            lambda model, ids: model.left["emb"](ids).sum(),
            torch.optim.SGD(model.parameters(), lr=1.0),
            (torch.arange(3),),
        )
