"""Will this person like this film?  DeepFM (Guo et al., 2017) on files of clicks with strings.

::

    make demo-clicks                                          MovieLens-100K, with a trainer killed
    python -m trainer.examples.movielens                      this process alone
    pserver launch --servers 2 --trainers 2 movielens.py --format avazu --data train.gz

Any string is the name of an embedding: nobody counts ids before, or builds a vocabulary.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pserver import DistributedEmbedding, Normal, fleet
from trainer.examples.click_files import FORMATS
from trainer.metrics import AUC
from trainer.row_optimizers import Adagrad


class DeepFM(nn.Module):
    """The weight of each string, the products of their embeddings in pairs, and a network."""

    columns: Tensor  # a part of each id: one string in two columns has two embeddings

    def __init__(self, fields: int, numbers: int, dim: int = 16) -> None:
        super().__init__()
        rows: dict[str, Any] = {"init": Normal(0, 0.01), "optimizer": Adagrad(lr=0.02)}
        self.weights = DistributedEmbedding(1, **rows)
        self.factors = DistributedEmbedding(dim, **rows)
        self.deep = nn.Sequential(
            nn.Linear(fields * dim + numbers, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )
        self.register_buffer("columns", torch.arange(1, fields + 1) * 0x1E3779B97F4A7C15)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """A batch of the dataset -> logits [batch]."""
        ids = batch["ids"] ^ self.columns
        factors = self.factors(ids)  # [batch, fields, dim]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        numbers = [batch["numbers"].clamp(min=0).log1p()] if "numbers" in batch else []
        deep = self.deep(torch.cat([factors.flatten(1), *numbers], 1)).squeeze(1)
        logits: Tensor = self.weights(ids).sum((1, 2)) + pairs + deep
        return logits


def learn(
    model: nn.Module, optimizer: Any, batches: Iterable[dict[str, Tensor]], dies: int, mark: Path
) -> None:
    """Trains for one pass; trainer 1 is killed at step ``dies``, unless a file says that it was."""
    for batch in batches:
        if fleet.worker_index() == 1 and optimizer.steps == dies and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = binary_cross_entropy_with_logits(model(batch), batch["click"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fleet.report(samples=len(batch["click"]), loss=loss)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> float:
    """The AUC over the batches of all trainers; all of them call it."""
    auc = AUC()
    model.eval()
    for batch in batches:
        auc.update(model(batch).sigmoid(), batch["click"])
    return auc.compute()


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and evaluates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--format", choices=FORMATS, default="movielens", help="of the files; default: movielens")
    add("--data", nargs="+", default=["build/movielens/train.tsv"], help="files to learn from")
    add("--test", nargs="+", default=["build/movielens/test.tsv"], help="files to evaluate on")
    add("--epochs", type=int, default=6, help="passes over the files; default: 6")
    add("--batch", type=int, default=256, help="samples of a trainer's step; default: 256")
    add("--kill-at", type=int, default=-1, help="the step at which trainer 1 is killed, once")
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    form = FORMATS[asked.format]
    model = fleet.distributed_model(DeepFM(len(form.strings), len(form.numbers)))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), strategy)
    dataset, held_out = fleet.QueueDataset(), fleet.QueueDataset()
    for each, files in (dataset, asked.data), (held_out, asked.test):
        each.init(batch_size=asked.batch, parser=form.lines())
        each.set_filelist(files)
    began = time.perf_counter()
    for _ in range(asked.epochs):
        learn(model, optimizer, dataset, asked.kill_at, Path(asked.data[0]).with_name("killed"))
        fleet.barrier_worker()
        for number, epoch in fleet.epoch_status().items() if fleet.is_first_worker() else ():
            print(f"epoch {number}: {epoch['decided']} of {epoch['samples']} samples counted")
    seconds = time.perf_counter() - began
    optimizer.flush()  # the parameters after all trainers' steps
    auc = evaluate(model, held_out)
    if fleet.is_first_worker():
        print(f"AUC {auc:.4f} after {seconds:.1f} s of training, trainers: {fleet.worker_num()}")
    fleet.finish()


if __name__ == "__main__":
    main()
