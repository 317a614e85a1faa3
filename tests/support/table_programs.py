"""Models with sparse tables as programs: captured once, begun again, transpiled, run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import DistributedEmbedding, Executor, Normal, row_optimizers
from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
)
from transpiler.program import Program

Servers = Callable[[int], str]


Batch = tuple[torch.Tensor, torch.Tensor]


ROWS, DIM = 30, 4


class Net(nn.Module):
    """One table that is looked up twice, one in bags with an optimizer of its own, a weight of
    torch's, a dense layer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = DistributedEmbedding(DIM, init=Normal(0, 0.5))
        self.bag = DistributedEmbedding(
            DIM,
            num_embeddings=ROWS,
            pooling="mean",
            padding_idx=0,
            seed=5,
            optimizer=row_optimizers.Adam(lr=0.05),
        )
        self.word = nn.Embedding(ROWS, 3, sparse=True)
        self.fc = nn.Linear(3 * DIM + 3, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [self.emb(ids[:, 0]), self.emb(ids[:, 1]), self.word(ids[:, 2]), self.bag(ids)]
        out: torch.Tensor = self.fc(torch.cat(rows, 1))
        return out


class Tables(nn.Module):
    """Nothing but tables: two that are looked up, of the same optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = DistributedEmbedding(DIM, num_embeddings=ROWS, seed=1)
        self.item = DistributedEmbedding(DIM, num_embeddings=ROWS, seed=2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        score = (self.user(ids[:, 0]) * self.item(ids[:, 1])).sum(1)
        return torch.stack([score, -score], 1)


def step(model: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), y)


def batches(count: int, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, ROWS, (size, 3), generator=generator),
            torch.randint(0, 2, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def begin_again(model: nn.Module, new: nn.Module) -> None:
    """What a new model has is this one's: also the rows, which may be servers'."""
    for mine, fresh in zip(model.modules(), new.modules(), strict=True):
        if isinstance(mine, DistributedEmbedding):
            mine.rows = fresh.rows
    model.load_state_dict(new.state_dict())


@functools.cache
def captured(kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer]) -> Any:
    """A model, its optimizer and its programs: capturing takes longer than all the rest."""
    model = kind()
    optimizer = make(model)
    return model, optimizer, capture(model, step, optimizer, batches(1)[0])


def begun(
    kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer] = adagrad
) -> Any:
    """The same, with everything as it was before the first step."""
    model, optimizer, programs = captured(kind, make)
    new = kind()
    begin_again(model, new)
    optimizer.load_state_dict(make(new).state_dict())
    return model, optimizer, *programs


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    clip: Any = None,
    gamma: float = 1.0,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for ids, y in data:
        optimizer.zero_grad()
        step(model, ids, y).backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        schedule.step()


def transpiled(
    main: Program,
    startup: Program | None,
    endpoints: str,
    trainers: int = 1,
    trainer: int = 0,
    strategy: DistributedStrategy | None = None,
    **fields: Any,
) -> Any:
    config = DistributeTranspilerConfig()
    config.min_block_size = 8
    for name, value in fields.items():
        setattr(config, name, value)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(
        trainer,
        main,
        pservers=endpoints,
        trainers=trainers,
        startup_program=startup,
        strategy=strategy,
    )
    return transpiler


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a model has learned, as its modules read it."""
    ids = torch.arange(ROWS)
    found = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "proxy" not in name
    }
    with torch.no_grad():
        for name, module in model.named_children():
            if isinstance(module, DistributedEmbedding):
                found[name] = module(ids if module.pooling is None else ids[1:, None])
    return found


def assert_close(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= tolerance, name


def run(
    transpiler: Any, data: Sequence[Batch], model: nn.Module, schedule: Any = None
) -> tuple[dict[str, torch.Tensor], float]:
    """What a trainer's program has learned, and how many pulls a step took."""
    program = transpiler.get_trainer_program()
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for batch in data:
            exe.run(program, feed=batch, fetch_list=["loss"])
            if schedule is not None:
                schedule.step()
        communicator = exe._runtimes[0].communicator
        communicator.flush()
        pulls = communicator.metrics()["lookups"] / len(data)
        found = values(model)
    return {
        **found,
        **{name: p.detach().clone() for name, p in model.named_parameters() if "proxy" not in name},
    }, pulls


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)
