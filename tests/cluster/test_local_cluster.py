"""``local_cluster``: servers in the background of a process that is their only trainer."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.support.waiting import eventually
from trainer import fleet, local_cluster, notebook

ROOT = str(Path(__file__).parent.parent.parent)

SCRIPT = """
import os
import torch
import pserver
from pserver import fleet

def job(fails):
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if fails:
        raise KeyError("a mistake in a cell")
    fleet.finish()

before = dict(os.environ)
try:
    with pserver.local_cluster(servers=1, logs="logs") as cluster:
        job(fails=False)
        job(fails=True)
except KeyError as error:
    print("raised", error, cluster.endpoints, dict(os.environ) == before)
cluster.start()
job(fails=False)
print("again", *cluster.endpoints, flush=True)
if os.environ["ENDS"] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_servers_end_with_the_block_and_with_the_process(
    ends: str, processes: Processes, tmp_path: Path
) -> None:
    """After an error, too, with the environment as it was; and may begin again.  Standard output
    has the script's lines alone.
    """
    script = tmp_path / "cell.py"
    script.write_text(SCRIPT)
    process = processes.python("script", str(script), PYTHONPATH=ROOT, ENDS=ends)
    status = process.status(patience=220.0)

    assert status == (0 if ends == "by itself" else -9), process
    first, second = (line for line in process.lines if "WARNING" not in line)
    assert first == "raised 'a mistake in a cell' [] True"
    host, _, port = second.removeprefix("again ").rpartition(":")
    eventually(lambda: not _listens(host, int(port)))


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


WRONG = [
    (0, ValueError, "servers: expected 1 or more, got 0"),
    ("2", TypeError, "servers: expected a whole number, got '2'"),
    (True, TypeError, "servers: expected a whole number, got True"),
]


@pytest.mark.parametrize(("servers", "kind", "said"), WRONG)
def test_a_wrong_number_is_refused(servers: object, kind: type[Exception], said: str) -> None:
    """Before anything is started."""
    with pytest.raises(kind, match=re.escape(said)):
        local_cluster(servers=servers)  # type: ignore[arg-type]  # as users may


def test_a_job_or_a_cluster_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is in one of them at a time."""
    fleet.init()
    with pytest.raises(RuntimeError, match=r"call fleet.finish\(\) first: a job is running"):
        local_cluster().start()
    fleet.finish()
    monkeypatch.setenv("TRAINING_ROLE", "TRAINER")
    with pytest.raises(RuntimeError, match="outside of a cluster, got one with TRAINING_ROLE=TR"):
        local_cluster().start()


@pytest.mark.processes
def test_a_server_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its last lines; nothing stays behind, and the process is in no cluster."""
    before = dict(os.environ)
    fails = "import sys; print('no port is left'); sys.exit(3)"
    monkeypatch.setattr(notebook, "SERVE", (sys.executable, "-c", fails))

    with pytest.raises(RuntimeError, match="server . ended with status 3:\nno port is left"):
        local_cluster(servers=2, logs=tmp_path).start()

    assert dict(os.environ) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["server-0.log", "server-1.log"]
