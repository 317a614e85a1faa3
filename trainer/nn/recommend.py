"""Losses and layers of models that recommend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.embedding.embedding import DistributedEmbedding
from trainer.nn.sequence import (
    Ragged,
    Sequences,
    begins,
    check_labels,
    check_matrix,
    check_same_shape,
    gathered,
    like,
    refuse_tracing,
    sequences_of,
    single_label,
)

# ---- center loss ----
#
# The center loss: keeps features of one class close to one another.


def center_loss(
    input: Tensor, label: Tensor, centers: Tensor, alpha: float, update_center: bool = True
) -> Tensor:
    """Half the squared distance of each sample from its class's center, which moves towards it.

    A center c of a class with m samples x in the batch becomes c - alpha * sum(c - x) / (1 + m).
    The loss uses the centers before the move.

    Wen, Zhang, Li, Qiao: A Discriminative Feature Learning Approach for Deep Face Recognition,
    ECCV 2016.

    Args:
        input: features, floats [n, size].
        label: the class of each sample, int64 [n] or [n, 1].
        centers: floats [classes, size]; written in place, and they never get a gradient.
        alpha: how fast centers move.
        update_center: whether centers move.

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are not whole numbers.
        ValueError: shapes do not fit, or a label is out of range.
    """
    check_matrix("center_loss", "input", input)
    if centers.dim() != 2 or centers.shape[1] != input.shape[1]:
        raise ValueError(
            f"center_loss: centers: expected [classes, {input.shape[1]}], got {list(centers.shape)}"
        )
    label = single_label("center_loss", label, input.shape[0])
    check_labels("center_loss", label, centers.shape[0])
    away = input - centers.detach().index_select(0, label)
    if update_center:
        with torch.no_grad():
            moved = torch.zeros_like(centers).index_add(0, label, away.detach())
            seen = torch.zeros_like(centers[:, 0]).index_add(0, label, torch.ones_like(away[:, 0]))
            centers.add_(alpha * moved / (1 + seen).unsqueeze(1))
    return away.square().sum(1, keepdim=True) / 2


class CenterLoss(nn.Module):
    """:func:`center_loss` with centers of its own, which move while it trains.

    The centers are a buffer: part of ``state_dict()``, but not a parameter.  In a job with servers
    ``a_sync_configs["buffers"]`` applies to them: with "trainer0", the default, all trainers have
    the centers that trainer 0's samples move, with "mean" the mean of all trainers' centers.

    Args:
        num_classes, feature_size: of the centers, which begin at zero.
        alpha: how fast centers move.

    Attributes:
        centers: floats [num_classes, feature_size].
    """

    centers: Tensor

    def __init__(self, num_classes: int, feature_size: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = alpha
        self.register_buffer("centers", torch.zeros(num_classes, feature_size))

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """[n, feature_size] and [n] -> [n, 1]."""
        return center_loss(input, label, self.centers, self.alpha, self.training)


# ---- data norm ----
#
# Features normalized by the statistics of all batches so far.


def data_norm(
    input: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    epsilon: float = 1e-5,
    summary_decay_rate: float = 0.9999999,
    update: bool = True,
) -> Tensor:
    """Subtracts each feature's mean and divides by its deviation, both over the batches before this
    one.

    The mean is batch_sum / batch_size, the variance batch_square_sum / batch_size.  Then the sums
    are multiplied by the decay, and this batch is added: its number of samples, its sum, and the
    squares of its distances from that mean, plus epsilon each.  The statistics are constants for
    the gradient.  A batch norm normalizes by the batch itself instead (Ioffe, Szegedy: Batch
    Normalization, ICML 2015); the name and the sums are of PaddlePaddle's layer.

    Args:
        input: floats [n, features].
        batch_size, batch_sum, batch_square_sum: the sums, floats [features], written in place.
        epsilon: keeps the variance above 0.
        summary_decay_rate: above 0, up to 1.
        update: whether this batch is added.

    Returns:
        [n, features].

    Raises:
        ValueError: shapes do not fit, or the decay is out of its range.
    """
    check_matrix("data_norm", "input", input)
    features = (input.shape[1],)
    for name, sums in (
        ("batch_size", batch_size),
        ("batch_sum", batch_sum),
        ("batch_square_sum", batch_square_sum),
    ):
        if tuple(sums.shape) != features:
            raise ValueError(
                f"data_norm: {name}: expected {list(features)}, got {list(sums.shape)}"
            )
    if not 0 < summary_decay_rate <= 1:
        raise ValueError(
            "data_norm: summary_decay_rate: expected a number above 0, up to 1, got "
            f"{summary_decay_rate}"
        )
    with torch.no_grad():
        mean = batch_sum / batch_size
        scale = (batch_size / batch_square_sum).sqrt()
        if update:
            given = input.detach().to(mean.dtype)
            squares = (given - mean).square() + epsilon
            for sums, added in (
                (batch_size, torch.ones_like(given)),
                (batch_sum, given),
                (batch_square_sum, squares),
            ):
                sums.mul_(summary_decay_rate).add_(added.sum(0))
    return (input - mean.to(input.dtype)) * scale.to(input.dtype)


class DataNorm(nn.Module):
    """:func:`data_norm` with sums of its own, to which each batch is added while it trains.

    The sums are buffers: part of ``state_dict()``, of checkpoints and of exports.  In a job with
    servers ``a_sync_configs["buffers"] = "mean"`` makes them the mean over trainers, on servers;
    "trainer0", the default, makes them trainer 0's.

    Args:
        num_features: of the input.
        epsilon, summary_decay_rate: as of the function.
        batch_size_default, batch_sum_default, batch_square_sum_default: the initial sums; the
            greater they are, the longer the first batches have little weight.

    Attributes:
        batch_size, batch_sum, batch_square_sum: float64 [num_features]; float32 could not represent
            a decay so close to 1.
    """

    batch_size: Tensor
    batch_sum: Tensor
    batch_square_sum: Tensor

    def __init__(
        self,
        num_features: int,
        epsilon: float = 1e-5,
        summary_decay_rate: float = 0.9999999,
        batch_size_default: float = 1e4,
        batch_sum_default: float = 0.0,
        batch_square_sum_default: float = 1e4,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.summary_decay_rate = summary_decay_rate
        for name, value in (
            ("batch_size", batch_size_default),
            ("batch_sum", batch_sum_default),
            ("batch_square_sum", batch_square_sum_default),
        ):
            self.register_buffer(name, torch.full((num_features,), value, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        """[n, num_features] -> [n, num_features]."""
        return data_norm(
            input,
            self.batch_size,
            self.batch_sum,
            self.batch_square_sum,
            self.epsilon,
            self.summary_decay_rate,
            self.training,
        )


# ---- ids ----
#
# Ids made from other numbers: hashes that are the same everywhere, and ids within a shard.
#
# The hash is xxHash's XXH64 (Collet, https://xxhash.com) over the little-endian bytes of a row of
# int64 numbers, computed by torch's own integer ops: so it is the same on every machine and device,
# and in a program.


_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _signed(number: int) -> int:
    """The int64 with the 64 bits of the number."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


_P1, _P2, _P3, _P4, _P5 = map(_signed, _PRIMES)


def hash(input: Tensor, hash_size: int, num_hash: int = 1) -> Tensor:
    """Feature hashing: rows of whole numbers as ids below ``hash_size``, by ``num_hash`` hashes.

    Weinberger, Dasgupta, Langford, Smola, Attenberg: Feature Hashing for Large Scale Multitask
    Learning, ICML 2009.  Two rows may have the same id: of n different rows, about n * n / (2 *
    hash_size) pairs have.

    Example::

        hash(torch.tensor([[1, 2], [3, 4]]), hash_size=1000, num_hash=2)    # [2, 2, 1]

    Args:
        input: whole numbers [n, size], or [n] for size 1.
        hash_size: 1 to 2^62.
        num_hash: 1 or more; hash k is XXH64 with the seed k.

    Returns:
        int64 [n, num_hash, 1].

    Raises:
        TypeError: the input is not whole numbers.
        ValueError: a number or shape is out of its range.
    """
    if input.is_floating_point() or input.is_complex():
        raise TypeError(f"hash: input: expected whole numbers, got {input.dtype}")
    if input.dim() not in (1, 2):
        raise ValueError(f"hash: input: expected [n] or [n, size], got {list(input.shape)}")
    if not 1 <= hash_size <= 2**62:
        raise ValueError(f"hash: hash_size: expected 1 to 2^62, got {hash_size}")
    if num_hash < 1:
        raise ValueError(f"hash: num_hash: expected 1 or more, got {num_hash}")
    columns = list((input.unsqueeze(1) if input.dim() == 1 else input).long().unbind(1))
    hashes = torch.stack([_xxh64(columns, seed) for seed in range(num_hash)], 1)
    halves, last = _shifted(hashes, 1), hashes & 1  # the bits as an unsigned number, modulo
    return (((halves % hash_size) * 2 + last) % hash_size).unsqueeze(2)


def _xxh64(lanes: list[Tensor], seed: int) -> Tensor:
    """XXH64 of each row of 8-byte lanes, int64 [n] each -> [n]."""
    whole = len(lanes) // 4 * 4
    if whole:
        starts = (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)
        sums = [torch.full_like(lanes[0], _signed(start)) for start in starts]
        for index, lane in enumerate(lanes[:whole]):
            sums[index % 4] = _round(sums[index % 4], lane)
        turned = zip(sums, (1, 7, 12, 18), strict=True)
        found = torch.stack([_rotated(each, by) for each, by in turned]).sum(0)
        for each in sums:
            found = (found ^ _round(torch.zeros_like(each), each)) * _P1 + _P4
    else:
        found = torch.full_like(lanes[0], _signed(seed + _P5))
    found = found + 8 * len(lanes)
    for lane in lanes[whole:]:
        found = _rotated(found ^ _round(torch.zeros_like(lane), lane), 27) * _P1 + _P4
    found = (found ^ _shifted(found, 33)) * _P2
    found = (found ^ _shifted(found, 29)) * _P3
    return found ^ _shifted(found, 32)


def _round(sum: Tensor, lane: Tensor) -> Tensor:
    return _rotated(sum + lane * _P2, 31) * _P1


def _shifted(bits: Tensor, by: int) -> Tensor:
    """The bits shifted to the right, with zeros from the left."""
    moved: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return moved


def _rotated(bits: Tensor, by: int) -> Tensor:
    return (bits << by) | _shifted(bits, 64 - by)


def shard_index(
    input: Tensor, index_num: int, nshards: int, shard_id: int, ignore_value: int = -1
) -> Tensor:
    """Ids within one of ``nshards`` equal parts of 0 to ``index_num`` - 1.

    Example::

        shard_index(torch.tensor([[1], [16]]), index_num=20, nshards=2, shard_id=1)  # [[-1], [6]]

    Args:
        input: whole numbers of any shape; no part has those below 0 or from ``index_num`` on.
        index_num: the number of ids; a part has index_num / nshards of them, rounded up.
        shard_id: 0 to nshards - 1.
        ignore_value: replaces ids of other parts.

    Returns:
        A tensor like the input.

    Raises:
        TypeError: the input is not whole numbers.
        ValueError: a number is out of its range.
    """
    if input.is_floating_point() or input.is_complex():
        raise TypeError(f"shard_index: input: expected whole numbers, got {input.dtype}")
    if index_num < 1 or nshards < 1:
        raise ValueError(
            f"shard_index: expected index_num and nshards of 1 or more, got {index_num} and "
            f"{nshards}"
        )
    if not 0 <= shard_id < nshards:
        raise ValueError(f"shard_index: shard_id: expected 0 to {nshards - 1}, got {shard_id}")
    size = -(-index_num // nshards)
    begin, end = shard_id * size, min((shard_id + 1) * size, index_num)
    mine = (input >= begin) & (input < end)
    return torch.where(mine, input - begin, ignore_value)


# ---- ranking ----
#
# Losses that compare scores with one another: better items rank first.


def bpr_loss(input: Tensor, label: Tensor) -> Tensor:
    """Bayesian personalized ranking: the chosen item against each other item of its row.

    Of a row with scores x and chosen item i it is the mean over j != i of -log sigmoid(x_i - x_j).

    Rendle, Freudenthaler, Gantner, Schmidt-Thieme: BPR: Bayesian Personalized Ranking from Implicit
    Feedback, UAI 2009; over the rows of a batch as in Hidasi, Karatzoglou, Baltrunas, Tikk:
    Session-based Recommendations with Recurrent Neural Networks, ICLR 2016.

    Example::

        bpr_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))    # [[0.1269]]

    Args:
        input: scores, floats [n, items], items at least 2.
        label: the chosen item of each row, int64 [n] or [n, 1].

    Returns:
        [n, 1].

    Raises:
        TypeError: labels are not whole numbers.
        ValueError: shapes do not fit, or a label is out of range.
    """
    check_matrix("bpr_loss", "input", input)
    if input.shape[1] < 2:
        raise ValueError(f"bpr_loss: input: expected two items or more, got {input.shape[1]}")
    label = single_label("bpr_loss", label, input.shape[0])
    check_labels("bpr_loss", label, input.shape[1])
    chosen = label.unsqueeze(1)
    losses = F.softplus(input - input.gather(1, chosen))
    others = torch.ones_like(input).scatter(1, chosen, 0.0)  # the item against itself is no pair
    return (losses * others).sum(1, keepdim=True) / (input.shape[1] - 1)


def rank_loss(label: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """RankNet's loss of pairs: log(1 + exp(left - right)) - label * (left - right).

    Burges, Shaked, Renshaw, Lazier, Deeds, Hamilton, Hullender: Learning to Rank using Gradient
    Descent, ICML 2005.

    Args:
        label: how likely left is to be ranked higher: 0 to 1, floats of the scores' shape.
        left, right: scores, floats of any shape.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("rank_loss", label=label, left=left, right=right)
    difference = left - right
    return F.softplus(difference) - label * difference


def margin_rank_loss(label: Tensor, left: Tensor, right: Tensor, margin: float = 0.1) -> Tensor:
    """The hinge of pairs: max(0, margin - label * (left - right)).

    Herbrich, Graepel, Obermayer: Large Margin Rank Boundaries for Ordinal Regression, 2000.

    Args:
        label: 1 to rank left higher, -1 to rank right higher; of the scores' shape.
        left, right: scores, floats of any shape.
        margin: the difference from which a pair has no loss.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("margin_rank_loss", label=label, left=left, right=right)
    return F.relu(margin - label * (left - right))


class BPRLoss(nn.Module):
    """:func:`bpr_loss` as a module."""

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """[n, items] and [n] -> [n, 1]."""
        return bpr_loss(input, label)


class RankLoss(nn.Module):
    """:func:`rank_loss` as a module."""

    def forward(self, label: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Three tensors of one shape -> a tensor of this shape."""
        return rank_loss(label, left, right)


class MarginRankLoss(nn.Module):
    """:func:`margin_rank_loss` as a module.

    Args:
        margin: the difference from which a pair has no loss.
    """

    def __init__(self, margin: float = 0.1) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, label: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Three tensors of one shape -> a tensor of this shape."""
        return margin_rank_loss(label, left, right, self.margin)


# ---- selected rows ----
#
# Row gradients as data: the ids of some rows, and a gradient for each.


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """A gradient that has some rows of a table, and zeros elsewhere.

    Attributes:
        ids: int64 [u]; an id may occur several times, until they are merged.
        rows: [u, dim], the gradient of each.
        height: the table's number of rows; None: any int64 is an id.
    """

    ids: Tensor
    rows: Tensor
    height: int | None

    def to_dense(self) -> Tensor:
        """The dense gradient, [height, dim], with the rows of equal ids added up.

        Raises:
            ValueError: ``height`` is None: any int64 is an id.
        """
        if self.height is None:
            raise ValueError("to_dense: expected a table of some height; any int64 is an id here")
        return self.rows.new_zeros(self.height, self.rows.shape[1]).index_add(
            0, self.ids, self.rows
        )


def selected_rows(source: Any) -> SelectedRows:
    """The row gradient of a table, before the optimizer's step.

    For a :class:`~trainer.DistributedEmbedding` it is the gradient that its step will take: the sum
    over all lookups since ``zero_grad``, scaled as the script has scaled its proxy's gradient.  It
    is a copy: changing it changes no step.

    Example::

        table = nn.Embedding(1000, 16, sparse=True)
        table(torch.tensor([3, 7, 3])).sum().backward()
        merge_selected_rows(selected_rows(table)).ids    # [3, 7]

    Args:
        source: a DistributedEmbedding; an nn.Embedding or nn.EmbeddingBag with ``sparse=True``; a
            parameter with a sparse gradient; or a sparse tensor of torch.

    Raises:
        TypeError: it is something else.
        ValueError: it has no gradient, or a dense one.
    """
    if isinstance(source, DistributedEmbedding):
        waiting = source.proxy.waiting()
        if waiting is None:
            raise ValueError(f"selected_rows: expected a gradient, {source.whose()} has none")
        return SelectedRows(waiting.ids, waiting.rows, source.num_embeddings)
    if isinstance(source, nn.Embedding | nn.EmbeddingBag):
        source = source.weight
    if not isinstance(source, Tensor):
        raise TypeError(
            "selected_rows: expected a DistributedEmbedding, an embedding of torch, a parameter or "
            f"a sparse tensor, got {type(source).__name__}"
        )
    gradient = source.grad if isinstance(source, nn.Parameter) else source
    if gradient is None:
        raise ValueError("selected_rows: expected a parameter with a gradient, got none")
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1 or gradient.dim() != 2:
        raise ValueError(
            "selected_rows: expected a sparse gradient of rows, as of an embedding with "
            f"sparse=True, got {gradient.layout} {list(gradient.shape)}"
        )
    return SelectedRows(
        gradient._indices()[0].clone(), gradient._values().detach().clone(), gradient.shape[0]
    )


def merge_selected_rows(x: SelectedRows) -> SelectedRows:
    """The same gradient with each id once, in ascending order; rows of equal ids are added up."""
    ids, inverse = torch.unique(x.ids, return_inverse=True)
    rows = x.rows.new_zeros(len(ids), x.rows.shape[1]).index_add(0, inverse, x.rows)
    return SelectedRows(ids, rows, x.height)


def get_tensor_from_selected_rows(x: SelectedRows) -> Tensor:
    """The rows alone, [u, dim]; row i belongs to ``x.ids[i]``."""
    return x.rows


# ---- shows and clicks ----
#
# Shows and clicks as the first two features of a sample.


def continuous_value_model(input: Tensor, cvm: Tensor, use_cvm: bool = True) -> Tensor:
    """Features that begin with a row's counts of shows and clicks, made ready for a network.

    With ``use_cvm`` the two columns become log(show + 1) and log(click + 1) - log(show + 1);
    without it they are left out.  The gradient of the two columns is ``cvm``, whatever the loss:
    pushed to a table, it increases the counts of a row.

    Embeddings with counters are used so for click-through rates in McMahan et al.: Ad Click
    Prediction: a View from the Trenches, KDD 2013 (counts as features), and in PaddlePaddle, where
    the name is from.

    Args:
        input: floats [n, size], size at least 2: shows, clicks, and learned features.
        cvm: shows and clicks of each sample, floats [n, 2].

    Returns:
        [n, size], or [n, size - 2] without ``use_cvm``.

    Raises:
        ValueError: shapes do not fit.
    """
    check_matrix("continuous_value_model", "input", input)
    if input.shape[1] < 2:
        raise ValueError(
            "continuous_value_model: input: expected shows, clicks and features in each row, got "
            f"{list(input.shape)}"
        )
    if cvm.dim() != 2 or cvm.shape[0] != input.shape[0] or cvm.shape[1] != 2:
        raise ValueError(
            f"continuous_value_model: cvm: expected [{input.shape[0]}, 2], got {list(cvm.shape)}"
        )
    found: Tensor = _Counts.apply(input, cvm.to(input.dtype), use_cvm)  # type: ignore[no-untyped-call]  # torch's own
    return found


class _Counts(torch.autograd.Function):
    """The two columns as logarithms, or without them; their gradient is given."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, cvm: Tensor, use_cvm: bool) -> Tensor:
        ctx.save_for_backward(cvm)
        ctx.kept = 0 if use_cvm else 2
        if not use_cvm:
            return input[:, 2:].clone()
        show, click = (input[:, :2] + 1).log().chunk(2, 1)
        return torch.cat([show, click - show, input[:, 2:]], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (cvm,) = ctx.saved_tensors
        return torch.cat([cvm, gradient[:, 2 - ctx.kept :]], 1), None, None


class ContinuousValueModel(nn.Module):
    """:func:`continuous_value_model` as a module."""

    def __init__(self, use_cvm: bool = True) -> None:
        super().__init__()
        self.use_cvm = use_cvm

    def forward(self, input: Tensor, cvm: Tensor) -> Tensor:
        """[n, size] and [n, 2] -> [n, size], or [n, size - 2]."""
        return continuous_value_model(input, cvm, self.use_cvm)


# ---- tags ----
#
# Samples chosen by their tags.


def filter_by_instag(
    ins: Ragged, ins_tag: Ragged, filter_tag: Tensor, out_val_if_empty: float = 0
) -> tuple[Ragged, Tensor]:
    """The samples that have one of some tags.

    If no sample is left, one row of ``out_val_if_empty`` replaces them, with the weight 0, so that
    a step with nothing to learn still runs.  A multi-task model thus learns a task from its own
    samples alone: see Ma et al.: Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts, KDD 2018.  How many are left depends on values, so a program cannot hold it:
    multiply losses by a mask there.

    Args:
        ins: samples, [n, ...]; or sequences, one for each sample, as (values, offsets) or nested.
        ins_tag: whole numbers: [n], [n, tags], or sequences of tags, one for each sample.
        filter_tag: the wanted tags, whole numbers [k].
        out_val_if_empty: see above.

    Returns:
        The samples that are left, in their order and in the form of the input, and a weight for
        each row of their values, [rows, 1], float32: 1, or 0 for the row that replaces missing
        samples.

    Raises:
        TypeError: sequences have another form.
        ValueError: numbers of samples differ, or ``capture`` is tracing.
    """
    whose = "filter_by_instag"
    tags, owners, count = _tags(whose, ins_tag)
    refuse_tracing(whose, tags)
    wanted = torch.isin(tags, filter_tag.to(tags))
    stays = torch.zeros(count, dtype=torch.bool, device=tags.device)
    stays[owners[wanted]] = True
    if isinstance(ins, Tensor) and not ins.is_nested:
        _check_count(whose, len(ins), count)
        kept = ins[stays.to(ins.device)]
        return _or_one_row(kept, ins, out_val_if_empty)
    given = sequences_of(whose, ins)
    sizes = given.sizes()
    _check_count(whose, len(sizes), count)
    stays = stays.to(sizes.device)
    chosen = gathered(given, begins(sizes)[stays], sizes[stays])
    values, weight = _or_one_row(chosen.values, given.values, out_val_if_empty)
    offsets = chosen.offsets if len(chosen.offsets) else sizes.new_zeros(1)
    return like(ins, Sequences(values, offsets)), weight


def _tags(whose: str, given: Ragged) -> tuple[Tensor, Tensor, int]:
    """All tags, the sample of each, and the number of samples."""
    if isinstance(given, Tensor) and not given.is_nested:
        rows = given.reshape(len(given), -1)
        owners = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        return rows.reshape(-1), owners, len(rows)
    tags = sequences_of(whose, given)
    return tags.values.reshape(-1), tags.owners(), len(tags.offsets)


def _check_count(whose: str, samples: int, tagged: int) -> None:
    if samples != tagged:
        raise ValueError(f"{whose}: ins_tag: expected {samples} samples, got {tagged}")


def _or_one_row(kept: Tensor, given: Tensor, value: float) -> tuple[Tensor, Tensor]:
    if len(kept):
        return kept, torch.ones(len(kept), 1, device=given.device)
    return given.new_full((1, *given.shape[1:]), value), torch.zeros(1, 1, device=given.device)


# ---- teacher and student ----
#
# A click and a teacher's opinion of it in one label.


def teacher_student_sigmoid_loss(
    input: Tensor,
    label: Tensor,
    soft_max_up_bound: float = 15.0,
    soft_max_lower_bound: float = -15.0,
) -> Tensor:
    """Log loss of a click, plus that of a teacher's score if there is one.

    The label encodes both: -2 is no click and -1 a click, without a teacher; 0 + z is no click and
    1 + z a click, with the teacher's score z, at least 0 and below 1.  With a score x, the loss is
    softplus(x) - x * click, plus softplus(x) - x * z.

    After Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015, which combines
    soft targets with hard ones.

    Args:
        input: logits, floats [n, 1] or of any shape.
        label: floats of that shape.
        soft_max_up_bound, soft_max_lower_bound: a logit that is not between them has a loss, but no
            gradient.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("teacher_student_sigmoid_loss", input=input, label=label)
    inside = (input > soft_max_lower_bound) & (input < soft_max_up_bound)
    logit = torch.where(inside, input, input.detach())
    taught = label >= 0
    clicked = torch.where(taught, label >= 1, label >= -1).to(input.dtype)
    teacher = torch.where(taught, label - clicked, 0.0)
    softplus = F.softplus(logit)
    loss = softplus - logit * clicked
    return loss + torch.where(taught, softplus - logit * teacher, 0.0)


class TeacherStudentSigmoidLoss(nn.Module):
    """:func:`teacher_student_sigmoid_loss` as a module; the arguments are those of the function."""

    def __init__(
        self, soft_max_up_bound: float = 15.0, soft_max_lower_bound: float = -15.0
    ) -> None:
        super().__init__()
        self.bounds = soft_max_up_bound, soft_max_lower_bound

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """Two tensors of one shape -> a tensor of this shape."""
        return teacher_student_sigmoid_loss(input, label, *self.bounds)
