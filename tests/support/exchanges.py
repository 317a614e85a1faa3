"""What each of several trainers does in the tests of how gradients travel: functions that ``spawn``
can find, and the collectives that they record outside of the code under test.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainer import fleet
from transpiler import DistributedStrategy

# A collective: its name, elements, dtype, the ranks of its group, and which group that is.
Collective = tuple[str, int, str, list[int], int]
OPERATIONS = ("allreduce", "reduce", "broadcast", "_reduce_scatter_base", "reduce_scatter_single")
STEPS = 3

# By case: the settings, and the pages' own values where a page has an example.
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"fp16_allreduce": True},
    "each": {"fuse_all_reduce_ops": False},
    "size": {"fuse_grad_size_in_MB": 1},
    "page size": {"fuse_grad_size_in_MB": 50},
    "last": {"last_comm_group_size_MB": 2},
    "number": {"fuse_grad_size_in_num": 2},
    "unused": {"find_unused_parameters": True},
    "groups": {"nccl_comm_num": 2, "fuse_grad_size_in_num": 2},
    "waits": {"sync_nccl_allreduce": True, "fuse_grad_size_in_num": 2},
    "rows": {"use_hierarchical_allreduce": True},
    "page rows": {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 8},
    "two rows": {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
    "all": {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
        "nccl_comm_num": 2,
        "fp16_allreduce": True,
        "fuse_grad_size_in_num": 4,
        "sync_nccl_allreduce": True,
    },
}


class Net(nn.Module):
    """Matrices of 0.5, 1, 1 and 0.08 MB; one that is left out on demand."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes = (64, 2048, 128, 2048, 10)
        self.layers = nn.ModuleList(
            nn.Linear(*each) for each in zip(sizes, sizes[1:], strict=False)
        )
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        found: Tensor = self.layers[-1](x)
        return found


def digits(rank: int, trainers: int) -> list[tuple[Tensor, Tensor]]:
    """One trainer's batches."""
    x, y = load_digits(return_X_y=True)
    x, y = (
        torch.tensor(x[rank::trainers] / 16, dtype=torch.float32),
        torch.tensor(y[rank::trainers]),
    )
    return list(zip(x.split(32)[:STEPS], y.split(32)[:STEPS], strict=True))


def strategy_of(settings: Mapping[str, Any]) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in settings.items():
        setattr(strategy, name, value)
    return strategy


@contextmanager
def recorded(waits: bool = False) -> Iterator[list[Any]]:
    """The collectives of floating-point tensors that begin inside, in order.

    Args:
        waits: "wait" is in the list, too, where this thread waits for one.
    """
    found: list[Any] = []

    def wrapped(name: str, kind: Any) -> Any:
        original = getattr(kind, name)

        def call(self: Any, tensors: Any, *arguments: Any) -> Any:
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            if tensor.is_floating_point():
                ranks = dist.get_process_group_ranks(self)
                dtype = str(tensor.dtype).removeprefix("torch.")
                found.append((name, tensor.numel(), dtype, ranks, id(self)))
            return original(self, tensors, *arguments)

        return call

    original_wait = dist.Work.wait

    def wait(self: Any, *arguments: Any) -> Any:
        found.append("wait")
        return original_wait(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            if hasattr(dist.ProcessGroup, name):
                patch.setattr(dist.ProcessGroup, name, wrapped(name, dist.ProcessGroup))
        if waits:
            patch.setattr(dist.Work, "wait", wait)
        yield found


@contextmanager
def recorded_backends() -> Iterator[list[Any]]:
    """The collectives of floating-point tensors in process groups that belong to no job of torch's:
    name, elements, dtype, size of the group, which group; and "wait" where a thread waits for one;
    each with its thread.
    """
    found: list[Any] = []
    backend = torch._C._distributed_c10d.Backend

    def wrapped(name: str) -> Any:
        original = getattr(backend, name)

        def call(self: Any, tensors: Any, *arguments: Any) -> Any:
            tensor = tensors[0]
            if tensor.is_floating_point():
                dtype = str(tensor.dtype).removeprefix("torch.")
                said = (name, tensor.numel(), dtype, self.size(), id(self))
                found.append((threading.get_ident(), said))
            return original(self, tensors, *arguments)

        return call

    original_wait = dist.Work.wait

    def wait(self: Any, *arguments: Any) -> Any:
        found.append((threading.get_ident(), "wait"))
        return original_wait(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("allreduce", "reduce", "broadcast"):
            patch.setattr(backend, name, wrapped(name))
        patch.setattr(dist.Work, "wait", wait)
        yield found


def of_one(found: list[Any]) -> list[Any]:
    """The collectives of one thread that backends have recorded, without waits, their groups
    numbered.
    """
    thread = next(at for at, each in found if each != "wait")
    return numbered([each for at, each in found if at == thread and each != "wait"])


def numbered(found: list[Any]) -> list[Any]:
    """Groups by their number in the order of their first use."""
    groups: dict[int, int] = {}
    return [
        each if each == "wait" else (*each[:-1], groups.setdefault(each[-1], len(groups)))
        for each in found
    ]


def job(name: str) -> dict[str, Any]:
    """A job on the digits: the collectives of each step, the losses, the parameters, and the first
    step's gradients as each trainer has them alone and as they arrive.
    """
    settings = CASES[name]
    fleet.init(is_collective=True, strategy=strategy_of(settings))
    model = Net("find_unused_parameters" in settings)
    alone = copy.deepcopy(model)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    steps, losses = [], []
    data = digits(dist.get_rank(), dist.get_world_size())
    F.cross_entropy(alone(data[0][0]), data[0][1]).backward()
    first: list[Tensor] = []
    for x, y in data:
        optimizer.zero_grad()
        with recorded("sync_nccl_allreduce" in settings or name == "number") as found:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        steps.append(numbered(found))
        losses.append(float(loss.detach()))
    result = {
        "steps": steps,
        "losses": losses,
        "values": [p.detach().clone() for p in model.parameters()],
        "alone": [p.grad for p in alone.parameters() if p.grad is not None],
        "first": first,
    }
    fleet.finish()
    return result


def keep(path: str, names: list[str]) -> None:
    """Does these jobs one after another; the results are left in files."""
    torch.set_num_threads(1)
    found = {name: job(name) for name in names}
    torch.save(found, Path(path) / f"{os.environ['RANK']}.pt")
