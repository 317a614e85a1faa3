"""Samples for the recommenders, drawn from known models.

Each function gives columns of equally many samples, by name: tensors, or sequences as ``(values,
offsets)``.  ``seed`` draws the samples; the known model does not depend on it, so that another seed
gives unseen samples of the same world.  ``logit`` is a label's true logit: except by chance no
model scores better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

FIELDS, CATEGORIES = 8, 20  # of impressions
ITEMS, KINDS, LONGEST = 2_000, 20, 10  # of visits: a shop's items, their kinds, and a history
CLASSES, CLUSTERS, READERS = 1_000_000, 20, 200  # of choices: items, tastes, and users
USERS, VIDEOS, SAME = 50, 50, 0.8  # of views; and how much the second label follows the first
Sequences = tuple[Tensor, Tensor]


def impressions(samples: int, seed: int) -> dict[str, Tensor]:
    """Clicks that follow a factorization machine: the weights of an impression's categories, and
    the products of their factors, pair by pair.

    Returns:
        number, int64 [samples]; label, float32 [samples]; ids, int64 [samples, 8], of which no two
        fields share one; logit.
    """
    world, draws = _generator(-1), _generator(seed)
    weights = 0.5 * torch.randn(FIELDS * CATEGORIES, generator=world)
    factors = 0.4 * torch.randn(FIELDS * CATEGORIES, 4, generator=world)
    ids = torch.randint(CATEGORIES, (samples, FIELDS), generator=draws)
    ids += CATEGORIES * torch.arange(FIELDS)
    chosen = factors[ids]
    pairs = (chosen.sum(1).square() - chosen.square().sum(1)).sum(1) / 2
    logit = weights[ids].sum(1) + pairs
    number = torch.arange(samples)
    return {"number": number, "label": _labels(logit, draws), "ids": ids, "logit": logit}


def visits(samples: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Sequences]]:
    """Clicks on items whose kind occurs among the items that the user clicked before.

    Returns:
        label, float32 [samples]; item and its kind, int64 [samples]; logit.  And the sequences
        history and kinds, of 1 to 10 items.
    """
    draws = _generator(seed)
    item = torch.randint(ITEMS, (samples,), generator=draws)
    history = torch.randint(ITEMS, (samples, LONGEST), generator=draws)
    likes = torch.rand(samples, generator=draws) < 0.3  # has clicked an item of this kind
    same_kind = item % KINDS + KINDS * torch.randint(ITEMS // KINDS, (samples,), generator=draws)
    history[:, 0] = torch.where(likes, same_kind, history[:, 0])
    sizes = torch.randint(1, LONGEST + 1, (samples,), generator=draws)
    there = torch.arange(LONGEST) < sizes[:, None]
    occurs = ((history % KINDS == item[:, None] % KINDS) & there).any(1)
    logit = torch.where(occurs, 2.0, -2.0)
    values, offsets = history[there], sizes.cumsum(0) - sizes
    columns = {"label": _labels(logit, draws), "item": item, "kind": item % KINDS, "logit": logit}
    return columns, {"history": (values, offsets), "kinds": (values % KINDS, offsets)}


def choices(samples: int, seed: int) -> dict[str, Tensor]:
    """Choices of items of the user's own cluster, popular ones more often: ids rise as frequencies
    fall.

    Returns:
        user and item, int64 [samples].
    """
    draws = _generator(seed)
    user = torch.randint(READERS, (samples,), generator=draws)
    uniform = torch.rand(samples, generator=draws, dtype=torch.float64)
    rank = (uniform * math.log(CLASSES // CLUSTERS)).exp().long() - 1
    return {"user": user, "item": rank * CLUSTERS + user % CLUSTERS}


def views(samples: int, seed: int) -> dict[str, Tensor]:
    """Two labels that go together, as watching a video and liking it do.

    Returns:
        user and video, int64 [samples]; labels and logit, float32 [samples, 2].
    """
    world, draws = _generator(-2), _generator(seed)
    tastes = torch.randn(USERS, 4, generator=world)
    watched, liked = torch.randn(2, VIDEOS, 4, generator=world)
    user = torch.randint(USERS, (samples,), generator=draws)
    video = torch.randint(VIDEOS, (samples,), generator=draws)
    other = SAME * watched + (1 - SAME**2) ** 0.5 * liked
    logit = torch.stack([(tastes[user] * each[video]).sum(1) for each in (watched, other)], 1)
    return {"user": user, "video": video, "labels": _labels(logit, draws), "logit": logit}


def write_multislot(
    folder: Path, name: str, parts: int, columns: Mapping[str, Tensor | Sequences]
) -> None:
    """Writes samples as text: of each column a count, and that many values.

    Args:
        parts: the number of files, NAME-0.txt, NAME-1.txt, ...; sample i is in file i % parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lists = [_lists(column) for column in columns.values()]
    lines = [
        " ".join(f"{len(values)} " + " ".join(f"{each:g}" for each in values) for values in sample)
        for sample in zip(*lists, strict=True)
    ]
    for part in range(parts):
        text = "\n".join(lines[part::parts]) + "\n"
        (folder / f"{name}-{part}.txt").write_text(text, encoding="utf-8")


def _lists(column: Tensor | Sequences) -> list[list[float]]:
    if isinstance(column, Tensor):
        return [row.tolist() for row in column.reshape(len(column), -1)]
    values, offsets = column
    return [part.tolist() for part in values.tensor_split(offsets[1:])]


def _labels(logit: Tensor, draws: torch.Generator) -> Tensor:
    return (torch.rand(logit.shape, generator=draws) < logit.sigmoid()).float()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
