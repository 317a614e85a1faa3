"""The models whose whole life is checked: those of the capture suite, and two with tables.  Each
step returns what a service would predict, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import EIGHT, Batch, Case
from trainer import DistributedEmbedding, Normal

Step = Callable[..., Mapping[str, Tensor]]


class Dlrm(nn.Module):
    """Two tables, one of them in bags, a tower for dense features, and all pairs of interactions;
    after Naumov et al., 2019.
    """

    def __init__(self) -> None:
        super().__init__()
        wide = Normal(0, 0.3)
        self.user = DistributedEmbedding(8, num_embeddings=40, init=wide, seed=1)
        self.words = DistributedEmbedding(
            8, num_embeddings=60, init=wide, seed=2, pooling="sum", padding_idx=0
        )
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, user: Tensor, words: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, self.user(user), self.words(words)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = [products[:, 0, 1], products[:, 0, 2], products[:, 1, 2]]
        score: Tensor = self.top(torch.cat([bottom, torch.stack(pairs, 1)], 1))
        return score.squeeze(1)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def dlrm() -> Case:
    def step(model: nn.Module, dense: Tensor, user: Tensor, words: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(dense, user, words), y)

    def batch(size: int) -> Batch:
        features = torch.randn(size, 5), torch.randint(0, 40, (size,))
        return *features, torch.randint(0, 60, (size, 4)), torch.randint(0, 2, (size,)).float()

    return Dlrm(), step, adagrad, batch


class TwoTower(nn.Module):
    """Users and items in one space: each a row of torch's own sparse embedding, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(40, 8, sparse=True)
        self.item = nn.Embedding(50, 8, sparse=True)
        self.of_user = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.of_item = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        users = F.normalize(self.of_user(self.user(user)), dim=1)
        items = F.normalize(self.of_item(self.item(item)), dim=1)
        return 5.0 * users @ items.T


def two_tower() -> Case:
    """In-batch negatives: the other items of the batch."""

    def step(model: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        scores = model(user, item)
        return F.cross_entropy(scores, torch.arange(scores.shape[0]))

    def batch(size: int) -> Batch:
        return torch.randint(0, 40, (size,)), torch.randint(0, 50, (size,))

    return TwoTower(), step, adagrad, batch


# a model with two optimizers has its place here, too
MODELS: dict[str, Callable[[], Case]] = {each.__name__: each for each in (*EIGHT, dlrm, two_tower)}


def predicting(model: nn.Module, step: Callable[..., Any]) -> Step:
    """A step that returns its loss and the output of the model's forward."""
    last: list[Tensor] = []

    def note(module: nn.Module, inputs: object, output: Any) -> None:
        last[:] = [output if isinstance(output, Tensor) else output.logits]

    model.register_forward_hook(note)

    def whole(model: nn.Module, *batch: Tensor) -> Mapping[str, Tensor]:
        result = step(model, *batch)
        if isinstance(result, dict):
            return {"loss": result["loss"], "prediction": result["logits"]}
        return {"loss": result, "prediction": last[0]}

    return whole
