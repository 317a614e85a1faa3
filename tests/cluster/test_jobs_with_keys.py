"""Real processes with keys: a job over TLS is the job without, and opens no port but those that
docs/ports.md lists.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_keys import key_folder
from tests.support.launched import launched
from tests.support.load import run

pytestmark = pytest.mark.processes
DEADLINE = 120.0
# Trainer 0 prints the listening TCP sockets of all processes of the launch, when the job runs.
SCRIPT = """
import json, os, sys
import psutil
import torch
{before}
torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
{init}
for step in range(20):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.sum() for p in net.parameters()).item()
if first:
    found = {{}}
    for process in psutil.Process(os.getppid()).children(recursive=True):
        role = "server" if "serve" in process.cmdline() else "trainer"
        for each in process.net_connections(kind="inet"):
            if each.status == psutil.CONN_LISTEN:
                found.setdefault(f"{{role}} {{process.pid}}", []).append(list(each.laddr))
    print("found", json.dumps([total, os.environ.get("MASTER_PORT", ""), found]), flush=True)
{after}
"""
SERVED = SCRIPT.format(
    before="from trainer import fleet",
    init="""fleet.init()
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
first = fleet.is_first_worker()""",
    after="fleet.finish()",
)
COLLECTIVE = SCRIPT.format(
    before="from trainer import DataParallel, init_parallel_env",
    init="""init_parallel_env()
model = DataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
first = os.environ["RANK"] == "0\"""",
    after="",
)


def found_in(output: str) -> list[Any]:
    """The findings of trainer 0."""
    line = next(line for line in output.splitlines() if "found [" in line)
    found: list[Any] = json.loads(line.partition("found ")[2])
    return found


def begun(path: Path, script: str, *flags: str) -> tuple[str, list[Any]]:
    """The output of a launch of interpreters that ended well, and what trainer 0 has found."""
    (path / "train.py").write_text(script)
    command = [sys.executable, "-m", "pserver", "launch", *flags, "--trainers", "2", "train.py"]
    environ = {name: value for name, value in os.environ.items() if name != "PSERVER_KEYS"}
    done = run(command, cwd=path, env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, found_in(done.stdout)


@pytest.mark.timeout(300)
def test_a_job_over_tls_is_the_job_without(tmp_path: Path) -> None:
    """To the bit; and servers listen on their control port and their port for tensors, trainers on
    none.
    """
    served = "--servers", "1", "--transport", "tcp"
    out, found = begun(tmp_path, SERVED, *served, "--keys", str(key_folder() / "a"))
    plain = found_in(launched(tmp_path, "", *served, "--trainers", "2", "train.py").output)

    assert found[0] == plain[0] and "joined over tcp" in out and "with keys" in out
    ready = next(line for line in out.splitlines() if "pserver ready at" in line)
    ports = {int(ready.partition("127.0.0.1:")[2].split()[0]), int(ready.split("tcp ")[1][:5])}
    (server,) = (sockets for name, sockets in found[2].items() if name.startswith("server"))
    assert {port for _, port in server} == ports
    assert all(host.endswith("127.0.0.1") for host, _ in server)  # gRPC's is an IPv6 socket
    assert not [name for name in found[2] if name.startswith("trainer")]


@pytest.mark.timeout(300)
def test_a_collective_job_listens_at_loopback_alone(tmp_path: Path) -> None:
    """The rendezvous at MASTER_PORT, and gloo's own; no port of another kind."""
    _, (_, master, found) = begun(tmp_path, COLLECTIVE, "--nccl2")

    everything = [tuple(each) for sockets in found.values() for each in sockets]
    assert int(master) in {port for _, port in everything}
    assert all(host.endswith("127.0.0.1") or host == "::1" for host, _ in everything)
