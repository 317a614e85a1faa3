"""Jobs with deep gradient compression: a model with one large tensor, its batches, and a reference
written out as the paper has it.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import fleet
from transpiler import ClipGradByGlobalNorm, DistributedStrategy

LARGE = "0.weight"  # 19,200 elements; the others stay below 16,384
RAMP: dict[str, Any] = {"rampup_begin_step": 3, "rampup_step": 6, "sparsity": [0.75, 0.9375, 0.999]}
KEPT = [19200] * 3 + [4800] * 2 + [1200] * 2 + [19] * 13  # elements of ``LARGE`` in 20 steps
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}

Batch = tuple[Tensor, Tensor]


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 10))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{**SGD, **options})


def batches(trainer: int, count: int = 20) -> list[Batch]:
    generator = torch.Generator().manual_seed(trainer + 1)
    return [
        (torch.randn(8, 64, generator=generator), torch.randint(0, 10, (8,), generator=generator))
        for _ in range(count)
    ]


def strategy_of(
    configs: dict[str, Any] | None = None, **a_sync_configs: Any
) -> DistributedStrategy:
    """With dgc; sync, or as ``a_sync_configs`` says."""
    strategy = DistributedStrategy()
    strategy.dgc, strategy.dgc_configs = True, RAMP if configs is None else configs
    strategy.a_sync = bool(a_sync_configs)
    strategy.a_sync_configs = a_sync_configs
    return strategy


def train(
    model: nn.Module, optimizer: Any, data: Sequence[Batch], after: Callable[[], Any] = lambda: None
) -> list[Any]:
    """What ``after`` gives after each step."""
    found = []
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(after())
    return found


def norm(gradients: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients))


def reference(
    data: Sequence[Sequence[Batch]],
    kept: Sequence[int] = KEPT,
    nesterov: bool = False,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """The parameters after these steps of all trainers, step by step as in arXiv 1712.01887.

    Args:
        data: by trainer.
        kept: by step, the elements of the large tensor that a trainer sends; all of them: the step
            is one of momentum SGD.
        clip: of the global norm of the mean gradient; each trainer clips its share, 1/N of its
            gradient, to N^(-1/2) of it.
    """
    model, trainers = net(), len(data)
    rate, momentum, decay = SGD["lr"], SGD["momentum"], SGD["weight_decay"]
    u = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in data]
    v = [torch.zeros_like(model[0].weight) for _ in data]
    for step, k in enumerate(kept):
        mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for trainer in range(trainers):
            own = copy.deepcopy(model)
            x, y = data[trainer][step]
            F.cross_entropy(own(x), y).backward()
            shares = {name: p.grad / trainers for name, p in own.named_parameters()}
            if clip is not None:
                bound = clip / math.sqrt(trainers)
                factor = min(1.0, bound / norm(list(shares.values())))
                shares = {name: share * factor for name, share in shares.items()}
            for name, share in shares.items():
                gradient = share * trainers + decay * dict(model.named_parameters())[name].detach()
                velocity = u[trainer][name]
                velocity.mul_(momentum).add_(gradient)
                moved = gradient + momentum * velocity if nesterov else velocity.clone()
                if name == LARGE and k < moved.numel():
                    moved = _sent(k, moved, velocity, v[trainer])
                mean[name] += moved / trainers
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= rate * mean[name]
    return {name: p.detach() for name, p in model.named_parameters()}


def _sent(k: int, moved: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The k largest elements of v; u and v are 0 there afterwards."""
    v += moved
    threshold = v.abs().flatten().sort(descending=True).values[k - 1]
    mask = v.abs() >= threshold
    assert int(mask.sum()) == k, "the data has no ties"
    sent = torch.where(mask, v, 0.0)
    v[mask] = 0.0
    u[mask] = 0.0
    return sent


def close(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        wanted = expected[name].detach()
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)


# ---- trainers without servers ----


def counted(counts: list[int]) -> Any:
    """all_gather, which counts the elements of values that it is given."""
    gather = dist.all_gather

    def count(every: list[Tensor], mine: Tensor, *args: Any) -> Any:
        if mine.is_floating_point():
            counts.append(mine.numel())
        return gather(every, mine, *args)

    return count


def on_ranks(path: str) -> None:
    """What each of two trainers does; what it ends with is left in a file."""
    torch.set_num_threads(1)
    number, found = int(os.environ["RANK"]), {}
    for name, options in {
        "plain": {},
        "clip": {"clip": 0.5},
        "nesterov": {"nesterov": True},
    }.items():
        clip, counts = options.pop("clip", None), list[int]()
        fleet.init(is_collective=True, strategy=strategy_of())
        model = fleet.distributed_model(net(seed=3 + number))  # trainer 0's values count
        clipped = None if clip is None else ClipGradByGlobalNorm(clip)
        optimizer = fleet.distributed_optimizer(sgd(model, **options), grad_clip=clipped)
        with patch.object(dist, "all_gather", counted(counts)):
            train(model, optimizer, batches(number))
        found[name] = {"counts": counts, "parameters": dict(model.state_dict())}
        fleet.finish()
    found["overflow"] = {"counts": [], "parameters": with_overflow(number)}
    torch.save(found, f"{path}/{number}.pt")


def with_overflow(number: int, bad: int = 6) -> dict[str, Tensor]:
    """Trainer 1's step 6 overflows, which its GradScaler finds; 20 others count."""
    fleet.init(is_collective=True, strategy=strategy_of())
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (x, y) in enumerate(batches(number, 21)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (math.inf if (step, number) == (bad, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0 and optimizer.steps == 20
    fleet.finish()
    return dict(model.state_dict())
