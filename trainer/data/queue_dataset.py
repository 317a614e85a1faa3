"""A dataset whose samples come from their files as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from trainer.data.batches import Batch, tensors_of
from trainer.data.columns import Columns, joined, part, samples_of
from trainer.data.file_dataset import FileDataset


class QueueDataset(FileDataset):
    """Samples in the order of this trainer's files; few of them are in memory.

    Each iteration is a pass over the files, and gives dicts of tensors: slot -> tensor, or
    ``(values, offsets)`` of a ragged slot.
    """

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """A pass, from this batch on; those before it are read, and left out."""
        pieces, size, drop_last = self._pieces(), self._batch_size, self._drop_last

        def made() -> Iterator[Batch]:
            with closing(self._read_all(pieces)) as found:
                blocks = (block for parsed in found for block in parsed.blocks)
                for columns in _cut(blocks, first * size, size, drop_last):
                    yield tensors_of(columns)

        return self._counted(made, first)


def _cut(blocks: Iterator[Columns], left_out: int, size: int, drop_last: bool) -> Iterator[Columns]:
    """Batches of samples in a row, which begin in one block and may end in another.

    Args:
        left_out: samples at the beginning.
    """
    held, have = list[Columns](), 0
    for block in blocks:
        samples = samples_of(block)
        if samples <= left_out:
            left_out -= samples
            continue
        held.append(part(block, left_out, samples) if left_out else block)
        have, left_out = have + samples - left_out, 0
        if have < size:
            continue
        whole = joined(held)
        full = have - have % size
        for begin in range(0, full, size):
            yield part(whole, begin, begin + size)
        held, have = ([part(whole, full, have)] if have > full else []), have - full
    if held and not drop_last:
        yield joined(held)
