"""What each of two trainers does in the tests of local SGD: functions that ``spawn`` can find."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import ranks
from trainer import fleet
from trainer.collective.all_reduce import Ring
from transpiler import DistributedStrategy

STEPS = 20
FIXED = {"localsgd": True, "localsgd_configs": {"k_steps": 3, "begin_step": 2}}
ADAPTIVE = {
    "adaptive_localsgd": True,
    "adaptive_localsgd_configs": {"init_k_steps": 5, "begin_step": 1},
}
LATE = {  # the first step does not average
    "adaptive_localsgd": True,
    "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 0},
}
PAGES = {  # the examples of the documentation
    "fixed": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 30}},
    "adaptive": {
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {"init_k_steps": 1, "begin_step": 30},
    },
}
COURSES = {"fixed": FIXED, "adaptive": ADAPTIVE, "late": LATE}
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def lr_of(step: int) -> float:
    """The learning rate of the courses, from step 1."""
    return 0.2 if step <= 10 else 0.05


def strategy_of(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def begun(strategy: DistributedStrategy, seed: int) -> tuple[nn.Module, Any]:
    """A job's model and optimizer, with momentum."""
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(ranks.net(seed))
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    return model, fleet.distributed_optimizer(sgd)


def one_step(model: nn.Module, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    x, y = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return optimizer.step(loss=loss)


def values(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, without the hooks of ``state_dict``."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@contextmanager
def counted(sizes: list[int]) -> Iterator[None]:
    """Notes the elements of every all-reduce: those of torch.distributed, and those of rings."""

    def noting(whole: Callable[..., Any], place: int) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            sizes.append(arguments[place].numel())
            return whole(*arguments, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noting(dist.all_reduce, 0))
        patch.setattr(Ring, "begin", noting(Ring.begin, 1))
        yield


# ---- one function for each promise ----


def course(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Every step's values and all-reduces, and what was logged."""
    model, optimizer = begun(strategy_of(**settings), rank)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainer.collective.local_sgd")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    sizes, steps = list[list[int]](), list[list[torch.Tensor]]()
    for step, batch in enumerate(ranks.mine(ranks.batches(STEPS)), 1):
        optimizer.param_groups[0]["lr"] = lr_of(step)
        sizes.append([])
        with counted(sizes[-1]):
            one_step(model, optimizer, batch)
        steps.append(values(model))
    logger.removeHandler(handler)
    fleet.finish()
    return {"sizes": sizes, "steps": steps, "log": told, "end": values(model)}


def between(rank: int, path: Path) -> dict[str, Any]:
    """The values after what needs them in the middle of a window, and after a load."""
    configs = {"k_steps": 4, "begin_step": 0}
    model, optimizer = begun(strategy_of(localsgd=True, localsgd_configs=configs), rank)
    data, found = ranks.mine(ranks.batches(12)), dict[str, Any]()
    one_step(model, optimizer, data[0])
    found["own"] = values(model)
    model.state_dict()
    found["state_dict"] = values(model)
    one_step(model, optimizer, data[1])
    fleet.save(str(path / "saved"))
    found["save"] = values(model)
    one_step(model, optimizer, data[2])
    fleet.export(str(path / "exported.pt"))
    found["export"] = values(model)
    sizes: list[int] = []
    with counted(sizes):
        one_step(model, optimizer, data[3])  # the fourth step, as without all these
    found["fourth"] = sizes
    one_step(model, optimizer, data[4])
    found["loaded step"] = fleet.load(str(path / "saved"))
    found["load"] = values(model)
    sizes = []
    with counted(sizes):
        for batch in data[5:9]:
            one_step(model, optimizer, batch)
            sizes.append(0)
    found["after load"] = sizes
    one_step(model, optimizer, data[9])
    fleet.finish()
    found["finish"] = values(model)
    return found


def lossless(rank: int) -> dict[str, Any]:
    """An adaptive step without a loss, one with a closure, and one whose loss overflowed."""
    model, optimizer = begun(strategy_of(adaptive_localsgd=True), rank)
    x, y = ranks.mine(ranks.batches(1))[0]
    said = ""
    F.mse_loss(model(x), y).backward()
    try:
        optimizer.step()
    except ValueError as error:
        said = str(error)

    def closure() -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    given = optimizer.step(closure)
    fleet.finish()
    return {"said": said, "closure": float(given.detach())}


def scaled(rank: int) -> dict[str, Any]:
    """A GradScaler whose gradients overflow on trainer 1 alone: its own update is skipped."""
    configs = {"k_steps": 2, "begin_step": 0}
    model, optimizer = begun(strategy_of(localsgd=True, localsgd_configs=configs), rank)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), values(model)
    for step, (x, y) in enumerate(ranks.mine(ranks.batches(2))):
        optimizer.zero_grad()
        factor = math.inf if rank == 1 and step == 0 else 1.0
        scaler.scale(F.mse_loss(model(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            skipped = all(map(torch.equal, values(model)[:6], before[:6]))
    found = {"skipped": skipped, "end": values(model)}
    fleet.finish()
    return found


def digits(rank: int, settings: dict[str, Any]) -> float:
    """The accuracy on held-out digits after four passes."""
    fleet.init(is_collective=True, strategy=strategy_of(**settings))
    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    x, y = pixels.float() / 16, labels
    torch.manual_seed(rank)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = fleet.distributed_optimizer(adam)
    loader = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=16, shuffle=True)
    for _ in range(4):
        for images, wanted in fleet.shard(loader):
            loss = F.cross_entropy(model(images), wanted)
            loss.backward()
            optimizer.step(loss=loss)
            optimizer.zero_grad()
    fleet.finish()
    with torch.no_grad():
        return float((model(x[1437:]).argmax(1) == y[1437:]).float().mean())


def keep(path: str) -> None:
    """Does all of them, one job after another; the results are left in files."""
    torch.set_num_threads(1)
    fleet.init()
    rank = fleet.worker_index()
    fleet.finish()
    found: dict[str, Any] = {name: course(rank, given) for name, given in COURSES.items()}
    found["between"] = between(rank, Path(path))
    found["lossless"] = lossless(rank)
    found["scaled"] = scaled(rank)
    found["digits"] = {
        name: digits(rank, given) for name, given in {"mean gradients": {}, **PAGES}.items()
    }
    torch.save(found, Path(path) / f"{rank}.pt")
