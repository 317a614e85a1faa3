"""Promises of the batch script: what it does with the commands of Slurm, and on a real Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pserver.__main__ import main
from tests.support import slurm_commands
from tests.support.manifests import CASES, at_small_job, written
from tests.support.pages import ROOT
from tests.support.tiers import RARE

SECONDS = 100.0
SCRIPT = """
import os, sys, time
import torch
from torch.nn.functional import mse_loss
from trainer import fleet

fleet.init()
if "fail" in sys.argv:
    sys.exit(7)
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(1000 if "long" in sys.argv else 2):
    mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if "long" in sys.argv:
        print("a step", flush=True)
        time.sleep(0.1)
print("trainer", fleet.worker_index(), "of", fleet.worker_num(), *sys.argv[1:], flush=True)
fleet.finish()
"""
BATCH = [name for name in CASES if name.endswith(".sbatch")]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, from which a job is submitted."""
    (tmp_path / "bin").mkdir()
    at_small_job(tmp_path, monkeypatch)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    slurm_commands.install(tmp_path / "bin")
    return tmp_path


def batch(job: Path, *arguments: str, restarts: str = "0") -> subprocess.Popen[str]:
    """Starts the batch script of one server and two trainers, as Slurm would on one host."""
    line = ["--kind", "slurm", "--servers", "1", "--trainers", "2", "--output", "job.sbatch"]
    assert main(["manifest", *line, "--restarts", restarts, "train.py", *arguments]) == 0
    return subprocess.Popen(
        ["bash", "job.sbatch"],
        env=slurm_commands.environment(job / "bin", tasks=3),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def logs(job: Path) -> dict[str, str]:
    """What the processes have written, by the names of the files."""
    return {path.name: path.read_text("utf-8") for path in job.glob("logs/*/*")}


@pytest.mark.processes
@pytest.mark.parametrize("name", BATCH)
def test_bash_reads_the_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shellcheck, where there is one, finds nothing in it."""
    at_small_job(tmp_path, monkeypatch)
    text = written(CASES[name], capsys)
    checks = [["bash", "-n"], *([["shellcheck", "-"]] if shutil.which("shellcheck") else [])]

    for check in checks:
        done = subprocess.run(check, input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.processes
@pytest.mark.parametrize(("argument", "status"), [("it's $HOME", 0), RARE("fail", 7)])
def test_the_job_ends_as_its_trainers_do(job: Path, argument: str, status: int) -> None:
    """Its exit status is theirs; each process has a log, an argument arrives as it was typed, and
    the secret's files are gone.
    """
    with batch(job, argument) as process:
        out, _ = process.communicate(timeout=SECONDS)
    found = logs(job)

    assert process.returncode == status, (out, found)
    assert not [name for name in found if name.endswith(".token")]
    assert "with a key" in found["server-0.log"]
    if status == 0:
        for number in (0, 1):
            assert f"trainer {number} of 2 {argument}\n" in found[f"trainer-{number}.log"]
        assert "the job is done" in found["server-0.log"]


@pytest.mark.processes
@pytest.mark.long
def test_a_job_that_has_failed_is_started_again(job: Path) -> None:
    """As often as it may be, in the same logs; its status is that of the last time."""
    with batch(job, "fail", restarts="1") as process:
        out, _ = process.communicate(timeout=SECONDS)
    found = logs(job)

    assert process.returncode == 7, (out, found)
    assert out.count("starts the job again (restart 1 of 1)") == 1
    assert found["server-0.log"].count("pserver ready at") == 2


@pytest.mark.processes
@pytest.mark.long
def test_sigterm_ends_the_job_in_good_order(job: Path) -> None:
    """Slurm sends it to the script before the time is up: trainers end with 143, and the server
    has drained.
    """
    with batch(job, "long") as process:
        deadline = time.monotonic() + SECONDS
        while "a step" not in logs(job).get("trainer-0.log", ""):
            assert process.poll() is None and time.monotonic() < deadline, logs(job)
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)

    assert process.returncode == 143
    assert "server-0.log" in logs(job) and "Traceback" not in logs(job)["server-0.log"]


def cluster() -> str:
    """Why no job can be submitted here; "" if one can."""
    if shutil.which("sbatch") is None:
        return "Slurm is not installed"
    done = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 and done.stdout else "no Slurm controller answers"


@pytest.mark.processes
@pytest.mark.containers
@pytest.mark.timeout(600)
def test_slurm_runs_the_job(job: Path) -> None:
    """A real one, where this machine has a cluster: the files and the exit status."""
    if why := cluster():
        pytest.skip(why)
    line = ["--kind", "slurm", "--servers", "1", "--trainers", "2", "--output", "job.sbatch"]
    assert main(["manifest", *line, "train.py", "hello"]) == 0
    done = subprocess.run(
        ["sbatch", "--wait", "job.sbatch"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=500,
    )

    assert done.returncode == 0, (done.stderr, logs(job))
    assert "trainer 1 of 2 hello" in logs(job)["trainer-1.log"]
