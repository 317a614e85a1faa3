"""Batches of tensors from columns, made ahead by a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

# ---- columns ----
#
# Samples as columns: for each slot an array with a row for each sample, or a ragged column.
#
# A dense column is an array ``[samples]`` or ``[samples, width]``.


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column with any number of values for each sample.

    Attributes:
        values: [values], those of a sample side by side.
        bounds: int64 [samples + 1]; sample i has ``values[bounds[i] : bounds[i + 1]]``.
    """

    values: Array
    bounds: Array

    @classmethod
    def of(cls, values: Array, counts: Array) -> Ragged:
        """A column from values, and the number of values of each sample."""
        bounds = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=bounds[1:])
        return cls(values, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def counts(self) -> Array:
        """int64 [samples]: the number of values of each sample."""
        return np.diff(self.bounds)


Column = Array | Ragged
Columns = Mapping[str, Column]


def samples_of(columns: Columns) -> int:
    """The number of samples."""
    return min((len(column) for column in columns.values()), default=0)


def bytes_of(columns: Columns) -> int:
    """The bytes of memory that columns take."""
    return sum(
        column.values.nbytes + column.bounds.nbytes if isinstance(column, Ragged) else column.nbytes
        for column in columns.values()
    )


def part(columns: Columns, begin: int, end: int) -> dict[str, Column]:
    """Consecutive samples, without a copy."""
    return {name: _part(column, begin, end) for name, column in columns.items()}


def _part(column: Column, begin: int, end: int) -> Column:
    if not isinstance(column, Ragged):
        return column[begin:end]
    bounds = column.bounds[begin : end + 1]
    return Ragged(column.values[bounds[0] : bounds[-1]], bounds - bounds[0])


def samples_at(columns: Columns, places: Array) -> dict[str, Column]:
    """The samples at these places, in this order."""
    return {name: _taken(column, places) for name, column in columns.items()}


def _taken(column: Column, places: Array) -> Column:
    if not isinstance(column, Ragged):
        return column[places]
    counts = column.counts[places]
    found = Ragged.of(column.values[:0], counts)
    # value j of a sample is j places after its first one
    shift = np.repeat(column.bounds[:-1][places] - found.bounds[:-1], counts)
    return Ragged(column.values[np.arange(found.bounds[-1]) + shift], found.bounds)


def joined(parts: Sequence[Columns]) -> dict[str, Column]:
    """The samples of all parts, which have the same slots; one part is given as it is."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: _joined([each[name] for each in parts]) for name in (parts[0] if parts else ())}


def _joined(columns: Sequence[Column]) -> Column:
    dense = [column for column in columns if not isinstance(column, Ragged)]
    if dense:
        return np.concatenate(dense)
    ragged = [column for column in columns if isinstance(column, Ragged)]
    values = np.concatenate([column.values for column in ragged])
    return Ragged.of(values, np.concatenate([column.counts for column in ragged]))


# ---- sample hash ----
#
# Samples by number, and the random order that a hash of a number gives.
#
# A sample's number has the trainer that read it, and the sample's place among that trainer's.  An
# order by a hash of that number is the same wherever the sample is by then, and needs no state.


PLACE_BITS = 40  # of a sample's number: its place; above them the trainer
_ODD, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def numbers_of(trainer: int, samples: int) -> Array:
    """int64 [samples]: the numbers of the samples that a trainer has read."""
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
    """int64 [samples]: places in a random order, which depends on the numbers and salts alone."""
    return np.lexsort((numbers, hashed(numbers, *salts)))


def checksum(numbers: Array) -> int:
    """The checksum of a set of samples, in any order; the checksums of its parts add up to it."""
    with np.errstate(over="ignore"):
        return int(hashed(numbers, 0).astype(np.int64).sum())


# ---- batches ----


# slot -> a tensor, or (values, offsets) of a ragged slot
Batch = dict[str, Any]
T = TypeVar("T")


def tensors_of(columns: Columns, pinned: bool | None = None) -> Batch:
    """A batch: for each slot a tensor, or the values and offsets that an embedding with pooling
    takes.  The tensors share the columns' memory where it is not pinned.

    Args:
        pinned: in pinned memory, for copies to a GPU; None: where there is a GPU.
    """
    pins = torch.cuda.is_available() if pinned is None else pinned

    def tensor(array: Any) -> Tensor:
        found = torch.from_numpy(array)
        return found.pin_memory() if pins else found

    return {
        name: (tensor(column.values), tensor(column.bounds[:-1]))
        if isinstance(column, Ragged)
        else tensor(column)
        for name, column in columns.items()
    }


class Prefetched(Generic[T]):
    """The items of an iterator, made ahead by a thread.

    Args:
        begin: makes the iterator, in the thread, which also closes it.
        most: items that wait to be taken, at most.
    """

    def __init__(self, begin: Callable[[], Iterator[T]], most: int) -> None:
        self._begin, self._most = begin, most
        self._moved = threading.Condition()  # guards what follows
        self._made = deque[T]()
        self._over = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __iter__(self) -> Generator[T]:
        self._thread.start()
        try:
            while True:
                with self._moved:
                    self._moved.wait_for(lambda: self._made or self._over)
                    if not self._made:
                        break
                    one = self._made.popleft()
                    self._moved.notify_all()
                yield one
            if self._error is not None:
                raise self._error
        finally:
            self._close()

    def _close(self) -> None:
        with self._moved:
            self._closed = True
            self._made.clear()
            self._moved.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            iterator = self._begin()
            try:
                for one in iterator:
                    if not self._put(one):
                        break
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # the script's thread raises it
            self._error = error
        finally:
            with self._moved:
                self._over = True
                self._moved.notify_all()

    def _put(self, one: T) -> bool:
        """Queues an item, when there is room; returns whether the iteration is still open."""
        with self._moved:
            self._moved.wait_for(lambda: len(self._made) < self._most or self._closed)
            self._made.append(one)
            self._moved.notify_all()
            return not self._closed
