"""Leases in real jobs: each sample counts once an epoch, whoever trains on it."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = pytest.mark.processes

SCRIPT = """
import json, sys
import torch
from trainer import fleet

every, workers = int(sys.argv[1]), int(sys.argv[2])
strategy = fleet.DistributedStrategy()
fleet.init(strategy=strategy)
loader = torch.utils.data.DataLoader(torch.arange(203), 4, shuffle=True, num_workers=workers)
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
for _ in range(3):
    seen = []
    for number, x in enumerate(fleet.shard(loader), 1):
        model(x.float()[:, None]).mean().backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        seen += x.tolist()
    print("seen", json.dumps(seen), flush=True)
fleet.finish()
"""


@pytest.mark.long  # test_restarted_trainers, and test_sample_leases.py in one process, stand for it
@pytest.mark.parametrize(("every", "workers"), [RARE(1, 0), (3, 2)])
def test_trainers_share_each_epoch_s_samples(
    processes: Processes, every: int, workers: int
) -> None:
    """An async job of 2 servers and 2 trainers: every sample goes to one trainer, in each epoch,
    also where gradients are accumulated and where workers draw ahead.
    """
    (processes.path / "leased.py").write_text(SCRIPT)
    launch = ("-m", "pserver", "launch", "--servers", "2", "--trainers", "2", "leased.py")
    started = processes.python("leased", *launch, str(every), str(workers))
    status, lines = started.status(), started.lines
    passes: list[list[int]] = [[], [], []]
    for trainer in "0", "1":
        said = [
            line for line in lines if line.startswith(f"trainer {trainer} ") and "| seen" in line
        ]
        assert len(said) == 3, lines
        for number, line in enumerate(said):
            passes[number] += json.loads(line.partition("seen ")[2])

    assert status == 0
    assert [sorted(each) for each in passes] == [list(range(203))] * 3
