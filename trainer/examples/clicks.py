"""Clicks on advertisements, batch by batch: files in Criteo's format, or a generator with a known
ground truth.

A batch is ``(labels, numbers, ids)``: float32 [batch], float32 [batch, 13], int64 [batch, 26].  The
ids of a slot (a column of categories) share no id with another slot's.  ``shard`` gives a trainer
every n-th batch, and each equally many: the batches of the others are not generated, and of files
their lines are counted but not parsed.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch

NUMBERS, SLOTS = 13, 26
SLOT_BITS = 32  # of an id: the category; above them the slot
READ_BYTES = 2**22
NAMES = (
    "label",
    *(f"number {i + 1}" for i in range(NUMBERS)),
    *(f"category {i + 1}" for i in range(SLOTS)),
)
KINDS = {name: pa.string() if name.startswith("category") else pa.float64() for name in NAMES}
HEXADECIMAL = frozenset(string.hexdigits)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Generated:
    """Clicks that follow a logistic model, so that the best that any model can reach is known.

    A slot's categories are Zipf distributed, and weigh by a normal number that is a hash of slot
    and category; the numbers weigh too, and so do a few pairs of slots.  ``truth`` gives each
    click's true logit.

    Args:
        samples: in one epoch.
        categories: in each slot.
        zipf: exponent of their frequencies, above 1.
        seed: of the samples; the weights do not depend on it, so that another seed gives unseen
            samples of the same world.
    """

    samples: int
    batch_size: int
    categories: int = 1_000_000
    zipf: float = 1.2
    seed: int = 0
    number: int = 0
    of: int = 1

    def shard(self, number: int, of: int) -> Generated:
        """Trainer ``number``'s part, of ``of``."""
        return replace(self, number=number, of=of)

    def __len__(self) -> int:
        """Batches of this trainer."""
        return -(-self.samples // self.batch_size) // self.of

    def __iter__(self) -> Iterator[Batch]:
        for batch, _ in self.with_truth():
            yield batch

    def with_truth(self) -> Iterator[tuple[Batch, np.ndarray]]:
        """Batches, each with the true logits of its samples."""
        for index in range(self.number, len(self) * self.of, self.of):
            size = min(self.batch_size, self.samples - index * self.batch_size)
            yield self._batch(np.random.default_rng((self.seed, index)), size)

    def _batch(self, random: np.random.Generator, size: int) -> tuple[Batch, np.ndarray]:
        ranks = self._zipf(random.random((size, SLOTS)))
        ids = ranks + (np.arange(SLOTS, dtype=np.int64) << (SLOT_BITS + 1))
        numbers = random.standard_normal((size, NUMBERS)).astype(np.float32)
        logits = self._truth(ids, numbers)
        labels = (random.random(size) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return (torch.from_numpy(labels), torch.from_numpy(numbers), torch.from_numpy(ids)), logits

    def _zipf(self, uniform: np.ndarray) -> np.ndarray:
        """Ranks from 0, with a probability of about 1 / (rank + 1) ** zipf: the inverse of the
        continuous distribution.
        """
        power = 1.0 - self.zipf
        top = (self.categories + 1.0) ** power
        ranks = (1.0 + uniform * (top - 1.0)) ** (1.0 / power)
        return np.asarray(np.minimum(ranks.astype(np.int64) - 1, self.categories - 1))

    @staticmethod
    def _truth(ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        pairs = np.stack([_weight(ids[:, a] * 31 + ids[:, b]) for a, b in ((0, 1), (2, 3), (4, 5))])
        return np.asarray(
            0.4 * _weight(ids).sum(1)
            + 0.2 * pairs.sum(0)
            + 0.15 * numbers.sum(1).astype(np.float64)
            - 0.5
        )


def _weight(ids: np.ndarray) -> np.ndarray:
    """A number of mean 0 and deviation 1 for each id: a hash of it."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5) * 12**0.5


@dataclass(frozen=True)
class Files:
    """Files in Criteo's format: a label, 13 integers and 26 categories (hexadecimal, of 32 bits),
    separated by tabs.

    Any field but the label may be missing: a number is then 0, and a category one of its own.
    Numbers are taken as sign(x) log(1 + |x|).  Names that end in .gz are decompressed.

    Args:
        paths: read one after the other.

    Raises:
        OSError: while reading: there is no such file, or its compressed bytes are torn.
        ValueError: while reading: a line, which is named, has another number of fields, a label
            that is neither 0 nor 1, or a field that is no number.
    """

    paths: Sequence[str]
    batch_size: int
    number: int = 0
    of: int = 1

    def shard(self, number: int, of: int) -> Files:
        """Trainer ``number``'s part, of ``of``."""
        return replace(self, number=number, of=of)

    def __iter__(self) -> Iterator[Batch]:
        group: list[list[_Lines]] = []
        for batch in self._batches():
            group.append(batch)
            if len(group) == self.of:
                yield _parsed(group[self.number])
                group = []

    def _batches(self) -> Iterator[list[_Lines]]:
        """The lines of each batch; it may begin in one file and end in another."""
        held, missing = list[_Lines](), self.batch_size
        for path in self.paths:
            for block in _blocks(path):
                while block.count:
                    own, block = block.split(missing)
                    held.append(own)
                    missing -= own.count
                    if not missing:
                        yield held
                        held, missing = [], self.batch_size
        if held:
            yield held


@dataclass(frozen=True)
class _Lines:
    """Whole lines of a file: the number of the first, from 1, the text, and where each line begins
    in it, and the last ends.
    """

    path: str
    first: int
    text: memoryview
    bounds: np.ndarray

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def split(self, count: int) -> tuple[_Lines, _Lines]:
        """The first ``count`` lines, and the others."""
        return replace(self, bounds=self.bounds[: count + 1]), replace(
            self,
            first=self.first + min(count, self.count),
            bounds=self.bounds[min(count, self.count) :],
        )

    def parse(self) -> tuple[np.ndarray, ...]:
        """Labels, numbers, ids."""
        try:
            return _columns(self.text[self.bounds[0] : self.bounds[-1]])
        except ValueError as error:
            if self.count == 1:
                raise ValueError(f"{self.path}: line {self.first}: {error}") from error
        halves = self.split(self.count // 2)  # so the first line that is wrong is found
        columns = zip(*(half.parse() for half in halves), strict=True)
        return tuple(np.concatenate(pair) for pair in columns)


def _blocks(path: str) -> Iterator[_Lines]:
    """A file's lines, some megabytes at a time."""
    rest, first = b"", 1
    with pa.input_stream(path, compression="detect") as stream:
        while True:
            block = stream.read(READ_BYTES)
            text = rest + (block or b"\n" * bool(rest))  # the last line may lack its end
            cut = text.rfind(b"\n") + 1
            bounds = np.append(
                0, np.flatnonzero(np.frombuffer(text, np.uint8, cut) == ord("\n")) + 1
            )
            yield _Lines(path, first, memoryview(text), bounds)
            if not block:
                return
            rest, first = text[cut:], first + len(bounds) - 1


def _parsed(batch: Sequence[_Lines]) -> Batch:
    whole = (
        np.concatenate(columns) for columns in zip(*(lines.parse() for lines in batch), strict=True)
    )
    labels, numbers, ids = map(torch.from_numpy, whole)
    return labels, numbers, ids


def _columns(text: memoryview) -> tuple[np.ndarray, ...]:
    """Labels, numbers and ids of whole lines; ValueError without saying of which."""
    block = pa.csv.read_csv(
        pa.BufferReader(text),
        pa.csv.ReadOptions(column_names=NAMES, use_threads=False),
        pa.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        pa.csv.ConvertOptions(column_types=KINDS, null_values=[""], strings_can_be_null=True),
    ).combine_chunks()
    labels = block.column(0).to_numpy().astype(np.float32)
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("label: expected 0 or 1")
    numbers = np.nan_to_num(
        np.stack([column.to_numpy() for column in block.columns[1 : 1 + NUMBERS]], axis=1)
    )
    ids = np.stack(
        [_ids(column.chunk(0), slot) for slot, column in enumerate(block.columns[1 + NUMBERS :])],
        axis=1,
    )
    return labels, (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32), ids


def _ids(column: pa.Array, slot: int) -> np.ndarray:
    """A slot's ids: each distinct category is read once."""
    encoded = column.dictionary_encode()
    values = []
    for text in encoded.dictionary.to_pylist():
        if len(text) > SLOT_BITS // 4 or not HEXADECIMAL.issuperset(text):
            raise ValueError(
                f"category {slot + 1}: expected at most 8 hexadecimal digits, got {text!r}"
            )
        values.append(int(text, 16))
    missing = 2**SLOT_BITS  # one above all categories: its own id
    codes = encoded.indices.fill_null(len(values)).to_numpy()
    return np.asarray(
        np.array([*values, missing], dtype=np.int64)[codes] + (slot << (SLOT_BITS + 1))
    )


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the ROC curve: the chance that a click scores above what was not clicked; nan
    without both kinds.
    """
    order = np.argsort(scores, kind="stable")
    _, first, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.repeat(first + (counts + 1) / 2, counts)  # of ties the mean
    clicked = labels[order] > 0.5
    positives, negatives = clicked.sum(), (~clicked).sum()
    if not positives or not negatives:
        return float("nan")
    return float((ranks[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives))
