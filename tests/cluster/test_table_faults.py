"""Tables when processes die in the middle of a step: who is left learns who it was, and a job that
was saved goes on to the bit.

Servers and trainers are real processes; what two trainers have trained they print as a digest of
every bit.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.load import scaled
from tests.support.processes import Processes, Started

DEADLINE = 3.0
KNOWN_WITHIN = DEADLINE + 15.0
FOREVER = "0-1000000000"

SCRIPT = """
import hashlib, os, signal, sys, time
import torch
from pserver.wire_pb2 import LoadRequest, SaveRequest
from trainer import DistributedEmbedding, Normal, fleet, row_optimizers

jobs, fault, path, *pids = sys.argv[1:]  # jobs: FIRST-LAST steps, one after the other

def at_fault(optimizer, what, call):
    '''Trainer 1 strikes in its fifth step: when it has sent rows and has not committed it, or when
    it looks up those of it.'''
    def calling(*arguments):
        if fleet.worker_index() == 1 and optimizer.steps == 4 and fault == what:
            print("fault at", time.monotonic(), flush=True)
            os.kill(int(pids[0]) if pids else os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return calling

def step(number, model, optimizer):
    generator = torch.Generator().manual_seed(100 * number + fleet.worker_index())
    ids = torch.randint(0, 40, (30,), generator=generator)
    optimizer.zero_grad()
    model.fc(torch.cat([model.emb(ids), model.other(ids * 7)], 1)).square().sum().backward()
    optimizer.step()

def own_files(model, optimizer):
    '''Saved by the servers themselves; what is trained then is undone when they load it.'''
    def all_servers(call, request):
        fleet.barrier_worker()
        for client in optimizer.communicator.clients if fleet.worker_index() == 0 else ():
            getattr(client._control, call)(request(session=client._reply.session, path="kept"))
        fleet.barrier_worker()
    all_servers("save", SaveRequest)
    for number in range(2):
        step(1000 + number, model, optimizer)
    all_servers("load", LoadRequest)
    optimizer.communicator.pull()

def job(first, last):
    torch.manual_seed(1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"lost_trainer": "stop"}
    fleet.init(strategy=strategy)
    model = torch.nn.Module()
    rule = row_optimizers.Adagrad(lr=0.1)
    model.emb = DistributedEmbedding(8, init=Normal(0, 0.1), optimizer=rule)
    model.other = DistributedEmbedding(4, seed=2)
    model.fc = torch.nn.Linear(12, 1)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    communicator = optimizer.communicator
    communicator.close_step = at_fault(optimizer, "in a step", communicator.close_step)
    lookups = communicator.lookups
    lookups.pull_all = at_fault(optimizer, "in a lookup", lookups.pull_all)
    if first:
        assert fleet.load(path) == first
    for number in range(first, last):
        step(number, model, optimizer)
        if path and number == 2:
            own_files(model, optimizer) if fault == "none" else fleet.save(path)
    with torch.no_grad():
        ids = torch.arange(40)
        parts = (model.emb(ids), model.other(ids * 7), *model.fc.parameters())
        found = torch.cat([part.flatten() for part in parts])
    print("trained", hashlib.sha256(found.numpy().tobytes()).hexdigest(), flush=True)
    fleet.finish()

for each in jobs.split():
    job(*map(int, each.split("-")))
"""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def survivors(lasting: Processes) -> list[tuple[Started, str]]:
    """A server that outlives every job of this file, and may write files."""
    return lasting.servers(
        1, DEADLINE, "--data-dir", str(lasting.path / "data"), "--keep-failed", "0"
    )


def start(
    processes: Processes, servers: list[tuple[Started, str]], script: str, *arguments: str
) -> list[Started]:
    return processes.trainers(
        2, [endpoint for _, endpoint in servers], DEADLINE, script, *arguments
    )


def assert_knows(trainer: Started, fault_at: float, errors: str, who: str) -> None:
    """It ended in time, and its last lines say what happened and who was the cause."""
    assert trainer.status(KNOWN_WITHIN + 30) not in (0, -signal.SIGKILL), trainer
    assert trainer.ended_at - fault_at < scaled(KNOWN_WITHIN), trainer
    assert re.search(
        rf"pserver\.errors\.({errors}): .*{re.escape(who)}", "\n".join(trainer.lines[-4:])
    ), trainer


def test_a_trainer_killed_between_its_rows_and_their_commit_is_named_by_everybody(
    processes: Processes, survivors: list[tuple[Started, str]], script: str
) -> None:
    """kill -9 of a trainer in mid-step: the other ends with TrainerLost and its number; the servers
    say who it was.
    """
    begin = [len(server.lines) for server, _ in survivors]
    other, killed = start(processes, survivors, script, FOREVER, "in a step", "")

    at = float(killed.said(r"fault at (\S+)")[1])
    assert_knows(other, at, "TrainerLost", "trainer 1 has sent no heartbeat")
    assert killed.status() == -signal.SIGKILL
    for (server, _), first in zip(survivors, begin, strict=True):
        server.said("the job failed: .*trainer 1 has sent no heartbeat", first)


@pytest.mark.long
def test_a_job_whose_server_is_killed_is_told_and_goes_on_to_the_bit(
    processes: Processes, survivors: list[tuple[Started, str]], tmp_path: Path, script: str
) -> None:
    """Sync: a server is killed with -9 while rows are looked up there, and every trainer says which
    one it was; from what was saved before, one other server ends with the numbers of a job that
    nothing happened to.

    That job had its servers save their own files, tables too, and load them after steps that were
    thus undone.
    """
    path, servers = str(tmp_path / "checkpoint"), processes.servers(2, DEADLINE)
    victim, endpoint = servers[1]
    half = start(processes, servers, script, FOREVER, "in a lookup", path, str(victim.pid))
    at = float(half[1].said(r"fault at (\S+)")[1])
    for trainer in half:
        assert_knows(trainer, at, "ServerLost|JobFailed", f"server 1 at {endpoint}")
    assert any("pserver.errors.ServerLost" in line for trainer in half for line in trainer.lines), (
        f"{half}"
    )

    resumed = start(processes, survivors, script, "3-6 0-6", "none", path)
    for trainer in resumed:
        assert trainer.status() == 0, f"{resumed}"
    found = [line for trainer in resumed for line in trainer.lines if line.startswith("trained")]
    assert len(found) == 4 and len(set(found)) == 1, f"{resumed}"
