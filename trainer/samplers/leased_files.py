"""One pass over the files of a dataset, which leases deal out piece by piece.

A position is a sample: its piece's segment, and its number there.  A lease has the rest of a piece;
its progress is part of each step's record, so another trainer can continue from there.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import PurePath

from pserver.leases.epoch import WIDTH, Epoch, Intervals, Range
from trainer.data.batches import Batch, Columns, joined, part, samples_of, tensors_of
from trainer.data.datasets import Parses
from trainer.data.lines import Parsed
from trainer.data.pieces import Piece
from trainer.samplers.sample_leases import SampleLeases


def epoch_of(
    number: int, name: str, pieces: Sequence[Piece], batch_size: int, drop_last: bool
) -> Epoch:
    """A pass over pieces, for the lease table.

    Args:
        number: among the passes of the job.
        name: of the dataset.
    """
    seed = in_words(pieces)
    return Epoch(number, name, seed, 0, batch_size, 0, drop_last, segments=len(pieces))


def in_words(pieces: Sequence[Piece], *more: object) -> str:
    """A text that identifies pieces, the same on every trainer.

    Args:
        more: further values that must be the same.
    """
    # hosts may have their files in folders of other names
    said = repr([(PurePath(each.path).name, each.begin, each.end) for each in pieces] + [*more])
    return f"{len(pieces)} pieces, checksum {zlib.crc32(said.encode()):08x}"


class LeasedFiles:
    """This trainer's batches of one pass; see :class:`trainer.samplers.leased_pass.LeasedPass`.

    A thread makes batches ahead of the script, so a batch counts as given when the script gets it.

    Args:
        leases: of this trainer, on demand.
        epoch: the pass.
        pieces: of all files.
        parses: gives the samples of pieces, in their order.
    """

    def __init__(
        self, leases: SampleLeases, epoch: Epoch, pieces: Sequence[Piece], parses: Parses
    ) -> None:
        self._leases, self._epoch, self._pieces, self._parses = leases, epoch, pieces, parses
        self._first: list[Range] = []  # leased, and not being read yet
        self._drawn: deque[list[Range]] = deque()  # made, not given
        self._over = False
        self._guard = threading.Lock()  # guards what follows
        self._held = Intervals()  # leased, and not given to the script

    def more(self) -> bool:
        """Whether there is more; waits for it, with no leased samples left."""
        if not self._over:
            lease = self._leases.wait(self._epoch)
            self._over = lease.over
            self._take(lease.ranges)
            self._first = list(lease.ranges)
        return bool(self._first)

    def draw(self) -> Iterator[Batch]:
        """The batches that need no wait."""
        size = self._epoch.batch_size
        for ranges, columns in cut(self._blocks(), size):
            if self._epoch.drop_last and samples_of(columns) < size:
                self._let_go(ranges)
                self._leases.leave_out(self._epoch, ranges)
            else:
                self._drawn.append(ranges)
                yield tensors_of(columns)

    def give(self) -> None:
        """Counts the next batch as given: the script gets it."""
        ranges, number = self._drawn.popleft(), self._epoch.number
        self._let_go(ranges)
        self._leases.communicator.consumed.give((number, a, b) for a, b in ranges)

    def close(self) -> None:
        """Hands back the rest: the script takes no more."""
        if not self._over:
            self._over = True
            self._leases.hand_back(self._epoch, list(self._held))

    def _take(self, ranges: Iterable[Range]) -> None:
        with self._guard:
            for start, stop in ranges:
                self._held.add(start, stop)

    def _let_go(self, ranges: Iterable[Range]) -> None:
        with self._guard:
            for start, stop in ranges:
                self._held.remove(start, stop)

    def _blocks(self) -> Iterator[tuple[int, Columns]]:
        """Consecutive samples: the position of the first one, and their columns."""
        reading: deque[Range] = deque()  # the leases of the pieces that are parsed

        def wanted() -> Iterator[Piece]:
            ranges, self._first = self._first, []
            while ranges:
                for start, stop in ranges:
                    reading.append((start, stop))
                    yield self._pieces[start // WIDTH]
                ranges = list(self._leases.lease(self._epoch).ranges)
                self._take(ranges)

        with closing(self._parses(wanted())) as found:
            for parsed in found:
                yield from self._leased(parsed, *reading.popleft())

    def _leased(self, parsed: Parsed, start: int, stop: int) -> Iterator[tuple[int, Columns]]:
        """The leased samples of a piece."""
        segment, begin = start // WIDTH, start // WIDTH * WIDTH
        end = begin + parsed.samples
        with self._guard:
            self._held.discard(end, begin + WIDTH)
        self._leases.end(self._epoch, segment, parsed.samples)
        at = begin
        for block in parsed.blocks:
            samples = samples_of(block)
            first, last = max(start, at), min(stop, at + samples)
            if first < last:
                yield first, part(block, first - at, last - at)
            at += samples


def cut(blocks: Iterable[tuple[int, Columns]], size: int) -> Iterator[tuple[list[Range], Columns]]:
    """Batches of consecutive samples, which may span several blocks; the last one has the rest.

    Args:
        blocks: the position of the first sample, and the columns.

    Returns:
        For each batch its positions, and its columns.
    """
    held: list[tuple[int, Columns]] = []
    have = 0
    for start, block in blocks:
        at, samples = 0, samples_of(block)
        while have + samples - at >= size:
            stop = at + size - have
            held.append((start + at, part(block, at, stop)))
            yield _batch(held)
            held, have, at = [], 0, stop
        if at < samples:
            held.append((start + at, part(block, at, samples)))
            have += samples - at
    if held:
        yield _batch(held)


def _batch(held: Sequence[tuple[int, Columns]]) -> tuple[list[Range], Columns]:
    ranges: list[Range] = []
    for start, columns in held:
        stop = start + samples_of(columns)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], stop
        else:
            ranges.append((start, stop))
    return ranges, joined([columns for _, columns in held])
