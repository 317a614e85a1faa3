"""A small table that is trained and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.export import TableRows, export
from trainer.embedding.embedding import DistributedEmbedding

DIM = 5


def trained(embedding: DistributedEmbedding, ids: torch.Tensor) -> DistributedEmbedding:
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    for _ in range(2):
        embedding(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return embedding


def exported(embedding: DistributedEmbedding, path: Path, **options: Any) -> None:
    state = embedding.state_dict()
    held = [{"ids": state["table.ids"].numpy(), "values": state["table.values"].numpy()}]
    rows = TableRows(embedding.settings.table(), held, embedding.padding_idx, embedding.padding_row)
    state = {f"emb.{name}": tensor for name, tensor in state.items()}
    export(str(path), state | {"fc.weight": torch.ones(2)}, {"emb": rows}, **options)
