"""A job without servers that is complete is done, whatever becomes of a process after that."""

from __future__ import annotations

import pytest

from tests.support.processes import Processes

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys
import torch
from trainer import fleet

print("BEGUN", flush=True)
who, where = int(sys.argv[1]), sys.argv[2]
fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(4, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if fleet.worker_index() == who:
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "in":
        torch.distributed.destroy_process_group = die
    fleet.finish()
    if where.isdigit():
        sys.exit(int(where))
    die()
fleet.finish()
"""


@pytest.mark.parametrize(
    "who, where, status",
    [
        ("0", "in", 0),
        pytest.param("1", "in", 0, marks=pytest.mark.long),
        pytest.param("0", "after", 0, marks=pytest.mark.long),
        pytest.param("1", "after", 0, marks=pytest.mark.long),
        pytest.param("1", "3", 3, marks=pytest.mark.long),
        pytest.param("1", "143", 0, marks=pytest.mark.long),
    ],
)
def test_a_trainer_that_dies_when_it_has_finished(
    processes: Processes, who: str, where: str, status: int
) -> None:
    """Killed in ``finish()`` or after it, the job is done, also where a handler has answered
    SIGTERM with its status; an error of the script keeps its status.  Nothing is begun again.
    """
    (processes.path / "ends.py").write_text(SCRIPT)
    launch = ("-m", "pserver", "launch", "--nccl2", "--trainers", "2", "--max-restarts", "2")
    process = processes.python("launch", *launch, "ends.py", who, where)

    assert process.status() == status, process
    assert sum("| BEGUN" in line for line in process.lines) == 2, process
    if not status:
        died = 143 if where == "143" else 137
        assert process.said(
            f"trainer {who} ended with status {died} .*when it had finished the job"
        )
        assert process.said(f"the job is done without trainer {who}")
