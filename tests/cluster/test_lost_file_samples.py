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

LENGTHS = (10, 3, 17, 1, 0, 25, 8, 8, 20, 9)  # of the files, in samples
SAMPLES, EPOCHS = sum(LENGTHS), 2
SCRIPT = f"""
import json, os, signal, subprocess, sys
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
me, died, seen = fleet.worker_index(), Path("died"), Path("seen")
first = not died.exists()
dataset = fleet.QueueDataset()
dataset.init(batch_size=3, use_var=[fleet.Slot("n")], thread_num=2)
dataset.set_filelist([f"part-{{n}}" for n in range({len(LENGTHS)})])
for epoch in range({EPOCHS}):
    for number, batch in enumerate(dataset, 1):
        if me == 1 and first and epoch == 0 and number == 3:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
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


@pytest.mark.parametrize(
    ("mode", "restarts"),
    [
        ("sync", 0),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("sync", 1), ("async", 0), ("async", 1))
        ),
    ],
)
def test_the_decided_steps_have_each_sample_of_the_files_once(
    processes: Processes, mode: str, restarts: int
) -> None:
    """kill -9 of one of three trainers in its third step: what it leaves goes to the others, or to
    the process that takes its place; the next epoch is whole, too.
    """
    first = 0
    for file, length in enumerate(LENGTHS):
        lines = "".join(f"1 {n}\n" for n in range(first, first + length))
        (processes.path / f"part-{file}").write_text(lines)
        first += length
    (processes.path / "script.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "3", "--max-restarts", str(restarts))
    started = processes.python("launch", "-m", "pserver", "launch", *flags, "script.py", mode)
    status, lines = started.status(patience=200), started.lines
    text = "\n".join(lines)

    assert status == 0, text
    assert "trainer 1 failed with status 137" in text
    accounts = [json.loads(each)[-1] for each in re.findall(r"epochs (\[.*\])", text)]
    assert len(accounts) == EPOCHS, text
    for each in accounts:
        assert each["samples"] == each["decided"] == SAMPLES, each
        assert not (each["leased"] or each["skipped"] or each["left_out"]), each
    if mode == "async":
        weights = re.findall(r"weights \[(.*)\]", text)
        assert weights and set(weights) == {f"{float(EPOCHS)}"}, text
        return
    steps = [json.loads(each) for each in re.findall(r"step (\[\d, \[.*\]\])", text)]
    for epoch in range(EPOCHS):
        counted = Counter(n for number, batch in steps if number == epoch for n in batch)
        assert counted == Counter(range(SAMPLES)), (epoch, text)
