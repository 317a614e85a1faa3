"""Sequences of other lengths: expanded, joined, padded, cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.nn.labels import traced
from trainer.nn.ragged import (
    Ragged,
    Sequences,
    begins,
    gathered,
    like,
    refuse_tracing,
    sequences_of,
    taken_or,
)


def sequence_expand(x: Ragged, y: Ragged) -> Ragged:
    """Repeats x's sequence i as often as y's sequence i is long.

    Sequences repeated give a result whose size depends on values, which a program cannot hold; one
    row for each sequence of y does not: see :func:`sequence_expand_as`.

    Args:
        x: sequences, as many as y has; or a tensor with a row for each.
        y: sequences, whose lengths count.

    Returns:
        Sequences: one for each repetition, or, of rows, one for each sequence of y.

    Raises:
        TypeError, ValueError: the sequences are none, their numbers differ, or ``capture`` is
            tracing.
    """
    whose = "sequence_expand"
    if isinstance(x, Tensor) and not x.is_nested:
        return sequence_expand_as(x, y)
    given, times = sequences_of(whose, x), sequences_of(whose, y).sizes()
    _check_count(whose, given.offsets.shape[0], times.shape[0])
    refuse_tracing(whose, given.values)
    sizes = given.sizes()
    begin = begins(sizes).repeat_interleave(times)
    return like(x, gathered(given, begin, sizes.repeat_interleave(times)))


def sequence_expand_as(x: Tensor, y: Ragged) -> Ragged:
    """Repeats row i of x as often as y's sequence i is long: sequences as long as those of y.

    Args:
        x: [sequences, ...].

    Raises:
        TypeError, ValueError: y is no sequences, or their number is not that of x's rows.
    """
    given = sequences_of("sequence_expand_as", y)
    _check_count("sequence_expand_as", x.shape[0], given.offsets.shape[0])
    return like(y, Sequences(x.index_select(0, given.owners()), given.offsets))


def sequence_concat(input: Sequence[Ragged]) -> Ragged:
    """Sequence i of each input, one after the other, as one sequence.

    Args:
        input: one or more, each with as many sequences.

    Raises:
        TypeError, ValueError: they are no sequences, or their numbers differ.
    """
    whose = "sequence_concat"
    if not input:
        raise ValueError(f"{whose}: expected one or more inputs, got none")
    parts = [sequences_of(whose, each) for each in input]
    for part in parts[1:]:
        _check_count(whose, parts[0].offsets.shape[0], part.offsets.shape[0])
    sizes = [part.sizes() for part in parts]
    offsets = begins(torch.stack(sizes).sum(0))
    places, filled = [], offsets
    for part, size in zip(parts, sizes, strict=True):
        own = torch.arange(part.values.shape[0], device=offsets.device)
        places.append(own + (filled - begins(size)).index_select(0, part.owners()))
        filled = filled + size
    values = torch.cat([part.values for part in parts])
    order = torch.cat(places)
    source = torch.zeros_like(order).scatter(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    return like(input[0], Sequences(values.index_select(0, source), offsets))


def sequence_pad(
    x: Ragged, pad_value: float | Tensor = 0.0, maxlen: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sequences as rows of one length.

    In a program ``maxlen`` is needed, and what is longer is cut.

    Args:
        x: sequences of [n, ...].
        pad_value: a number, or a tensor of a value's shape.
        maxlen: the length; None: that of the longest.

    Returns:
        [sequences, maxlen, ...], and the lengths of the sequences, int64 [sequences].

    Raises:
        TypeError: x is no sequences.
        ValueError: a sequence is longer than ``maxlen``, or there is none in a program.
    """
    given = sequences_of("sequence_pad", x)
    sizes = given.sizes()
    if not traced(sizes):
        longest = int(sizes.max()) if len(sizes) else 0
        maxlen = longest if maxlen is None else maxlen
        if longest > maxlen:
            raise ValueError(f"sequence_pad: maxlen: expected {longest} or more, got {maxlen}")
    if maxlen is None:
        raise ValueError("sequence_pad: maxlen: expected a number in a program, got None")
    steps = torch.arange(maxlen, device=sizes.device)
    places = begins(sizes).unsqueeze(1) + steps
    return taken_or(given.values, places, steps < sizes.unsqueeze(1), pad_value), sizes


def sequence_unpad(x: Tensor, length: Tensor) -> Ragged:
    """The first values of each row, as sequences.

    How many they are depends on values, which a program cannot hold.

    Args:
        x: [sequences, maxlen, ...].
        length: whole numbers [sequences], 0 to maxlen.

    Returns:
        (values, offsets).

    Raises:
        ValueError: shapes or lengths do not fit, or ``capture`` is tracing.
    """
    whose = "sequence_unpad"
    refuse_tracing(whose, x)
    if x.dim() < 2 or length.numel() != x.shape[0]:
        raise ValueError(
            f"{whose}: expected x [sequences, maxlen, ...] and length [sequences], got "
            f"{list(x.shape)} and {list(length.shape)}"
        )
    sizes = length.reshape(-1).to(x.device, torch.int64)
    _check_range(whose, "length", sizes, torch.full_like(sizes, x.shape[1]))
    kept = torch.arange(x.shape[1], device=x.device) < sizes.unsqueeze(1)
    return x[kept], begins(sizes)


def sequence_slice(input: Ragged, offset: Tensor, length: Tensor) -> Ragged:
    """A part of each sequence.

    How large the parts are together depends on values, which a program cannot hold.

    Args:
        input: sequences.
        offset: where the part begins in each, whole numbers [sequences] or [sequences, 1].
        length: how long it is; of the same shape.

    Raises:
        TypeError: the input is no sequences.
        ValueError: a part is not within its sequence, or ``capture`` is tracing.
    """
    whose = "sequence_slice"
    given = sequences_of(whose, input)
    refuse_tracing(whose, given.values)
    sizes = given.sizes()
    starts, lengths = (each.reshape(-1).to(sizes) for each in (offset, length))
    _check_count(whose, len(sizes), len(starts))
    _check_count(whose, len(sizes), len(lengths))
    _check_range(whose, "offset", starts, sizes)
    _check_range(whose, "length", lengths, sizes - starts)
    return like(input, gathered(given, begins(sizes) + starts, lengths))


def sequence_erase(input: Ragged, tokens: Sequence[int]) -> Ragged:
    """The sequences without some ids.

    How many are left depends on values, which a program cannot hold.

    Args:
        input: sequences of ids, [n] or [n, 1].
        tokens: the ids that go.

    Raises:
        TypeError: the input is no sequences.
        ValueError: ``capture`` is tracing.
    """
    given = sequences_of("sequence_erase", input)
    refuse_tracing("sequence_erase", given.values)
    erased = torch.isin(given.values, torch.tensor(list(tokens), dtype=given.values.dtype))
    stays = ~erased.reshape(len(erased), -1).any(1)
    owners = given.owners()[stays]
    sizes = torch.zeros_like(given.offsets).index_add(0, owners, torch.ones_like(owners))
    return like(input, Sequences(given.values[stays], begins(sizes)))


def sequence_reshape(input: Ragged, new_dim: int) -> Ragged:
    """The numbers of each sequence in rows of another size.

    Args:
        input: sequences of [n, size].
        new_dim: the new size, which divides how many numbers each sequence has.

    Returns:
        Sequences of [n * size / new_dim, new_dim].

    Raises:
        TypeError: the input is no sequences.
        ValueError: the size does not fit.
    """
    whose = "sequence_reshape"
    given = sequences_of(whose, input)
    if given.values.dim() != 2 or new_dim < 1:
        raise ValueError(
            f"{whose}: expected values [n, size] and new_dim of 1 or more, got "
            f"{list(given.values.shape)} and {new_dim}"
        )
    numbers = given.sizes() * given.values.shape[1]
    if not traced(numbers) and bool((numbers % new_dim).any()):
        raise ValueError(
            f"{whose}: new_dim: {new_dim} does not divide the numbers of each sequence"
        )
    return like(input, Sequences(given.values.reshape(-1, new_dim), begins(numbers) // new_dim))


def sequence_scatter(input: Tensor, index: Ragged, updates: Ragged) -> Tensor:
    """Adds to row i what sequence i says: updates, at the columns of the index.

    Args:
        input: [sequences, size].
        index: sequences of columns, whole numbers [n].
        updates: sequences of numbers, [n], as long as those.

    Returns:
        A tensor like the input.

    Raises:
        TypeError, ValueError: the sequences are none, or do not fit.
    """
    whose = "sequence_scatter"
    places, added = sequences_of(whose, index), sequences_of(whose, updates)
    if input.dim() != 2:
        raise ValueError(f"{whose}: input: expected [sequences, size], got {list(input.shape)}")
    _check_count(whose, input.shape[0], places.offsets.shape[0])
    columns, numbers = places.values.reshape(-1), added.values.reshape(-1)
    if columns.shape != numbers.shape:
        raise ValueError(
            f"{whose}: updates: expected {columns.shape[0]} numbers, got {numbers.shape[0]}"
        )
    if not traced(columns):
        if not torch.equal(places.offsets, added.offsets):
            raise ValueError(f"{whose}: updates: expected the offsets of the index")
        _check_range(whose, "index", columns, torch.full_like(columns, input.shape[1] - 1))
    return input.index_put((places.owners(), columns.long()), numbers, accumulate=True)


def sequence_mask(x: Tensor, maxlen: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
    """Ones where a step is within its sequence, zeros after it.

    Args:
        x: lengths, whole numbers of any shape.
        maxlen: of the result's last dimension; None: the greatest length, in eager code alone.

    Returns:
        [*x.shape, maxlen].

    Raises:
        ValueError: there is no ``maxlen`` in a program.
    """
    if maxlen is None:
        if traced(x):
            raise ValueError("sequence_mask: maxlen: expected a number in a program, got None")
        maxlen = int(x.max()) if x.numel() else 0
    return (torch.arange(maxlen, device=x.device) < x.unsqueeze(-1)).to(dtype)


def _check_count(whose: str, expected: int, got: int) -> None:
    if expected != got:
        raise ValueError(f"{whose}: expected {expected} sequences, got {got}")


def _check_range(whose: str, name: str, numbers: Tensor, most: Tensor) -> None:
    wrong = ((numbers < 0) | (numbers > most)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{whose}: {name}: expected 0 to {int(most[at])} at {at}, got {int(numbers[at])}"
        )
