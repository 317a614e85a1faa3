"""Processes of the click benchmarks: each answers lines, as those of peers.py do.

A line is a number of steps; the answer: the seconds that they took, until every step was applied,
and the CPU seconds since the process began.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from ctr_data import DIM, SLOTS, WIDTH, batches
from processes import READY
from torch import nn

RATE, DENSE_RATE = 0.05, 0.01
PLACES: dict[str, dict[str, Any] | None] = {  # a_sync_configs; None: sync
    "async": {},
    "sync": None,
    "k_step": {"k_steps": 10},
    "mixed": {"modes": {"emb*": "async", "*": "collective"}},
    "mixed_sync": {"modes": {"emb*": "sync", "*": "collective"}},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=DENSE_RATE),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=DENSE_RATE),
}


class Clicks(nn.Module):
    """Embeddings of all slots, and a network over them."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.emb = embedding
        self.net = network()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, slots] -> logits [batch, 1]."""
        logits: torch.Tensor = self.net(self.emb(ids).flatten(1))
        return logits


class Slots(nn.Module):
    """A table for each slot."""

    def __init__(self, tables: list[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, slots] -> [batch, slots, DIM]."""
        return torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)


class Both(nn.Module):
    """Weights and factors of ids, as a factorization machine has them, and a network over the
    factors.

    Args:
        of: makes embeddings of all slots, of this width.
    """

    def __init__(self, of: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.weights, self.factors = of(1), of(DIM)
        self.net = network()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, slots] -> logits [batch, 1]."""
        logits: torch.Tensor = self.net(self.factors(ids).flatten(1))
        return logits + self.weights(ids).sum(1)


def network() -> nn.Sequential:
    """Two wide layers and a logit."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(SLOTS * DIM, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
    )


def stepping(
    model: nn.Module,
    optimizers: list[Any],
    seed: int,
    rows: int,
    device: str = "cpu",
    of_slot: int | None = None,
) -> Callable[[], None]:
    """One step of the ordinary loop; its batches are made beforehand.

    Args:
        of_slot: ids begin with 0 in each slot, which has so many; None: all slots share a range.
    """
    made = [
        (
            torch.from_numpy(ids % (of_slot or rows)).to(device),
            torch.from_numpy(label).to(device),
        )
        for ids, label in batches(seed, rows)
    ]
    upcoming: Iterator[tuple[torch.Tensor, torch.Tensor]] = itertools.cycle(made)

    def step() -> None:
        ids, label = next(upcoming)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(ids), label).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def answer(step: Callable[[], None], drain: Callable[[], None] = lambda: None) -> None:
    """Takes as many steps as each line says."""
    print(READY, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        drain()
        print(time.perf_counter() - began, time.process_time(), flush=True)


def plain(seed: int, rows: int, rule: str = "adagrad", device: str = "cpu") -> None:
    """Plain torch in one process.  ``rule``: of rows and network."""
    model = Clicks(nn.Embedding(rows, DIM, sparse=True)).to(device)
    make = torch.optim.SGD if rule == "sgd" else torch.optim.Adagrad
    optimizers = [make(model.emb.parameters(), lr=RATE), OPTIMIZERS[rule](model.net.parameters())]
    answer(stepping(model, optimizers, seed, rows, device), settled(device))


def settled(device: str) -> Callable[[], None]:
    """Waits for what steps have begun on a device."""
    return (lambda: None) if device == "cpu" else torch.cuda.synchronize


def ddp(rank: int, world: int, port: int, rows: int) -> None:
    """One rank of DDP for the network; its rows are its own: nobody exchanges them."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    model = Clicks(nn.Embedding(rows, DIM, sparse=True))
    model.net = nn.parallel.DistributedDataParallel(model.net)  # type: ignore[assignment]
    embedding = torch.optim.Adagrad(model.emb.parameters(), lr=RATE)
    answer(stepping(model, [embedding, OPTIMIZERS["adagrad"](model.net.parameters())], rank, rows))
    dist.destroy_process_group()


def trainer(
    number: int,
    trainers: int,
    endpoint: str,
    transport: str,
    place: str,
    rows: int,
    rule: str = "adagrad",
    tables: int = 1,
    device: str = "cpu",
) -> None:
    """One of ours.

    Args:
        rule: of the network, and where it is "sgd" of the rows.
        tables: 1, or one for each slot.
    """
    from trainer import DistributedEmbedding, Uniform, fleet
    from trainer.row_optimizers import SGD, Adagrad

    os.environ["PSERVER_TRANSPORT"] = transport
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = PLACES[place] is not None, PLACES[place] or {}
    fleet.init(
        fleet.UserDefinedRoleMaker(number, worker_num=trainers, server_endpoints=[endpoint]),
        strategy=strategy,
    )
    own = SGD(lr=RATE) if rule == "sgd" else Adagrad(lr=RATE)
    made: list[nn.Module] = [
        DistributedEmbedding(DIM, init=Uniform(-0.01, 0.01), optimizer=own) for _ in range(tables)
    ]
    model = fleet.distributed_model(Clicks(made[0] if tables == 1 else Slots(made)).to(device))
    optimizer = fleet.distributed_optimizer(OPTIMIZERS[rule](model.parameters()))

    def drain() -> None:
        assert optimizer.communicator is not None
        for lane in optimizer.communicator.lanes if place != "sync" else ():
            lane.drain()
        settled(device)()

    answer(stepping(model, [optimizer], number, rows, device), drain)
    fleet.finish()


def moved(endpoint: str, rows: int, by_slot: int) -> None:
    """The only trainer of a sync job with weights and factors: ``by_slot``: of torch's embeddings,
    two for each slot, which the strategy moves; otherwise two tables.
    """
    from trainer import DistributedEmbedding, fleet

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    if by_slot:
        strategy.a_sync_configs = {"embeddings": ["weights.*", "factors.*"]}
    fleet.init(
        fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[endpoint]), strategy=strategy
    )
    of_slot = rows // SLOTS
    model = Both(
        (lambda width: Slots([nn.Embedding(of_slot, width) for _ in range(SLOTS)]))
        if by_slot
        else (lambda width: DistributedEmbedding(width, num_embeddings=rows))
    )
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model.parameters()))
    answer(stepping(model, [optimizer], 0, rows, of_slot=of_slot if by_slot else None))
    fleet.finish()


ROLES: dict[str, Callable[..., None]] = {
    "ctr_moved": moved,
    "ctr_plain": plain,
    "ctr_ddp": ddp,
    "ctr_trainer": trainer,
}
