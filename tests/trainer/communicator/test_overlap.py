"""Gradients that leave while backward still runs: when they leave, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, batches
from tests.support.eager_modes import adam, assert_equal, eventually, joined, net


class Quiesce(torch.autograd.Function):
    """The identity, whose backward, the last of all, waits until something holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holds: Callable[[], bool]) -> torch.Tensor:
        ctx.holds = holds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        eventually(ctx.holds)
        return grad, None


@pytest.mark.observes("a_sync_configs.overlap")
def test_overlap_sends_gradients_while_backward_runs(servers: Servers) -> None:
    """At least half of a step's bytes have left before backward ends, and the result is equal to
    the bit.
    """
    torch.manual_seed(0)
    mine = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())))
    reference = copy.deepcopy(mine)
    optimizer = joined(servers(2), mine, adam(mine), overlap=True, modes={"*": "sync"})
    plain = adam(reference)
    total = sum(parameter.nbytes for parameter in mine.parameters())
    for _ in range(3):
        before = optimizer.communicator.metrics()["bytes_out"]

        def half_has_left(before: float = before) -> bool:
            return optimizer.communicator.metrics()["bytes_out"] - before >= total / 2

        x = torch.ones(4, 128, requires_grad=True)
        optimizer.zero_grad()
        mine(Quiesce.apply(x, half_has_left)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        reference(torch.ones(4, 128)).square().mean().backward()
        plain.step()

    assert_equal(mine, reference)


def test_overlap_refuses_a_second_backward_and_early_clipping(servers: Servers) -> None:
    """What breaks the promise is an error, never a wrong gradient."""
    mine = net()
    joined(servers(1), mine, adam(mine), overlap=True, modes={"*": "sync"})
    x, y = batches(1)[0]
    F.cross_entropy(mine(x), y).backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        F.cross_entropy(mine(x), y).backward()
