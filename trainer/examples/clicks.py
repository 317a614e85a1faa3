"""Clicks on advertisements, batch by batch: files in Criteo's format, or a generator with a known ground truth.

A batch is ``(labels, numbers, ids)``: float32 [batch], float32 [batch, 13], int64 [batch, 26].  The ids of a slot (a column of
categories) share no id with another slot's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch

NUMBERS, SLOTS = 13, 26
SLOT_BITS = 32  # of an id: the category; above them the slot
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Generated:
    """Clicks that follow a logistic model, so that the best that any model can reach is known.

    A slot's categories are Zipf distributed, and weigh by a normal number that is a hash of slot and category; the numbers weigh
    too, and so do a few pairs of slots.  ``truth`` gives each click's true logit.

    Args:
        samples: in one epoch.
        categories: in each slot.
        zipf: exponent of their frequencies, above 1.
        seed: of the samples; the weights do not depend on it, so that another seed gives unseen samples of the same world.
    """

    samples: int
    batch_size: int
    categories: int = 1_000_000
    zipf: float = 1.2
    seed: int = 0

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for batch, _ in self.with_truth():
            yield batch

    def with_truth(self) -> Iterator[tuple[Batch, np.ndarray]]:
        """Batches, each with the true logits of its samples."""
        for index in range(len(self)):
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
        """Ranks from 0, with a probability of about 1 / (rank + 1) ** zipf: the inverse of the continuous distribution."""
        power = 1.0 - self.zipf
        top = (self.categories + 1.0) ** power
        ranks = (1.0 + uniform * (top - 1.0)) ** (1.0 / power)
        return np.asarray(np.minimum(ranks.astype(np.int64) - 1, self.categories - 1))

    @staticmethod
    def _truth(ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        pairs = np.stack([_weight(ids[:, a] * 31 + ids[:, b]) for a, b in ((0, 1), (2, 3), (4, 5))])
        return np.asarray(0.4 * _weight(ids).sum(1) + 0.2 * pairs.sum(0) + 0.15 * numbers.sum(1).astype(np.float64) - 0.5)


def _weight(ids: np.ndarray) -> np.ndarray:
    """A number of mean 0 and deviation 1 for each id: a hash of it."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5) * 12**0.5


@dataclass(frozen=True)
class Files:
    """Files in Criteo's format: a label, 13 integers and 26 categories (hexadecimal, of 32 bits), separated by tabs.

    Any field but the label may be missing: a number is then 0, and a category one of its own.  Numbers are taken as
    sign(x) log(1 + |x|).  Names that end in .gz are decompressed.

    Args:
        paths: read one after the other.

    Raises:
        ValueError: while reading: a line has another number of fields, or a field that is no number.
    """

    paths: Sequence[str]
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        left: list[tuple[np.ndarray, ...]] = []
        for path in self.paths:
            for rows in _read(path):
                left.append(rows)
                while sum(len(rows[0]) for rows in left) >= self.batch_size:
                    whole = tuple(np.concatenate(columns) for columns in zip(*left, strict=True))
                    left = [tuple(column[self.batch_size :] for column in whole)]
                    yield _tensors(tuple(column[: self.batch_size] for column in whole))
        if sum(len(rows[0]) for rows in left):
            yield _tensors(tuple(np.concatenate(columns) for columns in zip(*left, strict=True)))


def _tensors(columns: tuple[np.ndarray, ...]) -> Batch:
    labels, numbers, ids = (torch.from_numpy(np.ascontiguousarray(column)) for column in columns)
    return labels, numbers, ids


def _read(path: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Blocks of a file: labels, numbers, ids."""
    names = ["label", *(f"number {i}" for i in range(NUMBERS)), *(f"category {i}" for i in range(SLOTS))]
    kinds = {name: pa.string() if name.startswith("category") else pa.float64() for name in names}
    try:
        blocks = pa.csv.open_csv(
            path,
            pa.csv.ReadOptions(column_names=names, block_size=2**22),
            pa.csv.ParseOptions(delimiter="\t", quote_char=False),
            pa.csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True),
        )
        for block in blocks:
            yield _columns(block, path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: expected lines of {len(names)} fields separated by tabs: {error}") from error


def _columns(block: pa.RecordBatch, path: str) -> tuple[np.ndarray, ...]:
    if block.column(0).null_count:
        raise ValueError(f"{path}: expected a label in every line")
    labels = block.column(0).to_numpy().astype(np.float32)
    numbers = np.stack([column.to_numpy(zero_copy_only=False) for column in block.columns[1 : 1 + NUMBERS]], axis=1)
    numbers = np.nan_to_num(numbers)
    ids = np.stack([_ids(column, slot, path) for slot, column in enumerate(block.columns[1 + NUMBERS :])], axis=1)
    return labels, (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32), ids


def _ids(column: pa.Array, slot: int, path: str) -> np.ndarray:
    """A slot's ids: each distinct category is read once."""
    encoded = column.dictionary_encode()
    try:
        values = [int(text, 16) & (2**SLOT_BITS - 1) for text in encoded.dictionary.to_pylist()]
    except ValueError as error:
        raise ValueError(f"{path}: category {slot}: expected hexadecimal digits ({error})") from error
    missing = 2**SLOT_BITS  # one above all categories: its own id
    codes = encoded.indices.fill_null(len(values)).to_numpy()
    return np.asarray(np.array([*values, missing], dtype=np.int64)[codes] + (slot << (SLOT_BITS + 1)))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the ROC curve: the chance that a click scores above what was not clicked; nan without both kinds."""
    order = np.argsort(scores, kind="stable")
    _, first, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.repeat(first + (counts + 1) / 2, counts)  # of ties the mean
    clicked = labels[order] > 0.5
    positives, negatives = clicked.sum(), (~clicked).sum()
    if not positives or not negatives:
        return float("nan")
    return float((ranks[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives))
