"""Promises about jobs on a real Ray with several nodes on this machine."""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.load import scaled
from tests.support.pages import ROOT
from tests.support.processes import Processes, Started
from tests.support.waiting import eventually

RAY = importlib.util.find_spec("ray")  # this folder has its name, and no origin
ABSENT = RAY is None or RAY.origin is None
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),  # Ray's own processes on a machine that others use as well
    pytest.mark.skipif(ABSENT, reason="Ray is not installed: pip install '.[ray]'"),
]
PATIENCE = 150.0
SLICE = 64 * 2048 * 4 // 2  # bytes; a process of Ray's may have some of its own there
MARK = "JOB_OF_A_TEST"  # a variable of all processes of a job
# Each trainer has half of the samples.  In its first life the job goes on until it is ended.
SCRIPT = """
import sys, time
import torch
from torch.nn.functional import mse_loss
from trainer import fleet

fleet.init()
torch.manual_seed(0)
x = torch.randn(16, 64)
y = x @ torch.randn(64, 2048)
half = slice(fleet.worker_index(), None, 2)
model = fleet.distributed_model(torch.nn.Linear(64, 2048))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
waits, saved, end = len(sys.argv) > 2, f"{sys.argv[1]}/saved", 6
begin = 0
if waits:
    try:
        begin = fleet.load(saved)
    except FileNotFoundError:
        end = 100_000
for step in range(begin, end):
    mse_loss(model(x[half]), y[half]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if waits and step == 2 and begin == 0:
        fleet.save(saved)
        print("saved", step + 1, flush=True)
    if end > 6:
        time.sleep(0.02)
print("from", begin, "to", end, "of", fleet.worker_num())
if fleet.is_first_worker():
    torch.save(model.state_dict(), f"{sys.argv[1]}/model.pt")
fleet.finish()
"""
FAILS = """
import sys
from trainer import fleet
fleet.init()
print("all is well so far")
sys.exit(7 if fleet.worker_index() == 1 else 0)
"""


class Site:
    """Ray's nodes, and drivers with jobs."""

    def __init__(self, path: Path, *nodes: str) -> None:
        self.path, self.processes = path, Processes(path)
        program = str(ROOT / "tests/support/ray_nodes.py")
        # no file in the user's home, and nobody is told
        self.own = {
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_COLOR_PREFIX": "0",
        }
        self.nodes = self.processes.python("nodes", program, *nodes, **self.own)

    def drive(self, path: Path, target: str, **said: Any) -> Started:
        """Starts a driver with a job.

        Args:
            path: of the test that looks for what it leaves.
            target: of the job; a script's text is written into a file.
        """
        address = self.nodes.said(r"^at (\S+)", patience=PATIENCE)[1]
        if "\n" in target:
            (path / "train.py").write_text(target, encoding="utf-8")
            target = str(path / "train.py")
        environment = {MARK: str(path), "OMP_NUM_THREADS": "1", **said.pop("environment", {})}
        shape = {
            "servers": 2,
            "trainers": 2,
            "start_timeout": scaled(100.0),
            "environment": environment,
        }
        program = str(Path(__file__).with_name("ray_driver.py"))
        request = json.dumps({**shape, **said})
        return self.processes.python("driver", program, address, target, request, **self.own)

    def end(self) -> None:
        """All of it ends, whatever a test has left."""
        if self.nodes.running:
            self.nodes.tell("end")
            self.nodes.said("^down", patience=PATIENCE)
        self.processes.end()


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes with two CPUs each; they stay as they are."""
    site = Site(tmp_path_factory.mktemp("ray"), "2", "127.0.0.2:2")
    yield site
    site.end()


def result(driver: Started, *lines: str) -> dict[str, Any]:
    """What became of the driver's job, after which no group of Ray's is left; nothing that is as
    large as a slice was in its stores.

    Args:
        lines: patterns of what Ray shows in the driver.
    """
    found = json.loads(driver.said("^result (.*)", patience=PATIENCE)[1])
    for line in lines:
        driver.said(line, patience=PATIENCE)
    driver.tell("end")
    assert driver.status(PATIENCE) == 0, driver
    assert set(found.pop("groups")) <= {"REMOVED"}
    assert found.pop("stored") < SLICE
    return dict(found)


def left(path: Path) -> list[str]:
    """The processes of this test's jobs that are still there."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={path}\0".encode() in each.read_bytes():
                found.append((each.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def plain(steps: int) -> dict[str, torch.Tensor]:
    """The same training in one process: the mean of the two halves' gradients."""
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    y = x @ torch.randn(64, 2048)
    model = torch.nn.Linear(64, 2048)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        found = []
        for number in range(2):
            half = slice(number, None, 2)
            loss = mse_loss(model(x[half]), y[half])
            found.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = (gradients[0] + gradients[1]) / 2
        optimizer.step()
    return model.state_dict()


def check_model(path: Path, steps: int) -> None:
    """The parameters are those of plain torch, to the bit."""
    for name, value in plain(steps).items():
        assert torch.equal(torch.load(path / "model.pt")[name], value), name


def test_a_job_on_two_nodes_is_plain_training(two_nodes: Site, tmp_path: Path) -> None:
    """2 servers and 2 trainers on two nodes, with keys; tensors stay off the object store, and no
    process stays.
    """
    driver = two_nodes.drive(tmp_path, SCRIPT, arguments=[str(tmp_path)])

    lines = [rf"^\(server {number} pid=.*\) .*ready at .*, with keys" for number in range(2)]
    found = result(driver, *lines, r"^\(trainer 1 pid=.*\) from 0 to 6 of 2")

    assert found == {"values": [None, None], "restarts": 0, "status": 0}
    assert not left(tmp_path)
    check_model(tmp_path, 6)


@pytest.mark.long
def test_a_function_trains_in_its_actor(two_nodes: Site, tmp_path: Path) -> None:
    """It may be of the driver's own script; what it prints is seen, and what it returns is told."""
    driver = two_nodes.drive(tmp_path, "trained", arguments=[5])

    found = result(driver, r"^\(trainer 1 pid=.*\) trainer 1 threads 1")

    assert not left(tmp_path)
    assert found["values"][0] == found["values"][1] and len(found["values"][0]) == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        (FAILS, 7, r"trainer 1 on node \S+ failed with status 7; its last lines:\n.*all is well"),
        ("exits", 9, r"trainer \d on node \S+ failed with status 9"),
        (
            "breaks",
            1,
            r"failed with status 1; its last lines:\n.*Trace(?s:.*)ArithmeticError: it is",
        ),
    ],
)
def test_a_failure_is_told(
    target: str, status: int, message: str, two_nodes: Site, tmp_path: Path
) -> None:
    """With the process, its node, its status, and its last lines."""
    restarts = int(target == FAILS)
    found = result(two_nodes.drive(tmp_path, target, max_restarts=restarts))

    assert found["status"] == status
    assert restarts == ("the job was started 2 times" in found["error"])
    assert re.search(message, found["error"]), found["error"]
    assert not left(tmp_path)


@pytest.mark.long
def test_what_the_cluster_lacks_is_said(two_nodes: Site, tmp_path: Path) -> None:
    """After the time for it, with what was asked for and what there is."""
    found = result(two_nodes.drive(tmp_path, "exits", trainers=5, start_timeout=2.0))

    assert re.search(
        r"^TimeoutError: .* within 2 s: PACK of 2 x {'CPU': 1} for servers and 5 x {'CPU': 1} for "
        r"trainers; the cluster has {[^}]*'CPU': 4.0[^}]*}, of which {.*} is free$",
        found["error"],
    ), found["error"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_driver(
    number: signal.Signals, two_nodes: Site, tmp_path: Path
) -> None:
    """Ctrl-C ends everything before the driver goes on; when the driver is killed Ray does."""
    driver = two_nodes.drive(tmp_path, SCRIPT, arguments=[str(tmp_path), "wait"])
    driver.said("saved 3", patience=PATIENCE)
    assert len(left(tmp_path)) == 4

    driver.send(number)

    if number == signal.SIGINT:
        assert result(driver)["error"].startswith("KeyboardInterrupt")
        assert not left(tmp_path)
    else:
        eventually(lambda: not left(tmp_path))


@pytest.mark.long
def test_a_job_goes_on_without_a_node(tmp_path: Path) -> None:
    """It starts again on the nodes that are left, from its checkpoint, and ends as if nothing had
    been.
    """
    site = Site(tmp_path, "0", "127.0.0.2:2", "127.0.0.3:2", "127.0.0.4:2")
    try:
        more = {"strategy": "SPREAD", "max_restarts": 1, "arguments": [str(tmp_path), "wait"]}
        driver = site.drive(tmp_path, SCRIPT, **more)
        ready = r"^\(server 1 pid=.* ready at (\S+):"
        node = driver.said(ready, patience=PATIENCE)[1]
        driver.said("saved 3", patience=PATIENCE)

        site.nodes.tell(node)

        again = r"was lost: .*the job starts again \(1 of 1\)"
        found = result(driver, again, r"\(trainer 1 pid=.*\) from 3 to 6 of 2")
        assert found == {"values": [None, None], "restarts": 1, "status": 0}
        assert len(re.findall(f"ready at {node}", repr(driver))) == 1
        check_model(tmp_path, 6)
        assert not left(tmp_path)
    finally:
        site.end()
