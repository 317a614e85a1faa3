"""A model that is divided among ranks at a level, its batches, and what it is compared with."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.sharding import group_sharded_parallel
from trainer.sharding.units import whole_of

LEVELS = ("os", "os_g", "p_g_os")


@functools.cache
def pair() -> Any:
    """The group of this rank and its neighbour."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def net(width: int = 24, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width),
        nn.Tanh(),
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)),
        nn.Linear(width, 3),
    )


def batches(ranks: int, count: int = 4, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of all ranks together, 4 samples each."""
    source = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4 * ranks, 6, generator=source),
            torch.randint(0, 3, (4 * ranks,), generator=source),
        )
        for _ in range(count)
    ]


def part(batch: Any, group: Any) -> Any:
    rank = dist.get_rank(group)
    return tuple(tensor[4 * rank : 4 * rank + 4] for tensor in batch)


def train(
    model: nn.Module, optimizer: Any, data: Any, clip: Any = None, scheduler: Any = None
) -> None:
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def sharded(
    level: str, group: Any = None, model: Any = None, rule: Any = torch.optim.Adam, **options: Any
) -> Any:
    """A model divided at a level, every tensor of it where parameters are divided too."""
    model = net() if model is None else model
    options = ({"segment_size": 1} if level == "p_g_os" else {}) | options
    return group_sharded_parallel(
        model, rule(model.parameters(), lr=1e-3), level, group=group, **options
    )


def values(model: nn.Module) -> list[torch.Tensor]:
    return [whole_of(tensor.detach()) for tensor in model.parameters()]


def assert_close(model: nn.Module, reference: nn.Module, exactly: bool = False) -> None:
    for (name, theirs), mine in zip(reference.named_parameters(), values(model), strict=True):
        if exactly:
            assert torch.equal(mine, theirs), name
        else:
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6, msg=name)


def live() -> int:
    """Bytes of all memory that tensors of this process hold, but for those that were there before
    ``gc.freeze()``.
    """
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                tensor = getattr(tensor, "_local_tensor", tensor)
                if tensor is not None and tensor.device.type != "meta":
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())
