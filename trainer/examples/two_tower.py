"""Retrieval by two towers (Yi et al.: Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
Recommendations, RecSys 2019): a softmax over a million items, of which a step computes some
hundreds.

::

    python -m trainer.examples.two_tower                                        this process alone
    pserver launch --servers 2 --trainers 2 trainer/examples/two_tower.py       a cluster
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pserver import DistributedEmbedding, Uniform, fleet
from trainer.examples import synthetic
from trainer.examples.options import parsed
from trainer.metrics import Mean
from trainer.nn import SampledSoftmax
from trainer.row_optimizers import Adagrad

NEGATIVES, MOST = 200, 50  # drawn for a step; recommended to a user
Batches = Iterable[Sequence[Tensor]]


class TwoTower(nn.Module):
    """A tower makes a vector of a user; an item's vector is its row, on the servers.  The score is
    their product.
    """

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        table: dict[str, Any] = {"init": Uniform(-0.1, 0.1), "optimizer": Adagrad(lr=rate)}
        self.users = DistributedEmbedding(dim, num_embeddings=synthetic.READERS, **table)
        self.tower = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.items = SampledSoftmax(
            synthetic.CLASSES, dim, NEGATIVES, sampler="log_uniform", **table
        )

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """The mean loss of the chosen items: int64 [batch] each -> []."""
        loss: Tensor = self.items(self.tower(self.users(user)), item).mean()
        return loss

    def scores(self, user: Tensor, items: Tensor) -> Tensor:
        """The scores of each user and each of some items: [batch, items]."""
        return self.items.scores(self.tower(self.users(user)), items)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """Trains for one pass: the loop of a script in one process."""
    for user, item in batches:
        model(user, item).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Any, batches: Batches, candidates: Tensor) -> float:
    """The recall: the share of chosen items that are among the 50 candidates with the highest
    scores.  All trainers call it, each with its own batches.
    """
    found = Mean()
    for user, item in batches:
        best = candidates[model.scores(user, candidates).topk(MOST).indices]
        found.update((best == item[:, None]).any(1).float())
    return found.compute()


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and evaluates."""
    defaults = {"samples": 40_000, "batch": 100, "epochs": 3, "dim": 16, "rate": 0.6}
    asked = parsed(__doc__, arguments, **defaults)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = asked.mode == "async"
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(TwoTower(asked.dim, asked.rate))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.003))
    chosen = DataLoader(
        TensorDataset(*synthetic.choices(asked.samples, 1).values()),
        batch_size=asked.batch // fleet.worker_num(),
        shuffle=True,
    )
    unseen = synthetic.choices(asked.samples // 4, 2)
    held_out = DataLoader(TensorDataset(*unseen.values()), batch_size=1000)
    torch.manual_seed(1 + fleet.worker_index())  # each trainer draws negatives of its own
    for _ in range(asked.epochs):
        learn(model, optimizer, fleet.shard(chosen))
    fleet.barrier_worker()
    optimizer.flush()  # in async mode: the parameters after all trainers' steps
    recall = evaluate(model, fleet.shard(held_out), unseen["item"].unique())
    if fleet.is_first_worker():
        print(f"recall {recall:.4f}")
    fleet.finish()


if __name__ == "__main__":
    main()
