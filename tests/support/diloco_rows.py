"""DiLoCo by hand: one matrix on the servers, one copy of it and an optimizer on each trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[Any], torch.optim.Optimizer]

ROWS, DIM = 12, 4

# rates are powers of two, so that a product does not round: torch fuses it with a sum or not
INNER: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2**-6),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=2**-6, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}
OUTER: dict[str, tuple[dict[str, Any], Make]] = {
    "sgd": ({"type": "sgd", "lr": 1.0}, lambda p: torch.optim.SGD(p, lr=1.0)),
    "nesterov": (
        {"type": "nesterov", "lr": 0.5, "momentum": 0.5},
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, nesterov=True),
    ),
    "adam": ({"type": "adam", "lr": 0.03}, lambda p: torch.optim.Adam(p, lr=0.03)),
}


def batches(trainer: int, count: int) -> list[Batch]:
    """Each has some of the rows; now and then the other trainer has others."""
    generator = torch.Generator().manual_seed(trainer)
    return [
        (
            torch.randperm(ROWS, generator=generator)[: ROWS // 3],
            torch.randn(ROWS // 3, DIM, generator=generator),
        )
        for _ in range(count)
    ]


def by_hand(
    start: torch.Tensor, data: Sequence[Sequence[Batch]], k_steps: int, inner: Make, outer: Make
) -> torch.Tensor:
    """The servers' rows after all steps: those behind the last exchange are exchanged, too."""
    served = nn.Parameter(start.clone())
    outer_optimizer = outer([served])
    own = [nn.Parameter(start.clone()) for _ in data]
    optimizers = [inner([rows]) for rows in own]
    for step in range(len(data[0])):
        for rows, optimizer, of_trainer in zip(own, optimizers, data, strict=True):
            ids, wanted = of_trainer[step]
            optimizer.zero_grad(set_to_none=False)
            (rows[ids] - wanted).square().sum().backward()
            optimizer.step()
        if (step + 1) % k_steps == 0 or step == len(data[0]) - 1:
            with torch.no_grad():
                changes = [rows - served for rows in own]
                served.grad = -(sum(changes[1:], changes[0]) * (1 / len(data)))
                outer_optimizer.step()
                for rows in own:
                    rows.copy_(served)
    return served.detach()
