"""What a failed job has left, with real processes: launch saves it, the commands reach it."""

from __future__ import annotations

import pytest

from pserver.checkpoint import checkpoint
from tests.support.processes import Processes

SCRIPT = """
import sys
import torch
from trainer import fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Linear(4, 2))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=float(sys.argv[1])))
if sys.argv[2:]:
    print("loaded step", fleet.load(sys.argv[2]), flush=True)
for step in range(7):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if not sys.argv[2:]:
    raise ArithmeticError("the data are gone")
fleet.finish()
"""

pytestmark = pytest.mark.processes


def test_launch_saves_what_a_failed_job_held_below_data_dir(processes: Processes) -> None:
    """Before its servers end; its own exit status is that of the failure."""
    (processes.path / "train.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "1", "--data-dir", "data", "train.py", "0.1")
    launch = processes.python("launch", "-m", "pserver", "launch", *flags)

    assert launch.status() == 1, launch
    assert launch.said("pserver launch: saved step 7 of the failed job, 8 tensors")
    (directory,) = (processes.path / "data").glob("failed-*")
    tensors, meta = checkpoint.load(directory)
    assert meta["step"] == 7 and tensors["state/exp_avg/weight"].shape == (2, 4)


@pytest.mark.long
def test_save_and_reset_rescue_a_failed_job(processes: Processes) -> None:
    """Another job is told both commands; after them it begins, and goes on from the file."""
    ((_, endpoint),) = processes.servers(1, 20.0)
    (processes.path / "train.py").write_text(SCRIPT)

    def command(name: str, *words: str) -> list[str]:
        started = processes.python(name, "-m", "pserver", name, endpoint, *words)
        assert started.status() == (1 if name == "status" else 0), started
        return started.lines

    def trainer(*words: str) -> tuple[int, str]:
        (started,) = processes.trainers(1, [endpoint], 20.0, "train.py", *words)
        return started.status(), "\n".join(started.lines)

    assert trainer("0.1")[0] == 1
    assert any("kept from other jobs for another" in line for line in command("status"))
    status, said = trainer("0.2")
    assert status == 1 and "pserver save" in said and "pserver reset" in said
    assert "saved step 7 of the failed job" in command("save", "held")[-1]
    assert command("reset") == [f"{endpoint}: reset (it was failed)"]
    status, said = trainer("0.2", "held")
    assert status == 0 and "loaded step 7" in said
