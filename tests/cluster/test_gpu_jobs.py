"""Two trainers on GPUs, in processes of their own: what they train is what plain torch trains on
the CPU with the whole batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.devices import assert_near, cuda
from tests.support.launched import launched
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes]

SCRIPT = """
import sys
import torch
from trainer import Constant, DistributedEmbedding, fleet, row_optimizers
from transpiler import DistributedStrategy

mode, kind = sys.argv[1:]
device = kind
strategy = DistributedStrategy()
strategy.a_sync_configs = {"modes": {"emb*": "sync", "*": mode}}
fleet.init(strategy=strategy)
if kind == "cuda":
    device = f"cuda:{fleet.worker_index() % torch.cuda.device_count()}"
torch.manual_seed(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        own = row_optimizers.SGD(lr=0.1)
        self.emb = DistributedEmbedding(4, num_embeddings=20, optimizer=own, init=Constant(0.5))
        self.dense = torch.nn.Linear(12, 3)

    def forward(self, ids):
        return self.dense(self.emb(ids).flatten(1)).square().mean()

model = fleet.distributed_model(Net().to(device))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
optimizer = fleet.distributed_optimizer(sgd)
generator = torch.Generator().manual_seed(2)
for step in range(10):
    ids = torch.randint(0, 20, (8, 3), generator=generator)
    model(ids[fleet.worker_index() :: 2].to(device)).backward()
    optimizer.step()
    optimizer.zero_grad()
assert {each.device.type for each in model.dense.parameters()} == {device.partition(":")[0]}
if fleet.is_first_worker():
    with torch.no_grad():
        rows = model.emb(torch.arange(20, device=device)).cpu()
    torch.save({"rows": rows, "dense": model.dense.cpu().state_dict()}, "model.pt")
fleet.finish()
"""


class Whole(nn.Module):
    """The same model in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(12, 3)
        self.emb = nn.Embedding.from_pretrained(torch.full((20, 4), 0.5), freeze=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.dense(self.emb(ids).flatten(1)).square().mean()
        return loss


@pytest.mark.parametrize("device", [RARE("cpu"), pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("mode", ["sync", "collective"])
def test_two_trainers_equal_plain_training(tmp_path: Path, mode: str, device: str) -> None:
    """On servers, where they may share a GPU; and with the dense layer averaged among them."""
    if (mode, device) == ("collective", "cuda") and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one trainer on each GPU, and there is one GPU")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    launched(tmp_path, "2 x 2", "train.py", mode, device)

    model = Whole()
    rows = torch.optim.SGD(model.emb.parameters(), lr=0.1)
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        ids = torch.randint(0, 20, (8, 3), generator=generator)
        model.zero_grad()
        model(ids).backward()
        rows.step()
        dense.step()
    found, saved = Whole(), torch.load(tmp_path / "model.pt")
    found.dense.load_state_dict(saved["dense"])
    found.emb.weight.data.copy_(saved["rows"])
    assert_near(found, model)
    assert not torch.equal(found.emb.weight, Whole().emb.weight)
