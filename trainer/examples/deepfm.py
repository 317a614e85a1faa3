"""DeepFM (Guo et al.: DeepFM, a factorization-machine based neural network for CTR prediction,
IJCAI 2017) over files that are dealt out to the trainers.

::

    python -m trainer.examples.deepfm                                        this process alone
    pserver launch --servers 2 --trainers 2 trainer/examples/deepfm.py       a cluster

A job with ``--checkpoint`` saves from time to time, in the middle of an epoch, too; after a restart
it continues at the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pserver import DistributedEmbedding, Uniform, fleet
from trainer.examples import synthetic
from trainer.examples.options import parsed
from trainer.metrics import AUC
from trainer.row_optimizers import Adagrad

FILES = 4  # of either kind: each of 2 trainers reads 2 of them
SLOTS = [
    fleet.Slot("number"),
    fleet.Slot("label", "float32"),
    fleet.Slot("ids", width=synthetic.FIELDS),
]


class DeepFM(nn.Module):
    """Three views of one impression, added up: the weight of each of its categories, the products
    of their embeddings in pairs, and a network over the embeddings.
    """

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        rows = synthetic.FIELDS * synthetic.CATEGORIES
        table: dict[str, Any] = {"init": Uniform(-0.1, 0.1), "optimizer": Adagrad(lr=rate)}
        self.weights = DistributedEmbedding(1, num_embeddings=rows, **table)
        self.factors = DistributedEmbedding(dim, num_embeddings=rows, **table)
        self.deep = nn.Sequential(
            nn.Linear(synthetic.FIELDS * dim, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [batch, fields] -> logits [batch]."""
        factors = self.factors(ids)  # [batch, fields, dim]
        # the sum over all pairs, by (a + b)^2 - a^2 - b^2 = 2 a b
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        deep = self.deep(factors.flatten(1)).squeeze(1)
        logits: Tensor = self.weights(ids).sum((1, 2)) + pairs + deep
        return logits


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[dict[str, Tensor]]
) -> None:
    """Trains for one pass: the loop of a script in one process."""
    for batch in batches:
        loss = binary_cross_entropy_with_logits(model(batch["ids"]), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> float:
    """The AUC over the batches of all trainers; all of them call it."""
    auc = AUC()
    for batch in batches:
        auc.update(model(batch["ids"]).sigmoid(), batch["label"])
    return auc.compute()


def files(folder: Path, name: str, samples: int, seed: int) -> list[str]:
    """The files of some impressions; trainer 0 writes them, before any other trainer reads."""
    if fleet.is_first_worker():
        columns = synthetic.impressions(samples, seed)
        synthetic.write_multislot(
            folder, name, FILES, {slot.name: columns[slot.name] for slot in SLOTS}
        )
    fleet.barrier_worker()
    return [str(folder / f"{name}-{part}.txt") for part in range(FILES)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and evaluates."""
    defaults = {"samples": 40_000, "batch": 100, "epochs": 2, "dim": 8, "rate": 0.2}
    asked = parsed(__doc__, arguments, data="impressions", **defaults)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = asked.mode == "async"
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(DeepFM(asked.dim, asked.rate))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    dataset, held_out = fleet.QueueDataset(), fleet.QueueDataset()
    kinds = ("learn", asked.samples, 1), ("test", asked.samples // 4, 2)
    for each, (name, samples, seed) in zip((dataset, held_out), kinds, strict=True):
        each.init(batch_size=asked.batch // fleet.worker_num(), use_var=SLOTS)
        each.set_filelist(files(Path(asked.data), name, samples, seed))
    for _ in range(asked.epochs):
        learn(model, optimizer, dataset)
    fleet.barrier_worker()
    optimizer.flush()  # in async mode: the parameters after all trainers' steps
    auc = evaluate(model, held_out)
    if fleet.is_first_worker():
        print(f"auc {auc:.4f}")
    fleet.finish()


if __name__ == "__main__":
    main()
