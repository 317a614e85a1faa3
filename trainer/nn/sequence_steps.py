"""What becomes of the values of each sequence: one pooled value, a distribution, another order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.nn.ragged import Ragged, Sequences, begins, like, sequences_of, taken_or

POOLS = ("sum", "average", "sqrt", "max", "last", "first")


def sequence_pool(input: Ragged, pool_type: str, pad_value: float = 0.0) -> Tensor:
    """One value for each sequence.

    Of equal maxima each gets an equal part of the gradient, as in torch.amax.

    Example::

        sequence_pool((torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2])), "sum")    # [3, 5]

    Args:
        input: sequences of [n, ...].
        pool_type: "sum"; "average"; "sqrt", the sum divided by the root of the length; "max";
            "last" or "first".
        pad_value: of an empty sequence.

    Returns:
        [sequences, ...].

    Raises:
        TypeError, ValueError: the sequences are none, or there is no such pool.
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
    """Of each sequence; zeros for an empty one."""
    shape = given.offsets.shape[0], *given.values.shape[1:]
    places = _beside(owners, given.values).expand_as(given.values)
    zeros = given.values.new_zeros(shape)
    return zeros.scatter_reduce(0, places, given.values, "amax", include_self=False)


def _beside(each: Tensor, values: Tensor) -> Tensor:
    """[n] with as many dimensions as the values [n, ...]."""
    return each.reshape(-1, *[1] * (values.dim() - 1))


def sequence_first_step(input: Ragged) -> Tensor:
    """The first value of each sequence, zeros for an empty one: [n, ...] -> [sequences, ...]."""
    return sequence_pool(input, "first")


def sequence_last_step(input: Ragged) -> Tensor:
    """The last value of each sequence, zeros for an empty one: [n, ...] -> [sequences, ...]."""
    return sequence_pool(input, "last")


def sequence_softmax(input: Ragged) -> Ragged:
    """A softmax over each sequence, of each further dimension by itself.

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
    """Each sequence from its end to its begin; sequences like the input."""
    given = sequences_of("sequence_reverse", x)
    owners, sizes = given.owners(), given.sizes()
    places = torch.arange(given.values.shape[0], device=owners.device)
    mirrored = (2 * begins(sizes) + sizes - 1).index_select(0, owners) - places
    return like(x, Sequences(given.values.index_select(0, mirrored), given.offsets))


def sequence_enumerate(input: Ragged, win_size: int, pad_value: int = 0) -> Ragged:
    """Each value with those after it, as many as a window has; ``pad_value`` beyond the end.

    Args:
        input: sequences of ids, [n] or [n, 1].
        win_size: 1 or more.

    Returns:
        Sequences of [n, win_size].

    Raises:
        TypeError, ValueError: the sequences are none, or a number is out of its range.
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
    """Beside each value its neighbours in the sequence: [n, ...] -> [n, size, ...].

    Args:
        start: the place of a window's first value, counted from the value that it stands beside.
        other: stands for values beyond the sequence's ends.
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
        padding_start: the place of the window's first value, counted from the value that it stands
            beside; None: the window lies around it, as evenly as it can, -(filter_size // 2).

    Returns:
        Sequences of [n, filters].

    Raises:
        TypeError, ValueError: the sequences are none, or shapes do not fit.
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
        feature_size, num_filters: of the sequences that come and go.
        filter_size, padding_start: as of the function.
        bias: whether there is one.
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
