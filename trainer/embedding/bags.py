"""Bags of ids, as torch.nn.EmbeddingBag takes them: the checked input, and the sum or mean of each
bag's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.embedding.autograd import gather_bags

POOLINGS = ("sum", "mean", "sqrtn")


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids in bags, one bag after the other.

    Attributes:
        ids: int64 [n].
        offsets: int64 [bags], where each begins.
        weights: float [n], or None for ones.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None

    def without(self, padding: int) -> tuple[Bags, Tensor | None]:
        """The bags without the padding's id; a mask of the other ids, bool [n], or None for all."""
        stays = self.ids != padding
        if bool(stays.all()):
            return self, None
        before = F.pad(stays.cumsum(0), (1, 0))  # how many ids stay before each
        weights = None if self.weights is None else self.weights[stays]
        return Bags(self.ids[stays], before[self.offsets], weights), stays

    def to(self, device: torch.device) -> Bags:
        """The bags with offsets and weights on a device."""
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        return Bags(self.ids, self.offsets.to(device, non_blocking=True), weights)

    def sizes(self) -> Tensor:
        """The number of ids of each, int64 [bags]."""
        ends = torch.cat([self.offsets[1:], self.offsets.new_tensor([len(self.ids)])])
        return ends[: len(self.offsets)] - self.offsets


def bags_of(
    whose: str, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, last: bool = False
) -> Bags:
    """A user's bags, checked.

    Args:
        whose: the table, for the message of an error.
        ids: int64 [bags, size] without offsets, or [n] with them.
        weights: of ids' shape.
        last: whether the last offset is the end of the last bag, not the beginning of one.

    Raises:
        TypeError: offsets are not whole numbers, or weights are not floats.
        ValueError: shapes do not fit, or offsets do not begin with 0, go down, or go beyond the
            ids.
    """
    if weights is not None:
        if not weights.is_floating_point():
            raise TypeError(f"{whose}: per_sample_weights: expected floats, got {weights.dtype}")
        if weights.shape != ids.shape:
            raise ValueError(
                f"{whose}: per_sample_weights: expected the ids' shape {list(ids.shape)}, got "
                f"{list(weights.shape)}"
            )
        weights = weights.reshape(-1)
    if offsets is None:
        if ids.dim() != 2:
            raise ValueError(
                f"{whose}: expected ids [bags, size], or [n] with offsets; got shape "
                f"{list(ids.shape)} and none"
            )
        bags, size = ids.shape
        return Bags(ids.reshape(-1), torch.arange(bags, device=ids.device) * size, weights)
    if ids.dim() != 1 or offsets.dim() != 1:
        raise ValueError(
            f"{whose}: expected ids [n] and offsets [bags], got shapes {list(ids.shape)} and "
            f"{list(offsets.shape)}"
        )
    return Bags(ids, _checked(whose, offsets.to(ids.device), len(ids), last), weights)


def _checked(whose: str, offsets: Tensor, count: int, last: bool) -> Tensor:
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise TypeError(f"{whose}: offsets: expected int64, got {offsets.dtype}")
    offsets = offsets.to(torch.int64)
    if not len(offsets):
        if count or last:
            raise ValueError(f"{whose}: offsets: expected at least one for {count} ids, got none")
        return offsets
    down = (offsets[1:] < offsets[:-1]).nonzero()
    if int(offsets[0]) != 0:
        raise ValueError(f"{whose}: offsets: expected 0 as the first, got {int(offsets[0])}")
    if len(down):
        at = int(down[0]) + 1
        raise ValueError(
            f"{whose}: offsets: expected them to go up, got {int(offsets[at])} after "
            f"{int(offsets[at - 1])} at {at}"
        )
    if int(offsets[-1]) > count or (last and int(offsets[-1]) != count):
        expected = f"{count}, where the ids end," if last else f"at most {count}"
        raise ValueError(
            f"{whose}: offsets: expected {expected} as the last, got {int(offsets[-1])}"
        )
    return offsets[:-1] if last else offsets


def pool(rows: Tensor, inverse: Tensor, bags: Bags, pooling: str) -> Tensor:
    """The pooled rows of each bag: [bags, dim]; zeros for an empty one.

    "sum" is the sum of w * row.  "mean" divides that by the bag's number of ids, with weights by
    their sum.  "sqrtn" divides by the root of the number of ids, with weights by the root of the
    sum of their squares.

    Args:
        rows: [u, dim], of unique ids.
        inverse: int64 [n], which of them each id of the bags is.
    """
    if not len(inverse):
        # still depends on the rows, of which there are none
        return rows.sum() + rows.new_zeros(len(bags.offsets), rows.shape[1])
    sizes = bags.sizes()
    if bags.weights is None:
        pooled = gather_bags(
            rows, inverse, bags.offsets, sizes, "mean" if pooling == "mean" else "sum"
        )
        return (
            pooled / sizes.clamp(min=1).to(rows.dtype).sqrt().unsqueeze(1)
            if pooling == "sqrtn"
            else pooled
        )
    weights = bags.weights.to(rows.dtype)
    sums = F.embedding_bag(inverse, rows, bags.offsets, mode="sum", per_sample_weights=weights)
    if pooling == "sum":
        return sums
    places = torch.repeat_interleave(torch.arange(len(bags.offsets), device=rows.device), sizes)
    total = weights.new_zeros(len(bags.offsets)).index_add(
        0, places, weights if pooling == "mean" else weights.square()
    )
    total = torch.where(total == 0, torch.ones_like(total), total)  # an empty bag, or one of zeros
    return sums / (total if pooling == "mean" else total.sqrt()).unsqueeze(1)
