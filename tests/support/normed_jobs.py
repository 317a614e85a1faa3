"""Jobs whose trainers have batch norm's running statistics, and see different data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.every_mode import with_every_mode
from tests.support.seeded import seeded
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once

MODES: dict[str, dict[str, Any]] = with_every_mode(
    {
        "sync": {"modes": {"*": "sync"}},
        "async": {},
        "async, one slot": {"send_queue_size": 1},
        "receiving thread": {"independent_recv_thread": True},
        "half-async": {"half_async": True, "max_merge_var_num": 2},
        "staleness": {"staleness": 2},
        "geo": {"k_steps": 2},
        "diloco": {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
    },
    dict,
)


class Normed(nn.Module):
    """A batch norm, with a buffer that is not in ``state_dict`` and one that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.layer = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("seen", torch.zeros(2), persistent=False)
            self.register_buffer("mask", torch.arange(5))
            self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach()[0, :2]
        y: Tensor = self.norm(self.layer(x))
        return y


def data(trainer: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + trainer)
    return torch.randn(6, 3, generator=generator) * (trainer + 1) + trainer


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def trainers(endpoints: str, count: int, mode: str, **configs: Any) -> list[Trainer]:
    """All of a job's, which have joined."""

    def join(number: int) -> Trainer:
        chosen = {**MODES[mode], **configs}
        return Trainer(endpoints, number, count, Normed(), **chosen)

    return at_once(*(lambda number=number: join(number) for number in range(count)))


def forward(each: Trainer, x: Tensor) -> dict[str, Tensor]:
    """A forward and backward; gives the buffers after it."""
    each.optimizer.zero_grad()
    each.model.train()
    each.model(x).square().mean().backward()
    return statistics(each.model)


def step(each: Trainer, number: int, trainer: int) -> dict[str, Tensor]:
    """A whole step; gives the buffers before it took effect."""
    before = forward(each, data(trainer, number))
    each.optimizer.step()
    return before


def together(of: list[Trainer], count: int, first: int = 0) -> list[dict[str, Tensor]]:
    """So many steps of all trainers side by side; gives each one's own buffers of the last."""

    def play(trainer: int) -> dict[str, Tensor]:
        before: dict[str, Tensor] = {}
        for number in range(first, first + count):
            before = step(of[trainer], number, trainer)
        return before

    return at_once(*(lambda trainer=trainer: play(trainer) for trainer in range(len(of))))


def finished(of: list[Trainer]) -> list[dict[str, Tensor]]:
    """All leave; gives each one's buffers."""
    at_once(*(each.optimizer.finish for each in of))
    return [statistics(each.model) for each in of]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
