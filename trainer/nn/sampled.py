"""Losses over very many classes: sampled softmax, noise-contrastive estimation, hierarchical
sigmoid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.embedding.embedding import DistributedEmbedding
from trainer.nn.sequence import check_labels, check_matrix, label_column, single_label, traced
from trainer.row_optimizers import Interval
from transpiler.ir.tables import Constant

# ---- frequencies ----
#
# The frequency of ids in batches, counted where tables are: on the servers of a job.
#
# Yi, Yang, Hong, Cheng, Heldt, Kumthekar, Zhao, Wei, Chi: Sampling-Bias-Corrected Neural Modeling
# for Large Corpus Item Recommendations, RecSys 2019, algorithm 2: a moving average of the number of
# steps between two batches with the id.  In the paper ids share the buckets of a hash; here each
# has a row.


class StreamingFrequency(nn.Module):
    """The probability that an id is in the batch of a step.

    A backward through the estimate counts its ids, in the step that follows, whatever the loss: the
    gradient is zero, and :class:`~trainer.row_optimizers.Interval` is the table's rule.  So
    clipping and loss scaling leave the counts alone, evaluation counts nothing, and checkpoints
    have them.  In sync mode a step has the batches of all trainers, otherwise the batch of one.

    Example::

        frequency = StreamingFrequency(1_000_000, name="how_often")
        logits = logits - frequency(items).log()    # int64 [n]; gives float32 [n]

    Args:
        num_ids: the number of ids; all ids are below it.
        alpha: the weight of the newest interval in the average.
        table: further arguments of :class:`~trainer.DistributedEmbedding`: name, capacity...

    Attributes:
        intervals: the table, of one column; 0 in rows that were not counted yet.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, num_ids: int, alpha: float = 0.05, **table: Any) -> None:
        super().__init__()
        rule = Interval(alpha)
        rule.rule()  # raises at once if alpha is wrong
        self.intervals = DistributedEmbedding(
            1, num_embeddings=num_ids, init=Constant(0.0), optimizer=rule, **table
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The present estimate; for an id that was not counted yet, the estimate for equally
        frequent ids.

        Args:
            ids: int64 [n]; an id may occur several times.

        Returns:
            float32 [n], above 0 and up to 1.
        """
        assert self.intervals.num_embeddings is not None
        intervals = self.intervals(ids).squeeze(-1)
        found: Tensor = _Frequency.apply(intervals, self.intervals.num_embeddings)  # type: ignore[no-untyped-call]  # torch's own
        return found


class _Frequency(torch.autograd.Function):
    """The inverse of the interval; its gradient is present, and zero."""

    @staticmethod
    def forward(ctx: Any, intervals: Tensor, num_ids: int) -> Tensor:
        # by sums of tensors: a program's batch may have any size
        alike = (torch.ones_like(intervals).sum() / num_ids).clamp(max=1)
        return torch.where(intervals == 0, alike, 1 / intervals.clamp(min=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(grad), None


# ---- hierarchical sigmoid ----
#
# Hierarchical sigmoid: a class as the path to its leaf in a binary tree.


def hsigmoid_loss(
    input: Tensor,
    label: Tensor,
    num_classes: int,
    weight: Tensor,
    bias: Tensor | None = None,
    path_table: Tensor | None = None,
    path_code: Tensor | None = None,
    is_sparse: bool = False,
) -> Tensor:
    """The log loss of each decision on the path from the root to the label's leaf, summed.

    A step costs about log2(num_classes) rows of the weight.  Without paths the tree is a complete
    binary one, in which class c is node c + num_classes, and node k has the children 2k and 2k + 1;
    node k's weight is row k - 1, and its decision is the last bit of the child.

    Morin, Bengio: Hierarchical Probabilistic Neural Network Language Model, AISTATS 2005.

    Args:
        input: features, floats [n, size].
        label: int64 [n] or [n, 1].
        num_classes: 2 or more.
        weight: of the inner nodes, [num_classes - 1, size]; with paths [nodes, size].
        bias: of the inner nodes, [nodes, 1].
        path_table: the nodes on each sample's path, int64 [n, depth]; a number below 0 is no node.
        path_code: the decision at each node, 0 or 1, int64 [n, depth].
        is_sparse: whether the gradients of weight and bias are sparse.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are not whole numbers.
        ValueError: shapes do not fit, or a label is out of range.
    """
    check_matrix("hsigmoid_loss", "input", input)
    if num_classes < 2:
        raise ValueError(f"hsigmoid_loss: num_classes: expected 2 or more, got {num_classes}")
    label = single_label("hsigmoid_loss", label, input.shape[0])
    if (path_table is None) != (path_code is None):
        raise ValueError("hsigmoid_loss: expected both path_table and path_code, or neither")
    if path_table is None or path_code is None:
        check_labels("hsigmoid_loss", label, num_classes)
        nodes, codes = _complete_tree(label, num_classes)
        _check_weights(weight, bias, num_classes - 1, input.shape[1])
    else:
        nodes, codes = path_table.long(), path_code
        if nodes.dim() != 2 or nodes.shape != codes.shape or nodes.shape[0] != input.shape[0]:
            raise ValueError(
                f"hsigmoid_loss: expected path_table and path_code [{input.shape[0]}, depth], got "
                f"{list(nodes.shape)} and {list(codes.shape)}"
            )
        _check_weights(weight, bias, weight.shape[0], input.shape[1])
    rows = nodes.clamp(min=0)
    scores = torch.einsum("nd,nkd->nk", input, F.embedding(rows, weight, sparse=is_sparse))
    if bias is not None:
        scores = scores + F.embedding(rows, bias, sparse=is_sparse).squeeze(2)
    losses = F.softplus(scores) - scores * codes.to(scores.dtype)
    return (losses * (nodes >= 0)).sum(1, keepdim=True)


def _complete_tree(label: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Nodes, below 0 for none, and decisions on the path of each label: int64 [n, depth]."""
    depth = (2 * classes - 1).bit_length() - 1
    steps = torch.arange(depth, device=label.device)
    leaf = (label + classes).unsqueeze(1)
    return (leaf >> (steps + 1)) - 1, (leaf >> steps) & 1


def _check_weights(weight: Tensor, bias: Tensor | None, nodes: int, size: int) -> None:
    if tuple(weight.shape) != (nodes, size):
        raise ValueError(
            f"hsigmoid_loss: weight: expected [{nodes}, {size}], got {list(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (nodes, 1):
        raise ValueError(f"hsigmoid_loss: bias: expected [{nodes}, 1], got {list(bias.shape)}")


class HSigmoidLoss(nn.Module):
    """:func:`hsigmoid_loss` with the nodes' weights and biases as parameters.

    Args:
        feature_size: of the samples.
        num_classes: 2 or more; with ``is_custom`` the number of inner nodes.
        bias: whether nodes have biases.
        is_custom: whether forward takes paths; otherwise the tree is the complete one.
        is_sparse: whether gradients are sparse.

    Attributes:
        weight: [nodes, feature_size]; the number of nodes is num_classes - 1, or num_classes with
            ``is_custom``.
        bias: [nodes, 1], or None.
    """

    def __init__(
        self,
        feature_size: int,
        num_classes: int,
        bias: bool = True,
        is_custom: bool = False,
        is_sparse: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"HSigmoidLoss: num_classes: expected 2 or more, got {num_classes}")
        nodes = num_classes if is_custom else num_classes - 1
        self.num_classes = num_classes
        self.is_custom = is_custom
        self.is_sparse = is_sparse
        self.weight = nn.Parameter(torch.empty(nodes, feature_size))
        self.bias = nn.Parameter(torch.zeros(nodes, 1)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self,
        input: Tensor,
        label: Tensor,
        path_table: Tensor | None = None,
        path_code: Tensor | None = None,
    ) -> Tensor:
        """[n, feature_size] and [n] -> [n, 1]; paths are required with ``is_custom``, and allowed
        only then.
        """
        if self.is_custom != (path_table is not None):
            raise ValueError("HSigmoidLoss: expected paths with is_custom=True, and only there")
        return hsigmoid_loss(
            input,
            label,
            self.num_classes,
            self.weight,
            self.bias,
            path_table,
            path_code,
            self.is_sparse,
        )


# ---- samplers ----
#
# The sources of negative classes: distributions over class ids, and draws without repetition.


class Sampler(Protocol):
    """A distribution over the ids 0 to ``classes`` - 1."""

    classes: int

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws ids independently: int64 [count], on the CPU."""

    def probability(self, ids: Tensor) -> Tensor:
        """The ids' probabilities in one draw, float32 or float64 of the ids' shape, on their
        device.
        """


class UniformSampler:
    """The uniform distribution: every class has the same probability.

    Args:
        classes: 1 or more.
    """

    def __init__(self, classes: int) -> None:
        self.classes = _checked(classes)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """See :class:`Sampler`."""
        return torch.randint(self.classes, (count,), generator=generator)

    def probability(self, ids: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        return torch.full_like(ids, 1 / self.classes, dtype=torch.float64)


class LogUniformSampler:
    """Class k has a probability of log((k + 2) / (k + 1)) / log(classes + 1): nearly Zipf's law,
    for classes that are numbered from the most frequent one on.

    Args:
        classes: 1 or more.
    """

    def __init__(self, classes: int) -> None:
        self.classes = _checked(classes)
        self._range = math.log(classes + 1)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """See :class:`Sampler`."""
        exponents = torch.rand(count, generator=generator, dtype=torch.float64) * self._range
        return (exponents.exp().long() - 1).clamp(0, self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        return (1 / (ids.to(torch.float64) + 1)).log1p() / self._range


class GivenSampler:
    """Class k has a given probability.

    Args:
        probabilities: floats [classes], none below 0; they are divided by their sum.

    Raises:
        ValueError: the probabilities are invalid.
    """

    def __init__(self, probabilities: Tensor) -> None:
        given = probabilities.detach().double().cpu()
        if given.dim() != 1 or not len(given) or bool((given < 0).any()) or not given.sum() > 0:
            raise ValueError(
                "probabilities: expected [classes], none below 0 and one above it, got "
                f"{list(given.shape)}"
            )
        self.classes = len(given)
        self._probabilities = given / given.sum()
        self._cumulated = self._probabilities.cumsum(0)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """See :class:`Sampler`."""
        drawn = torch.rand(count, generator=generator, dtype=torch.float64) * self._cumulated[-1]
        return torch.searchsorted(self._cumulated, drawn, right=True).clamp(max=self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        return self._probabilities.to(ids.device)[ids]


@dataclass(frozen=True)
class Negatives:
    """Drawn classes, and how they were drawn.

    Attributes:
        ids: int64 [samples].
        tries: the number of draws; None: as many as there are samples, which may repeat.
        sampler: the sampler that drew them.
    """

    ids: Tensor
    tries: int | None
    sampler: Sampler

    def expected(self, ids: Tensor) -> Tensor:
        """The expected count of each id among the samples, floats of the ids' shape."""
        probability = self.sampler.probability(ids)
        if self.tries is None:
            return probability * len(self.ids)
        return -torch.expm1(self.tries * torch.log1p(-probability))


def draw_unique(
    sampler: Sampler, count: int, generator: torch.Generator | None = None
) -> Negatives:
    """Draws until there are ``count`` different ids, and counts the draws.

    Raises:
        ValueError: ``count`` is below 1, or above the number of classes.
    """
    if not 1 <= count <= sampler.classes:
        raise ValueError(f"num_samples: expected 1 to {sampler.classes}, got {count}")
    drawn = sampler.draw(2 * count, generator)
    while True:
        ids, inverse = torch.unique(drawn, return_inverse=True)
        if len(ids) >= count:
            break
        drawn = torch.cat([drawn, sampler.draw(len(drawn), generator)])
    places = torch.arange(len(drawn))
    first = torch.full_like(ids, len(drawn)).scatter_reduce(0, inverse, places, "amin")
    kept = first.sort().values[:count]
    return Negatives(drawn[kept], int(kept[-1]) + 1, sampler)


def seeded(seed: int) -> torch.Generator | None:
    """A separate generator with this seed; None for 0, which means torch's own."""
    return torch.Generator().manual_seed(seed) if seed else None


def _checked(classes: int) -> int:
    if classes < 1:
        raise ValueError(f"classes: expected 1 or more, got {classes}")
    return classes


# ---- noise-contrastive estimation ----
#
# Noise-contrastive estimation: true classes distinguished from drawn ones, one by one.


NCE_SAMPLERS = ("uniform", "log_uniform", "custom_dist")


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
    """The loss of distinguishing a sample's true classes from ``num_neg_samples`` drawn ones.

    With a class's score s, its probability q of being drawn, and k draws, the class is true with a
    probability of sigmoid(s - log(k * q)); the loss is the log loss of that, summed over the true
    and the drawn classes.

    Gutmann, Hyvarinen: Noise-Contrastive Estimation, AISTATS 2010; Mnih, Teh: A Fast and Simple
    Algorithm for Training Neural Probabilistic Language Models, ICML 2012.  Scores are used as in
    the papers; PaddlePaddle's op of this name uses sigmoid(s) in place of exp(s).

    In a program the drawn classes are an input of the step: ``samples``.

    Args:
        input: features, floats [n, size].
        label: true classes, int64 [n] or [n, true].
        num_total_classes: the number of classes; all ids are below it.
        weight: of the classes, [num_total_classes, size].
        bias: [num_total_classes].
        sample_weight: factors of the samples, [n] or [n, 1].
        num_neg_samples: k.
        sampler: "uniform", "log_uniform", or "custom_dist".
        custom_dist: with "custom_dist", the probability of each class, [num_total_classes].
        seed: of the draws; 0: torch's own generator.
        samples: drawn classes, int64 [n, k]; None: they are drawn here.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are not whole numbers.
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
        samples = _drawn_noise(input, noise, num_neg_samples, seed)
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
        known = ", ".join(map(repr, NCE_SAMPLERS))
        raise ValueError(f"nce: sampler: expected one of {known}, got {name!r}")
    if len(given) != classes:
        raise ValueError(f"nce: custom_dist: expected [{classes}], got {list(given.shape)}")
    return GivenSampler(given)


def _drawn_noise(input: Tensor, noise: Sampler, each: int, seed: int) -> Tensor:
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


# ---- sampled logits ----
#
# Cross entropy over the true class and some sampled ones.


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

    The drawn classes are all different, the same in every row, and log-uniform: number class ids by
    falling frequency.  From each logit the logarithm of its class's expected count among the
    samples is subtracted (logQ correction).  Of several true classes each counts 1 / num_true.

    Jean, Cho, Memisevic, Bengio: On Using Very Large Target Vocabulary for Neural Machine
    Translation, ACL 2015; Bengio, Senecal: Adaptive Importance Sampling to Accelerate Training of a
    Neural Probabilistic Language Model, 2008.

    The logits of all classes are given here; :class:`trainer.nn.SampledSoftmax` computes those of
    the samples alone.

    In a program the samples come from outside, because drawing different ones depends on values:
    give ``customized_samples`` and their probabilities as inputs of the step.

    Args:
        logits: floats [n, classes], not probabilities.
        label: true classes, int64 [n, num_true], or [n] for one.
        num_samples: the number of drawn classes.
        num_true: the number of true classes of a row.
        remove_accidental_hits: whether a drawn class that is a true one of the row is left out.
        use_customized_samples: whether to use the two following arguments, and draw nothing.
        customized_samples: int64 [n, num_true + num_samples], the true classes first.
        customized_probabilities: floats of that shape: the expected count of each class.
        seed: of the draws; 0: torch's own generator.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are not whole numbers.
        ValueError: shapes do not fit, a label is out of range, or required samples are missing.
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
        else _drawn_classes(whose, logits, label, num_samples, seed, *given)
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


def _drawn_classes(
    whose: str,
    logits: Tensor,
    label: Tensor,
    count: int,
    seed: int,
    samples: Tensor | None,
    expected: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The true classes and the drawn ones, and the expected count of each, [n, true + count]."""
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


# ---- sampled softmax ----
#
# Softmax over very many classes, whose weights are rows of a table on servers.
#
# A step computes the logits of the true classes and of some others, and pulls and pushes only these
# rows: its cost does not depend on the number of classes.


SOFTMAX_SAMPLERS = ("log_uniform", "uniform", "in_batch")


class SampledSoftmax(nn.Module):
    """The cross entropy of a softmax over sampled classes.

    A class is a row of the table ``classes``: its weight, and in the last column its bias.  In a
    job with servers these hold the rows, and a step carries only the rows of the batch's true
    classes and of the samples.

    The samples are drawn by each trainer at each forward, all different ("log_uniform", for classes
    that are numbered by falling frequency, or "uniform"), or they are the true classes of the rest
    of the batch ("in_batch", for two-tower models).  With ``logq`` the logarithm of a class's
    expected count among the samples is subtracted from its logit, true or drawn, so that the module
    learns the softmax over all classes, whichever classes the sampler prefers.  With "in_batch" and
    ``logq`` the frequencies of classes are counted in a second table, on servers if there are any:
    see :class:`~trainer.nn.sampled.StreamingFrequency`.

    Jean, Cho, Memisevic, Bengio: On Using Very Large Target Vocabulary for Neural Machine
    Translation, ACL 2015; Yi et al.: Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations, RecSys 2019.

    Example::

        output = SampledSoftmax(1_000_000, 64, num_samples=500)
        loss = output(users, clicked).mean()    # [n, 64] and [n]; gives [n, 1]

    Args:
        num_classes: 2 or more.
        feature_size: of the inputs.
        num_samples: the number of classes drawn for a batch; 0 with "in_batch", which draws none.
        sampler: "log_uniform", "uniform" or "in_batch".
        remove_accidental_hits: whether a sample that is a row's true class is left out of the row.
        logq: whether logits are corrected.
        bias: whether classes have biases.
        frequencies: with "in_batch" and ``logq``; None: the module makes its own.
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

        In a program nothing is drawn: give negatives, and with ``logq`` their expected counts.

        Args:
            input: features, floats [n, feature_size].
            label: the true class of each row, int64 [n] or [n, 1].
            negatives: replace drawn classes, int64 [s]; not allowed with "in_batch".
            expected: with negatives and ``logq``: the expected counts of the labels, [n], and of
                the negatives, [s], among the samples.

        Returns:
            [n, 1].

        Raises:
            TypeError: labels are not whole numbers.
            ValueError: shapes do not fit, or a class is out of range.
        """
        whose = "SampledSoftmax"
        check_matrix(whose, "input", input)
        label = single_label(whose, label, input.shape[0])
        check_labels(whose, label, self.num_classes)
        if self.sampler == "in_batch":
            if negatives is not None or expected is not None:
                raise ValueError(f"{whose}: negatives: expected none with in_batch, got some")
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
        """The uncorrected logits of some classes, for evaluation.

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
        """Draws negatives, with the expected counts of the labels and of the negatives."""
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
        """The sizes and the sampler, for ``repr``."""
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
    if sampler not in SOFTMAX_SAMPLERS:
        known = ", ".join(map(repr, SOFTMAX_SAMPLERS))
        raise ValueError(f"SampledSoftmax: sampler: expected one of {known}, got {sampler!r}")
    drawn = sampler != "in_batch"
    if not (1 <= samples <= classes if drawn else samples == 0):
        expected = f"1 to {classes}" if drawn else "0, as the batch's classes are the samples,"
        raise ValueError(
            f"SampledSoftmax: num_samples: expected {expected} with sampler={sampler!r}, "
            f"got {samples}"
        )
