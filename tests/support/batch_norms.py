"""What each of two trainers does in the tests of sync_batch_norm: functions that ``spawn`` can
find.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pserver.errors import PServerError
from tests.support import ranks
from trainer import fleet
from trainer.collective.world import world_total
from trainer.modules.sync_batch_norm import connect_batch_norms
from transpiler import DistributedStrategy


def strategy_of(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def net(seed: int) -> nn.Module:
    return ranks.net(seed)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def joint() -> list[tuple[Tensor, Tensor]]:
    """Batches of both trainers, whose halves have other means."""
    return [(x + torch.arange(8)[:, None] / 8, y) for x, y in ranks.batches(6)]


def begun(model: nn.Module) -> tuple[nn.Module, Any]:
    fleet.init(is_collective=True, strategy=strategy_of(sync_batch_norm=True))
    model = fleet.distributed_model(model)
    return model, fleet.distributed_optimizer(sgd(model))


def half(rank: int, of: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = of
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


# ---- one function for each promise ----


def trained(rank: int) -> dict[str, Any]:
    """With an evaluation on trainer 0 in between."""
    model, optimizer = begun(net(rank))
    evaluated = False
    for x, y in (half(rank, each) for each in joint()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if rank == 0 and not evaluated:
            model.eval()
            with torch.no_grad():
                evaluated = bool(model(x).isfinite().all())
            model.train()
    fleet.finish()
    return {"trained": dict(model.state_dict()), "evaluated": evaluated}


def in_backward(rank: int) -> str:
    """Trainer 0 calls the model a second time where the other one goes on to backward."""
    model, _ = begun(net(0))
    x, y = half(rank, joint()[0])
    said = ""
    try:
        loss = F.mse_loss(model(x), y)
        if rank == 0:
            with torch.no_grad():
                model(x)
        loss.backward()
    except PServerError as error:
        said = str(error)
    fleet.finish()
    return said


def in_no_batch_norm(rank: int) -> str:
    """Trainer 0 is in a forward too many, while the other one waits for its buffers."""
    model, _ = begun(net(0))
    connect_batch_norms([model], world_total, 2, 1.0)
    x, y = half(rank, joint()[0])
    said = ""
    try:
        if rank == 0:
            with torch.no_grad():
                model(x)
        F.mse_loss(model(x), y).backward()
    except PServerError as error:
        said = str(error)
    fleet.finish()
    return said


def after_the_end(rank: int) -> str:
    """Trainer 1 calls the model once more, when the other one has finished."""
    model, _ = begun(net(0))
    x, _ = half(rank, joint()[0])
    said = ""
    try:
        with torch.no_grad():
            for _ in range(1 + rank):
                model(x)
    except PServerError as error:
        said = str(error)
    fleet.finish()
    return said


def digits(rank: int) -> float:
    """The accuracy on held-out digits after three passes of 4 samples a trainer."""
    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    x, y = pixels.float() / 16, labels
    torch.manual_seed(rank)
    layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)]
    model, optimizer = begun(nn.Sequential(*layers))
    loader = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=4, shuffle=True)
    for _ in range(2):
        for images, wanted in fleet.shard(loader):
            F.cross_entropy(model(images), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    fleet.finish()
    model.eval()
    with torch.no_grad():
        return float((model(x[1437:]).argmax(1) == y[1437:]).float().mean())


def keep(path: str) -> None:
    """Does all of them, one job after another; the results are left in files."""
    torch.set_num_threads(1)
    fleet.init()
    rank = fleet.worker_index()
    fleet.finish()
    found = trained(rank)
    found["digits"] = digits(rank)
    found["after the end"] = after_the_end(rank)
    found["in backward"] = in_backward(rank)
    found["in no batch norm"] = in_no_batch_norm(rank)
    torch.save(found, Path(path) / f"{rank}.pt")
    # threads of gloo may still be in what failed, and wake while an interpreter ends
    os._exit(0)
