"""A model with tables of ours as plain torch has it, for comparisons: no line of it is ours."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainer import DistributedEmbedding


def plain(model: nn.Module, sparse: bool = False) -> nn.Module:
    """The model, each of its tables replaced by an ``nn.Embedding`` of the same initial rows."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, DistributedEmbedding):
                assert child.num_embeddings is not None
                with torch.no_grad():
                    rows = child(torch.arange(child.num_embeddings)).clone()
                setattr(
                    module,
                    name,
                    nn.Embedding(len(rows), rows.shape[1], sparse=sparse, _weight=rows),
                )
    return model


def batches(samples: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """The samples in their order."""
    for begin in range(0, len(next(iter(samples.values()))), size):
        yield {name: column[begin : begin + size] for name, column in samples.items()}
