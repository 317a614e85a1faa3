"""A script as a user writes it, with annotations: no type checker complains, and it runs."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pserver.lr
from pserver import BuildStrategy, DistributedEmbedding, DistributeTranspilerConfig, fleet
from pserver.metrics import AUC
from pserver.nn.functional import string_ids
from transpiler.strategy.fields import ASyncConfigs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = DistributedEmbedding(4, num_embeddings=100, pooling="mean")
        self.dense = nn.Linear(4, 1)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.words(ids))
        return found.squeeze(1)


def strategy_of(steps: int) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": steps, "outer_optimizer": {"type": "nesterov"}}
    strategy.a_sync_configs = {**strategy.a_sync_configs, "merge": "mean", "embeddings": ("emb.*",)}
    configs: ASyncConfigs = {"modes": {"emb.*": "async", "*": "sync"}}
    configs["staleness"] = None
    strategy.a_sync_configs = configs
    strategy.gradient_merge_configs = {"k_steps": 2, "avg": "sum"}
    strategy.hybrid_configs = {"order": ["dp", "pp", "sharding", "sep", "mp"]}
    strategy.amp_configs = {"init_loss_scaling": 1024}
    build = BuildStrategy()
    build.enable_inplace = True
    strategy.build_strategy = build
    strategy.execution_strategy = {"num_threads": 2}
    sync: bool = not strategy.a_sync
    names: list[str] = strategy.recompute_configs["checkpoints"]
    print(sync, names, strategy.a_sync_configs["k_steps"] + 1)
    return strategy


def batches() -> Iterable[int]:
    yield 1


print(strategy_of(10))
fleet.init()
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
scheduler = pserver.lr.WarmupLR(torch.optim.lr_scheduler.StepLR(optimizer, 2), 1)
loader = fleet.shard(DataLoader(TensorDataset(torch.ones(4, 2).long()), batch_size=2))
area = AUC()
print(len(loader))
for (ids,) in loader:
    logits = model.logits(ids)
    area.update(torch.sigmoid(logits), torch.tensor([0.0, 1.0]))
    logits.sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
hashes: torch.Tensor = string_ids(["Nike"])
number: int = next(iter(fleet.shard([1, 2])))
for number in fleet.shard(batches()):
    print(number)
value: float = area.compute()
config = DistributeTranspilerConfig()
config.min_block_size = 16
print(fleet.worker_num() + 1, value)
fleet.finish()
