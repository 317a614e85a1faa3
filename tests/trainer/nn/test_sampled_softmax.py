"""Softmax over classes that are rows of a table: against a dense one, alone, in a program, and on
two servers with two trainers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.step_programs import trains_alike
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once
from trainer.nn import SampledSoftmax, StreamingFrequency
from trainer.nn.functional import selected_rows

CLASSES, SIZE = 12, 3
LABEL, NEGATIVES = torch.tensor([3, 0, 3, 7]), torch.tensor([0, 5, 3, 11, 8])
EXPECTED = torch.tensor([0.3, 0.9, 0.3, 0.2]), torch.tensor([0.9, 0.2, 0.3, 0.1, 0.15])
Servers = Callable[[int], str]


def dense_of(module: SampledSoftmax) -> nn.Parameter:
    """All rows, as a parameter."""
    return nn.Parameter(module.classes(torch.arange(CLASSES)).detach().clone())


def reference(
    rows: Tensor, x: Tensor, expected: tuple[Tensor, Tensor] | None, remove: bool, bias: bool
) -> Tensor:
    """Sample by sample, and class by class."""
    losses = []
    for i, label in enumerate(LABEL.tolist()):
        logits = []
        for k, c in enumerate([label, *NEGATIVES.tolist()]):
            if k > 0 and remove and c == label:
                continue
            logit = x[i] @ rows[c, :SIZE] + (rows[c, SIZE] if bias else 0)
            if expected is not None:
                logit = logit - (expected[0][i] if k == 0 else expected[1][k - 1]).log()
            logits.append(logit)
        losses.append(-torch.stack(logits).log_softmax(0)[0])
    return torch.stack(losses).unsqueeze(1)


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("logq", [True, False])
def test_it_equals_a_dense_softmax_over_the_same_samples(
    remove: bool, bias: bool, logq: bool
) -> None:
    """Losses, the gradient of the features, and the rows after a step."""
    module = SampledSoftmax(
        CLASSES, SIZE, 5, remove_accidental_hits=remove, bias=bias, logq=logq, seed=4
    )
    rows, expected = dense_of(module), EXPECTED if logq else None
    x = torch.randn(4, SIZE, requires_grad=True)
    twin = x.detach().clone().requires_grad_()

    loss = module(x, LABEL.unsqueeze(1), NEGATIVES, expected)

    dense = reference(rows, twin, expected, remove, bias)
    torch.testing.assert_close(loss, dense)
    for value, parameters in ((loss, module.parameters()), (dense, [rows])):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        value.sum().backward()
        optimizer.step()
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(dense_of(module), rows)


def test_negatives_of_the_batch() -> None:
    """Each row's class against those of the other rows, with the counted frequency of each."""
    module = SampledSoftmax(CLASSES, SIZE, sampler="in_batch", seed=4)
    rows, x = dense_of(module), torch.randn(4, SIZE)
    assert module.frequencies is not None
    for batch in ([3, 1], [0, 1], [1, 2]):
        count(module.frequencies, batch)
    known = module.frequencies(LABEL)

    loss = module(x, LABEL)

    for i in range(4):
        others = [j for j in range(4) if j == i or int(LABEL[j]) != int(LABEL[i])]
        logits = torch.stack(
            [x[i] @ rows[LABEL[j], :SIZE] + rows[LABEL[j], SIZE] - known[j].log() for j in others]
        )
        torch.testing.assert_close(loss[i, 0], -logits.log_softmax(0)[others.index(i)])
    loss.sum().backward()
    assert module.frequencies.intervals.proxy.grad == 0  # what clipping sees of it


def count(frequency: StreamingFrequency, ids: list[int]) -> None:
    """A step whose batch has these ids."""
    frequency(torch.tensor(ids)).sum().backward()
    table = frequency.intervals
    table.step(table.rules())
    table.discard()


def test_frequencies_of_a_stream() -> None:
    """An id that is in every k-th batch has a probability of about 1 / k; a lookup alone counts
    nothing.
    """
    stream = StreamingFrequency(100, alpha=0.05)
    generator = torch.Generator().manual_seed(0)
    chances = torch.tensor([0.5, 0.2, 0.05])
    for _ in range(600):
        present = torch.rand(3, generator=generator) < chances
        count(stream, [*torch.arange(3)[present].tolist(), 9, 9])
        with torch.no_grad():
            stream(torch.tensor([77]))
    found = stream(torch.tensor([0, 1, 2, 9, 77])).detach()
    assert ((found[:3] / chances).log().abs() < 0.5).all(), found
    assert float(found[3]) == 1
    assert float(found[4]) == pytest.approx(5 / 100)  # never counted: as if all were alike


@pytest.mark.parametrize("sampler", ["uniform", "log_uniform"])
def test_drawn_samples_teach_the_softmax_over_all_classes(sampler: str) -> None:
    """Where labels have the probabilities that the scores say, the gradient is zero on average;
    without the correction that of a sampler with favourites is not.
    """
    torch.manual_seed(0)
    x = torch.randn(1, SIZE)
    found = {}
    for logq in (True, False):
        module = SampledSoftmax(CLASSES, SIZE, 5, sampler=sampler, logq=logq, seed=1)
        chances = module.scores(x, torch.arange(CLASSES)).detach().softmax(1)[0]
        for _ in range(300):
            label = torch.multinomial(chances, 256, replacement=True)
            (module(x.expand(256, SIZE), label).mean() / 300).backward()
        found[logq] = selected_rows(module.classes).rows[:, SIZE].abs().max()
    assert found[True] < 0.008
    assert sampler == "uniform" or found[False] > 0.02


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tower = nn.Linear(2, SIZE)
        self.output = SampledSoftmax(CLASSES, SIZE, 5, seed=4, **options)

    def forward(self, x: Tensor, label: Tensor, negatives: Tensor, *expected: Tensor) -> Tensor:
        given = expected if self.output.logq else None
        loss: Tensor = self.output(self.tower(x), label, negatives, given).mean()
        return loss


def test_in_a_program() -> None:
    """With its negatives as inputs of the step; without them it says so."""
    torch.manual_seed(1)
    given = torch.randn(4, 2), LABEL, NEGATIVES, *EXPECTED
    trains_alike(Model(), lambda m, *batch: m(*batch), given)
    with pytest.raises(ValueError, match="expected negatives, as an input of the step"):
        trains_alike(Model(), lambda m, x, y: m.output(m.tower(x), y).mean(), given[:2])


def test_on_two_servers_with_two_trainers(servers: Servers) -> None:
    """Each trainer with its own samples: three sync steps end as the mean of both does alone."""
    generator = torch.Generator().manual_seed(2)
    batches = [
        [
            (torch.randn(4, 2, generator=generator), *(
                torch.randint(CLASSES, (n,), generator=generator) for n in (4, 5)
            ))
            for _ in range(2)
        ]
        for _ in range(3)
    ]  # fmt: skip
    torch.manual_seed(0)
    models = [Model(logq=False)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    alone = models.pop()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in batches:
        optimizer.zero_grad()
        (sum(alone(*batch) for batch in step) / 2).backward()
        optimizer.step()

    def train(number: int) -> Tensor:
        one = Trainer(endpoints, number, 2, models[number], sgd)
        for step in batches:
            one.optimizer.zero_grad()
            one.model(*step[number]).backward()
            one.optimizer.step()
        rows = one.model.output.classes(torch.arange(CLASSES)).detach().clone()
        one.job.finish()
        return rows

    endpoints = servers(2)
    for rows in at_once(lambda: train(0), lambda: train(1)):
        torch.testing.assert_close(rows, dense_of(alone.output).detach())
    for mine, theirs in zip(models[1].tower.parameters(), alone.tower.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


class Towers(nn.Module):
    """Negatives of the batch, whose frequencies are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(2, SIZE)
        self.output = SampledSoftmax(CLASSES, SIZE, sampler="in_batch", seed=4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        loss: Tensor = self.output(self.tower(x), label).mean()
        return loss


def counts_of(model: Towers) -> Tensor:
    """How often each class was in a batch."""
    assert model.output.frequencies is not None
    with torch.no_grad():
        return model.output.frequencies.intervals(torch.arange(CLASSES)).flatten()


def test_a_program_counts_as_eager_code_does() -> None:
    """Step by step: the loss needs what was counted before."""
    torch.manual_seed(1)
    batches = [(torch.randn(4, 2), torch.randint(CLASSES, (4,))) for _ in range(5)]
    trains_alike(Towers(), lambda m, *batch: m(*batch), batches[0], *batches)


def test_servers_count_the_batches_of_all_trainers(servers: Servers) -> None:
    """A class is in a sync step where one of the trainers' batches has it, once or twice."""
    labels = [[[3, 0, 3, 7], [1, 0, 2, 5]], [[1, 4, 8, 2], [6, 9, 6, 11]], [[3, 0], [5, 10]]]
    torch.manual_seed(0)
    models = [Towers()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    alone = models.pop()
    for step in labels:
        assert alone.output.frequencies is not None
        count(alone.output.frequencies, sum(step, []))

    def train(number: int) -> Tensor:
        one = Trainer(endpoints, number, 2, models[number], sgd)
        for step in labels:
            one.optimizer.zero_grad()
            one.model(torch.randn(len(step[number]), 2), torch.tensor(step[number])).backward()
            one.optimizer.step()
        counted = counts_of(one.model).clone()
        one.job.finish()
        return counted

    endpoints = servers(2)
    for counted in at_once(lambda: train(0), lambda: train(1)):
        assert torch.equal(counted, counts_of(alone))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 13}, "num_samples: expected 1 to 12 .* got 13"),
        ({"num_samples": 2, "sampler": "in_batch"}, "expected 0"),
        ({"num_samples": 2, "sampler": "zipf"}, "sampler: expected one of 'log_uniform'"),
        ({"num_samples": 2, "frequencies": StreamingFrequency(CLASSES)}, "in_batch"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """With what was expected."""
    with pytest.raises(ValueError, match=message):
        SampledSoftmax(CLASSES, SIZE, **options)
