"""The same small model on torch's embedding and on a DistributedEmbedding, and ids to look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer import DistributedEmbedding

ROWS, DIM = 30, 5


Optimizer = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """An embedding, and a layer on what it returns."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.layer = embedding, nn.Linear(DIM, 2)

    def forward(self, *inputs: Any) -> Tensor:
        hidden: Tensor = torch.tanh(self.layer(self.embedding(*inputs)))
        return hidden.square().sum() * 3


def pair(**options: Any) -> tuple[Net, Net]:
    """The same model with torch's embedding and with ours."""
    torch.manual_seed(3)
    embedding = nn.Embedding(ROWS, DIM, **options)
    return Net(embedding), Net(DistributedEmbedding.from_module(embedding))


def values(module: nn.Module) -> Tensor:
    """All rows, as a lookup reads them."""
    embedding = module.embedding if isinstance(module, Net) else module
    with torch.no_grad():
        if isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
            return embedding.weight.clone()
        if embedding.pooling is not None:
            return embedding(torch.arange(ROWS), torch.arange(ROWS))
        return embedding(torch.arange(ROWS))


def some_ids(step: int, *shape: int) -> Tensor:
    """Ids of which some repeat, others in every step."""
    return torch.randint(
        0, ROWS, shape or (3, 4), generator=torch.Generator().manual_seed(step)
    ) % (ROWS - step)


FIVE = torch.arange(5)
