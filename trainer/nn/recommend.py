"""Ids made of other numbers: hashes that are the same everywhere, and ids within a shard.

The hash is xxHash's XXH64 (Collet, https://xxhash.com) over the little-endian bytes of a row of
int64 numbers, computed by torch's own integer ops: so it is the same on every machine and device,
and in a program.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    Learning, ICML 2009.  Two rows may have one id: of n rows that differ, about
    n * n / (2 * hash_size) pairs have.

    Example::

        hash(torch.tensor([[1, 2], [3, 4]]), hash_size=1000, num_hash=2)    # [2, 2, 1]

    Args:
        input: whole numbers [n, size], or [n] for size 1.
        hash_size: 1 to 2^62.
        num_hash: 1 or more; hash k is XXH64 with the seed k.

    Returns:
        int64 [n, num_hash, 1].

    Raises:
        TypeError: the input is no whole numbers.
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
    """The bits to the right, with zeros from the left."""
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
        input: whole numbers of any shape; below 0 and from ``index_num`` on no part has them.
        index_num: how many ids there are; a part has index_num / nshards of them, rounded up.
        shard_id: 0 to nshards - 1.
        ignore_value: stands for ids of other parts.

    Returns:
        A tensor like the input.

    Raises:
        TypeError: the input is no whole numbers.
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
