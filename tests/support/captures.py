"""Schedules, comparisons and source lines: what the tests of capture share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ."""
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(left[key], right[key])]


def line_of(function: Callable, marker: str) -> str:
    """``"test_capture.py:123"``: where the marker stands in the function's source."""
    lines, first = inspect.getsourcelines(function)
    offset = next(index for index, line in enumerate(lines) if marker in line)
    return f"{Path(inspect.getfile(function)).name}:{first + offset}"
