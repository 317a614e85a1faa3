"""An evaluation that is divided among two trainers: they decide alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.processes import Processes
from tests.support.tiers import RARE
from trainer.metrics import auc

pytestmark = pytest.mark.processes

SCRIPT = """
import json
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset
from trainer import fleet
from trainer.metrics import AUC

fleet.init()
generator = torch.Generator().manual_seed(0)
x = torch.randn(900, 4, generator=generator)
y = (x.sum(1) + torch.randn(900, generator=generator) > 0).float()
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
found, own = [], []
best = since = 0.0
for epoch in range(12):
    for inputs, labels in fleet.shard(DataLoader(TensorDataset(x[:600], y[:600]), batch_size=50)):
        binary_cross_entropy_with_logits(model(inputs)[:, 0], labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole, part = AUC(exact=True), []
    with torch.no_grad():
        for inputs, labels in fleet.shard(DataLoader(TensorDataset(x[600:], y[600:]), 70)):
            whole.update(model(inputs), labels)
            part.append((model(inputs)[:, 0], labels))
    value = whole.compute()
    scheduler.step(value)
    fleet.report(auc=value)
    found.append([value, optimizer.param_groups[0]["lr"]])
    best, since = (value, 0) if value > best + 1e-3 else (best, since + 1)
    if since == 3:
        break
scores = torch.cat(fleet.all_gather(torch.cat([scores for scores, _ in part])))
labels = torch.cat(fleet.all_gather(torch.cat([labels for _, labels in part])))
print("found", json.dumps([found, scores.tolist(), labels.tolist()]), flush=True)
fleet.finish()
"""


@pytest.mark.parametrize("flags", [("--nccl2",), RARE(("--servers", "1"))], ids=" ".join)
def test_trainers_decide_alike(processes: Processes, flags: tuple[str, ...]) -> None:
    """The same AUC, rate and last epoch, to the bit; the AUC is that of all held-out samples."""
    (processes.path / "evaluated.py").write_text(SCRIPT)
    launch = ("-m", "pserver", "launch", "--trainers", "2", *flags, "evaluated.py")
    started = processes.python("launch", *launch, GLOO_SOCKET_IFNAME="lo")
    assert started.status() == 0, started
    said = [line.partition("found ")[2] for line in started.lines if "| found " in line]
    (found, scores, labels), other = (json.loads(line) for line in said)

    assert other == [found, scores, labels]
    rates: list[Any] = [rate for _, rate in found]
    assert len(found) < 12 and rates == sorted(rates, reverse=True) and rates[-1] < 1.0
    assert len(labels) == 300
    assert found[-1][0] == auc(torch.tensor(scores), torch.tensor(labels), exact=True)
