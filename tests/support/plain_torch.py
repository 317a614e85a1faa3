"""A model with tables as plain torch has it, for comparisons: its embeddings, optimizers and
batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer import DistributedEmbedding

LARGEST = 10_000  # rows that are copied: a process makes each of them by its id
Sequences = tuple[Tensor, Tensor]


def plain(model: nn.Module, sparse: bool = False) -> nn.Module:
    """The model, each of its tables replaced by an ``nn.Embedding`` of the same initial rows; of a
    table too large for that, of rows from -0.1 to 0.1.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, DistributedEmbedding):
                size, dim = child.num_embeddings, child.embedding_dim
                assert size is not None
                with torch.no_grad():
                    if size <= LARGEST:
                        rows = child(torch.arange(size)).clone()
                    else:
                        rows = torch.empty(size, dim).uniform_(-0.1, 0.1)
                setattr(module, name, nn.Embedding(size, dim, sparse=sparse, _weight=rows))
    return model


class TwoRules(torch.optim.Optimizer):
    """Adagrad for embeddings, and Adam for all else."""

    def __init__(self, model: nn.Module, rate: float, dense_rate: float) -> None:
        tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
        ids = {id(weight) for weight in tables}
        others = [weight for weight in model.parameters() if id(weight) not in ids]
        super().__init__(model.parameters(), {})
        self.rules = torch.optim.Adagrad(tables, rate), torch.optim.Adam(others, dense_rate)

    def step(self, closure: Any = None) -> Any:
        """Both step."""
        for rule in self.rules:
            rule.step()


def batches(columns: Mapping[str, Tensor | Sequences], size: int) -> Iterator[dict[str, Any]]:
    """The samples in their order; sequences' offsets begin at 0 in each batch."""
    samples = max(len(column) for column in columns.values() if isinstance(column, Tensor))
    for begin in range(0, samples, size):
        yield {name: _part(column, begin, begin + size) for name, column in columns.items()}


def _part(column: Tensor | Sequences, begin: int, end: int) -> Tensor | Sequences:
    if isinstance(column, Tensor):
        return column[begin:end]
    values, offsets = column
    bounds = torch.cat([offsets, torch.tensor([len(values)])])[begin : end + 1]
    return values[bounds[0] : bounds[-1]], bounds[:-1] - bounds[0]
