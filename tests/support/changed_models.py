"""Models that a script changes while it trains: it unfreezes a part, adds parameters, casts all of
it.  Two trainers do so in each way of averaging, and are compared with plain torch on their joint
batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer import fleet
from trainer.sharding import group_sharded_parallel
from trainer.sharding.levels import sharded
from trainer.sharding.units import whole_of
from transpiler import DistributedStrategy

WIDTH = 128  # of layers whose weight dgc takes for a large one
STEPS = 8
AT = 2  # before this step the model changes, and changes once more two steps later

Groups = Callable[[dict[str, Any]], None]


class Adapter(nn.Module):
    """A frozen layer, with a small one beside it that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return out


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 2),
    )


# ---- the kinds of changes: a beginning, and a change before each step ----


class Change:
    """One kind: nothing changes.

    Args:
        model: before anything is registered.
    """

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model

    def groups(self) -> list[dict[str, Any]]:
        """What the optimizer is made of."""
        return [{"params": list(self.model.parameters())}]

    def before(self, step: int, add: Groups) -> None:
        """What the script does before a step; ``add`` is the optimizer's add_param_group."""


class Unfrozen(Change):
    """In the optimizer from the start, unfrozen in the middle."""

    last = STEPS

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(model)
        model[2].requires_grad_(False)

    def before(self, step: int, add: Groups) -> None:
        if step == AT:
            self.model[2].requires_grad_(True)
        if step == self.last:
            self.model[2].requires_grad_(False)


class Early(Unfrozen):
    """Unfrozen before the first forward."""

    def before(self, step: int, add: Groups) -> None:
        if step == 0:
            self.model[2].requires_grad_(True)


class Refrozen(Unfrozen):
    """Unfrozen, and frozen again."""

    last = AT + 2


class AllFrozen(Unfrozen):
    """No part of it is trained at first."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(model)
        model.requires_grad_(False)

    def before(self, step: int, add: Groups) -> None:
        if step == AT:
            self.model.requires_grad_(True)


class Added(Unfrozen):
    """Unfrozen and added to the optimizer in the middle, with a rate of its own."""

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.model.parameters() if p.requires_grad]}]

    def before(self, step: int, add: Groups) -> None:
        super().before(step, add)
        if step == AT:
            add({"params": list(self.model[2].parameters()), "lr": 0.02})


class Replaced(Change):
    """Another parameter, which begins differently on every trainer, in the place of one."""

    def before(self, step: int, add: Groups) -> None:
        if step == AT:
            self.model[2].weight = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))
            add({"params": [self.model[2].weight]})


class Tied(Change):
    """Two layers share a weight from the middle on."""

    def before(self, step: int, add: Groups) -> None:
        if step == AT:
            self.model[4].weight = self.model[2].weight


class Injected(Change):
    """An adapter around a layer, which begins differently on every trainer."""

    def before(self, step: int, add: Groups) -> None:
        if step == AT:
            self.model[2] = Adapter(self.model[2])
            add({"params": [*self.model[2].down.parameters(), *self.model[2].up.parameters()]})


class Double(Change):
    """All of it becomes float64."""

    def before(self, step: int, add: Groups) -> None:
        if step == AT:
            self.model.double()


class Half(Change):
    """All of it becomes bfloat16, before the first forward."""

    def before(self, step: int, add: Groups) -> None:
        if step == 0:
            self.model.to(torch.bfloat16)


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Unfrozen, Early, Refrozen, AllFrozen, Added, Replaced, Tied, Injected, Double, Half),
    )
}


# ---- the ways of averaging ----


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "rows": {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
    },
    "merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}},
    "fused merge": {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 2, "avg": True},
        "fuse_grad_merge": True,
    },
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 1, "begin_step": 1}},
    "dgc": {
        "dgc": True,
        "dgc_configs": {"rampup_begin_step": 100, "rampup_step": 1, "sparsity": [0.75]},
    },
}
LEVELS = ("os", "os_g", "p_g_os")
DIVIDED: dict[str, dict[str, Any]] = {
    "replicas": {"hybrid_configs": {"dp_degree": 2}},
    "shards": {"sharding": True, "sharding_configs": {"sharding_degree": 2}},
}


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Joint batches of two trainers."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield torch.randn(8, 8, generator=generator), torch.randn(8, 2, generator=generator)


def train(
    model: nn.Module, change: Change, optimizer: Any, place: slice = slice(None), merged: int = 1
) -> None:
    """Trains it; with ``merged`` every so many steps make one update of their mean."""
    for step, (x, y) in enumerate(batches()):
        change.before(step, optimizer.add_param_group)
        dtype = next(change.model.parameters()).dtype
        if step % merged == 0:
            optimizer.zero_grad()
        out = model(x[place].to(dtype))
        if out.requires_grad:
            (F.mse_loss(out, y[place].to(dtype)) / merged).backward()
        if (step + 1) % merged == 0:
            optimizer.step()


def sgd(change: Change, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(change.groups(), lr=0.1, momentum=momentum)


def check_equal(kind: str, way: str) -> None:
    """Two trainers that average in this way, and plain torch; all have the same in the end."""
    rank = dist.get_rank()
    momentum = 0.9 if way == "dgc" else 0.0
    plain = KINDS[kind](net(0))
    train(plain.model, plain, sgd(plain, momentum), merged=2 if "merge" in way else 1)
    strategy = DistributedStrategy()
    for name, value in WAYS[way].items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)
    change = KINDS[kind](net(rank))
    model = fleet.distributed_model(change.model)
    optimizer = fleet.distributed_optimizer(sgd(change, momentum))
    train(model, change, optimizer, slice(4 * rank, 4 * rank + 4))
    optimizer.flush()
    for (name, found), expected in zip(
        model.named_parameters(), plain.model.parameters(), strict=True
    ):
        close = {"rtol": 0.1, "atol": 0.02} if kind == "Half" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, expected, msg=f"{name} is not as plain", **close)
        other = found.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(found, other), f"{name} differs between the trainers"
    fleet.finish()


def check_divided(kind: str, way: str) -> None:
    """Two trainers among which the model is divided train as plain torch, or the step raises on
    both, with the name of a parameter.
    """
    rank = dist.get_rank()
    plain = KINDS[kind](net(0))
    train(plain.model, plain, sgd(plain, 0.0))
    change = KINDS[kind](net(rank))
    place = slice(4 * rank, 4 * rank + 4)
    began = False
    try:
        if way in LEVELS:
            model, optimizer, _ = group_sharded_parallel(change.model, sgd(change, 0.0), way)
            whole = sharded[model].full
        else:
            strategy = DistributedStrategy()
            for name, value in DIVIDED[way].items():
                setattr(strategy, name, value)
            fleet.init(is_collective=True, strategy=strategy)
            began = True
            model = fleet.distributed_model(change.model)
            optimizer = fleet.distributed_optimizer(sgd(change, 0.0))
            whole = whole_of
        train(model, change, optimizer, place)
        close = {"rtol": 0.1, "atol": 0.02} if kind == "Half" else {"rtol": 1e-4, "atol": 1e-5}
        for found, expected in zip(
            model.state_dict().values(), plain.model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(whole(found).detach(), expected, **close)
    except (RuntimeError, ValueError) as error:
        named = re.search(r"'[0246]\.[a-z.]+'", str(error))
        assert named or (kind == "AllFrozen" and "trainable parameter" in str(error)), error
    finally:
        if began:
            fleet.finish()
