"""Data whose batches are known by their numbers only: those of any iterable.

Every trainer reads all batches, with the same random numbers, and leaves out those that are not
dealt out to it.  To go back to batches that another trainer has not trained on, it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pserver.leases.epoch import Epoch, Range, place_of
from trainer.samplers.sample_pass import NoSuchBatch, PositionItems
from trainer.samplers.shared_randomness import SharedRandomness

_END = object()


class CountedReader(PositionItems):
    """The batches of one pass over an iterable, by their numbers.  One thread uses it.

    Args:
        epoch: the pass; its stripes do not matter.
        data: gives the same batches whenever it is iterated over with the same random numbers.
        randomness: makes the random sources, each time as at the beginning of the pass.
        compare: called with each batch that is read, and its number from 0, whether it is this
            trainer's or not.
        least: the fewest batches that are enough for the trainers.
    """

    def __init__(
        self,
        epoch: Epoch,
        data: Iterable[Any],
        randomness: Callable[[], SharedRandomness],
        compare: Callable[[int, Any], None],
        least: int = 1,
    ) -> None:
        self._epoch = replace(epoch, samples=0, batch_size=1, unit="batches", whole=True)
        self._data, self._randomness, self._compare, self._least = data, randomness, compare, least
        self._next = 0  # the number of the next batch to read
        self._length: int | None = None
        self._reading: tuple[SharedRandomness, Iterator[Any]] | None = None

    def epoch(self, stripes: int) -> Epoch:
        """The pass, for a dealer; ``stripes``: see :class:`~pserver.leases.epoch.Epoch`."""
        return replace(self._epoch, stripes=stripes, segments=stripes or 1)

    def at(self, batch: Sequence[Range], stripes: int) -> Any:
        """The batch at a position.  Where trainers step together, each has a batch of this step.

        Raises:
            NoSuchBatch: there are fewer, or too few for each of the trainers to have one.
            ValueError: there are fewer batches than trainers; or another number than before.
        """
        ((position, _),) = batch
        place, together = place_of(position, stripes), max(1, stripes)
        last = place - place % together + together - 1  # the last one of the step
        if self._length is not None and last >= self._length:
            raise NoSuchBatch(self._length)
        if self._reading is None or place < self._next:
            self._begin()
        while self._next < place:
            self._read()
        found = self._read()
        while self._length is None and self._next <= last:
            self._read()
        return found

    def _begin(self) -> None:
        sources = self._randomness()
        with sources:
            self._reading = sources, iter(self._data)
        self._next = 0

    def _read(self) -> Any:
        assert self._reading is not None, "it has begun"
        sources, batches = self._reading
        with sources:
            batch = next(batches, _END)
        if batch is _END:
            self._end()
        self._compare(self._next, batch)
        self._next += 1
        return batch

    def _end(self) -> None:
        length = self._next
        if self._length is None:
            self._length = length
        if length != self._length:
            raise ValueError(
                f"fleet.shard: expected {self._length} batches again, as when they were read "
                f"before, got {length}: the data must begin again as it began"
            )
        if length < self._least:
            raise ValueError(
                f"fleet.shard: expected at least one batch for each of {self._least} trainers, "
                f"got {length}: make smaller batches, or iterate without fleet.shard over data "
                "that every trainer is to see whole"
            )
        raise NoSuchBatch(length)
