"""Processes that are stopped for longer than the heartbeat timeout, and continued: with real
processes.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

HEARTBEAT, STOPPED = 3.0, 7.0
SCRIPT = """
import sys, threading
import torch
from trainer import fleet

configs = {"sync": None, "async": {}, "geo": {"k_steps": 4}}.get(sys.argv[1])
strategy = fleet.DistributedStrategy()
strategy.a_sync, strategy.a_sync_configs = configs is not None, configs or {}
collective = sys.argv[1] == "collective"
fleet.init(is_collective=collective) if collective else fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
enough = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), enough.set()), daemon=True).start()
step, over = 0, False
while not over:
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 5:
        print("trains", flush=True)
    over = enough.is_set() if len(sys.argv) > 2 else any(fleet.all_gather_object(enough.is_set()))
    enough.wait(0.02)
fleet.finish()
print("finished", flush=True)
"""

pytestmark = pytest.mark.processes


def begun(processes: Processes, script: str, mode: str, *more: str) -> list[Started]:
    """Servers, if the mode has some, and two trainers that train."""
    if mode == "collective":
        port = str(_free_port())
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        trainers = [
            processes.python(
                f"trainer {n}",
                *(script, mode, *more),
                **ranks,
                **{"RANK": str(n), "LOCAL_RANK": str(n), "LOCAL_WORLD_SIZE": "2"},
                PSERVER_HEARTBEAT_TIMEOUT=str(HEARTBEAT),
            )
            for n in (0, 1)
        ]
    else:
        servers = processes.servers(2, HEARTBEAT, "--once")
        trainers = processes.trainers(2, [e for _, e in servers], HEARTBEAT, script, mode, *more)
    for trainer in trainers:
        trainer.said("trains")
    return trainers


def _free_port() -> int:
    from pserver.launcher.cluster import free_port

    return free_port()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Of the script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("mode", ["sync", RARE("async"), RARE("geo"), RARE("collective")])
def test_a_job_that_is_stopped_and_continued_goes_on(
    processes: Processes, path: str, mode: str
) -> None:
    """As by a laptop's lid: all of it, in any order, and continued one after the other; nobody is
    blamed for what no process has run.
    """
    trainers = begun(processes, path, mode)
    for order, number in ((1, signal.SIGSTOP), (2, signal.SIGCONT)):
        for each in random.Random(order).sample(processes.all, len(processes.all)):
            each.send(number)
            time.sleep(0.7 if number == signal.SIGCONT else 0.0)  # what takes the time is tested
        time.sleep(STOPPED if number == signal.SIGSTOP else 0.0)
    trainers[0].tell("enough")

    for each in processes.all:
        assert each.status() == 0, processes.all


def test_a_trainer_that_wakes_says_that_it_was_away(processes: Processes, path: str) -> None:
    """When the others have lost it meanwhile; not that a server was."""
    trainers = begun(processes, path, "async", "apart")
    trainers[1].send(signal.SIGSTOP)
    processes.all[0].said("trainer 1 has sent no heartbeat")
    trainers[1].send(signal.SIGCONT)
    told = trainers[1].said(r"^pserver\.errors\.(\w+): (.*)")
    trainers[0].tell("enough")

    assert told[1] == "TrainerLost", told[0]
    assert "did not run for" in told[2] or "trainer 1 has sent no heartbeat" in told[2]
    assert [trainer.status() for trainer in trainers] == [0, 1], processes.all
    assert not [line for line in trainers[1].lines if "ServerLost" in line]


@pytest.mark.long
def test_a_short_stop_is_nothing(processes: Processes, path: str) -> None:
    """Below the heartbeat timeout."""
    trainers = begun(processes, path, "async", "apart")
    trainers[1].send(signal.SIGSTOP)
    time.sleep(HEARTBEAT / 2)  # what takes the time is tested
    trainers[1].send(signal.SIGCONT)
    for each in trainers:
        each.tell("enough")

    assert [trainer.status() for trainer in trainers] == [0, 0], processes.all
