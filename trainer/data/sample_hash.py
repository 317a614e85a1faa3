"""Samples by number, and the random order that a hash of a number gives.

A sample is known by the trainer that has read it and its place among those.  An order that is a
hash of that number is the same wherever the sample is by then, and needs nobody's state.
"""

from __future__ import annotations

import numpy as np

from trainer.data.columns import Array

PLACE_BITS = 40  # of a sample's number: its place; above them the trainer
_ODD, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def numbers_of(trainer: int, samples: int) -> Array:
    """int64 [samples]: the numbers of those that a trainer has read."""
    return np.arange(samples, dtype=np.int64) + (trainer << PLACE_BITS)


def hashed(numbers: Array, *salts: int) -> Array:
    """uint64 [samples]: a hash of numbers and salts (the finaliser of splitmix64, Steele et al.,
    2014).
    """
    found = numbers.astype(np.uint64)
    with np.errstate(over="ignore"):
        for salt in salts:
            found = found + (np.uint64(salt % 2**64) + np.uint64(1)) * _ODD
            found = (found ^ (found >> np.uint64(30))) * _FIRST
            found = (found ^ (found >> np.uint64(27))) * _SECOND
            found = found ^ (found >> np.uint64(31))
    return found


def shuffled(numbers: Array, *salts: int) -> Array:
    """int64 [samples]: places in a random order, in which equal numbers always come alike."""
    return np.lexsort((numbers, hashed(numbers, *salts)))


def checksum(numbers: Array) -> int:
    """Of a set of samples, however they are ordered or divided: the sums of parts add up."""
    with np.errstate(over="ignore"):
        return int(hashed(numbers, 0).astype(np.int64).sum())
