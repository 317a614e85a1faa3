"""A small GAN: two networks, an optimizer for each, and the alternating steps of a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]  # real samples [n, 6] and noise [n, 4]


class Gan(NamedTuple):
    """Two networks."""

    discriminator: nn.Module
    generator: nn.Module

    def state(self) -> dict[str, Any]:
        return {"d": self.discriminator.state_dict(), "g": self.generator.state_dict()}


class Pair(NamedTuple):
    """The optimizers of the two networks."""

    discriminator: Any
    generator: Any

    def states(self) -> list[Any]:
        return [each.state_dict() for each in self]


def gan(seed: int = 3, norm: bool = True) -> Gan:
    """Two networks; the generator's first layer is large enough for two slices."""
    torch.manual_seed(seed)
    normed: list[nn.Module] = [nn.BatchNorm1d(40)] if norm else []
    return Gan(
        nn.Sequential(nn.Linear(6, 40), nn.LeakyReLU(0.2), nn.Linear(40, 1)),
        nn.Sequential(nn.Linear(4, 40), *normed, nn.Tanh(), nn.Linear(40, 6)),
    )


def optimizers(nets: Gan, momentum: float = 0.9) -> Pair:
    """Two rules, as different as they may be."""
    return Pair(
        torch.optim.SGD(nets.discriminator.parameters(), lr=0.05, momentum=momentum),
        torch.optim.Adam(nets.generator.parameters(), lr=0.01, betas=(0.5, 0.999)),
    )


def batches(count: int, seed: int = 1, size: int = 8) -> list[Batch]:
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=made), torch.randn(size, 4, generator=made))
        for _ in range(count)
    ]


def discriminator_step(nets: Gan, optimizer: Any, batch: Batch) -> None:
    real, noise = batch
    optimizer.zero_grad()
    scores = nets.discriminator(real), nets.discriminator(nets.generator(noise).detach())
    loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
    loss.backward()
    optimizer.step()


def generator_step(nets: Gan, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    F.softplus(-nets.discriminator(nets.generator(batch[1]))).mean().backward()
    optimizer.step()


def train(nets: Gan, pair: Pair, data: Sequence[Batch], critic: int = 1) -> None:
    """Steps of the two in turn: ``critic`` of the discriminator before one of the generator."""
    for number, batch in enumerate(data, 1):
        discriminator_step(nets, pair.discriminator, batch)
        if number % critic == 0:
            generator_step(nets, pair.generator, batch)
