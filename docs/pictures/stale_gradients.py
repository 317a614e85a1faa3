"""Training with gradients of an exact staleness: three small models, and the loop that trains them.

[Note: exact staleness]  In a job the staleness of a gradient depends on the speed of processes and
of the network, so two runs differ.  Here one process applies the gradient of each step to the
parameters s steps after those that it was computed at, by the code that a server updates a slice
with.  That is what a server does with s + 1 async trainers of equal speed that step in turn, each
waiting for its own result; a test compares the two, to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pserver.dense.update import SliceUpdate, SliceUpdater
from trainer.examples import synthetic
from transpiler.ir.rules import rule_of

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
LETTERS, LENGTH = 12, 8  # of a text: its alphabet, and what a sequence predicts


def train(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    staleness: int = 0,
    compensation: float = 0.0,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Trains a model by a server's update rule, at a rate that falls linearly to 0.  It ends early
    where a gradient is not finite.

    Args:
        model: its parameters are float32, on the CPU; they end as the server's.
        loss: of the model's output and a batch's second tensor.
        batches: one for each step: the model's input, and what the loss compares it with.
        optimizer: of all parameters in one group; says the rule and the first rate, and never
            steps itself.
        staleness: the number of steps between the parameters that a gradient is computed at, and
            those that it is applied to; the first steps have no more than came before them.
        compensation: the factor lambda of ``dc_asgd``.
        after: called after each step, with its number from 1; the model has the server's
            parameters.
    """
    parameters, (group,) = list(model.parameters()), optimizer.param_groups
    rate = group["lr"]
    # the update is element-wise: one slice of all parameters gives what one for each would
    value = parameters_to_vector(parameters).detach()
    updater = SliceUpdater(rule_of(optimizer, group), value)
    update = SliceUpdate("all", "all", 0, 0, value, updater, compensation=compensation)
    received = deque([value.clone()], maxlen=staleness + 1)
    for step, (inputs, wanted) in enumerate(batches):
        before = received[0]
        vector_to_parameters(before, parameters)
        gradients = torch.autograd.grad(loss(model(inputs), wanted), parameters)
        gradient = parameters_to_vector(gradients)
        if not gradient.isfinite().all():
            return
        hparams = {"lr": rate * (1 - step / len(batches))}
        update.update(gradient, hparams, before=before)
        received.append(value.clone())
        vector_to_parameters(received[-1], parameters)
        after(step + 1)


@dataclass(frozen=True)
class Task:
    """A model, and what it learns.

    Attributes:
        model: what it is, for people.
        make: makes one, from torch's generator.
        loss: of outputs and what they are compared with.
        batches: those of a seed; ``held_out``: one to be judged by.
        score: its name, and the function of outputs and what they are compared with; higher is
            better, but for the loss.
        guess: the loss of a model that knows how often each answer occurs, and nothing else.
    """

    model: str
    make: Callable[[], nn.Module]
    loss: Loss
    batches: Callable[[int], Sequence[Batch]]
    held_out: Batch
    score: tuple[str, Callable[[Tensor, Tensor], float]]
    guess: float


def measure(
    task: Task,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    staleness: int,
    compensation: float,
    seed: int,
    points: int,
) -> tuple[list[float], float]:
    """One run.

    Args:
        seed: of the first parameters, and of the order of the samples.
        points: at which it is judged, evenly spaced, one of them at the end.

    Returns:
        The held-out loss before the first step and at each point, at most that of a guess, which is
        also that of a run that ended early; and the final score.
    """
    torch.manual_seed(seed)
    model, batches = task.make(), task.batches(seed)
    inputs, wanted = task.held_out
    curve, every = list[float](), len(batches) // points

    @torch.no_grad()
    def judge(step: int) -> None:
        if step % every == 0:
            found = task.loss(model(inputs), wanted).item()
            curve.append(found if found < task.guess else task.guess)  # a NaN is no less

    judge(0)
    train(model, task.loss, batches, optimizer(model.parameters()), staleness, compensation, judge)
    curve += [task.guess] * (points + 1 - len(curve))
    with torch.no_grad():
        outputs = model(inputs).nan_to_num().clamp(-1e6, 1e6)  # of a run that failed, too
        return curve, task.score[1](outputs, wanted)


def drawn(inputs: Tensor, wanted: Tensor, size: int, steps: int) -> Callable[[int], list[Batch]]:
    """For a seed so many batches: all samples in one order after another."""

    def batches(seed: int) -> list[Batch]:
        generator, found = torch.Generator().manual_seed(seed), list[Tensor]()
        while len(found) < steps:
            order = torch.randperm(len(inputs), generator=generator)
            found += order.split(size)[: len(inputs) // size]
        return [(inputs[each], wanted[each]) for each in found[:steps]]

    return batches


def digits() -> Task:
    """Handwritten digits, 8 x 8 pixels, and a network of one hidden layer."""
    pixels, labels = load_digits(return_X_y=True)
    images, wanted = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    learn, test = order.split([1437, 360])
    return Task(
        "perceptron, digits",
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        F.cross_entropy,
        drawn(images[learn], wanted[learn], 32, 256),
        (images[test], wanted[test]),
        ("accuracy", lambda out, label: (out.argmax(1) == label).float().mean().item()),
        torch.tensor(10.0).log().item(),
    )


class DeepFM(nn.Module):
    """The weights of an impression's categories, the products of their embeddings in pairs, and a
    network over the embeddings; all of them are parameters.
    """

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        rows = synthetic.FIELDS * synthetic.CATEGORIES
        self.weights, self.factors = nn.Embedding(rows, 1), nn.Embedding(rows, dim)
        for each in (self.weights, self.factors):
            nn.init.uniform_(each.weight, -0.1, 0.1)
        self.deep = nn.Sequential(
            nn.Linear(synthetic.FIELDS * dim, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [batch, fields] -> logits [batch]."""
        factors = self.factors(ids)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        logits: Tensor = (
            self.weights(ids).sum((1, 2)) + pairs + self.deep(factors.flatten(1)).squeeze(1)
        )
        return logits


def clicks() -> Task:
    """The generated impressions of trainer/examples/deepfm.py, and a DeepFM."""
    learn, test = synthetic.impressions(40_000, 1), synthetic.impressions(4_000, 2)
    share = learn["label"].mean()
    return Task(
        "DeepFM, clicks",
        DeepFM,
        F.binary_cross_entropy_with_logits,
        drawn(learn["ids"], learn["label"], 64, 256),
        (test["ids"], test["label"]),
        ("AUC", lambda out, label: float(roc_auc_score(label.numpy(), out.numpy()))),
        F.binary_cross_entropy(share.expand_as(learn["label"]), learn["label"]).item(),
    )


class Letters(nn.Module):
    """A recurrent model of the next letter."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 16)
        self.past = nn.GRU(16, width, batch_first=True)
        self.next = nn.Linear(width, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        """int64 [batch, LENGTH + 1] -> logits [batch, LETTERS, LENGTH]: of the first letter
        nothing follows.
        """
        out: Tensor = self.next(self.past(self.letters(letters))[0][:, 1:])
        return out.transpose(1, 2)


def texts(count: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Letters that each follow from the two before.

    Returns:
        int64 [count, LENGTH + 1]; the letters that follow all but the first, int64 [count, LENGTH];
        and the mean loss of the truth.
    """
    world, draws = torch.Generator().manual_seed(5), torch.Generator().manual_seed(seed)
    follows = (2.5 * torch.randn(LETTERS, LETTERS, LETTERS, generator=world)).softmax(-1)
    found = torch.randint(LETTERS, (count, LENGTH + 2), generator=draws)
    for place in range(2, LENGTH + 2):
        known = follows[found[:, place - 2], found[:, place - 1]]
        found[:, place] = torch.multinomial(known, 1, generator=draws)[:, 0]
    truth = follows[found[:, :-2], found[:, 1:-1]].gather(-1, found[:, 2:, None])
    return found[:, :-1], found[:, 2:], -truth.log().mean().item()


def letters() -> Task:
    """Generated text, and a recurrent model."""
    learn, test = texts(12_800, 1), texts(500, 2)
    shares = torch.bincount(learn[1].flatten(), minlength=LETTERS) / learn[1].numel()
    return Task(
        "GRU, letters",
        Letters,
        F.cross_entropy,
        drawn(*learn[:2], 32, 192),
        test[:2],
        ("loss", lambda out, label: F.cross_entropy(out, label).item()),
        -(shares * shares.log()).sum().item(),
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "clicks": clicks, "letters": letters}
OPTIMIZERS: dict[str, Callable[[float], Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = {
    "SGD": lambda rate: lambda parameters: torch.optim.SGD(parameters, lr=rate),
    "SGD, momentum 0.9": lambda rate: lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9),
    "Adam": lambda rate: lambda parameters: torch.optim.Adam(parameters, lr=rate),
}
