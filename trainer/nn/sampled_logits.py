"""Cross entropy over the true class and some sampled ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.nn.labels import check_labels, check_matrix, label_column, traced
from trainer.nn.samplers import LogUniformSampler, draw_unique, seeded


def sampled_softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    num_samples: int,
    num_true: int = 1,
    remove_accidental_hits: bool = True,
    use_customized_samples: bool = False,
    customized_samples: Tensor | None = None,
    customized_probabilities: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Softmax cross entropy over each row's true classes and ``num_samples`` drawn ones.

    The drawn ones are all different, the same in every row, and log-uniform: class ids are to be
    numbered by falling frequency.  From each logit the logarithm of how often its class is expected
    among the samples is subtracted (logQ correction).  Of several true classes each counts 1 /
    num_true.

    Jean, Cho, Memisevic, Bengio: On Using Very Large Target Vocabulary for Neural Machine
    Translation, ACL 2015; Bengio, Senecal: Adaptive Importance Sampling to Accelerate Training of a
    Neural Probabilistic Language Model, 2008.

    The logits of all classes are given here; :class:`trainer.nn.SampledSoftmax` computes those of
    the samples alone.

    In a program the samples come from outside, for drawing until they differ depends on values:
    give ``customized_samples`` and their probabilities as inputs of the step.

    Args:
        logits: floats [n, classes], no probabilities.
        label: true classes, int64 [n, num_true], or [n] for one.
        num_samples: how many are drawn.
        num_true: how many true classes a row has.
        remove_accidental_hits: whether a drawn class that is a true one of the row is left out.
        use_customized_samples: takes the two following arguments and draws nothing.
        customized_samples: int64 [n, num_true + num_samples], the true classes first.
        customized_probabilities: floats of that shape: how often each is expected.
        seed: of the draws; 0: torch's own generator.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are no whole numbers.
        ValueError: shapes do not fit, a label is out of range, or samples are not given where they
            must be.
    """
    whose = "sampled_softmax_with_cross_entropy"
    check_matrix(whose, "logits", logits)
    label = label_column(whose, label, logits.shape[0])
    if label.shape[1] != num_true:
        raise ValueError(
            f"{whose}: label: expected [{logits.shape[0]}, {num_true}], got {list(label.shape)}"
        )
    check_labels(whose, label, logits.shape[1])
    given = customized_samples, customized_probabilities
    samples, expected = (
        _given(whose, *given, (logits.shape[0], num_true + num_samples))
        if use_customized_samples
        else _drawn(whose, logits, label, num_samples, seed, *given)
    )
    chosen = logits.gather(1, samples) - expected.log().to(logits.dtype)
    if remove_accidental_hits:
        hits = (samples[:, num_true:].unsqueeze(2) == samples[:, :num_true].unsqueeze(1)).any(2)
        chosen = chosen.masked_fill(F.pad(hits, (num_true, 0)), torch.finfo(logits.dtype).min)
    return -F.log_softmax(chosen, 1)[:, :num_true].mean(1, keepdim=True)


def _given(
    whose: str, samples: Tensor | None, expected: Tensor | None, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    if samples is None or expected is None:
        raise ValueError(
            f"{whose}: use_customized_samples: expected customized_samples and "
            "customized_probabilities, too"
        )
    for name, each in (("samples", samples), ("probabilities", expected)):
        if tuple(each.shape) != shape:
            raise ValueError(
                f"{whose}: customized_{name}: expected {list(shape)}, got {list(each.shape)}"
            )
    return samples.long(), expected


def _drawn(
    whose: str,
    logits: Tensor,
    label: Tensor,
    count: int,
    seed: int,
    samples: Tensor | None,
    expected: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The true classes and the drawn ones, and how often each is expected, [n, true + count]."""
    if samples is not None or expected is not None:
        raise ValueError(f"{whose}: customized samples are for use_customized_samples=True")
    if traced(logits):
        raise ValueError(
            f"{whose}: drawing depends on values, which a program has not; expected "
            "use_customized_samples=True, with the samples as inputs of the step"
        )
    negatives = draw_unique(LogUniformSampler(logits.shape[1]), count, seeded(seed))
    drawn = negatives.ids.to(label.device).expand(label.shape[0], count)
    together = torch.cat([label, drawn], 1)
    return together, negatives.expected(together)


class SampledSoftmaxWithCrossEntropy(nn.Module):
    """:func:`sampled_softmax_with_cross_entropy` as a module that draws at each forward.

    Args:
        num_samples, num_true, remove_accidental_hits: as of the function.
    """

    def __init__(
        self, num_samples: int, num_true: int = 1, remove_accidental_hits: bool = True
    ) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.num_true = num_true
        self.remove_accidental_hits = remove_accidental_hits

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """[n, classes] and [n, num_true] -> [n, 1]."""
        return sampled_softmax_with_cross_entropy(
            logits, label, self.num_samples, self.num_true, self.remove_accidental_hits
        )
