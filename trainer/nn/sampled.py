"""Softmax over very many classes, whose weights are rows of a table on servers.

A step computes the logits of the true classes and of some others, and pulls and pushes these rows
alone: it costs the same however many classes there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.embedding.embedding import DistributedEmbedding
from trainer.nn.frequencies import StreamingFrequency
from trainer.nn.labels import check_labels, check_matrix, single_label, traced
from trainer.nn.samplers import LogUniformSampler, Sampler, UniformSampler, draw_unique

SAMPLERS = ("log_uniform", "uniform", "in_batch")


class SampledSoftmax(nn.Module):
    """The cross entropy of a softmax over sampled classes.

    A class is a row of the table ``classes``: its weight, and in the last column its bias.  In a
    job with servers these hold the rows, and a step carries those of the batch's true classes and
    of the samples alone.

    The samples are drawn by each trainer at each forward, all different ("log_uniform", for classes
    that are numbered by falling frequency, or "uniform"), or they are the true classes of the rest
    of the batch ("in_batch", for two-tower models).  With ``logq`` the logarithm of how often a
    class is expected among the samples is subtracted from its logit, true or drawn, so that what is
    learned is the softmax over all classes, whatever classes the sampler prefers.  How often a
    class is in a batch is counted in a second table, on servers where there are any: see
    :class:`~trainer.nn.frequencies.StreamingFrequency`.

    Jean, Cho, Memisevic, Bengio: On Using Very Large Target Vocabulary for Neural Machine
    Translation, ACL 2015; Yi et al.: Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations, RecSys 2019.

    Example::

        output = SampledSoftmax(1_000_000, 64, num_samples=500)
        loss = output(users, clicked).mean()    # [n, 64] and [n]; gives [n, 1]

    Args:
        num_classes: 2 or more.
        feature_size: of the inputs.
        num_samples: how many classes are drawn for a batch; 0 with "in_batch", which draws none.
        sampler: "log_uniform", "uniform" or "in_batch".
        remove_accidental_hits: whether a sample that is a row's true class is left out of the row.
        logq: whether logits are corrected.
        bias: whether a class has one.
        frequencies: with "in_batch" and ``logq``; None: counts of this module's own.
        table: further arguments of :class:`~trainer.DistributedEmbedding`: name, init, optimizer...

    Attributes:
        classes: the table, of feature_size columns, and one for the bias.

    Raises:
        ValueError: a number is out of its range, or there is no such sampler.
    """

    def __init__(
        self,
        num_classes: int,
        feature_size: int,
        num_samples: int = 0,
        *,
        sampler: str = "log_uniform",
        remove_accidental_hits: bool = True,
        logq: bool = True,
        bias: bool = True,
        frequencies: StreamingFrequency | None = None,
        **table: Any,
    ) -> None:
        super().__init__()
        _check(num_classes, feature_size, num_samples, sampler)
        counted = sampler == "in_batch" and logq
        if frequencies is not None and not counted:
            raise ValueError(
                'SampledSoftmax: frequencies: expected them with sampler="in_batch" and logq alone'
            )
        self.num_classes = num_classes
        self.feature_size = feature_size
        self.num_samples = num_samples
        self.sampler = sampler
        self.remove_accidental_hits = remove_accidental_hits
        self.logq = logq
        self.bias = bias
        self.classes = DistributedEmbedding(
            feature_size + bias, num_embeddings=num_classes, **table
        )
        self.frequencies = (frequencies or StreamingFrequency(num_classes)) if counted else None

    def forward(
        self,
        input: Tensor,
        label: Tensor,
        negatives: Tensor | None = None,
        expected: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The loss of each row.

        In a program nothing is drawn: give negatives, and with ``logq`` what is expected.

        Args:
            input: features, floats [n, feature_size].
            label: the true class of each row, int64 [n] or [n, 1].
            negatives: in the place of drawn ones, int64 [s]; with "in_batch": none.
            expected: with negatives and ``logq``: how often the labels, [n], and the negatives,
                [s], are expected among the samples.

        Returns:
            [n, 1].

        Raises:
            TypeError: labels are no whole numbers.
            ValueError: shapes do not fit, or a class is out of range.
        """
        whose = "SampledSoftmax"
        check_matrix(whose, "input", input)
        label = single_label(whose, label, input.shape[0])
        check_labels(whose, label, self.num_classes)
        if self.sampler == "in_batch":
            if negatives is not None or expected is not None:
                raise ValueError(f"{whose}: negatives: expected none, for the batch's classes are")
            return self._in_batch(input, label)
        if negatives is None:
            negatives, expected = self._draw(label)
        elif (expected is not None) != self.logq:
            raise ValueError(
                f"{whose}: expected: expected it beside negatives with logq, and only there"
            )
        together = torch.cat([label, negatives.to(label)])
        weight, bias = self._weights(together)
        n = input.shape[0]
        true = (input * weight[:n]).sum(1) + bias[:n]
        drawn = input @ weight[n:].t() + bias[n:]
        if expected is not None:
            true = true - expected[0].log().to(true.dtype)
            drawn = drawn - expected[1].log().to(true.dtype)
        if self.remove_accidental_hits:
            drawn = _without(drawn, negatives.to(label) == label.unsqueeze(1))
        logits = torch.cat([true.unsqueeze(1), drawn], 1)
        return logits.logsumexp(1, keepdim=True) - logits[:, :1]

    def scores(self, input: Tensor, classes: Tensor) -> Tensor:
        """The logits of some classes, as they are: for evaluation.

        Args:
            input: [n, feature_size].
            classes: int64 [k], the same for every row.

        Returns:
            [n, k].
        """
        weight, bias = self._weights(classes)
        return input @ weight.t() + bias

    def _weights(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [k, feature_size] and biases [k]."""
        rows = self.classes(classes)
        if self.bias:
            return rows[:, :-1], rows[:, -1]
        return rows, rows.new_zeros(rows.shape[0])

    def _draw(self, label: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Classes, and how often the labels and they are expected."""
        if traced(label):
            raise ValueError(
                "SampledSoftmax: drawing depends on values, which a program has not; expected "
                "negatives, as an input of the step"
            )
        drawn = draw_unique(self._distribution(), self.num_samples)
        negatives = drawn.ids.to(label.device)
        both = drawn.expected(label), drawn.expected(negatives)
        return negatives, both if self.logq else None

    def _distribution(self) -> Sampler:
        kind = LogUniformSampler if self.sampler == "log_uniform" else UniformSampler
        return kind(self.num_classes)

    def _in_batch(self, input: Tensor, label: Tensor) -> Tensor:
        weight, bias = self._weights(label)
        logits = input @ weight.t() + bias
        if self.frequencies is not None:
            logits = logits - self.frequencies(label).log()
        own = torch.eye(label.shape[0], dtype=torch.bool, device=label.device)
        if self.remove_accidental_hits:
            logits = _without(logits, (label == label.unsqueeze(1)) & ~own)
        true = (logits * own).sum(1, keepdim=True)
        return logits.logsumexp(1, keepdim=True) - true

    def extra_repr(self) -> str:
        """What the module is made of."""
        drawn = "" if self.sampler == "in_batch" else f", num_samples={self.num_samples}"
        return f"{self.num_classes} classes, {self.feature_size}{drawn}, sampler={self.sampler!r}"


def _without(logits: Tensor, hits: Tensor) -> Tensor:
    return logits.masked_fill(hits, torch.finfo(logits.dtype).min)


def _check(classes: int, size: int, samples: int, sampler: str) -> None:
    if classes < 2 or size < 1:
        raise ValueError(
            "SampledSoftmax: expected num_classes of 2 or more and feature_size of 1 or more, got "
            f"{classes} and {size}"
        )
    if sampler not in SAMPLERS:
        known = ", ".join(map(repr, SAMPLERS))
        raise ValueError(f"SampledSoftmax: sampler: expected one of {known}, got {sampler!r}")
    drawn = sampler != "in_batch"
    if not (1 <= samples <= classes if drawn else samples == 0):
        expected = f"1 to {classes}" if drawn else "none, for the batch's classes are,"
        raise ValueError(
            f"SampledSoftmax: num_samples: expected {expected} with sampler={sampler!r}, "
            f"got {samples}"
        )
