"""Losses over sampled classes, against the sums that their papers have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainer.nn as field
import trainer.nn.functional as FF
from tests.support.step_programs import trains_alike
from trainer.nn.sampled import GivenSampler, LogUniformSampler, UniformSampler, draw_unique


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("true", [1, 2])
def test_sampled_softmax_over_given_samples(remove: bool, true: int) -> None:
    """Row by row: logits minus log of the expectation, hits left out, cross entropy of the rest."""
    torch.manual_seed(0)
    label = torch.tensor([[1, 3], [2, 0], [7, 7]])[:, :true]
    negatives = torch.tensor([[1, 2, 4, 5], [3, 2, 1, 5], [0, 1, 2, 3]])
    samples = torch.cat([label, negatives], 1)
    expected = torch.rand(samples.shape).double() + 0.1
    ours, theirs = (torch.randn(3, 8).double().requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)

    loss = FF.sampled_softmax_with_cross_entropy(
        ours, label, 4, true, remove, True, samples, expected
    )

    rows = []
    for i in range(3):
        kept = [
            j
            for j in range(samples.shape[1])
            if j < true or not remove or int(samples[i, j]) not in label[i].tolist()
        ]
        chosen = torch.stack([theirs[i, samples[i, j]] - expected[i, j].log() for j in kept])
        rows.append(-(chosen.log_softmax(0)[:true]).mean())
    reference = torch.stack(rows).unsqueeze(1)
    torch.testing.assert_close(loss, reference)
    loss.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_drawn_samples() -> None:
    """A seed repeats them, and with all classes drawn the loss is nearly that over all."""
    logits, label = torch.randn(5, 20), torch.randint(20, (5,))
    one, two = (
        FF.sampled_softmax_with_cross_entropy(logits, label, 6, seed=seed) for seed in (3, 3)
    )
    torch.manual_seed(0)
    assert one.shape == (5, 1) and torch.equal(one, two)
    whole = field.SampledSoftmaxWithCrossEntropy(20)(logits, label)
    torch.testing.assert_close(
        whole.squeeze(1), F.cross_entropy(logits, label, reduction="none"), atol=0.05, rtol=0.05
    )
    with pytest.raises(ValueError, match="num_samples: expected 1 to 20, got 21"):
        FF.sampled_softmax_with_cross_entropy(logits, label, 21)


@pytest.mark.parametrize(
    "sampler",
    [UniformSampler(6), LogUniformSampler(6), GivenSampler(torch.tensor([0.5, 0, 1, 2, 1, 0.5]))],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samplers_draw_as_they_say(sampler) -> None:
    """Probabilities add up to 1, and 20000 draws are as they say; so are draws without
    repetition.
    """
    generator = torch.Generator().manual_seed(0)
    says = sampler.probability(torch.arange(6))
    assert says.sum().item() == pytest.approx(1)
    drawn = torch.bincount(sampler.draw(20_000, generator), minlength=6) / 20_000
    assert (drawn - says).abs().max() < 0.015
    rounds = [draw_unique(sampler, 3, generator) for _ in range(2000)]
    for each in rounds:
        assert each.ids.unique().numel() == 3 and each.tries >= 3
    seen = torch.bincount(torch.cat([each.ids for each in rounds]), minlength=6) / 2000
    expected = torch.stack([each.expected(torch.arange(6)) for each in rounds]).mean(0)
    assert (seen - expected).abs().max() < 0.08


@pytest.mark.parametrize("sampler", ["uniform", "log_uniform", "custom_dist"])
def test_nce_tells_true_classes_from_noise(sampler: str) -> None:
    """The log loss of sigmoid(s - log(k q)) for the true class and each drawn one."""
    torch.manual_seed(1)
    dist = torch.tensor([0.1, 0.2, 0.3, 0.4]) if sampler == "custom_dist" else None
    label, drawn = torch.tensor([0, 3, 2]), torch.tensor([[1, 1], [0, 2], [3, 0]])
    zipf = [(torch.tensor((k + 2) / (k + 1)).log() / torch.tensor(5.0).log()) for k in range(4)]
    q = {"uniform": [0.25] * 4, "log_uniform": zipf, "custom_dist": [0.1, 0.2, 0.3, 0.4]}[sampler]
    module = field.NCE(4, 5, 2, sampler, dist)
    torch.nn.init.normal_(module.bias)
    x = torch.randn(3, 5)
    weight, bias = (each.detach().clone().requires_grad_() for each in module.parameters())
    rows = []
    for i in range(3):
        loss = torch.zeros(())
        for at, c in enumerate([int(label[i]), *drawn[i].tolist()]):
            odds = x[i] @ weight[c] + bias[c] - torch.log(2 * torch.as_tensor(q[c]))
            loss = loss - F.logsigmoid(odds if at == 0 else -odds)
        rows.append(loss * (i + 1))
    reference = torch.stack(rows).unsqueeze(1)

    found = module(x, label, torch.tensor([1.0, 2.0, 3.0]), drawn)

    torch.testing.assert_close(found, reference)
    found.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(module.weight.grad, weight.grad)
    torch.testing.assert_close(module.bias.grad, bias.grad)
    assert torch.isfinite(module(x, label)).all()  # draws by itself


def test_sampled_losses_in_programs() -> None:
    """The samples are inputs of the step; drawing there is refused, with what to write."""
    torch.manual_seed(2)
    samples = torch.tensor([[1, 2, 4], [3, 2, 1], [0, 1, 2], [2, 4, 3]])
    expected = torch.rand(4, 3)

    def softmax(m, x: Tensor, s: Tensor, q: Tensor) -> Tensor:
        return FF.sampled_softmax_with_cross_entropy(
            m(x), s[:, :1], 2, use_customized_samples=True, customized_samples=s,
            customized_probabilities=q,
        ).mean()  # fmt: skip

    model = torch.nn.Linear(3, 5)
    trains_alike(model, softmax, (torch.randn(4, 3), samples, expected))

    def estimated(m, x: Tensor, s: Tensor) -> Tensor:
        return m(x, s[:, 0], samples=s[:, 1:]).mean()

    trains_alike(field.NCE(5, 3), estimated, (torch.randn(4, 3), samples))
    with pytest.raises(ValueError, match="expected use_customized_samples=True"):
        drawing = lambda m, x, y: FF.sampled_softmax_with_cross_entropy(m(x), y, 2).mean()  # noqa: E731
        trains_alike(model, drawing, (torch.randn(4, 3), samples[:, 0]))
    with pytest.raises(ValueError, match="expected samples, as an input of the step"):
        trains_alike(
            field.NCE(5, 3), lambda m, x, y: m(x, y).mean(), (torch.randn(4, 3), samples[:, 0])
        )


def test_a_batch_may_be_empty_and_labels_are_a_tensor() -> None:
    """A trainer may have no sample left: its losses are [0, 1]."""
    none, no_label = torch.randn(0, 4), torch.zeros(0, dtype=torch.long)

    assert field.HSigmoidLoss(4, 10)(none, no_label).shape == (0, 1)
    assert field.SampledSoftmax(10, 4, num_samples=3)(none, no_label).shape == (0, 1)
    with pytest.raises(TypeError, match="hsigmoid_loss: label: expected a tensor, got list"):
        field.HSigmoidLoss(4, 10)(torch.randn(1, 4), ["a"])
