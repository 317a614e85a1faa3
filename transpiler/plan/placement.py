"""Cuts variables into slices and gives each slice to a server.

This is arithmetic on names, shapes and bytes only, without ``hash()``, a clock or random numbers:
the same input gives the same placement in every process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from transpiler.plan.plan import Placement, Plan, Slice

# ---- placement ----


def slice_variable(shape: Sequence[int], servers: int, min_block_size: int) -> list[int]:
    """The number of elements of each slice of a variable.

    There is at most one slice for each server, and only the last may be smaller than
    ``min_block_size``.  A variable with two or more dimensions is cut between rows only; one
    without elements is one slice of 0 elements.

    Args:
        shape: of the variable.
        servers: their number.
        min_block_size: elements.

    Returns:
        Elements by slice, in the order of the flattened variable.

    Raises:
        ValueError: ``servers`` or ``min_block_size`` is below 1, or a dimension is negative.
        TypeError: one of the two is no whole number.

    Example:
        >>> slice_variable((1000, 1000), servers=4, min_block_size=8192)
        [250000, 250000, 250000, 250000]
    """
    for name, value in (("servers", servers), ("min_block_size", min_block_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if servers < 1 or min_block_size < 1:
        raise ValueError(
            f"expected servers and min_block_size of at least 1, got {servers} and {min_block_size}"
        )
    if any(extent < 0 for extent in shape):
        raise ValueError(f"expected a shape of whole numbers from 0 up, got {tuple(shape)}")
    elements = math.prod(shape)
    if elements == 0:
        return [0]
    size = -(-elements // min(servers, max(1, elements // min_block_size)))
    if len(shape) >= 2:
        row = math.prod(shape[1:])
        size = -(-size // row) * row
    return [min(size, elements - begin) for begin in range(0, elements, size)]


@dataclass(frozen=True, slots=True)
class SliceSize:
    """A slice's name and size, from which a split method chooses its server.

    Attributes:
        name: ``fc.weight.block0``.
        nbytes: of its elements.
    """

    name: str
    nbytes: int


class Dispatcher(Protocol):
    """A split method: the interface of RoundRobin, HashName, SizeBalanced and a user's own class.

    It is constructed with the number of servers and called once, with all slices of a job in order.
    Its answer must be the same in every process.
    """

    def __init__(self, servers: int) -> None: ...

    def dispatch(self, slices: Sequence[SliceSize]) -> Sequence[int]:
        """Chooses servers.

        Args:
            slices: of all variables, in the order of the plan.

        Returns:
            The index of a server for each slice.
        """
        ...


class RoundRobin:
    """A split method that deals slices out in turn, in the order of the optimizer ops."""

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, slices: Sequence[SliceSize]) -> list[int]:
        """0, 1, ..., servers - 1, 0, ..."""
        return [index % self.servers for index in range(len(slices))]


class HashName:
    """A split method that hashes the name of a slice, so that a new layer moves no other slice.

    The hash is blake2b, which is the same in every process.
    """

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, slices: Sequence[SliceSize]) -> list[int]:
        """The first 8 bytes of each name's digest, modulo the number of servers."""
        digests = (
            hashlib.blake2b(slice_.name.encode(), digest_size=8).digest() for slice_ in slices
        )
        return [int.from_bytes(digest, "big") % self.servers for digest in digests]


class SizeBalanced:
    """A split method that balances bytes: the largest slice first, each to the server that has the
    fewest bytes so far.

    Graham's LPT rule (SIAM J. Appl. Math. 1969): the fullest server holds at most 4/3 of the best
    possible.  Among equal slices the earlier comes first, among equal servers the one with fewer
    slices, then the lower number.
    """

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, slices: Sequence[SliceSize]) -> list[int]:
        """The server of each slice, in the order of the slices."""
        loads = [(0, 0, server) for server in range(self.servers)]  # bytes, slices, server
        chosen = [0] * len(slices)
        for index in sorted(range(len(slices)), key=lambda i: -slices[i].nbytes):
            held, count, server = min(loads)
            loads[server] = (held + slices[index].nbytes, count + 1, server)
            chosen[index] = server
        return chosen


def element_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: torch has no such dtype.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f'expected the name of a torch dtype ("float32"), got {dtype!r}')
    return found.itemsize


def tensor_bytes(shape: Sequence[object], dtype: str) -> int:
    """Bytes of a tensor; extents that are not numbers count as 1.

    Raises:
        ValueError: torch has no such dtype.
    """
    return math.prod(extent for extent in shape if isinstance(extent, int)) * element_bytes(dtype)


def _cut(name: str, shape: tuple[int, ...], servers: int, min_block_size: int) -> list[Slice]:
    """The slices of one variable; all are on server 0 until they are dispatched."""
    sizes = slice_variable(shape, servers, min_block_size)
    if len(sizes) == 1:
        return [Slice(name, 0, sizes[0], shape, 0)]
    slices, begin = [], 0
    for index, size in enumerate(sizes):
        held = (size // math.prod(shape[1:]), *shape[1:])
        slices.append(Slice(f"{name}.block{index}", begin, begin + size, held, 0))
        begin += size
    return slices


def _dispatch(method: type[Dispatcher], slices: Sequence[SliceSize], servers: int) -> list[int]:
    """The checked answer of a split method, which may be a user's own."""
    answer = list(method(servers).dispatch(slices))
    valid = all(isinstance(server, int) and 0 <= server < servers for server in answer)
    if len(answer) != len(slices) or not valid:
        raise ValueError(
            f"{method.__name__}.dispatch: expected {len(slices)} server numbers from 0 to "
            f"{servers - 1}, got {answer[:8]}"
            f"{' ...' if len(answer) > 8 else ''} ({len(answer)} of them)"
        )
    return answer


def place(
    variables: Iterable[tuple[str, Sequence[int], str, int | None]],
    servers: int,
    min_block_size: int = 8192,
    slice_var_up: bool = True,
    method: type[Dispatcher] = RoundRobin,
    whole: Collection[str] = (),
) -> tuple[Placement, ...]:
    """Cuts variables into slices and chooses their servers.

    Args:
        variables: (name, shape, dtype, group); ``group`` is the index of the update rule, None for
            a variable that servers hold and never update.
        servers: their number.
        min_block_size: elements.
        slice_var_up: False leaves every variable whole.
        method: the split method.
        whole: the names of variables that stay whole all the same.

    Returns:
        One placement for each variable, in their order.

    Raises:
        ValueError: two slices would have one name, a dtype is unknown, or the method's answer is no
            placement.
    """
    listed = [(name, tuple(shape), dtype, group) for name, shape, dtype, group in variables]
    cuts = [
        _cut(name, shape, servers if slice_var_up and name not in whole else 1, min_block_size)
        for name, shape, _, _ in listed
    ]
    flat = [(s, dtype) for cut, (_, _, dtype, _) in zip(cuts, listed, strict=True) for s in cut]
    names = [slice_.name for slice_, _ in flat]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"expected different names for all variables and slices, got {', '.join(twice)} twice"
        )
    sizes = [SliceSize(s.name, (s.end - s.begin) * element_bytes(dtype)) for s, dtype in flat]
    owners = iter(_dispatch(method, sizes, servers))
    return tuple(
        Placement(
            name,
            shape,
            dtype,
            group,
            tuple(Slice(s.name, s.begin, s.end, s.shape, next(owners)) for s in cut),
        )
        for (name, shape, dtype, group), cut in zip(listed, cuts, strict=True)
    )


def name_beside(placement: Placement, slice_: Slice, mark: str) -> str:
    """The name of a tensor that belongs to a slice.

    Args:
        placement: of the slice's variable.
        slice_: of this variable.
        mark: says which tensor: ``GRAD`` gives ``fc.weight@GRAD.block0``.
    """
    return f"{placement.name}@{mark}{slice_.name.removeprefix(placement.name)}"


# ---- owners ----
#
# Which trainer updates each parameter of a job without servers that shards its updates.


def owners(plan: Plan) -> dict[str, int]:
    """The trainer that updates each trained parameter, by name, in the plan's order.

    The largest parameters come first, each goes to the trainer that has the fewest bytes, and of
    several such trainers to the first.
    """
    trained = [placement for placement in plan.placements if placement.group is not None]
    sizes = {p.name: prod(p.shape) * element_bytes(p.dtype) for p in trained}
    held = [0] * plan.trainers
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: ties in the plan's order
        found[name] = min(range(plan.trainers), key=held.__getitem__)
        held[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}
