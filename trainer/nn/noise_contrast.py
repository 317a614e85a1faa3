"""Noise-contrastive estimation: true classes told from drawn ones, one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.nn.labels import check_labels, check_matrix, label_column, traced
from trainer.nn.samplers import GivenSampler, LogUniformSampler, Sampler, UniformSampler, seeded

SAMPLERS = ("uniform", "log_uniform", "custom_dist")


def nce(
    input: Tensor,
    label: Tensor,
    num_total_classes: int,
    weight: Tensor,
    bias: Tensor | None = None,
    sample_weight: Tensor | None = None,
    num_neg_samples: int = 10,
    sampler: str = "uniform",
    custom_dist: Tensor | None = None,
    seed: int = 0,
    samples: Tensor | None = None,
) -> Tensor:
    """Tells the true classes of a sample from ``num_neg_samples`` drawn ones.

    With a class's score s, its probability q of being drawn, and k draws, the class is true with a
    probability of sigmoid(s - log(k * q)); the loss is the log loss of that, summed over the true
    and the drawn classes.

    Gutmann, Hyvarinen: Noise-Contrastive Estimation, AISTATS 2010; Mnih, Teh: A Fast and Simple
    Algorithm for Training Neural Probabilistic Language Models, ICML 2012.  Scores are used as in
    the papers; PaddlePaddle's op of this name puts sigmoid(s) in the place of exp(s).

    In a program the drawn classes are an input of the step: ``samples``.

    Args:
        input: features, floats [n, size].
        label: true classes, int64 [n] or [n, true].
        num_total_classes: ids are below it.
        weight: of the classes, [num_total_classes, size].
        bias: [num_total_classes].
        sample_weight: factors of the samples, [n] or [n, 1].
        num_neg_samples: k.
        sampler: "uniform", "log_uniform", or "custom_dist".
        custom_dist: with the last one, the probability of each class, [num_total_classes].
        seed: of the draws; 0: torch's own generator.
        samples: drawn classes, int64 [n, k]; None: they are drawn here.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are no whole numbers.
        ValueError: shapes do not fit, a label is out of range, or there is no such sampler.
    """
    check_matrix("nce", "input", input)
    if tuple(weight.shape) != (num_total_classes, input.shape[1]):
        raise ValueError(
            f"nce: weight: expected [{num_total_classes}, {input.shape[1]}], got "
            f"{list(weight.shape)}"
        )
    count = input.shape[0]
    label = label_column("nce", label, count)
    check_labels("nce", label, num_total_classes)
    noise = _noise(sampler, num_total_classes, custom_dist)
    if samples is None:
        samples = _drawn(input, noise, num_neg_samples, seed)
    elif samples.dim() != 2 or samples.shape[0] != count:
        raise ValueError(f"nce: samples: expected [{count}, k], got {list(samples.shape)}")
    classes = torch.cat([label, samples.long()], 1)
    scores = torch.einsum("nd,nkd->nk", input, F.embedding(classes, weight))
    if bias is not None:
        scores = scores + bias[classes]
    odds = scores - (noise.probability(classes) * samples.shape[1]).log().to(scores.dtype)
    true, drawn = odds[:, : label.shape[1]], odds[:, label.shape[1] :]
    loss = F.softplus(-true).sum(1, keepdim=True) + F.softplus(drawn).sum(1, keepdim=True)
    return loss if sample_weight is None else loss * sample_weight.reshape(-1, 1)


def _noise(name: str, classes: int, given: Tensor | None) -> Sampler:
    if (name == "custom_dist") != (given is not None):
        raise ValueError('nce: custom_dist: expected it with sampler="custom_dist", and only there')
    if name == "uniform":
        return UniformSampler(classes)
    if name == "log_uniform":
        return LogUniformSampler(classes)
    if given is None:
        known = ", ".join(map(repr, SAMPLERS))
        raise ValueError(f"nce: sampler: expected one of {known}, got {name!r}")
    if len(given) != classes:
        raise ValueError(f"nce: custom_dist: expected [{classes}], got {list(given.shape)}")
    return GivenSampler(given)


def _drawn(input: Tensor, noise: Sampler, each: int, seed: int) -> Tensor:
    if each < 1:
        raise ValueError(f"nce: num_neg_samples: expected 1 or more, got {each}")
    if traced(input):
        raise ValueError(
            "nce: a program draws nothing by itself; expected samples, as an input of the step"
        )
    count = input.shape[0]
    return noise.draw(count * each, seeded(seed)).reshape(count, each).to(input.device)


class NCE(nn.Module):
    """:func:`nce` with the classes' weights and biases as parameters.

    Args:
        num_total_classes, feature_size: of the weights.
        num_neg_samples, sampler, custom_dist: as of the function.

    Attributes:
        weight: [num_total_classes, feature_size].
        bias: [num_total_classes].
    """

    def __init__(
        self,
        num_total_classes: int,
        feature_size: int,
        num_neg_samples: int = 10,
        sampler: str = "uniform",
        custom_dist: Tensor | None = None,
    ) -> None:
        super().__init__()
        _noise(sampler, num_total_classes, custom_dist)  # raises
        self.num_neg_samples = num_neg_samples
        self.sampler = sampler
        self.custom_dist = custom_dist
        self.weight = nn.Parameter(torch.empty(num_total_classes, feature_size))
        self.bias = nn.Parameter(torch.zeros(num_total_classes))
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self,
        input: Tensor,
        label: Tensor,
        sample_weight: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """[n, feature_size] and [n] -> [n, 1]."""
        return nce(
            input,
            label,
            len(self.weight),
            self.weight,
            self.bias,
            sample_weight,
            self.num_neg_samples,
            self.sampler,
            self.custom_dist,
            samples=samples,
        )
