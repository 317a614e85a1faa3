"""Sequences of any length in one tensor: values one after the other, and where each begins.

Wherever sequences are expected, two forms do: a tuple (values [n, ...], offsets int64 [sequences]),
as :class:`torch.nn.EmbeddingBag` has bags, or a nested tensor of torch with the jagged layout.  A
result has the form of what was given.

[Note: offsets in a program]  Where a value belongs is computed from the offsets by a search and
sizes by counting, so that every op here has a result whose size is known before the values are: a
program can hold it.  Eager code checks offsets first; a program cannot raise by values, and takes
them as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.nn.labels import traced


class Sequences(NamedTuple):
    """Sequences, one after the other.

    Attributes:
        values: [n, ...].
        offsets: int64 [sequences], where each begins: 0 first, never going down.
    """

    values: Tensor
    offsets: Tensor

    def owners(self) -> Tensor:
        """The sequence of each value, int64 [n].  See [Note: offsets in a program]."""
        places = torch.arange(self.values.shape[0], device=self.values.device)
        return torch.searchsorted(self.offsets, places, right=True) - 1

    def sizes(self) -> Tensor:
        """How many values each has, int64 [sequences]."""
        owners = self.owners()
        return torch.zeros_like(self.offsets).index_add(0, owners, torch.ones_like(owners))


Ragged = Tensor | tuple[Tensor, Tensor]


def sequences_of(whose: str, given: Ragged) -> Sequences:
    """What the user gave, checked.

    Raises:
        TypeError: it is neither of the two forms, or offsets are no whole numbers.
        ValueError: offsets do not begin with 0, go down, or go beyond the values.
    """
    if isinstance(given, Tensor) and given.is_nested:
        if given.layout != torch.jagged:
            raise TypeError(f"{whose}: expected a nested tensor with the jagged layout")
        nested: Any = given  # torch's annotations have no nested tensors
        return Sequences(nested.values(), nested.offsets()[:-1])
    pair = isinstance(given, tuple) and len(given) == 2
    if not pair or not all(isinstance(each, Tensor) for each in given):
        got = f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise TypeError(
            f"{whose}: expected sequences as (values, offsets) or a nested tensor, got {got}"
        )
    values, offsets = given
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise TypeError(f"{whose}: offsets: expected int64, got {offsets.dtype}")
    if values.dim() < 1 or offsets.dim() != 1:
        raise ValueError(
            f"{whose}: expected values [n, ...] and offsets [sequences], got "
            f"{list(values.shape)} and {list(offsets.shape)}"
        )
    offsets = offsets.to(values.device, torch.int64)
    if not (traced(values) or traced(offsets)):
        _check_offsets(whose, offsets, len(values))
    return Sequences(values, offsets)


def _check_offsets(whose: str, offsets: Tensor, count: int) -> None:
    if not len(offsets):
        if count:
            raise ValueError(f"{whose}: offsets: expected one or more for {count} values, got none")
        return
    if int(offsets[0]) != 0:
        raise ValueError(f"{whose}: offsets: expected 0 as the first, got {int(offsets[0])}")
    down = (offsets[1:] < offsets[:-1]).nonzero()
    if len(down):
        at = int(down[0]) + 1
        raise ValueError(
            f"{whose}: offsets: expected them to go up, got {int(offsets[at])} after "
            f"{int(offsets[at - 1])} at {at}"
        )
    if int(offsets[-1]) > count:
        raise ValueError(
            f"{whose}: offsets: expected at most {count}, the number of values, got "
            f"{int(offsets[-1])}"
        )


def like(given: Ragged, made: Sequences) -> Ragged:
    """The sequences in the form of what was given."""
    if not isinstance(given, Tensor):
        return made.values, made.offsets
    ends = made.offsets.new_tensor([made.values.shape[0]])
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        made.values, torch.cat([made.offsets, ends])
    )
    return nested


def begins(sizes: Tensor) -> Tensor:
    """Where sequences of these sizes begin, int64 [sequences]."""
    return sizes.cumsum(0) - sizes


def refuse_tracing(whose: str, tensor: Tensor) -> None:
    """Raises:
    ValueError: ``capture`` is tracing.
    """
    if traced(tensor):
        raise ValueError(
            f"{whose}: how large its result is depends on values, so a program cannot hold it; "
            "call it before the step, and give the step its result"
        )


def gathered(given: Sequences, begin: Tensor, sizes: Tensor) -> Sequences:
    """New sequences: ``sizes`` values each, from ``begin`` on among the given values.

    Args:
        begin, sizes: int64 [sequences].
    """
    offsets = begins(sizes)
    places = torch.arange(int(sizes.sum()), device=sizes.device)
    taken = places + (begin - offsets).repeat_interleave(sizes)
    return Sequences(given.values.index_select(0, taken), offsets)


def taken_or(values: Tensor, places: Tensor, there: Tensor, other: float | Tensor) -> Tensor:
    """``values[places]`` where ``there``, and ``other`` elsewhere.

    Args:
        values: [n, ...].
        places, there: int64 and bool, of any one shape.
        other: a number, or a tensor of a value's shape.

    Returns:
        [*places.shape, ...].
    """
    one = torch.as_tensor(other, dtype=values.dtype, device=values.device)
    padded = torch.cat([values, one.expand(1, *values.shape[1:])])
    chosen = torch.where(there, places, values.shape[0]).reshape(-1)
    return padded.index_select(0, chosen).reshape(*places.shape, *values.shape[1:])
