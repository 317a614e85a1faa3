"""fleet.shard in real jobs, with servers and without: each sample once, on through a restart, and
an error where the trainers draw differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os, random, sys
import torch
from trainer import fleet

class Own(torch.utils.data.Sampler):
    def __init__(self, key): self.key = key
    def __len__(self): return 24
    def __iter__(self): return iter(sorted(range(24), key=self.key))

kind, path, resumes = sys.argv[1:]
sampler = Own(lambda _: random.random()) if kind == "random" else Own(lambda _: os.urandom(8))
loader = torch.utils.data.DataLoader(torch.arange(24), 4, sampler=sampler)
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
if resumes == "resumes":
    fleet.load(path)
for _ in range(2):
    seen = []
    for x in fleet.shard(loader):
        model(x.float()[:, None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += x.tolist()
    print("seen", json.dumps(seen), flush=True)
fleet.save(path)
fleet.finish()
"""
LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "servers": ("--trainers", "2", "--servers", "1"),
    "collective": ("--nccl2", "--trainers", "2"),
}


def run(processes: Processes, job: str, kind: str, resumes: str) -> tuple[int, list[str]]:
    """A job of two trainers: its exit code and what it said."""
    (processes.path / "sharded.py").write_text(SCRIPT)
    launch = ("-m", "pserver", "launch", *LAUNCHES[job], "sharded.py")
    started = processes.python(
        f"{kind} {resumes}", *launch, kind, "saved", resumes, GLOO_SOCKET_IFNAME="lo"
    )
    return started.status(), started.lines


def seen(lines: list[str]) -> list[list[int]]:
    """The samples of each pass, of both trainers."""
    by_trainer: dict[str, list[list[int]]] = {}
    for line in lines:
        trainer, _, words = line.partition(" | ")
        if words.startswith("seen"):
            by_trainer.setdefault(trainer.strip(), []).append(json.loads(words[len("seen") :]))
    assert len(by_trainer) == 2, lines
    return [one + other for one, other in zip(*by_trainer.values(), strict=True)]


@pytest.mark.long  # tests/trainer/job/test_data_shard.py stands for it
@pytest.mark.parametrize("job", ["servers", RARE("collective")])
def test_each_process_gets_its_own_samples_also_after_a_restart(
    processes: Processes, job: str
) -> None:
    """A sampler on random's generator, which each process seeds otherwise: four passes, the last
    two of a resumed job, are partitions in four orders.
    """
    found = []
    for resumes in ("", "resumes"):
        status, lines = run(processes, job, "random", resumes)
        assert status == 0, lines
        found += seen(lines)

    assert [sorted(samples) for samples in found] == [list(range(24))] * 4
    assert len(set(map(tuple, found))) == 4


@pytest.mark.parametrize("job", [RARE("servers"), "collective"])
def test_trainers_that_draw_differently_are_told(processes: Processes, job: str) -> None:
    """The job fails in its first pass, and says what to write instead."""
    status, lines = run(processes, job, "system", "")

    assert status != 0
    assert any("Own must draw alike in every process" in line for line in lines), lines
