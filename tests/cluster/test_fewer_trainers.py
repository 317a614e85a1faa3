"""A job without servers goes on from its checkpoint with the trainers that are left: under
``launch --nccl2 --max-restarts``, and under torchrun's agents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from torch.distributed import TCPStore

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES, EPOCHS = 24, 2
# a step adds the mean of the trainers' samples to the only weight
SCRIPT = f"""
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from trainer import fleet

death, victims = sys.argv[1:]
place = f"{{os.environ['RANK']}} of {{os.environ['WORLD_SIZE']}}"

def dies():
    if victims == "agents":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

if death == f"{{place}} at its start":
    dies()
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(1, 1, bias=False))
torch.nn.init.zeros_(model.weight)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
for epoch in range({EPOCHS}):
    for x in fleet.shard(DataLoader(torch.arange({SAMPLES}.0), shuffle=True)):
        (-model(x[:, None])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("trained", optimizer.steps, place, epoch, int(x), flush=True)
        if death == f"{{place}} after {{optimizer.steps}}":
            dies()
print("weight", model.weight.item(), flush=True)
fleet.finish()
"""
SAVES = {"PSERVER_CHECKPOINT": "saved", "PSERVER_CHECKPOINT_EVERY": "0.000001"}


def check(lines: Iterable[str], counts: Iterable[str]) -> None:
    """The checkpoint's steps and those of the last start are all that counts: they have every
    sample once in an epoch, and give the weight.

    Args:
        counts: by start of the job, the last word of its trainers' places: "3".
    """
    # without the end of a log that launch's report repeats
    text = "\n".join(line for line in lines if "launch:     " not in line)
    saved = {int(step) for step in re.findall(r"continues from \S+, after (\d+) steps", text)}
    assert len(saved) <= 1, text
    before = saved.pop() if saved else 0
    *_, last = counts
    samples, weight = [list[int]() for _ in range(EPOCHS)], 0.0
    for step, trainers, epoch, sample in re.findall(r"trained (\d+) \d+ of (\d) (\d) (\d+)", text):
        if (int(step) <= before) == (trainers != last):
            samples[int(epoch)].append(int(sample))
            weight += int(sample) / int(trainers)

    assert [sorted(epoch) for epoch in samples] == [list(range(SAMPLES))] * EPOCHS, text
    weights = re.findall(r"weight (\S+)", text)
    assert [float(each) for each in weights] == [pytest.approx(weight)] * int(last), text
    assert set(re.findall(r"of (\d)", " ".join(re.findall("trained.*", text)))) == {*counts}, text


@pytest.mark.parametrize(
    ("trainers", "death", "restarts", "said", "counts"),
    [
        (
            "2:3",
            "2 of 3 after 5",
            1,
            ["the place of trainer 2 stays empty: starts the job again with 2 trainers (restart 1"],
            ["3", "2"],
        ),
        RARE(
            "3",
            "1 of 3 at its start",
            2,
            ["starts the job again (restart 1 of 2)", "the place of trainer 1 stays empty: starts"],
            ["2"],
        ),
    ],
)
def test_a_job_goes_on_without_a_place_that_does_not_come_back(
    processes: Processes,
    trainers: str,
    death: str,
    restarts: int,
    said: list[str],
    counts: list[str],
) -> None:
    """At once with MIN:MAX, otherwise when it has died twice in a row at its start; the steps up
    to the checkpoint stay, and the rest of the data is dealt anew.
    """
    (processes.path / "fewer.py").write_text(SCRIPT)
    flags = ("--nccl2", "--trainers", trainers, "--max-restarts", str(restarts))
    launch = ("-m", "pserver", "launch", *flags, "fewer.py", death, "trainers")
    started = processes.python("launch", *launch, GLOO_SOCKET_IFNAME="lo", **SAVES)

    assert started.status(patience=200) == 0, started
    text = "\n".join(started.lines)
    assert [words for words in said if words not in text] == [], text
    check(started.lines, counts)


@pytest.mark.long
def test_a_job_of_torchruns_agents_goes_on_without_a_host_that_dies(processes: Processes) -> None:
    """With ``--nnodes MIN:MAX`` torch's own agents, one a host, start the others again.  Where they
    meet is a host that lives.
    """
    (processes.path / "fewer.py").write_text(SCRIPT)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}")
    times = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
    quick = ("--rdzv-conf", f"is_host=false,{times}")
    hosts = ("--nnodes", "2:3", "--nproc-per-node", "1", "--local-addr", "127.0.0.1")
    script = ("--max-restarts", "3", "fewer.py", "2 of 3 after 5", "agents")
    torchrun = ("-m", "torch.distributed.run", *hosts, *meeting, *quick, *script)
    agents = [
        processes.python(f"host {number}", *torchrun, GLOO_SOCKET_IFNAME="lo", **SAVES)
        for number in range(3)
    ]
    statuses = sorted(agent.status(patience=200) for agent in agents)

    assert statuses == [-9, 0, 0], "\n".join(line for each in agents for line in each.lines)
    check([line for agent in agents for line in agent.lines], ["3", "2"])
