"""The models whose whole life is checked: those of the capture suite, two with tables, and a GAN,
which has two optimizers.  Each step returns what a service would predict, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import gans
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


class Trained(NamedTuple):
    """What one optimizer of a model trains.

    Attributes:
        step: of a training program; its result has "loss" and "prediction".
        optimizer_of: gives the optimizer of the model.
        inputs: how many of a batch's tensors the step takes, from the last one.
    """

    step: Step
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: int


Model = tuple[nn.Module, list[Trained], Callable[[int], Batch]]


def one_optimizer(case: Callable[[], Case]) -> Callable[[], Model]:
    """A model with one optimizer, in the form of those with several."""

    def made() -> Model:
        model, step, optimizer_of, batch = case()
        inputs = len(batch(4))
        return model, [Trained(predicting(model, step), optimizer_of, inputs)], batch

    return made


def gan() -> Model:
    """Two networks in one module; each has an optimizer and a step of its own."""
    nets = gans.gan()

    def discriminate(model: nn.ModuleList, real: Tensor, noise: Tensor) -> Mapping[str, Tensor]:
        scores = model[0](real), model[0](model[1](noise).detach())
        loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        return {"loss": loss, "prediction": scores[0]}

    def generate(model: nn.ModuleList, noise: Tensor) -> Mapping[str, Tensor]:
        made = model[1](noise)
        return {"loss": F.softplus(-model[0](made)).mean(), "prediction": made}

    def batch(size: int) -> Batch:
        return torch.randn(size, 6), torch.randn(size, 4)

    def by(number: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = gans.optimizers(gans.Gan(*model))[number]  # type: ignore[misc]  # a list of two
            return made

        return optimizer_of

    return (
        nn.ModuleList(nets),
        [Trained(discriminate, by(0), 2), Trained(generate, by(1), 1)],
        batch,
    )


MODELS: dict[str, Callable[[], Model]] = {
    **{each.__name__: one_optimizer(each) for each in (*EIGHT, dlrm, two_tower)},
    "gan": gan,
}


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
