"""Cuts variables into slices and gives each slice to a server: arithmetic on names, shapes and
bytes only.

The same input gives the same placement in every process: no ``hash()``, no clock, no random
numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from transpiler.plan.plan import Placement, Slice


def slice_variable(shape: Sequence[int], servers: int, min_block_size: int) -> list[int]:
    """Elements of each slice of a variable: at most one per server, none (but a last one) below
    ``min_block_size``.

    A variable with two or more dimensions is cut between rows only; one without elements is one
    slice of 0.

    Raises:
        ValueError: ``servers`` or ``min_block_size`` is below 1, or a dimension is negative.
        TypeError: one of the two is no whole number.
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
class Piece:
    """What a dispatcher sees of a slice."""

    name: str  # "fc.weight.block0"
    nbytes: int


class Dispatcher(Protocol):
    """A split method: a class that is made with the number of servers and asked once, for all
    slices of a job in order.

    A user's own class is as good as ours if it answers the same in every process.
    """

    def __init__(self, servers: int) -> None: ...

    def dispatch(self, pieces: Sequence[Piece]) -> Sequence[int]:
        """The server (from 0) of each piece."""
        ...


class RoundRobin:
    """One cursor over all slices, in the order in which the optimizer ops appear."""

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, pieces: Sequence[Piece]) -> list[int]:
        """0, 1, ..., servers - 1, 0, ..."""
        return [index % self.servers for index in range(len(pieces))]


class HashName:
    """By the name of the slice alone, so that adding a layer moves no other slice.

    The hash is blake2b: stable everywhere.
    """

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, pieces: Sequence[Piece]) -> list[int]:
        """The first 8 bytes of each name's digest, modulo the number of servers."""
        digests = (hashlib.blake2b(piece.name.encode(), digest_size=8).digest() for piece in pieces)
        return [int.from_bytes(digest, "big") % self.servers for digest in digests]


class SizeBalanced:
    """By bytes: the largest slice first, each onto the server that has the fewest bytes so far.

    Graham's LPT rule (SIAM J. Appl. Math. 1969): the fullest server holds at most 4/3 of the best
    possible.  Among equal slices the earlier comes first, among equal servers the one with fewer
    slices, then the lower number.
    """

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, pieces: Sequence[Piece]) -> list[int]:
        """The server of each piece, in the order of the pieces."""
        loads = [(0, 0, server) for server in range(self.servers)]  # bytes, slices, server
        chosen = [0] * len(pieces)
        for index in sorted(range(len(pieces)), key=lambda i: -pieces[i].nbytes):
            held, count, server = min(loads)
            loads[server] = (held + pieces[index].nbytes, count + 1, server)
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


def _cut(name: str, shape: tuple[int, ...], servers: int, min_block_size: int) -> list[Slice]:
    """The slices of one variable; server 0 stands in until they are dispatched."""
    sizes = slice_variable(shape, servers, min_block_size)
    if len(sizes) == 1:
        return [Slice(name, 0, sizes[0], shape, 0)]
    slices, begin = [], 0
    for index, size in enumerate(sizes):
        held = (size // math.prod(shape[1:]), *shape[1:])
        slices.append(Slice(f"{name}.block{index}", begin, begin + size, held, 0))
        begin += size
    return slices


def _dispatch(method: type[Dispatcher], pieces: Sequence[Piece], servers: int) -> list[int]:
    """What the method answers, checked: it may be a user's own."""
    answer = list(method(servers).dispatch(pieces))
    valid = all(isinstance(server, int) and 0 <= server < servers for server in answer)
    if len(answer) != len(pieces) or not valid:
        raise ValueError(
            f"{method.__name__}.dispatch: expected {len(pieces)} server numbers from 0 to "
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
) -> tuple[Placement, ...]:
    """Slices and servers of variables ``(name, shape, dtype, group)``, in their order.

    Args:
        variables: ``group`` is the index of the update rule, None for a variable that is held and
            never updated.
        min_block_size: elements.
        slice_var_up: False leaves every variable whole.
        method: the split method.

    Raises:
        ValueError: two slices would have one name, a dtype is unknown, or the method's answer is no
            placement.
    """
    listed = [(name, tuple(shape), dtype, group) for name, shape, dtype, group in variables]
    cuts = [
        _cut(name, shape, servers if slice_var_up else 1, min_block_size)
        for name, shape, _, _ in listed
    ]
    names = [piece.name for cut in cuts for piece in cut]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"expected different names for all variables and slices, got {', '.join(twice)} twice"
        )
    pieces = [
        Piece(piece.name, (piece.end - piece.begin) * element_bytes(dtype))
        for cut, (_, _, dtype, _) in zip(cuts, listed, strict=True)
        for piece in cut
    ]
    owners = iter(_dispatch(method, pieces, servers))
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


def name_beside(placement: Placement, piece: Slice, mark: str) -> str:
    """The name of what belongs to a slice: ``fc.weight@GRAD.block0`` for the mark ``GRAD``."""
    return f"{placement.name}@{mark}{piece.name.removeprefix(placement.name)}"
