"""A bucket: parameters whose gradients travel together, laid out one after the other in a flat
block of memory.

::

    | weight ............ | bias | weight2 .................. | pad |    bucket.size elements
    | rank 0's                   | rank 1's                         |    bucket.share elements each

A bucket's length is a multiple of the ranks, so that each rank's share is the same to the element,
however large the tensors: a model that is one large matrix is shared as evenly as one of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn

ALIGN = 16  # elements: every share begins where vector loads like it


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The layout of some parameters of one dtype on one device, for ``ranks`` ranks."""

    parameters: tuple[nn.Parameter, ...]
    ranks: int

    @property
    def size(self) -> int:
        """Elements, the pad included."""
        unit = self.ranks * ALIGN
        return -(-sum(parameter.numel() for parameter in self.parameters) // unit) * unit

    @property
    def share(self) -> int:
        """Elements of one rank."""
        return self.size // self.ranks

    def spans(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Each parameter with its first element and the one after its last."""
        at = 0
        for parameter in self.parameters:
            yield parameter, at, at + parameter.numel()
            at += parameter.numel()

    def shares(self, rank: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Each parameter's part in a rank's share: its first element there and the one after its
        last; the two are equal where there is none.
        """
        low = rank * self.share
        for parameter, begin, end in self.spans():
            first, last = (min(max(at - low, 0), self.share) for at in (begin, end))
            yield parameter, first, last

    def memory(self, device: torch.device | None = None) -> Tensor:
        """New memory for the whole bucket, on its parameters' device unless another is given; only
        the pad is set, to 0.
        """
        first = self.parameters[0]
        flat = torch.empty(self.size, dtype=first.dtype, device=device or first.device)
        flat[sum(parameter.numel() for parameter in self.parameters) :].zero_()
        return flat


def after_gradient(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Calls a method after each gradient of a parameter, for as long as its object lives: the
    collector does not see that a parameter has an object by a hook.
    """
    known = WeakMethod(method)

    def call(parameter: Tensor) -> None:
        present = known()
        if present is not None:
            present(parameter)

    parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]  # torch's own


def buckets_of(parameters: Sequence[nn.Parameter], ranks: int, most: int) -> list[Bucket]:
    """Buckets of at most ``most`` elements, in the order in which backward is likely to finish: the
    last parameters first.

    A tensor of more elements has a bucket of its own; dtypes and devices are never mixed.
    """
    filled: list[Bucket] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = kinds.setdefault((parameter.dtype, parameter.device), [])
        if kind and sum(other.numel() for other in kind) + parameter.numel() > most:
            filled.append(Bucket(tuple(kind), ranks))
            kind.clear()
        kind.append(parameter)
    return filled + [Bucket(tuple(kind), ranks) for kind in kinds.values() if kind]
