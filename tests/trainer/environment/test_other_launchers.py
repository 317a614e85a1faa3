"""Other launchers' variables that say "several", where this process trains alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers
from trainer import DataParallel, Executor, fleet, init_parallel_env
from trainer.collective.world import leave_parallel_env
from trainer.environment import environment
from trainer.environment.environment import (
    NUMBERS_OF_LAUNCHERS,
    PADDLE_ENDPOINTS,
    TF_CLUSTER,
    WORLD,
    several_processes,
)
from transpiler import capture

EVERY = [name for names in NUMBERS_OF_LAUNCHERS.values() for name in names] + [
    *PADDLE_ENDPOINTS,
    *TF_CLUSTER,
    *WORLD,
]
CLUSTER_OF_TWO = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
SEVERAL = {
    **dict.fromkeys(EVERY, "2"),
    PADDLE_ENDPOINTS[0]: "127.0.0.1:6174,127.0.0.1:6175",
    TF_CLUSTER[0]: CLUSTER_OF_TWO,
}
WITHOUT_TORCHRUN = [name for name in EVERY if name not in WORLD]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher has started the tests."""
    for name in EVERY:
        monkeypatch.delenv(name, raising=False)
    environment.forget_other_launchers()
    yield
    fleet.finish()
    leave_parallel_env()
    environment.forget_other_launchers()


def init() -> None:
    fleet.init()


def init_collective() -> None:
    fleet.init(is_collective=True)


def data_parallel() -> None:
    DataParallel(nn.Linear(2, 1))


def alone_and_data_parallel() -> None:
    fleet.init()
    DataParallel(nn.Linear(2, 1))


def run_a_program() -> None:
    model = nn.Linear(2, 1)
    main, startup = capture(
        model,
        lambda model, x: model(x).pow(2).mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.ones(4, 2),),
    )
    with Executor() as executor:
        executor.run(startup)
        for _ in range(3):
            executor.run(main, feed=(torch.ones(8, 2),))


ENTRIES: list[Callable[[], None]] = [
    init,
    init_collective,
    init_parallel_env,
    data_parallel,
    alone_and_data_parallel,
    run_a_program,
]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "alone" in record.getMessage() and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_training_alone_among_several_is_said_once(
    entry: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By every way to begin, with every launcher's variables: one warning names them; the next job
    says it anew.
    """
    for name in WITHOUT_TORCHRUN:
        monkeypatch.setenv(name, SEVERAL[name])
        for _ in range(2):
            caplog.clear()
            entry()
            (said,) = warnings(caplog)
            assert name in said and "pserver launch" in said or "transpile it" in said
            fleet.finish()
            leave_parallel_env()
            environment.forget_other_launchers()
        monkeypatch.delenv(name)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_one_warning_names_all_of_them(
    entry: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that runs below two launchers has the variables of both."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    entry()

    (said,) = warnings(caplog)
    assert "OMPI_COMM_WORLD_SIZE=4, SLURM_NTASKS=4" in said


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"},  # a shell of salloc
        {"SLURM_JOB_ID": "7"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 in an allocation of 4
        {"OMPI_COMM_WORLD_SIZE": "1", "PADDLE_TRAINERS_NUM": "1"},
        {"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6174"},
        {"PMI_SIZE": "many", "TF_CONFIG": "{"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
    ],
    ids=str,
)
def test_one_process_is_no_reason_to_warn(
    said: dict[str, str],
    entry: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor is what is no number."""
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    entry()

    assert not [text for text in warnings(caplog) if "several" in text]
    assert not list(several_processes(os.environ))


def test_a_job_of_one_trainer_names_torchruns_number(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which nothing reads beside servers."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    fleet.init(fleet.UserDefinedRoleMaker(0, server_endpoints=servers(1).split(",")))

    (said,) = warnings(caplog)
    assert "WORLD_SIZE=4" in said


def test_a_role_of_the_environment_is_not_doubted() -> None:
    """What starts ``pserver launch`` on each host may say how many hosts there are."""
    launched = {"TRAINING_ROLE": "TRAINER", "TRAINERS": "1", "SLURM_NTASKS": "2"}

    assert list(several_processes(launched)) == []
    assert list(several_processes({**launched, "WORLD_SIZE": "4"})) == ["WORLD_SIZE=4"]


def test_a_world_of_torchruns_that_is_one_is_not_doubted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``launch --nccl2 --trainers 1`` in an allocation of several tasks."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": "1", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    fleet.init(is_collective=True)

    assert fleet.worker_num() == 1 and not warnings(caplog)
