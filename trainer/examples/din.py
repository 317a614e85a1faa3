"""A deep interest network (Zhou et al.: Deep Interest Network for Click-Through Rate Prediction,
KDD 2018) over histories of any length, shuffled over all trainers.

::

    python -m trainer.examples.din                                        this process alone
    pserver launch --servers 2 --trainers 2 trainer/examples/din.py       a cluster
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
from trainer.nn.functional import sequence_expand_as, sequence_pool
from trainer.row_optimizers import Adagrad

FILES = 4  # of either kind: each of 2 trainers reads 2 of them
SLOTS = [
    fleet.Slot("label", "float32"),
    fleet.Slot("item"),
    fleet.Slot("kind"),
    fleet.Slot("history", width=None),  # of any length: values and offsets
    fleet.Slot("kinds", width=None),
]
Batch = dict[str, Any]


class DIN(nn.Module):
    """A deep interest network: the offered item decides which part of the history matters; a small
    network weighs each clicked item beside it.
    """

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        table: dict[str, Any] = {"init": Uniform(-0.1, 0.1), "optimizer": Adagrad(lr=rate)}
        self.items = DistributedEmbedding(dim, num_embeddings=synthetic.ITEMS, **table)
        self.kinds = DistributedEmbedding(dim, num_embeddings=synthetic.KINDS, **table)
        self.attention = nn.Sequential(nn.Linear(6 * dim, 32), nn.PReLU(), nn.Linear(32, 1))
        self.deep = nn.Sequential(nn.Linear(4 * dim, 32), nn.PReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [batch]."""
        (history, offsets), (kinds, _) = batch["history"], batch["kinds"]
        clicked = torch.cat([self.items(history), self.kinds(kinds)], 1)  # [values, 2 dim]
        offered = torch.cat([self.items(batch["item"]), self.kinds(batch["kind"])], 1)
        beside, _ = sequence_expand_as(offered, (clicked, offsets))  # [values, 2 dim]
        weights = self.attention(torch.cat([clicked, beside, clicked * beside], 1))
        interest = sequence_pool((clicked * weights, offsets), "sum")  # [batch, 2 dim]
        logits: Tensor = self.deep(torch.cat([interest, offered], 1)).squeeze(1)
        return logits


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> None:
    """Trains for one pass: the loop of a script in one process."""
    for batch in batches:
        loss = binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The AUC over the batches of all trainers; all of them call it."""
    auc = AUC()
    for batch in batches:
        auc.update(model(batch).sigmoid(), batch["label"])
    return auc.compute()


def files(folder: Path, name: str, samples: int, seed: int) -> list[str]:
    """The files of some visits; trainer 0 writes them, before any other trainer reads."""
    if fleet.is_first_worker():
        columns, sequences = synthetic.visits(samples, seed)
        both: dict[str, Tensor | synthetic.Sequences] = {**columns, **sequences}
        chosen = {slot.name: both[slot.name] for slot in SLOTS}
        synthetic.write_multislot(folder, name, FILES, chosen)
    fleet.barrier_worker()
    return [str(folder / f"{name}-{part}.txt") for part in range(FILES)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and evaluates."""
    defaults = {"samples": 40_000, "batch": 100, "epochs": 2, "dim": 8, "rate": 0.5}
    asked = parsed(__doc__, arguments, data="visits", **defaults)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = asked.mode == "async"
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(DIN(asked.dim, asked.rate))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    kinds = ("learn", asked.samples, 1), ("test", asked.samples // 4, 2)
    dataset, held_out = fleet.InMemoryDataset(), fleet.InMemoryDataset()
    for each, (name, samples, seed) in zip((dataset, held_out), kinds, strict=True):
        each.init(batch_size=asked.batch // fleet.worker_num(), use_var=SLOTS)
        each.set_filelist(files(Path(asked.data), name, samples, seed))
        each.load_into_memory()
    for _ in range(asked.epochs):
        dataset.global_shuffle()  # over all trainers
        learn(model, optimizer, dataset)
    fleet.barrier_worker()
    optimizer.flush()  # in async mode: the parameters after all trainers' steps
    auc = evaluate(model, held_out)
    if fleet.is_first_worker():
        print(f"auc {auc:.4f}")
    fleet.finish()


if __name__ == "__main__":
    main()
