"""How a job ends, with real processes: who knows after how long, and with which status each process
exits.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.load import scaled
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

DEADLINE = 20.0  # a heartbeat timeout that no ending here waits for
TOLD_WITHIN = 8.0  # of a busy machine; far below the deadline

SCRIPT = """
import os, signal, sys, time
import torch
from pserver.errors import PServerError
from trainer import fleet
from transpiler import DistributedStrategy

mode, what = sys.argv[1:]
strategy = DistributedStrategy()
strategy.a_sync = mode != "sync"
if mode == "mixed":
    modes = {"weight": "sync", "*": "collective"}
    strategy.a_sync_configs = {"modes": modes, "lost_trainer": "stop"}
fleet.init(strategy=strategy)
if "(" in what:
    exec(what)
if what == "wait":
    print("initialized", flush=True)
    sys.stdin.readline()
model = fleet.distributed_model(torch.nn.Linear(8, 4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
me, steps = fleet.worker_index(), 0

def train():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

try:
    while what not in ("finish", "forgets") or steps < 3:
        train()
        steps += 1
        if steps == 3:
            print("stepping", flush=True)
            if what == "stuck":  # no Python between here and the end
                import ctypes
                ctypes.PyDLL(None).sleep(60)
        if what == "slow" or mode == "async":
            time.sleep(0.01)
except PServerError as error:
    print("caught", type(error).__name__, error, flush=True)
    if what == "75":
        sys.exit(75)
    if what not in ("catch", "ignore"):
        raise
finally:
    print("finally at", time.monotonic(), flush=True)
if what not in ("forgets", "ignore"):
    fleet.finish()
    print("finished", flush=True)
"""

pytestmark = pytest.mark.processes


class Cluster:
    """Servers and trainers of one test; each server ends with its job."""

    def __init__(self, processes: Processes, servers: int = 2, *flags: str) -> None:
        self._processes = processes
        self.servers = processes.servers(servers, DEADLINE, "--once", *flags)
        self.script = str(processes.path / "train.py")
        (processes.path / "train.py").write_text(SCRIPT)

    def trainer(self, number: int, *arguments: str, trainers: int = 2) -> Started:
        return self._processes.python(
            f"trainer {number}",
            self.script,
            *arguments,
            TRAINING_ROLE="TRAINER",
            TRAINERS=str(trainers),
            TRAINER_ID=str(number),
            PSERVER_ENDPOINTS=",".join(endpoint for _, endpoint in self.servers),
            PSERVER_HEARTBEAT_TIMEOUT=str(DEADLINE),
        )

    def statuses(self) -> list[int]:
        return [server.status() for server, _ in self.servers]


@pytest.mark.parametrize("mode", [RARE("sync"), "async"])
def test_sigterm_of_a_trainer_is_told_to_everyone_and_it_exits_143(
    processes: Processes, mode: str
) -> None:
    """Long before the heartbeat timeout; its ``finally`` runs, and no process exits with 0."""
    cluster = Cluster(processes)
    other, ended = (cluster.trainer(number, mode, "run") for number in (0, 1))
    other.said("stepping")
    ended.said("stepping")
    at = time.monotonic()
    ended.send(signal.SIGTERM)

    assert ended.status() == 143, ended
    ended.said("finally at")
    assert other.status() == 1, other
    other.said("JobFailed: .*trainer 1 ended the job: ended by SIGTERM")
    assert float(other.said(r"finally at (\S+)")[1]) - at < scaled(TOLD_WITHIN)
    assert cluster.statuses() == [1, 1], processes.all


@pytest.mark.long
def test_sigterm_ends_a_trainer_whose_main_thread_is_outside_of_python(
    processes: Processes,
) -> None:
    """The others know at once; the process follows when its main thread has had its grace."""
    cluster = Cluster(processes, 1)
    other, stuck = cluster.trainer(0, "sync", "run"), cluster.trainer(1, "sync", "stuck")
    stuck.said("stepping")
    at = time.monotonic()
    stuck.send(signal.SIGTERM)

    assert other.status() == 1, other
    other.said("trainer 1 ended the job: ended by SIGTERM")
    assert float(other.said(r"finally at (\S+)")[1]) - at < scaled(TOLD_WITHIN)
    assert stuck.status() == 143, stuck
    assert cluster.statuses() == [1]


@pytest.mark.long
def test_the_servers_heartbeat_timeout_holds_among_trainers_too(processes: Processes) -> None:
    """A mixed job that stops with a trainer: those that wait for a silent one in their all-reduce
    know as the servers do, though only these were told a timeout.
    """
    cluster = Cluster(processes, 1, "--heartbeat-timeout", "3")
    other, silent = (cluster.trainer(number, "mixed", "run") for number in (0, 1))
    other.said("stepping")
    silent.said("stepping")
    silent.send(signal.SIGSTOP)

    assert other.status() == 1, other
    silent = f"{processes.scaled(3):g}"
    lost = f"is lost .silent for {silent} s|has sent no heartbeat for {silent}"
    other.said(f"TrainerLost.*trainer 1 ({lost})")
    assert cluster.statuses() == [1]


@pytest.mark.parametrize("mode", [RARE("sync"), "async"])
def test_a_server_that_is_told_to_stop_says_so_to_everyone(processes: Processes, mode: str) -> None:
    """Trainers that wait, and trainers that compute, and by them the other server."""
    cluster = Cluster(processes)
    trainers = [cluster.trainer(number, mode, "run") for number in (0, 1)]
    for trainer in trainers:
        trainer.said("stepping")
    at = time.monotonic()
    cluster.servers[1][0].send(signal.SIGTERM)

    for trainer in trainers:
        assert trainer.status() == 1, trainer
        trainer.said(r"(ServerLost|Draining|JobFailed).*is shutting down")
        assert float(trainer.said(r"finally at (\S+)")[1]) - at < scaled(TOLD_WITHIN)
    assert cluster.statuses() == [1, 143], processes.all


@pytest.mark.long
def test_a_script_that_catches_the_cluster_s_error_does_not_end_the_job_well(
    processes: Processes,
) -> None:
    """The server that it has not lost is told why it ends; ``finish()`` raises the same."""
    cluster = Cluster(processes)
    trainer = cluster.trainer(0, "sync", "catch", trainers=1)
    trainer.said("stepping")
    cluster.servers[1][0].send(signal.SIGKILL)
    cluster.servers[1][0].status()
    trainer.said("caught ServerLost", patience=DEADLINE + 30)

    assert trainer.status() == 1, trainer
    assert "finished" not in trainer.lines
    assert cluster.statuses() == [1, -signal.SIGKILL]
    cluster.servers[0][0].said("the job failed: trainer 0 ended the job: ServerLost")


@pytest.mark.long
def test_a_script_that_ignores_the_jobs_failure_does_not_exit_with_0(processes: Processes) -> None:
    """It catches the error and comes to its end: no process of a failed job exits with 0.  A status
    of its own stands.
    """
    cluster = Cluster(processes, 1)
    trainers = [
        cluster.trainer(number, "sync", what) for number, what in enumerate(("ignore", "75"))
    ]
    for trainer in trainers:
        trainer.said("stepping")
    cluster.servers[0][0].send(signal.SIGTERM)

    assert [trainer.status() for trainer in trainers] == [1, 75], processes.all
    for trainer in trainers:
        trainer.said("caught .*is shutting down")
    assert cluster.statuses() == [143]


@pytest.mark.long
def test_a_trainer_that_has_finished_fails_with_a_job_that_fails_later(
    processes: Processes,
) -> None:
    """It waits until all have finished: no process of a failed job exits with 0."""
    cluster = Cluster(processes)
    first, later = cluster.trainer(0, "async", "finish"), cluster.trainer(1, "async", "run")
    first.said("finally at")
    later.said("stepping")
    later.send(signal.SIGTERM)

    assert (later.status(), first.status()) == (143, 1), processes.all
    assert cluster.statuses() == [1, 1]


def test_a_script_that_forgets_finish_has_not_said_that_it_is_done(processes: Processes) -> None:
    """It says so in its log, and the job fails: for those that wait for its word, and for it."""
    cluster = Cluster(processes, 1)
    forgets, other = cluster.trainer(1, "sync", "forgets"), cluster.trainer(0, "sync", "finish")

    assert other.status() == 1, other
    other.said("JobFailed: .*trainer 1 ended the job: it ended without fleet.finish()")
    forgets.said("trainer 1: it ended without fleet.finish.. or Executor.close..; the job fails")
    assert forgets.status() == 1, forgets
    assert cluster.statuses() == [1]


def test_a_job_that_every_trainer_has_finished_ends_with_0(processes: Processes) -> None:
    """Trainers and servers."""
    cluster = Cluster(processes)
    trainers = [cluster.trainer(number, "sync", "finish") for number in (0, 1)]

    assert [trainer.status() for trainer in trainers] == [0, 0], processes.all
    assert cluster.statuses() == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("number", [RARE(0), 1])
def test_a_trainer_that_is_killed_before_it_joins_is_known(
    processes: Processes, number: int
) -> None:
    """Not after the start timeout: ``fleet.init`` has announced it."""
    short = 3.0
    cluster = Cluster(processes, 1, "--heartbeat-timeout", str(short))
    dead, other = cluster.trainer(number, "sync", "wait"), cluster.trainer(1 - number, "sync", "x")
    dead.said("initialized")
    for expected in (0, 1):
        cluster.servers[0][0].said(f"trainer {expected} is on its way")
    dead.send(signal.SIGKILL)

    assert other.status() == 1, other
    other.said(f"TrainerLost: .*trainer {number} ended before it joined: it has sent no heartbeat")
    if number == 1:
        assert cluster.statuses() == [1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "status", "known"),
    [
        RARE("sys.exit(0)", 0, "its script has ended"),
        ("os.kill(os.getpid(), 9)", -9, "no heartbeat"),
    ],
)
def test_an_end_right_after_init_is_known(
    processes: Processes, how: str, status: int, known: str
) -> None:
    """Though the process was there for a moment only, and may have status 0."""
    cluster = Cluster(processes, 2, "--heartbeat-timeout", "3")
    other = cluster.trainer(0, "sync", "x")
    cluster.servers[1][0].said("trainer 0 joined")
    ended = cluster.trainer(1, "sync", how)

    assert ended.status() == status, ended
    assert other.status() == 1, other
    other.said(f"trainer 1 ended before it joined: .*{known}")


def test_a_trainer_that_fails_before_it_joins_is_named_at_once(processes: Processes) -> None:
    """SIGTERM between ``fleet.init`` and ``distributed_optimizer``."""
    cluster = Cluster(processes, 1)
    ended, other = cluster.trainer(1, "sync", "wait"), cluster.trainer(0, "sync", "x")
    ended.said("initialized")
    cluster.servers[0][0].said("trainer 0 joined")
    ended.send(signal.SIGTERM)

    assert ended.status() == 143, ended
    assert other.status() == 1, other
    other.said("trainer 1 ended before it joined: ended by SIGTERM")
