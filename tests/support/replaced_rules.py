"""LARS, LAMB and adam_d2sum written out, and a job that a strategy makes step by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transpiler import DistributedStrategy

Batch = tuple[Tensor, Tensor]
EXCLUDED = ["batch_norm", ".b_0"]
SWITCHES: dict[str, dict[str, Any]] = {
    "lars": {
        "lars_coeff": 0.02,
        "lars_weight_decay": 0.003,
        "epsilon": 1e-4,
        "exclude_from_weight_decay": EXCLUDED,
    },
    "lamb": {"lamb_weight_decay": 0.02, "exclude_from_weight_decay": EXCLUDED},
    "adam_d2sum": {},
}
RATES = {"lars": 2.0, "lamb": 0.01, "adam_d2sum": 0.05}


def net() -> nn.Module:
    """The first weight would be cut over two servers."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(301, 90), nn.Tanh(), nn.BatchNorm1d(90), nn.Linear(90, 3))


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batches(count: int = 20, seed: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 301, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def strategy_of(switch: str, **a_sync_configs: Any) -> DistributedStrategy:
    """Sync, unless there are ``a_sync_configs``."""
    strategy = DistributedStrategy()
    strategy.a_sync = bool(a_sync_configs)
    strategy.a_sync_configs = a_sync_configs
    setattr(strategy, switch, True)
    if SWITCHES[switch]:
        setattr(strategy, f"{switch}_configs", SWITCHES[switch])
    return strategy


def optimizer_of(switch: str, model: nn.Module) -> torch.optim.Optimizer:
    """What a script makes, and the switch replaces."""
    if switch == "lars":
        return torch.optim.SGD(model.parameters(), lr=RATES[switch], momentum=0.8)
    return torch.optim.Adam(model.parameters(), lr=RATES[switch])


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


State = dict[str, Any]


def lars(w: Tensor, g: Tensor, state: State, lr: float, excluded: bool) -> Tensor:
    """Algorithm 1 of arXiv 1708.03888; plain momentum for what is excluded."""
    configs = SWITCHES["lars"]
    decay = 0.0 if excluded else configs["lars_weight_decay"]
    rate, norm, other = lr, float(w.norm()), float(g.norm())
    if not excluded and norm > 0 and other > 0:
        rate = lr * configs["lars_coeff"] * norm / (other + decay * norm + configs["epsilon"])
    state["v"] = 0.8 * state.get("v", 0.0) + rate * (g + decay * w)
    return w - state["v"]


def lamb(w: Tensor, g: Tensor, state: State, lr: float, excluded: bool) -> Tensor:
    """Algorithm 2 of arXiv 1904.00962; what is excluded has no decay."""
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
    change = (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
    change = change + (0.0 if excluded else SWITCHES["lamb"]["lamb_weight_decay"]) * w
    norm, other = float(w.norm()), float(change.norm())
    return w - lr * (norm / other if norm > 0 and other > 0 else 1.0) * change


def adam_d2sum(w: Tensor, g: Tensor, state: State, lr: float, excluded: bool) -> Tensor:
    """DAdamD2Sum of Paddle's dense tables, with the numbers that its servers are given."""
    state["d2"] = 0.9999 * state.get("d2", 0.0) + 1
    state["g2"] = 0.9999 * state.get("g2", 0.0) + g * g
    scale = ((state["d2"] + 1e-8 * state["d2"]) / (state["g2"] + 1e-8 * state["d2"])).sqrt()
    state["v"] = (state.get("v", 0.0) + g) * 0.99 - g
    return w + lr * state["v"] * scale


WRITTEN: dict[str, Callable[..., Tensor]] = {"lars": lars, "lamb": lamb, "adam_d2sum": adam_d2sum}


def reference(switch: str, data: list[list[Batch]]) -> nn.Module:
    """The model after a step for each row of batches, whose gradients are averaged, by the rule as
    it is written here; the rate falls.
    """
    model, states, lr = net(), dict[str, State](), RATES[switch]
    parameters = dict(model.named_parameters())
    for row in data:
        model.zero_grad()
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        for number, (x, y) in enumerate(row):
            if number:  # every trainer has trainer 0's statistics
                kept = {name: each.clone() for name, each in model.named_buffers()}
                model.load_state_dict(buffers, strict=False)
            (step(model, x, y) / len(row)).backward()
            if number:
                model.load_state_dict(kept, strict=False)
        with torch.no_grad():
            for name, w in parameters.items():
                assert w.grad is not None
                excluded = name.endswith("bias") or name.startswith("2.")
                state = states.setdefault(name, {})
                w.copy_(WRITTEN[switch](w.clone(), w.grad, state, lr, excluded))
        lr *= 0.97
    return model


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    """All parameters within 1e-6."""
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, msg=lambda m, n=name: n + m)
