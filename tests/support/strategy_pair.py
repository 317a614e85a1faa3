"""A script that trains digits with two properties of a strategy at once; ``launch`` starts it.

::

    pserver launch --servers 2 --trainers 2 strategy_pair.py amp recompute
    pserver launch --nccl2 --trainers 2     strategy_pair.py amp sharding

It prints ``accuracy 0.97`` or, where the two exclude each other, ``raises: `` and the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import fleet

EPOCHS, BATCH = 80, 32  # of each of two trainers
PROPERTIES = (
    "amp",
    "recompute",
    "gradient_merge",
    "dgc",
    "fp16_allreduce",
    "lars",
    "lamb",
    "asp",
    "k-step",
    "sharding",
)


def strategy_of(names: list[str], collective: bool) -> fleet.DistributedStrategy:
    """The strategy that asks for these properties."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    asked: dict[str, Callable[[], None]] = {
        "amp": lambda: setattr(strategy, "amp_configs", {"init_loss_scaling": 1024.0}),
        "recompute": lambda: setattr(strategy, "recompute_configs", {"checkpoints": ["0", "2"]}),
        "gradient_merge": lambda: setattr(strategy, "gradient_merge_configs", {"k_steps": 2}),
        "dgc": lambda: setattr(
            strategy,
            "dgc_configs",
            {"rampup_begin_step": 20, "rampup_step": 20, "sparsity": [0.75, 0.9]},
        ),
    }
    for name in names:
        if name == "k-step" and collective:
            strategy.localsgd, strategy.localsgd_configs = True, {"k_steps": 2, "begin_step": 4}
        elif name == "k-step":
            strategy.a_sync, strategy.a_sync_configs = True, {"k_steps": 2}
        else:
            setattr(strategy, name, True)
            asked.get(name, lambda: None)()
    return strategy


def model() -> nn.Sequential:
    """Large enough for a gradient that dgc compresses."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def optimizer_of(names: list[str], net: nn.Module, collective: bool) -> torch.optim.Optimizer:
    """LAMB takes Adam's place, LARS and DGC momentum's, at rates at which each learns."""
    if "lamb" in names and "dgc" not in names:
        return torch.optim.Adam(net.parameters(), lr=0.01)
    rate = 0.2
    if "lars" in names:
        rate = 3.0
    elif "k-step" in names and not collective:
        rate = 0.025  # what each trainer changes is added up, late, while the others go on
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)


def accuracy(names: list[str], collective: bool) -> float:
    """Trains, and evaluates on what was not trained on."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    learn, test = order[600:], order[:600]
    fleet.init(is_collective=collective, strategy=strategy_of(names, collective))
    net = fleet.distributed_model(model())
    optimizer = fleet.distributed_optimizer(optimizer_of(names, net, collective))
    loader = DataLoader(TensorDataset(images[learn], labels[learn]), batch_size=BATCH, shuffle=True)
    steps = EPOCHS * (len(learn) // (2 * BATCH))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(EPOCHS):
        for x, y in fleet.shard(loader, seed=1):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    optimizer.flush()
    with torch.no_grad():
        found = (net(images[test]).argmax(1) == labels[test]).float().mean().item()
    fleet.finish()
    return found


def main() -> None:
    """The script."""
    names = [name for name in sys.argv[1:] if name != "--collective"]
    try:
        print(f"accuracy {accuracy(names, '--collective' in sys.argv):.4f}", flush=True)
    except (ValueError, TypeError) as error:
        print(f"raises: {error}", flush=True)


if __name__ == "__main__":
    main()
