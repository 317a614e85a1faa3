"""Datasets in real jobs: each file has one trainer, samples change trainers, a trainer that dies is
noticed, and a job that is started again goes on at the same samples.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from trainer import fleet
from trainer.data.exchange import SampleExchange

def die():
    os.kill(os.getpid(), signal.SIGKILL)

fate, kind = sys.argv[1:]
fleet.init()
rank = fleet.worker_index()
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
dataset = getattr(fleet, kind)()
dataset.init(batch_size=4, use_var=[fleet.Slot("id")])
dataset.set_filelist([f"part-{n}" for n in range(5)])
if kind == "InMemoryDataset":
    dataset.load_into_memory()
for epoch in range(2):
    if kind == "InMemoryDataset":
        dataset.global_shuffle()
        assert dataset.get_memory_data_size(everywhere=True) == 50
    for batch in dataset:
        model(batch["id"].float()[:, None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("seen", json.dumps([epoch, batch["id"].tolist()]), flush=True)
        if fate == "dies once" and (rank, optimizer.steps) == (1, 9) and not Path("died").exists():
            Path("died").touch()
            die()
if fate == "dies in the exchange":
    whole = SampleExchange._swapped
    if rank == 1:
        SampleExchange._swapped = lambda *_: die()
    try:
        dataset.global_shuffle()
    except Exception as error:
        print("raised", type(error).__name__, dataset.get_memory_data_size(), error, flush=True)
        os._exit(3)
fleet.finish()
"""
JOBS = {"servers": ("--servers", "1"), "collective": ("--nccl2",)}


def run(processes: Processes, job: str, fate: str, kind: str, *flags: str) -> tuple[int, list[str]]:
    """A job of two trainers: its exit status, and what they said."""
    for index in range(5):
        text = "".join(f"1 {index * 10 + n}\n" for n in range(10))
        (processes.path / f"part-{index}").write_text(text)
    (processes.path / "script.py").write_text(SCRIPT)
    launch = ("-m", "pserver", "launch", "--trainers", "2", *JOBS[job], *flags, "script.py")
    started = processes.python(f"{fate}{flags}", *launch, fate, kind, GLOO_SOCKET_IFNAME="lo")
    return started.status(patience=200), started.lines


def seen(lines: list[str]) -> dict[tuple[str, int], list[list[int]]]:
    """The batches of each trainer and epoch."""
    found: dict[tuple[str, int], list[list[int]]] = {}
    for line in lines:
        trainer, _, words = line.partition(" | ")
        if words.startswith("seen"):
            epoch, batch = json.loads(words.removeprefix("seen"))
            found.setdefault((trainer.strip(), epoch), []).append(batch)
    return found


@pytest.mark.parametrize("job", ["servers", RARE("collective")])
def test_samples_change_trainers_until_one_dies(processes: Processes, job: str) -> None:
    """Each epoch every sample is on one trainer, another one than before for many, and both have
    equally many batches; when one dies in an exchange the other's call raises, and loses nothing.
    """
    flags = ("--heartbeat-timeout", "3") if job == "servers" else ()
    status, lines = run(processes, job, "dies in the exchange", "InMemoryDataset", *flags)
    assert status != 0, lines
    found = seen(lines)

    epochs = [[sum(found[f"trainer {rank}", n], []) for rank in (0, 1)] for n in (0, 1)]
    for first, second in epochs:
        assert sorted(first + second) == list(range(50))
    assert 5 < len({*epochs[0][0]} & {*epochs[1][0]}) < len(epochs[0][0]) - 5
    counts = {key: len(batches) for key, batches in found.items()}
    assert counts["trainer 0", 0] == counts["trainer 1", 0]
    assert all(1 <= len(batch) <= 4 for batches in found.values() for batch in batches)

    said = next(line for line in lines if "raised" in line)
    kind, size = said.partition("raised ")[2].split()[:2]
    assert kind in ("TrainerLost", "JobFailed") and int(size) == len(epochs[1][0]), said
    assert "trainer 1" in said


@pytest.mark.parametrize("kind", [RARE("InMemoryDataset"), RARE("QueueDataset")])
def test_a_job_started_again_goes_on_at_the_same_samples(processes: Processes, kind: str) -> None:
    """After a trainer's death both have, all in all, the batches of a job in which none dies."""
    status, lines = run(processes, "servers", "lives", kind)
    assert status == 0, lines
    expected = seen(lines)
    saving = ("--checkpoint", "saved", "--every", "0.01", "--max-restarts", "1")
    status, lines = run(processes, "servers", "dies once", kind, *saving)
    assert status == 0, lines
    found = seen(lines)

    assert Path(processes.path, "died").exists() and found.keys() == expected.keys()
    for key, batches in found.items():
        once = [batch for n, batch in enumerate(batches) if batch not in batches[:n]]
        assert once == expected[key], key
        assert len(batches) - len(once) <= 2, "what was saved is not given again"
