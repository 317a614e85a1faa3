"""Two labels from one model (Ma et al.: Modeling Task Relationships in Multi-task Learning with
Multi-gate Mixture-of-Experts, KDD 2018), with a rate that warms up and decays.

::

    python -m trainer.examples.mmoe                                        this process alone
    pserver launch --servers 2 --trainers 2 trainer/examples/mmoe.py       a cluster
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from pserver import DistributedEmbedding, Uniform, fleet
from trainer.examples import synthetic
from trainer.examples.options import parsed
from trainer.lr import WarmupLR
from trainer.metrics import AUC

TASKS, EXPERTS, WIDTH = ("watched", "liked"), 4, 16
Batches = Iterable[Sequence[Tensor]]


class MMoE(nn.Module):
    """Experts that all tasks share; for each task a gate that weighs them, and a tower."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        some = Uniform(-0.1, 0.1)
        self.users = DistributedEmbedding(dim, num_embeddings=synthetic.USERS, init=some)
        self.videos = DistributedEmbedding(dim, num_embeddings=synthetic.VIDEOS, init=some)
        self.experts = nn.Linear(3 * dim, EXPERTS * WIDTH)
        self.gates = nn.ModuleList(nn.Linear(3 * dim, EXPERTS) for _ in TASKS)
        self.towers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in TASKS)

    def forward(self, user: Tensor, video: Tensor) -> Tensor:
        """int64 [batch] each -> logits [batch, tasks]."""
        rows = self.users(user), self.videos(video)
        inputs = torch.cat([*rows, rows[0] * rows[1]], 1)  # [batch, 3 dim]
        experts = self.experts(inputs).relu().unflatten(1, (EXPERTS, WIDTH))
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = (gate(inputs).softmax(1).unsqueeze(2) * experts).sum(1)  # [batch, width]
            logits.append(tower(mixed))
        return torch.cat(logits, 1)


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, batches: Batches
) -> None:
    """Trains for one pass: the loop of a script in one process."""
    for user, video, labels in batches:
        loss = binary_cross_entropy_with_logits(model(user, video), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> list[float]:
    """Each task's AUC over the batches of all trainers; all of them call it."""
    aucs = [AUC() for _ in TASKS]
    for user, video, labels in batches:
        scores = model(user, video).sigmoid()
        for task, auc in enumerate(aucs):
            auc.update(scores[:, task], labels[:, task])
    return [auc.compute() for auc in aucs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and evaluates."""
    defaults = {"samples": 40_000, "batch": 100, "epochs": 2, "dim": 8, "rate": 0.02}
    asked = parsed(__doc__, arguments, **defaults)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = asked.mode == "async"
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(MMoE(asked.dim))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=asked.rate))
    steps = asked.epochs * asked.samples // asked.batch
    scheduler = WarmupLR(CosineAnnealingLR(optimizer, T_max=steps), warmup_steps=steps // 10)
    learned, unseen = (
        DataLoader(
            TensorDataset(*(columns[name] for name in ("user", "video", "labels"))),
            batch_size=asked.batch // fleet.worker_num(),
        )
        for columns in (synthetic.views(asked.samples, 1), synthetic.views(asked.samples // 4, 2))
    )
    for _ in range(asked.epochs):
        learn(model, optimizer, scheduler, fleet.shard(learned))
    fleet.barrier_worker()
    optimizer.flush()  # in async mode: the parameters after all trainers' steps
    values = evaluate(model, fleet.shard(unseen))
    if fleet.is_first_worker():
        print(
            ", ".join(f"{task} auc {value:.4f}" for task, value in zip(TASKS, values, strict=True))
        )
    fleet.finish()


if __name__ == "__main__":
    main()
