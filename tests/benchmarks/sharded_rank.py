"""One rank of a sharded model, for ``sharded.py``."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from peers import READY, answer, say
from torch import nn

LAYERS = 12


def held() -> int:
    """Bytes that tensors hold, but for those from before ``gc.freeze()``."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                tensor = getattr(tensor, "_local_tensor", tensor)
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def made(level: str, width: int) -> tuple[nn.Module, Any]:
    """A model and its optimizer at a level; "bare" is FSDP2 as torch has it."""
    from torch.distributed.fsdp import fully_shard

    from trainer import group_sharded_parallel

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    if level == "bare":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = (
        {"segment_size": 1} if level == "p_g_os" else {"buffer_max_size": width * (width + 1)}
    )
    return group_sharded_parallel(model, torch.optim.AdamW(model.parameters()), level, **options)[
        :2
    ]


def sharded(rank: int, ranks: int, port: int, level: str, width: int) -> None:
    """Lines: a number of steps; "memory", which answers the most bytes held in two steps."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    gc.collect()
    gc.freeze()
    model, optimizer = made(level, width)
    batch = torch.randn(16, width)

    def step(look: list[int] | None = None) -> None:
        model(batch).square().mean().backward()
        if look is not None:
            look.append(held())
        optimizer.step()
        if look is not None:
            look.append(held())
        optimizer.zero_grad()

    def ask(line: str) -> object:
        if line == "memory":
            looks: list[int] = []
            step(looks)
            step(looks)
            return max(looks)
        for _ in range(int(line)):
            step()
        return "done"

    say(READY)
    answer(ask)
    dist.destroy_process_group()
