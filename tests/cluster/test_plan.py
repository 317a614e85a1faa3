"""``pserver plan``: the split of a real script, and the step that a probe of it predicts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pserver.launcher.planning.cost import Figures
from tests.support.fork_server import finished

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PLAN = ("-m", "pserver", "plan")

SCRIPT = """
import sys, torch
from torch import nn
from trainer import fleet
fleet.init()
model = fleet.distributed_model(nn.Linear(100, int(sys.argv[1])))
fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
print("trained")
"""


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return finished([*PLAN, *words], seconds=90.0)


def test_plan_prints_the_split_bytes_and_memory_and_starts_nothing(tmp_path: Path) -> None:
    """The script runs up to its first connection; options may stand before it or behind its
    arguments.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    done = plan(str(script), "300", "--no-probe", "--servers", "2", "--trainers", "3")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "sync: 3 trainers, 2 servers"
    weight = next(line for line in lines if line.startswith("weight"))
    # the first variable's first block goes to the first server
    assert weight.endswith("0: 15000, 1: 15000")
    # 15000 of weight and 300 of bias, 4 bytes each
    assert any(line.startswith("0 ") and "61.2 KB" in line for line in lines)
    assert "trained" not in done.stdout


TABLES = """
import torch
from torch import nn
from trainer import DistributedEmbedding, fleet
fleet.init()
model = nn.Sequential(DistributedEmbedding(16, num_embeddings=1_000_000), nn.Linear(16, 2))
model = fleet.distributed_model(model)
fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters()))
"""


@pytest.mark.long
def test_plan_has_the_tables_with_what_a_row_weighs(tmp_path: Path) -> None:
    """The rows, a row's bytes in memory and on the way, and the memory of each server."""
    script = tmp_path / "train.py"
    script.write_text(TABLES)

    done = plan(str(script), "--servers", "2", "--trainers", "3", "--no-probe")

    assert done.returncode == 0, done.stderr
    lines = [re.split(" {2,}", line) for line in done.stdout.splitlines()]
    (table,) = (line for line in lines if line[0] == "0" and line[1].startswith("0 to"))
    # 16 values and 16 squares of 4 bytes; an id of 8 bytes and 16 values; half of all rows
    assert table[1:] == [
        *("0 to 999999", "float32[16]", "adagrad", "0"),
        *("128 B", "72 B", "72 B", "up to 64.0 MB"),
    ]
    servers = [line for line in lines if line[0] in "01" and line != table and "MB" in line[-1]]
    assert [line[-1] for line in servers] == ["64.0 MB", "64.0 MB"]


STEPS = """
import torch
from trainer import fleet
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(100, 10))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
for step in range(1_000_000):
    model(torch.ones(24 // fleet.worker_num(), 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def test_a_probe_runs_some_steps_and_predicts_the_job(tmp_path: Path) -> None:
    """The steps are of one trainer and then of two, whose batch is that of three; what is kept of
    them predicts again, for this job alone; nothing else is left behind.
    """
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    words = "--servers 1 --trainers 3 --hosts each --latency 50ms --window 1".split()
    figures = tmp_path / "figures.json"

    done = plan(str(script), *words, "--figures", str(figures))
    again = plan(str(script), *words, "--figures", str(figures))
    other = plan(str(script), *words, "--trainers", "2", "--figures", str(figures))

    assert done.returncode == 0, done.stderr
    assert (again.stdout, again.stderr) == (done.stdout, "")
    assert (other.returncode, len(other.stderr.splitlines())) == (1, 1)
    assert "has figures of another job: the plan" in other.stderr
    (probed,) = Figures.read(str(figures)).probes.values()
    assert probed.pair != probed.alone
    lines = done.stdout.splitlines()
    found = next(line for line in lines if line.startswith("predicted step"))
    assert found.endswith("bottleneck: latency")
    assert any(line.startswith("latency") and "100 ms" in line for line in lines)
    assert any(line.startswith("from a probe of") for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "train.py"]


@pytest.mark.long
def test_a_script_without_steps_has_a_split_and_no_prediction(tmp_path: Path) -> None:
    """The reason is its last line."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    done = plan(str(script), "300", "--servers", "1", "--trainers", "1")

    assert done.returncode == 0
    assert done.stdout.startswith("sync: 1 trainers, 1 servers")
    assert "no prediction, the probe has failed: its trainer ended" in done.stderr


def test_a_script_that_plans_nothing_is_told_so(tmp_path: Path) -> None:
    """With what it was given: a flag behind the script is the script's."""
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")

    done = plan(str(script), "--servers", "1", "--trainers", "1", "--lnk", "1Gbit")

    assert (done.returncode, done.stdout) == (1, "hello\n")
    assert "came to its end without a plan" in done.stderr
    assert done.stderr.endswith("was given --lnk 1Gbit\n")


@pytest.mark.parametrize(
    ("model", "mode", "link"),
    [("dense", "sync", "25Gbit"), ("clicks", "async", "10Gbit")],
)
def test_what_the_page_says_of_many_hosts_is_what_the_command_says(
    model: str, mode: str, link: str
) -> None:
    """Its table has the step and the bottleneck of the same command line."""
    words = ["--servers", "8", "--trainers", "64", "--link", link]
    figures = ["--figures", str(ROOT / f"docs/scale/{model}_{mode}.json")]
    page = (ROOT / "docs/planner.md").read_text()
    row = re.search(rf"^\| {model} \| {mode} \| {link} \| (.*?) \| (.*?) \|", page, re.M)

    done = plan(*words, *figures, str(ROOT / "tests/benchmarks/planner_scale.py"), model, mode)

    assert row is not None
    assert f"predicted step {row[1]}, " in done.stdout, done.stderr
    assert f"bottleneck: {row[2]}\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("nothing.py", "--servers", "1", "--trainers", "1"), 1),
        (("x.py", "--servers", "1"), 2),
        (("x.py", "--servers", "0", "--trainers", "1"), 2),
        (("x.py", "--servers", "100000", "--trainers", "1"), 2),
        (("--lnk", "1Gbit", "x.py", "--servers", "1", "--trainers", "1"), 2),
        (("x.py", "--servers", "1", "--trainers", "1", "--no-probe", "--figures", "x.json"), 2),
        (("x.py", "--servers", "1", "--trainers", "1", "--link", "fast"), 2),
        (("x.py", "--servers", "1", "--trainers", "1", "--no-probe", "--hosts", "each"), 2),
        (("x.py", "--servers", "1", "--trainers", "1", "--memory", "8Gi"), 2),
        (("x.py", "--servers", "1", "--trainers", "1", "--window", "0"), 2),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], status: int) -> None:
    """No traceback, and the usual exit statuses."""
    done = finished(["-u", *PLAN, *words])  # by an interpreter, as it needs no torch

    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 1
