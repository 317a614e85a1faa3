"""A trainer that is killed over the files of a dataset: each sample counts once an epoch.

Where trainers step together a trainer says which samples a step had when the servers have answered
it.  In an async job a step adds 1 to the weight of each of its samples.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.support.processes import Processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LENGTHS = (15, 3, 17, 6, 0, 25, 8, 13, 20)  # of the files, in samples
SAMPLES, EPOCHS = sum(LENGTHS), 2
LONG = pytest.mark.long
SHORT = {("shuffled", "sync", 0)}  # which stands for the others
SCRIPT = f"""
import json, os, signal, subprocess, sys, time
from pathlib import Path
import torch
from trainer import fleet


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros({SAMPLES}))

    def forward(self, x):
        return -self.weight[x].sum()


strategy = fleet.DistributedStrategy()
strategy.a_sync = sys.argv[1] == "async"
if strategy.a_sync:
    strategy.a_sync_configs = {{"send_queue_size": 1}}
fleet.init(strategy=strategy)
model = fleet.distributed_model(Weights())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
me, died, again = fleet.worker_index(), Path("died"), Path("again")
dies, awaited = sys.argv[3] == "dies", again if sys.argv[4] == "1" else died
first = not died.exists()
kind = sys.argv[2]
dataset = fleet.QueueDataset() if kind == "queue" else fleet.InMemoryDataset()
dataset.init(batch_size=2 if kind == "queue" else 5, use_var=[fleet.Slot("n")], thread_num=2)
dataset.set_filelist([f"part-{{n}}" for n in range({len(LENGTHS)})])
if kind != "queue":
    dataset.load_into_memory()
for epoch in range({EPOCHS}):
    if kind == "shuffled":
        dataset.global_shuffle()
    for number, batch in enumerate(dataset, 1):
        if dies and me == 1 and first and number == 3:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if me == 1 and not first:
            again.touch()
        while dies and strategy.a_sync and me != 1 and number == 2 and not awaited.exists():
            time.sleep(0.01)  # the others leave it its part
            optimizer.communicator.position.answer()
        model(batch["n"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", json.dumps([epoch, batch["n"].tolist()]), flush=True)
    if me == 0:
        server = os.environ["PSERVER_ENDPOINTS"].split(",")[0]
        status = [sys.executable, "-m", "pserver", "status", "--json", server]
        said = json.loads(subprocess.run(status, capture_output=True, check=True).stdout)
        print("epochs", json.dumps(said["servers"][0]["epochs"]), flush=True)
    fleet.barrier_worker()
optimizer.communicator.pull()
print("weights", sorted(set(model.weight.tolist())), flush=True)
fleet.finish()
"""


def run(
    processes: Processes, kind: str, mode: str, fate: str, restarts: int
) -> tuple[str, list[Counter[int]]]:
    """A job of three trainers: what it says, and by epoch the samples of the steps that were
    answered.
    """
    first = 0
    for file, length in enumerate(LENGTHS):
        lines = "".join(f"1 {n}\n" for n in range(first, first + length))
        (processes.path / f"part-{file}").write_text(lines)
        first += length
    (processes.path / "script.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "3", "--max-restarts", str(restarts))
    launch = ("-m", "pserver", "launch", *flags, "script.py", mode, kind, fate, str(restarts))
    started = processes.python("launch", *launch)
    status, text = started.status(patience=200), "\n".join(started.lines)

    assert status == 0, text
    accounts = [json.loads(each)[-1] for each in re.findall(r"epochs (\[.*\])", text)]
    assert len(accounts) == EPOCHS, text
    for each in accounts:
        assert each["samples"] == each["decided"], each
        assert each["unit"] != "samples" or each["samples"] == SAMPLES, each
        assert not (each["leased"] or each["skipped"] or each["left_out"]), each
    steps = [json.loads(each) for each in re.findall(r"step (\[\d, \[.*\]\])", text)]
    return text, [
        Counter(n for number, batch in steps if number == epoch for n in batch)
        for epoch in range(EPOCHS)
    ]


@pytest.mark.parametrize(
    ("kind", "mode", "restarts"),
    [
        pytest.param(kind, mode, restarts, marks=[] if (kind, mode, restarts) in SHORT else LONG)
        for kind in ("queue", "memory", "shuffled")
        for mode in ("sync", "async")
        for restarts in (0, 1)
    ],
)
def test_the_decided_steps_have_each_sample_of_the_files_once(
    processes: Processes, kind: str, mode: str, restarts: int
) -> None:
    """kill -9 of one of three trainers in its third step: what it leaves goes to the others, or to
    the process that takes its place; the next epoch is whole, too.
    """
    text, counted = run(processes, kind, mode, "dies", restarts)

    assert "trainer 1 failed with status 137" in text
    if mode == "async":
        weights = re.findall(r"weights \[(.*)\]", text)
        assert weights and set(weights) == {f"{float(EPOCHS)}"}, text
    else:
        assert counted == [Counter(range(SAMPLES))] * EPOCHS, text


@pytest.mark.long  # test_leased_files.py stands for it, in one process
@pytest.mark.parametrize("kind", ["memory", "shuffled"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_samples_in_memory_stay_there_while_nobody_is_lost(
    processes: Processes, kind: str, mode: str
) -> None:
    """No trainer reads a file again: each has leases for what it has in memory."""
    text, counted = run(processes, kind, mode, "lives", 0)

    assert counted == [Counter(range(SAMPLES))] * EPOCHS, text
    assert " again, which are leased" not in text
