"""append_backward on programs that look tables up: the gradients of a training program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import DistributedEmbedding, Executor, ShowClickEntry, Uniform
from transpiler import append_backward, capture, gradients

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two lookups of one table, of which one has computed ids; bags; a weight of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        init: Any = Uniform(-1, 1)
        self.emb = DistributedEmbedding(4, num_embeddings=30, name="emb", init=init, padding_idx=2)
        self.bag = DistributedEmbedding(
            4, num_embeddings=30, name="bag", pooling="mean", init=init, padding_idx=0
        )
        self.word = nn.Embedding(30, 3, sparse=True, padding_idx=1)
        self.fc = nn.Linear(15, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        again = torch.remainder(ids[:, 1] * 7, 30)
        rows = [self.emb(ids[:, 0]), self.emb(again), self.bag(ids), self.word(ids[:, 2])]
        result: torch.Tensor = self.fc(torch.cat(rows, 1))
        return result


def step(model: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model(ids)
    return {"loss": F.cross_entropy(logits, y), "logits": logits}


def batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    return (
        torch.randint(0, 30, (size, 3), generator=generator),
        torch.randint(0, 2, (size,), generator=generator),
    )


def test_the_gradients_of_rows_are_those_of_training() -> None:
    """To the bit, with padding and at other batch sizes; the tables go on to be pulled."""
    model, trained = Net(), Net()
    forward, _ = capture(model, step, example=batch(6))
    backward = append_backward(forward)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    main, _ = capture(trained, step, optimizer, batch(6))
    names = [f"{name}@GRAD" for name in ("emb", "bag", "word.weight", "fc.weight", "fc.bias")]

    for size in (6, 1, 9):
        with Executor() as executor:
            mine = executor.run(backward, batch(size), [*names, "loss"])
            theirs = executor.run(main, batch(size), [*names, "loss"])
        for name, own, other in zip(names, mine, theirs, strict=False):
            dense = [each.to_dense() if each.is_sparse else each for each in (own, other)]
            assert torch.equal(*dense), name
        assert torch.equal(mine[-1], theirs[-1])


def test_some_gradients_only() -> None:
    """A table by name, a parameter alone, and an input of the program."""
    forward, _ = capture(Net(), step, example=batch(6))

    def wanted(program: Any) -> set[str]:
        return {each.of for each in program.list_vars() if each.of}

    assert wanted(append_backward(forward, parameter_list=["emb"])) == {"emb"}
    assert wanted(gradients("logits", "fc.weight", forward)) == {"fc.weight"}


def test_a_table_that_counts_is_refused() -> None:
    """Shows and clicks come with the gradients of a training step."""
    entry = ShowClickEntry("show", "click")
    table = DistributedEmbedding(4, name="emb", entry=entry)
    forward, _ = capture(table, lambda m, i: m(i).sum(), example=(torch.arange(3),))

    with pytest.raises(ValueError, match="'emb' counts shows and clicks"):
        append_backward(forward, "output")
