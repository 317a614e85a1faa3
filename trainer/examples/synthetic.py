"""Samples for the recommenders, drawn from truths that are known.

Each function gives tensors of equally many rows, by name.  ``seed`` draws the samples; the truth
itself does not depend on it, so that another seed gives unseen samples of the same world.
``logit``, where there is one, is the true logit of a label: no model scores better than it does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

FIELDS, CATEGORIES = 8, 20  # of impressions

Samples = dict[str, Tensor]


def impressions(samples: int, seed: int) -> Samples:
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
    return {"number": number, "label": _clicked(logit, draws), "ids": ids, "logit": logit}


def write_multislot(folder: Path, name: str, parts: int, columns: Samples) -> list[str]:
    """Writes samples as text: of each column a count, and so many values.

    Returns:
        The paths of ``parts`` files, which have equally many samples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lists = [column.reshape(len(column), -1).tolist() for column in columns.values()]
    lines = [
        " ".join(f"{len(values)} " + " ".join(f"{each:g}" for each in values) for values in sample)
        for sample in zip(*lists, strict=True)
    ]
    paths = [str(folder / f"{name}-{part}.txt") for part in range(parts)]
    for part, path in enumerate(paths):
        Path(path).write_text("\n".join(lines[part::parts]) + "\n", encoding="utf-8")
    return paths


def _clicked(logit: Tensor, draws: torch.Generator) -> Tensor:
    return (torch.rand(len(logit), generator=draws) < logit.sigmoid()).float()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
