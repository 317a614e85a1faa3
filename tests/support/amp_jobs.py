"""Models with mixed precision: what ran in which dtype, and one trainer's course of the scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from transpiler import DistributedStrategy
from transpiler.precision.mixed_forward import mixed


def amp_strategy(**configs: Any) -> DistributedStrategy:
    """With ``amp``, and these ``amp_configs``."""
    strategy = DistributedStrategy()
    strategy.amp, strategy.amp_configs = True, configs
    return strategy


def amp_model(model: nn.Module, **configs: Any) -> nn.Module:
    return mixed(model, amp_strategy(**configs))


class Dtypes(TorchDispatchMode):
    """The dtypes of the floating tensors that each op of aten takes and gives, as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [*args, *(result if isinstance(result, tuple) else (result,))]
        seen = self.of.setdefault(func.__name__.partition(".")[0].strip("_"), set())
        for each in leaves:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                seen.add(each.dtype)
        return result


def dtypes(model: nn.Module, *inputs: torch.Tensor) -> dict[str, set[torch.dtype]]:
    """What a forward runs in, by op of aten."""
    with Dtypes() as seen, torch.no_grad():
        model(*inputs)
    return seen.of


def course(model: nn.Module, optimizer: Any, overflows: set[int], steps: int = 12) -> list[float]:
    """The scale after each step; at these steps the loss is infinite."""
    scales = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum() * (float("inf") if number in overflows else 1.0)
        loss.backward()
        optimizer.step()
        scales.append(optimizer.loss_scale)
    return scales


def expected_course(overflows: set[int], decr_every: int, steps: int = 12) -> list[float]:
    """The same, written out: from 64, doubled after 2 finite steps, halved after so many
    overflows.
    """
    scales, scale, good, bad = [], 64.0, 0, 0
    for number in range(steps):
        good, bad = (0, bad + 1) if number in overflows else (good + 1, 0)
        if bad == decr_every:
            scale, bad = scale / 2, 0
        if good == 2:
            scale, good = scale * 2, 0
        scales.append(scale)
    return scales
