"""``launch --record-log`` with real processes: what ``pserver replay`` gives is what the servers
held, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.checkpoint import checkpoint
from tests.support.processes import Processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = """
import sys
import torch
from trainer import CountFilterEntry, DistributedEmbedding, fleet
from transpiler import DistributedStrategy

mode = sys.argv[1]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = DistributedEmbedding(4, name="rows", entry=CountFilterEntry(2))
        self.out = torch.nn.Sequential(
            torch.nn.Linear(4, 9000), torch.nn.Tanh(), torch.nn.Linear(9000, 1)
        )

    def forward(self, ids):
        return self.out(self.rows(ids))

strategy = DistributedStrategy()
strategy.a_sync = mode != "sync"
if mode == "dc":
    strategy.a_sync_configs = {"dc_asgd": 0.1}
if mode.startswith("diloco"):  # the states of both optimizers have one name, or there are counts
    outer = {"type": "adam"} if "adam" in mode else {"type": "nesterov", "momentum": 0.9}
    strategy.a_sync_configs = {"k_steps": 2, "outer_optimizer": {**outer, "lr": 0.5}}
fleet.init(strategy=strategy)
torch.manual_seed(fleet.worker_index())
model = fleet.distributed_model(Net())
if mode.startswith("diloco"):
    rule = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
else:
    rule = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = fleet.distributed_optimizer(rule)
for step in range(12):
    (model(torch.randint(0, 50, (16,))) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        fleet.save("middle")
fleet.save("end")
fleet.finish()
"""

# tables so large that eviction searches a sample of each server's rows
LARGE = """
import sys
import torch
from trainer import DistributedEmbedding, fleet
from transpiler import DistributedStrategy

strategy = DistributedStrategy()
strategy.a_sync = True
fleet.init(strategy=strategy)
torch.manual_seed(fleet.worker_index())
rows = DistributedEmbedding(4, name="rows", capacity=34_000, eviction=sys.argv[1])
model = fleet.distributed_model(torch.nn.Sequential(rows, torch.nn.Linear(4, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
for step in range(10):
    (model(torch.randint(0, 60_000, (9000,))) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4:
        fleet.save("middle")
fleet.save("end")
fleet.finish()
"""


def held(path: Path) -> dict[str, np.ndarray]:
    """All that a checkpoint has, rows in the order of their ids."""
    reader = checkpoint.reading(path)
    found: dict[str, np.ndarray] = {
        name: tensor.numpy() for name, tensor in reader.tensors().items()
    }
    for table in reader.tables:
        chunks: list[Any] = list(reader.chunks(table))
        for column in {name for chunk in chunks for name in chunk}:
            ids = "waiting.ids" if column.startswith("waiting.") else "ids"
            some = [chunk for chunk in chunks if column in chunk]
            order = np.argsort(np.concatenate([chunk[ids] for chunk in some]))
            found[f"{table}@{column}"] = np.concatenate([chunk[column] for chunk in some])[order]
    return found


def check_same(one: Path, other: Path, *but: str) -> None:
    """Two checkpoints have the same bits, but for what trainers have added to the first."""
    mine, theirs = held(one), held(other)
    mine = {name: each for name, each in mine.items() if not name.startswith(but)}
    assert mine

    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()] == []


def run(processes: Processes, name: str, *words: str) -> list[str]:
    """Runs ``pserver`` to its end, which has to be a good one."""
    started = processes.python(name, "-m", "pserver", *words)
    assert started.status(patience=200) == 0, f"{started}"
    return started.lines


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync", "dc", "diloco", "diloco adam"])
def test_a_replay_gives_what_the_servers_held(processes: Processes, mode: str) -> None:
    """Two servers, two trainers, Adam and a table whose rows wait: from the beginning, and from a
    checkpoint of ``fleet.save`` in the middle; in DiLoCo the outer optimizer's states, too.
    """
    (processes.path / "train.py").write_text(SCRIPT)
    cluster = ("--servers", "2", "--trainers", "2", "--record-log", "log", "--no-panel")
    run(processes, "launch", "launch", *cluster, "train.py", mode)
    said = run(processes, "replay", "replay", "log", "--to", "whole")
    later = run(processes, "later", "replay", "log", "--from", "middle", "--to", "later")

    every = 6 if "diloco" in mode else 12  # exchanges, or steps
    for line, each in ((said[-1], every), (later[-1], every // 2)):
        assert f"{2 * each} steps (trainer 0 {each}, trainer 1 {each}) on 2 servers" in line
    of_trainers = ("state/", "rows@trainer@") if "diloco" in mode else ()
    for replayed in ("whole", "later"):
        check_same(processes.path / "end", processes.path / replayed, *of_trainers)
    outer = [name for name in held(processes.path / "whole") if name.startswith("server/")]
    assert bool(outer) is ("diloco" in mode)


@pytest.mark.long  # test_replay.py, and test_restarted_servers.py, stand for it
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_replay_evicts_the_rows_that_the_servers_evicted(
    processes: Processes, eviction: str
) -> None:
    """From a checkpoint on, too, in tables of more rows than are all searched: which rows go does
    not follow from where they lie.
    """
    (processes.path / "train.py").write_text(LARGE)
    cluster = ("--servers", "2", "--trainers", "2", "--record-log", "log", "--no-panel")
    run(processes, "launch", "launch", *cluster, "train.py", eviction)
    run(processes, "replay", "replay", "log", "--to", "whole")
    run(processes, "later", "replay", "log", "--from", "middle", "--to", "later")

    evicted = [
        checkpoint.reading(processes.path / name).meta["tables"]["rows"]["table"]["counts"][
            "evicted"
        ]
        for name in ("middle", "end", "whole", "later")
    ]
    assert 0 < evicted[0] < evicted[1] - 1000 and evicted[1:] == evicted[1:2] * 3
    for replayed in ("whole", "later"):
        check_same(processes.path / "end", processes.path / replayed)


@pytest.mark.long  # the test before, and tests/trainer/job/test_part_saves.py, stand for it
def test_a_replay_from_a_checkpoint_of_which_servers_wrote_parts(processes: Processes) -> None:
    """A job that saves by itself, and whose servers write their parts."""
    (processes.path / "train.py").write_text(SCRIPT)
    saves = ("--checkpoint", "saved", "--every", "0.5", "--keep", "20")
    cluster = ("--servers", "2", "--trainers", "2", "--record-log", "log", "--no-panel")
    run(processes, "launch", "launch", *cluster, *saves, "train.py", "async")
    found = sorted((processes.path / "saved").glob("step-*/checkpoint.json"))

    assert found
    for number, start in enumerate(found[:3]):
        words = ("log", "--from", str(start.parent), "--to", f"to-{number}")
        run(processes, f"replay-{number}", "replay", *words)
        check_same(processes.path / "end", processes.path / f"to-{number}")
