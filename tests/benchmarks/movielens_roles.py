"""Processes of the rows of MovieLens-100K: each answers lines, as those of peers.py do.

"learn" trains for one pass over the ratings, until every step is applied; the answer: the seconds
that it took.  "auc" is of the ratings held out.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from processes import READY
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainer.examples.click_files import FORMATS
from trainer.examples.movielens import DeepFM, evaluate, learn

FIELDS = FORMATS["movielens"].strings
BATCH, DIM, RATE, DEVIATION = 256, 16, 0.02, 0.01  # the example's
Batches = Iterable[dict[str, Tensor]]


def answer(learned: Callable[[], object], auc: Callable[[], float]) -> None:
    """Answers lines until there are no more."""
    print(READY, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        if line.strip() == "learn":
            learned()
            print(time.perf_counter() - began, flush=True)
        else:
            print(auc(), flush=True)


# ---- plain torch, and TorchRec ----


def numbered(folder: str) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """How many strings there are, and the ratings to learn from and those held out, in memory: each
    string of a column by its number.
    """
    numbers: dict[tuple[str, str], int] = {}
    found = []
    for name in ("train", "test"):
        with (Path(folder) / f"{name}.tsv").open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        ids = [
            [numbers.setdefault((field, line[field]), len(numbers)) for field in FIELDS]
            for line in lines
        ]
        clicks = [float(line["click"]) for line in lines]
        found.append({"ids": torch.tensor(ids), "click": torch.tensor(clicks)})
    return len(numbers), *found


def batches(ratings: dict[str, Tensor], order: Tensor) -> Iterator[dict[str, Tensor]]:
    """The ratings in an order, some at a time."""
    for chosen in order.split(BATCH):
        yield {name: values[chosen] for name, values in ratings.items()}


class Local(DeepFM):
    """The example's model, with other modules for its two tables.

    Args:
        table: makes one: int64 [batch, fields] -> [batch, fields, its argument].
    """

    def __init__(self, table: Callable[[int], nn.Module]) -> None:
        nn.Module.__init__(self)
        self.weights, self.factors = table(1), table(DIM)
        self.deep = nn.Sequential(
            nn.Linear(len(FIELDS) * DIM, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )
        self.register_buffer("columns", torch.zeros(len(FIELDS), dtype=torch.int64))


def _alone(
    model: nn.Module,
    optimizers: list[Any],
    learned: dict[str, Tensor],
    unseen: dict[str, Tensor],
) -> None:
    """The ordinary loop."""

    def epoch() -> None:
        model.train()
        for batch in batches(learned, torch.randperm(len(learned["click"]))):
            for optimizer in optimizers:
                optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(batch), batch["click"]).backward()
            for optimizer in optimizers:
                optimizer.step()

    answer(epoch, lambda: evaluate(model, batches(unseen, torch.arange(len(unseen["click"])))))


def plain(folder: str) -> None:
    """Plain torch in one process."""
    torch.manual_seed(0)
    count, learned, unseen = numbered(folder)

    def table(dim: int) -> nn.Module:
        made = nn.Embedding(count, dim, sparse=True)
        nn.init.normal_(made.weight, 0, DEVIATION)
        return made

    model = Local(table)
    rows = [*model.weights.parameters(), *model.factors.parameters()]
    optimizers = [
        torch.optim.Adagrad(rows, lr=RATE),
        torch.optim.Adam(model.deep.parameters()),
    ]
    _alone(model, optimizers, learned, unseen)


def torchrec(folder: str, port: int) -> None:
    """TorchRec in one process: fbgemm's tables, which the backward updates."""
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.types import ShardingType
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    class Rows(nn.Module):
        """One table that all columns share."""

        def __init__(self, dim: int) -> None:
            super().__init__()
            width = max(dim, 4)  # fbgemm takes multiples of it
            config = EmbeddingBagConfig(
                name=f"rows{dim}",
                embedding_dim=width,
                num_embeddings=count,
                feature_names=list(FIELDS),
                init_fn=lambda weight: nn.init.normal_(weight, 0, DEVIATION),
            )
            self.bags = EmbeddingBagCollection(tables=[config])
            self.dim, self.width = dim, width
            apply_optimizer_in_backward(torch.optim.Adagrad, self.parameters(), {"lr": RATE})

        def forward(self, ids: Tensor) -> Tensor:
            lengths = torch.ones(ids.numel(), dtype=torch.int64)
            asked = KeyedJaggedTensor(list(FIELDS), ids.t().flatten(), lengths=lengths)
            rows: Tensor = self.bags(asked).values()
            return rows.view(len(ids), len(FIELDS), self.width)[..., : self.dim]

    torch.manual_seed(0)
    count, learned, unseen = numbered(folder)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    local, sharders = Local(Rows), get_default_sharders()
    kept = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={f"rows{dim}": kept for dim in (1, DIM)},
    )
    model = DistributedModelParallel(
        local,
        device=torch.device("cpu"),
        plan=planner.plan(local, sharders),
        sharders=sharders,
    )
    dense = torch.optim.Adam(model.module.deep.parameters())
    _alone(model, [dense], learned, unseen)
    dist.destroy_process_group()


# ---- ours ----


def example(number: int, trainers: int, endpoints: str, folder: str) -> None:
    """One trainer of the example; endpoints "": this process alone."""
    from trainer import fleet

    role = None
    if endpoints:
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
    torch.manual_seed(0)
    fleet.init(role)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    model = fleet.distributed_model(DeepFM(len(FIELDS), 0))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), strategy)
    datasets = {name: fleet.QueueDataset() for name in ("train", "test")}
    for name, dataset in datasets.items():
        dataset.init(batch_size=BATCH, parser=FORMATS["movielens"].lines())
        dataset.set_filelist([str(Path(folder) / f"{name}.tsv")])

    def epoch() -> None:
        model.train()
        learn(model, optimizer, datasets["train"], -1, Path(os.devnull))
        fleet.barrier_worker()
        optimizer.flush()

    answer(epoch, lambda: evaluate(model, datasets["test"]))
    fleet.finish()


ROLES: dict[str, Callable[..., None]] = {
    "movielens": example,
    "movielens_plain": plain,
    "movielens_torchrec": torchrec,
}
