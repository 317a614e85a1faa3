"""Operations on sequences of different lengths: expand, join, pad, cut, pool; checks of labels.

[Note: offsets in a program]  The sequence of a value is computed from the offsets by a search, and
sizes by counting, so that the size of every op's result is known before the values: a program can
hold it.  Eager code checks offsets first; a program cannot check values, and takes them as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# ---- labels ----
#
# The labels that losses take beside scores, and their checks.


def traced(tensor: Tensor) -> bool:
    """Whether ``capture`` is tracing: the tensor has a shape, but no values."""
    return isinstance(tensor, FakeTensor)


def label_column(whose: str, label: Tensor, count: int) -> Tensor:
    """Labels as int64 [count, true], from a label [count] or [count, true].

    Raises:
        TypeError: they are not a tensor of whole numbers.
        ValueError: the shape is another one.
    """
    if not isinstance(label, Tensor):
        raise TypeError(f"{whose}: label: expected a tensor, got {type(label).__name__}")
    if label.is_floating_point() or label.is_complex():
        raise TypeError(f"{whose}: label: expected whole numbers, got {label.dtype}")
    if label.dim() not in (1, 2) or label.shape[0] != count:
        raise ValueError(
            f"{whose}: label: expected [{count}] or [{count}, 1], got {list(label.shape)}"
        )
    return label.long().unsqueeze(1) if label.dim() == 1 else label.long()


def single_label(whose: str, label: Tensor, count: int) -> Tensor:
    """Labels as int64 [count], from [count] or [count, 1]; raises as :func:`label_column`."""
    column = label_column(whose, label, count)
    if column.shape[1] != 1:
        raise ValueError(
            f"{whose}: label: expected [{count}] or [{count}, 1], got {list(label.shape)}"
        )
    return column.squeeze(1)


def check_labels(whose: str, label: Tensor, classes: int) -> None:
    """Checks the range of labels; not while ``capture`` is tracing, as labels have no values then.

    Raises:
        ValueError: a label is not in 0 to ``classes`` - 1.
    """
    if traced(label) or not label.numel():
        return
    low, high = int(label.min()), int(label.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{whose}: label: expected 0 to {classes - 1}, got {low if low < 0 else high}"
        )


def check_matrix(whose: str, name: str, tensor: Tensor) -> None:
    """Checks that a tensor has two dimensions.

    Raises:
        ValueError: it has another number.
    """
    if tensor.dim() != 2:
        raise ValueError(f"{whose}: {name}: expected two dimensions, got {list(tensor.shape)}")


def check_same_shape(whose: str, **tensors: Tensor) -> None:
    """Checks that tensors have one shape.

    Raises:
        ValueError: their shapes differ.
    """
    first, *others = (tensor.shape for tensor in tensors.values())
    if any(shape != first for shape in others):
        got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{whose}: expected tensors of one shape, got {got}")


# ---- ragged sequences ----
#
# Sequences of any length in one tensor: values one after the other, and the beginning of each.
#
# Sequences have one of two forms: a tuple (values [n, ...], offsets int64 [sequences]), like the
# bags of :class:`torch.nn.EmbeddingBag`, or a nested tensor of torch with the jagged layout.  A
# result has the form of the input.


class Sequences(NamedTuple):
    """Sequences, one after the other.

    Attributes:
        values: [n, ...].
        offsets: int64 [sequences], the beginning of each: 0 first, never decreasing.
    """

    values: Tensor
    offsets: Tensor

    def owners(self) -> Tensor:
        """The sequence of each value, int64 [n].  See [Note: offsets in a program]."""
        places = torch.arange(self.values.shape[0], device=self.values.device)
        return torch.searchsorted(self.offsets, places, right=True) - 1

    def sizes(self) -> Tensor:
        """The number of values of each sequence, int64 [sequences]."""
        owners = self.owners()
        return torch.zeros_like(self.offsets).index_add(0, owners, torch.ones_like(owners))


Ragged = Tensor | tuple[Tensor, Tensor]


def sequences_of(whose: str, given: Ragged) -> Sequences:
    """The user's sequences, checked, as one type.

    Raises:
        TypeError: they have neither of the two forms, or offsets are not whole numbers.
        ValueError: offsets do not begin with 0, decrease, or exceed the number of values.
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
    """The sequences in the form of the input."""
    if not isinstance(given, Tensor):
        return made.values, made.offsets
    ends = made.offsets.new_tensor([made.values.shape[0]])
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        made.values, torch.cat([made.offsets, ends])
    )
    return nested


def begins(sizes: Tensor) -> Tensor:
    """The offsets of sequences of these sizes, int64 [sequences]."""
    return sizes.cumsum(0) - sizes


def refuse_tracing(whose: str, tensor: Tensor) -> None:
    """Refuses to run while ``capture`` is tracing.

    Raises:
        ValueError: ``capture`` is tracing.
    """
    if traced(tensor):
        raise ValueError(
            f"{whose}: the size of its result depends on values, so a program cannot hold it; "
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


# ---- sequence shapes ----
#
# Sequences of other lengths: expanded, joined, padded, cut.


def sequence_expand(x: Ragged, y: Ragged) -> Ragged:
    """Repeats x's sequence i as many times as y's sequence i has values.

    If x has sequences, the size of the result depends on values, which a program cannot hold; if x
    has one row for each sequence of y, it does not: see :func:`sequence_expand_as`.

    Args:
        x: as many sequences as y has; or a tensor with a row for each.
        y: sequences, of which the lengths are used.

    Returns:
        Sequences: one for each repetition, or, of rows, one for each sequence of y.

    Raises:
        TypeError, ValueError: the arguments are not sequences, their numbers differ, or ``capture``
            is tracing.
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
    """Repeats row i of x as many times as y's sequence i has values: the result has sequences as
    long as y's.

    Args:
        x: [sequences, ...].

    Raises:
        TypeError, ValueError: y is not sequences, or their number is not that of x's rows.
    """
    given = sequences_of("sequence_expand_as", y)
    _check_count("sequence_expand_as", x.shape[0], given.offsets.shape[0])
    return like(y, Sequences(x.index_select(0, given.owners()), given.offsets))


def sequence_concat(input: Sequence[Ragged]) -> Ragged:
    """Joins sequence i of each input to one sequence.

    Args:
        input: one or more inputs, with equal numbers of sequences.

    Raises:
        TypeError, ValueError: they are not sequences, or their numbers differ.
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
    """Pads sequences to rows of one length.

    In a program ``maxlen`` is required, and longer sequences are cut.

    Args:
        x: sequences of [n, ...].
        pad_value: a number, or a tensor of a value's shape.
        maxlen: the length; None: that of the longest sequence.

    Returns:
        [sequences, maxlen, ...], and the lengths of the sequences, int64 [sequences].

    Raises:
        TypeError: x is not sequences.
        ValueError: a sequence is longer than ``maxlen``, or ``maxlen`` is None in a program.
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
    """Takes the first values of each row, as sequences.

    The size of the result depends on values, which a program cannot hold.

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
    """Takes a part of each sequence.

    The size of the result depends on values, which a program cannot hold.

    Args:
        input: sequences.
        offset: the beginning of the part in each sequence, whole numbers [sequences] or [sequences,
            1].
        length: the length of the part; of the same shape.

    Raises:
        TypeError: the input is not sequences.
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
    """Removes some ids from sequences.

    The size of the result depends on values, which a program cannot hold.

    Args:
        input: sequences of ids, [n] or [n, 1].
        tokens: the ids to remove.

    Raises:
        TypeError: the input is not sequences.
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
    """Puts the numbers of each sequence into rows of another size.

    Args:
        input: sequences of [n, size].
        new_dim: the new size, which divides the count of numbers in each sequence.

    Returns:
        Sequences of [n * size / new_dim, new_dim].

    Raises:
        TypeError: the input is not sequences.
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
    """Adds the updates of sequence i to row i, at the columns of the index.

    Args:
        input: [sequences, size].
        index: sequences of columns, whole numbers [n].
        updates: sequences of numbers, [n], as long as those of the index.

    Returns:
        A tensor like the input.

    Raises:
        TypeError, ValueError: the arguments are not sequences, or do not fit.
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
    """A mask with ones where a step is within its sequence, and zeros after it.

    Args:
        x: lengths, whole numbers of any shape.
        maxlen: the size of the result's last dimension; None: the greatest length, in eager code
            only.

    Returns:
        [*x.shape, maxlen].

    Raises:
        ValueError: ``maxlen`` is None in a program.
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


# ---- pooling, softmax and windows ----
#
# Operations on the values of each sequence: one pooled value, a distribution, another order.


POOLS = ("sum", "average", "sqrt", "max", "last", "first")


def sequence_pool(input: Ragged, pool_type: str, pad_value: float = 0.0) -> Tensor:
    """Pools each sequence to one value.

    Equal maxima share the gradient equally, as in torch.amax.

    Example::

        sequence_pool((torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2])), "sum")    # [3, 5]

    Args:
        input: sequences of [n, ...].
        pool_type: "sum"; "average"; "sqrt", the sum divided by the root of the length; "max";
            "last" or "first".
        pad_value: the value of an empty sequence.

    Returns:
        [sequences, ...].

    Raises:
        TypeError, ValueError: the input is not sequences, or there is no such pool.
    """
    pool = pool_type.lower()
    if pool not in POOLS:
        known = ", ".join(map(repr, POOLS))
        raise ValueError(f"sequence_pool: pool_type: expected one of {known}, got {pool_type!r}")
    given = sequences_of("sequence_pool", input)
    owners, sizes = given.owners(), given.sizes()
    if pool in ("last", "first"):
        begin = begins(sizes)
        places = begin if pool == "first" else begin + sizes - 1
        return taken_or(given.values, places, sizes > 0, pad_value)
    pooled = _maxima(given, owners) if pool == "max" else _sums(given, owners)
    if pool in ("average", "sqrt"):
        divisors = sizes.clamp(min=1).to(pooled.dtype)
        pooled = pooled / _beside(divisors if pool == "average" else divisors.sqrt(), pooled)
    return torch.where(_beside(sizes > 0, pooled), pooled, pad_value)


def _sums(given: Sequences, owners: Tensor) -> Tensor:
    shape = given.offsets.shape[0], *given.values.shape[1:]
    return given.values.new_zeros(shape).index_add(0, owners, given.values)


def _maxima(given: Sequences, owners: Tensor) -> Tensor:
    """The maxima of each sequence; zeros for an empty one."""
    shape = given.offsets.shape[0], *given.values.shape[1:]
    places = _beside(owners, given.values).expand_as(given.values)
    zeros = given.values.new_zeros(shape)
    return zeros.scatter_reduce(0, places, given.values, "amax", include_self=False)


def _beside(each: Tensor, values: Tensor) -> Tensor:
    """The tensor [n], with as many dimensions as the values [n, ...]."""
    return each.reshape(-1, *[1] * (values.dim() - 1))


def sequence_first_step(input: Ragged) -> Tensor:
    """The first value of each sequence, zeros for an empty one: [n, ...] -> [sequences, ...]."""
    return sequence_pool(input, "first")


def sequence_last_step(input: Ragged) -> Tensor:
    """The last value of each sequence, zeros for an empty one: [n, ...] -> [sequences, ...]."""
    return sequence_pool(input, "last")


def sequence_softmax(input: Ragged) -> Ragged:
    """A softmax over each sequence, separately for each further dimension.

    Returns:
        Sequences like the input.
    """
    given = sequences_of("sequence_softmax", input)
    owners = given.owners()
    highest = _maxima(Sequences(given.values.detach(), given.offsets), owners)
    powers = (given.values - highest.index_select(0, owners)).exp()
    sums = _sums(Sequences(powers, given.offsets), owners)
    return like(input, Sequences(powers / sums.index_select(0, owners), given.offsets))


def sequence_reverse(x: Ragged) -> Ragged:
    """Reverses each sequence; the result is like the input."""
    given = sequences_of("sequence_reverse", x)
    owners, sizes = given.owners(), given.sizes()
    places = torch.arange(given.values.shape[0], device=owners.device)
    mirrored = (2 * begins(sizes) + sizes - 1).index_select(0, owners) - places
    return like(x, Sequences(given.values.index_select(0, mirrored), given.offsets))


def sequence_enumerate(input: Ragged, win_size: int, pad_value: int = 0) -> Ragged:
    """A window for each value: the value and those after it, with ``pad_value`` beyond the end.

    Args:
        input: sequences of ids, [n] or [n, 1].
        win_size: 1 or more.

    Returns:
        Sequences of [n, win_size].

    Raises:
        TypeError, ValueError: the input is not sequences, or a number is out of its range.
    """
    given = sequences_of("sequence_enumerate", input)
    if win_size < 1:
        raise ValueError(f"sequence_enumerate: win_size: expected 1 or more, got {win_size}")
    if given.values.dim() > 1 and given.values.shape[1:] != (1,):
        raise ValueError(
            f"sequence_enumerate: input: expected [n] or [n, 1], got {list(given.values.shape)}"
        )
    flat = Sequences(given.values.reshape(-1), given.offsets)
    return like(input, Sequences(windows(flat, win_size, 0, pad_value), given.offsets))


def windows(given: Sequences, size: int, start: int, other: float = 0) -> Tensor:
    """The window of each value, with its neighbours in the sequence: [n, ...] -> [n, size, ...].

    Args:
        start: the place of a window's first value, relative to the window's own value.
        other: replaces values beyond the sequence's ends.
    """
    owners, sizes = given.owners(), given.sizes()
    own = torch.arange(given.values.shape[0], device=owners.device).unsqueeze(1)
    places = own + start + torch.arange(size, device=owners.device)
    begin = begins(sizes).index_select(0, owners).unsqueeze(1)
    end = begin + sizes.index_select(0, owners).unsqueeze(1)
    return taken_or(given.values, places, (places >= begin) & (places < end), other)


def sequence_conv(
    input: Ragged,
    weight: Tensor,
    bias: Tensor | None = None,
    filter_size: int = 3,
    padding_start: int | None = None,
) -> Ragged:
    """A convolution over each sequence by itself, with zeros beyond its ends.

    Args:
        input: sequences of features, [n, size].
        weight: [filter_size * size, filters]: the window's values one after the other.
        bias: [filters].
        filter_size: of a window, 1 or more.
        padding_start: the place of the window's first value, relative to the window's own value;
            None: the window is centered on it, -(filter_size // 2).

    Returns:
        Sequences of [n, filters].

    Raises:
        TypeError, ValueError: the input is not sequences, or shapes do not fit.
    """
    given = sequences_of("sequence_conv", input)
    if filter_size < 1:
        raise ValueError(f"sequence_conv: filter_size: expected 1 or more, got {filter_size}")
    if given.values.dim() != 2:
        raise ValueError(f"sequence_conv: expected [n, size], got {list(given.values.shape)}")
    wide = filter_size * given.values.shape[1]
    if weight.dim() != 2 or weight.shape[0] != wide:
        raise ValueError(
            f"sequence_conv: weight: expected [{wide}, filters], got {list(weight.shape)}"
        )
    start = -(filter_size // 2) if padding_start is None else padding_start
    found = windows(given, filter_size, start).reshape(-1, wide) @ weight
    return like(input, Sequences(found if bias is None else found + bias, given.offsets))


class SequenceConv(nn.Module):
    """:func:`sequence_conv` with weight and bias as parameters.

    Args:
        feature_size, num_filters: of the input and output sequences.
        filter_size, padding_start: as of the function.
        bias: whether there is a bias.
    """

    def __init__(
        self,
        feature_size: int,
        num_filters: int,
        filter_size: int = 3,
        padding_start: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.filter_size = filter_size
        self.padding_start = padding_start
        self.weight = nn.Parameter(torch.empty(filter_size * feature_size, num_filters))
        self.bias = nn.Parameter(torch.zeros(num_filters)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input: Ragged) -> Ragged:
        """Sequences of [n, feature_size] -> sequences of [n, num_filters]."""
        return sequence_conv(input, self.weight, self.bias, self.filter_size, self.padding_start)


class SequencePool(nn.Module):
    """:func:`sequence_pool` as a module; the arguments are those of the function."""

    def __init__(self, pool_type: str, pad_value: float = 0.0) -> None:
        super().__init__()
        self.pool_type = pool_type
        self.pad_value = pad_value

    def forward(self, input: Ragged) -> Tensor:
        """Sequences of [n, ...] -> [sequences, ...]."""
        return sequence_pool(input, self.pool_type, self.pad_value)


class SequenceSoftmax(nn.Module):
    """:func:`sequence_softmax` as a module."""

    def forward(self, input: Ragged) -> Ragged:
        """Sequences -> sequences like them."""
        return sequence_softmax(input)
