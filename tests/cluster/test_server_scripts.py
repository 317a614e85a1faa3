"""Scripts whose role is PSERVER, as processes: they end with their job, as it does, and another job
goes on with what they leave.
"""

from __future__ import annotations

import signal

import pytest

from pserver.launcher.cluster import free_port
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

SCRIPT = """
import os, sys
import torch
from torch import nn
from trainer import Executor, fleet
from transpiler import DistributeTranspiler, capture

way, end = sys.argv[1:]
serves = os.environ["TRAINING_ROLE"] == "PSERVER"
model = nn.Linear(8, 4)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
if way == "run_server" and serves:
    fleet.init()
    fleet.run_server()
elif way == "run_server":
    fleet.init()
    fleet.distributed_model(model)
    fleet.distributed_optimizer(optimizer)
    if end == "failed":
        raise ArithmeticError("the data are gone")
    fleet.finish()
else:
    step = lambda model, x: model(x).sum()
    program, startup = capture(model, step, optimizer, (torch.ones(2, 8),))
    t, endpoint = DistributeTranspiler(), os.environ["PSERVER_ENDPOINTS"]
    t.transpile(0, program, pservers=endpoint, trainers=1, startup_program=startup)
    executor = Executor()
    if serves:
        main, startup = t.get_pserver_programs(endpoint)
        executor.run(startup)
        executor.run(main)
        executor.save("server.program", main)
    else:
        main = t.get_trainer_program()
        executor.run(t.get_startup_program())
        executor.run(main, feed=(torch.ones(2, 8),))
        if end == "failed":
            raise ArithmeticError("the data are gone")
        print("step", executor.steps(main), "weight", model.weight[0, 0].item())
        executor.close()
print("returned", flush=True)
"""

pytestmark = pytest.mark.processes


def start(processes: Processes, way: str, end: str) -> tuple[Started, dict[str, str]]:
    """A server that is ready, and what its trainer is told."""
    endpoint = f"127.0.0.1:{free_port()}"
    (processes.path / "script.py").write_text(SCRIPT)
    job = {"TRAINERS": "1", "PSERVER_ENDPOINTS": endpoint}
    role = {"TRAINING_ROLE": "PSERVER", "CURRENT_ENDPOINT": endpoint}
    server = processes.python("server", "script.py", way, end, **role, **job)
    server.said("pserver ready at")
    return server, {"TRAINING_ROLE": "TRAINER", "TRAINER_ID": "0", **job}


@pytest.mark.parametrize(
    ("way", "end"),
    [
        RARE("run_server", "done"),
        RARE("run_server", "failed"),
        ("Executor.run", "done"),
        RARE("Executor.run", "failed"),
    ],
)
def test_a_script_whose_role_is_pserver_ends_with_its_job(
    processes: Processes, way: str, end: str
) -> None:
    """It returns when the job is done, and raises what ended one that failed."""
    server, role = start(processes, way, end)
    trainer = processes.python("trainer", "script.py", way, end, **role)

    assert trainer.status() == server.status() == (0 if end == "done" else 1), processes.all
    assert ("returned" in server.lines) == (end == "done")
    if end == "failed":
        server.said("JobFailed: trainer 0 ended the job: ArithmeticError: the data are gone")


@pytest.mark.long
def test_another_job_goes_on_with_a_saved_program(processes: Processes) -> None:
    """``pserver serve --program`` starts with it, and a new trainer goes on from its step."""
    server, role = start(processes, "Executor.run", "done")
    trainer = processes.python("trainer", "script.py", "Executor.run", "done", **role)
    trainer.said("step 1 weight 0.8")
    assert trainer.status() == server.status() == 0, processes.all

    endpoint = role["PSERVER_ENDPOINTS"]
    command = ("--program", "server.program", "--once", "--endpoint", endpoint)
    again = processes.python("again", "-m", "pserver", "serve", *command)
    again.said("pserver ready at")
    trainer = processes.python("trainer again", "script.py", "Executor.run", "done", **role)
    trainer.said("step 2 weight 0.5")  # 0.8 - 0.1 * (0.5 * 2 + 2)
    assert trainer.status() == again.status() == 0, processes.all


def test_sigterm_before_the_job_is_done_is_143(processes: Processes) -> None:
    """The script neither returns nor ends with 0."""
    server, _ = start(processes, "run_server", "")
    server.send(signal.SIGTERM)

    assert server.status() == 143, server
    assert "returned" not in server.lines
