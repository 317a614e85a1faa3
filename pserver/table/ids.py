"""Arithmetic on batches of ids: the ids that differ, the server of each id, and sums by id.

[Note: two hashes]  Ids come in every shape: counted up, in strides, as hashes of text.  Two mixing
functions spread them: ``mix`` gives an id's place in a server's table, ``owners`` the server that
holds it.  They share nothing, so that a server's ids, which all agree in their owner, are still
spread over the whole of its table.  Both are finalisers in the manner of splitmix64 (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, 2014), with the shifts and factors of D.
Stafford's variants 13 and 1.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np

from pserver.table.kernels import Array, kernel

MOST_SERVERS = 2**31 - 1
SHORT = 2**31 - 2  # ids of a batch whose places fit 32 bits
# of the places of :func:`unique`, which nobody sees: ids that were chosen to share one do not
SALT = np.uint64(secrets.randbits(64))


@kernel
def mix(value: np.uint64) -> np.uint64:
    """A bijection of 64 bits after which every bit depends on all.  See [Note: two hashes]."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@kernel
def _owner(value: np.uint64, servers: np.uint64) -> np.int32:
    value = value ^ np.uint64(0xD6E8FEB86659FD93)
    value = (value ^ (value >> np.uint64(31))) * np.uint64(0x7FB5D329728EA185)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x81DADEF4BC2DD44D)
    value = value ^ (value >> np.uint64(33))
    return np.int32(((value >> np.uint64(32)) * servers) >> np.uint64(32))


@kernel
def _unique(ids: Array, places: Array, found: Array, inverse: Array, salt: np.uint64) -> int:
    """Writes ``found`` and ``inverse``; returns how many ids differ.

    ``places``: a power of two of -1s, at least twice as many as ids.
    """
    count = 0
    last = np.int64(len(places) - 1)
    for i in range(len(ids)):
        place = np.int64(mix(np.uint64(ids[i]) ^ salt) & np.uint64(last))
        while True:
            held = places[place]
            if held < 0:
                places[place] = count
                found[count] = ids[i]
                inverse[i] = count
                count += 1
                break
            if found[held] == ids[i]:
                inverse[i] = held
                break
            place = (place + 1) & last
    return count


@kernel
def _all_differ(ids: Array, places: Array, salt: np.uint64) -> bool:
    """Whether no id comes twice.

    ``places``: a power of two of zeros, at least twice as many as ids.
    """
    last = np.int64(len(places) - 1)
    for i in range(len(ids)):
        place = np.int64(mix(np.uint64(ids[i]) ^ salt) & np.uint64(last))
        while places[place] != 0:
            if ids[places[place] - 1] == ids[i]:
                return False
            place = (place + 1) & last
        places[place] = i + 1
    return True


@kernel
def _unique_each(
    ids: Array,
    sizes: Array,
    places: Array,
    found: Array,
    inverse: Array,
    counts: Array,
    bounds: Array,
    salt: np.uint64,
) -> int:
    """As ``_unique`` of each run of ids in turn; returns how many ids ``found`` has.

    ``places``: a power of two, at least twice as many as ids of the longest run.
    """
    begin, total = 0, 0
    for run in range(len(sizes)):
        end = begin + sizes[run]
        room = 16
        while room < 2 * sizes[run]:
            room *= 2
        places[:room] = -1
        own = ids[begin:end]
        counts[run] = _unique(own, places[:room], found[total:], inverse[begin:end], salt)
        low, high = np.int64(2**63 - 1), np.int64(-(2**63))
        for value in own:
            low, high = min(low, value), max(high, value)
        bounds[run, 0], bounds[run, 1] = low, high
        begin, total = end, total + counts[run]
    return total


@kernel
def _merge(inverse: Array, values: Array, sums: Array) -> int:
    """Adds up in the order of occurrence; returns the first place outside the sums, or -1."""
    for i in range(len(inverse)):
        if inverse[i] < 0 or inverse[i] >= len(sums):
            return i
    width = values.shape[1]
    for i in range(len(inverse)):
        into = inverse[i]
        for j in range(width):
            sums[into, j] += values[i, j]
    return -1


@kernel
def _owners(ids: Array, servers: int, owned: Array) -> None:
    for i in range(len(ids)):
        owned[i] = _owner(np.uint64(ids[i]), np.uint64(servers))


@kernel
def _partition(owned: Array, order: Array, offsets: Array) -> None:
    for i in range(len(owned)):
        offsets[owned[i] + 1] += 1
    for server in range(len(offsets) - 1):
        offsets[server + 1] += offsets[server]
    at = offsets.copy()
    for i in range(len(owned)):
        order[at[owned[i]]] = i
        at[owned[i]] += 1


@kernel
def outside(ids: Array, low: int, high: int) -> int:
    """The place of the first id that is not in [low, high); -1 if all are."""
    some = False
    for i in range(len(ids)):
        some |= (ids[i] < low) | (ids[i] >= high)
    if some:
        for i in range(len(ids)):
            if ids[i] < low or ids[i] >= high:
                return i
    return -1


def checked(ids: object, what: str) -> Array:
    """Checks that ids are a flat contiguous array of int64.

    Args:
        ids: from anywhere.
        what: their name, for error messages.

    Returns:
        The ids; a copy where the memory is read-only or unaligned.

    Raises:
        TypeError: they are not an array, or of another dtype.
        ValueError: they have another number of dimensions or are not contiguous.
    """
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64:
        kind = f"an array of {ids.dtype}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise TypeError(f"{what}: expected ids of int64, got {kind}")
    if ids.ndim != 1:
        raise ValueError(f"{what}: expected ids of one dimension, got shape {ids.shape}")
    return ids if ids.flags.carray else plain(ids, what)


def plain(array: Array, what: str) -> Array:
    """An array of the kind that kernels are compiled for.

    Args:
        array: any.
        what: its name, for error messages.

    Returns:
        The array itself; a copy where its memory is read-only or unaligned, as numba would compile
        the kernels anew for these.

    Raises:
        ValueError: the array is not contiguous.
    """
    if array.flags.carray:  # contiguous, aligned, and may be written
        return array
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{what}: expected contiguous memory, got strides {array.strides} for shape "
            f"{array.shape}"
        )
    return array.copy()


def unique(ids: Array) -> tuple[Array, Array]:
    """The ids that differ, and the place of each id among them.

    Args:
        ids: int64[n].

    Returns:
        unique: int64[u], in the order of their first occurrence; inverse: int32[n] (int64 beyond
        2**31 ids), so that ``unique[inverse] == ids``.

    Raises:
        TypeError, ValueError: not a flat contiguous array of int64.
    """
    return unique_of(checked(ids, "unique"))


def unique_of(ids: Array) -> tuple[Array, Array]:
    """As :func:`unique`, of ids that are :func:`checked`."""
    small = np.int32 if len(ids) <= SHORT else np.int64
    places = np.full(1 << max(4, (2 * len(ids) - 1).bit_length()), -1, small)
    found, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), small)
    count = _unique(ids, places, found, inverse, SALT)
    return found[:count], inverse


def all_differ(ids: Array) -> bool:
    """Whether no id comes twice, of ids that are :func:`checked`."""
    small = np.int32 if len(ids) <= SHORT else np.int64
    places = np.zeros(1 << max(4, (2 * len(ids) - 1).bit_length()), small)
    return bool(_all_differ(ids, places, SALT))


class Uniques(NamedTuple):
    """The ids that differ of each of several runs of ids.

    Attributes:
        ids: int64[u of all runs], those of each run in the order of their first occurrence there.
        counts: int64[runs], how many of them each run has.
        inverse: int32[n] (int64 beyond 2**31 ids), the place of each id among its run's.
        bounds: int64[runs, 2], each run's least and greatest id; the other way round where it has
            none.
    """

    ids: Array
    counts: Array
    inverse: Array
    bounds: Array


def unique_each(ids: Array, sizes: Array) -> Uniques:
    """As :func:`unique` of each of several runs of ids, in one call.

    Args:
        ids: int64[n], one run behind the other.
        sizes: int64[runs], the ids of each.

    Raises:
        TypeError, ValueError: not a flat contiguous array of int64.
    """
    ids = checked(ids, "unique_each")
    small = np.int32 if len(ids) <= SHORT else np.int64
    longest = int(sizes.max(initial=0))
    places = np.empty(1 << max(4, (2 * longest - 1).bit_length()), small)
    found, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), small)
    counts, bounds = np.empty(len(sizes), np.int64), np.empty((len(sizes), 2), np.int64)
    total = _unique_each(ids, sizes, places, found, inverse, counts, bounds, SALT)
    return Uniques(found[:total], counts, inverse, bounds)


def merge(inverse: Array, values: Array, count: int) -> Array:
    """Sums of the rows of the same id, each added up in the order of occurrence.

    Args:
        inverse: int32[n] or int64[n], as of :func:`unique`.
        values: float32[n, d] or float64[n, d], contiguous.
        count: u, the number of sums.

    Returns:
        [u, d] of the values' dtype.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not fit each other, or a place outside the sums.
    """
    if inverse.dtype not in (np.int32, np.int64) or values.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"merge: expected int32 or int64, and float32 or float64, got {inverse.dtype} and "
            f"{values.dtype}"
        )
    if inverse.ndim != 1 or values.ndim != 2 or len(values) != len(inverse):
        raise ValueError(
            f"merge: expected shapes [n] and [n, d], got {inverse.shape} and {values.shape}"
        )
    sums = np.zeros((count, values.shape[1]), values.dtype)
    outside = _merge(plain(inverse, "merge"), plain(values, "merge"), sums)
    if outside >= 0:
        raise ValueError(
            f"merge: expected places from 0 to {count - 1}, got {inverse[outside]} at {outside}"
        )
    return sums


def owners(ids: Array, servers: int) -> Array:
    """The server that holds each id: uniform over the servers for ids of any pattern, the same in
    every process.

    Args:
        ids: int64[n].
        servers: 1 to 2**31 - 1.

    Returns:
        int32[n], from 0 to servers - 1.

    Raises:
        TypeError, ValueError: not a flat contiguous array of int64, or another number of servers.
    """
    ids = checked(ids, "owners")
    if not 1 <= servers <= MOST_SERVERS:
        raise ValueError(f"owners: expected 1 to {MOST_SERVERS} servers, got {servers}")
    owned = np.empty(len(ids), np.int32)
    _owners(ids, servers, owned)
    return owned


def partition(ids: Array, servers: int) -> tuple[Array, Array]:
    """The ids by server, each server's in the order in which they came.

    Args:
        ids: int64[n].
        servers: 1 to 2**31 - 1.

    Returns:
        order: int64[n]; offsets: int64[servers + 1]: server s holds ``ids[order[offsets[s] :
            offsets[s + 1]]]``.

    Raises:
        TypeError, ValueError: as :func:`owners`.
    """
    owned = owners(ids, servers)
    order, offsets = np.empty(len(owned), np.int64), np.zeros(servers + 1, np.int64)
    if servers == 1:
        order[:] = np.arange(len(owned))
        offsets[1] = len(owned)
    else:
        _partition(owned, order, offsets)
    return order, offsets
