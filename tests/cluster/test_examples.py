"""The examples do what they say, as real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from pserver.launcher.cluster import free_port
from tests.support.launched import EXAMPLES, accuracy, environment, launched
from tests.support.load import communicated
from tests.support.processes import Processes
from tests.support.tiers import RARE

DEADLINE = 100.0
pytestmark = pytest.mark.processes


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), RARE(("--program",))], ids=["eager", "program"])
def test_digits_learns_alone(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Plain ``python digits.py`` trains in one process to at least 97 %; its last line is the
    accuracy.
    """
    script = str(EXAMPLES / "digits.py")
    out = launched(tmp_path, "", script, *flags, command=()).output

    assert out.splitlines()[-1].startswith("accuracy") and accuracy(out) >= 0.97


@pytest.mark.parametrize(
    "flags", [RARE((), id="eager"), pytest.param(("--program",), id="program")]
)
def test_digits_learns_on_a_cluster(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Two servers and two trainers reach at least 97 %, eagerly and as a program; the last line of
    trainer 0's log says so.
    """
    out, log = launched(tmp_path, "2 x 2", str(EXAMPLES / "digits.py"), *flags)

    assert log.splitlines()[-1].startswith("accuracy") and accuracy(log) >= 0.97
    assert "trainer 0 | accuracy" in out and "trainer 1 | accuracy" not in out


@contextmanager
def started(command: list[str], **role: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        env=environment(**role),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            communicated(process, DEADLINE)


@pytest.mark.long
def test_the_transpiler_by_hand_runs_as_four_processes() -> None:
    """Two PSERVER and two TRAINER roles of one script fit the line, the same on both trainers;
    the servers end with their job.
    """
    endpoints = [f"127.0.0.1:{port}" for port in (free_port(), free_port())]
    command = [sys.executable, str(EXAMPLES / "transpiler_by_hand.py")]
    job = {"PSERVER_ENDPOINTS": ",".join(endpoints), "TRAINERS": "2"}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                started(command, TRAINING_ROLE="PSERVER", CURRENT_ENDPOINT=at, **job)
            )
            for at in endpoints
        ]
        trainers = [
            stack.enter_context(started(command, TRAINING_ROLE="TRAINER", TRAINER_ID=str(i), **job))
            for i in (0, 1)
        ]
        # one that has ended says why, before a trainer's deadline ends its wait for it
        for server in servers:
            assert server.stdout is not None
            said_first = server.stdout.readline()
            assert "pserver ready at" in said_first, said_first + server.stdout.read()
        said = [communicated(trainer, DEADLINE)[0] for trainer in trainers]

        assert [trainer.returncode for trainer in trainers] == [0, 0], said
        fitted = {re.search(r"weight (.+)", text)[1] for text in said}  # type: ignore[index]
        assert fitted == {"3.000, -2.000  bias 1.000"}
        for server in servers:
            out = communicated(server, DEADLINE)[0]
            assert server.returncode == 0, out


def test_the_transpiler_by_hand_names_a_missing_variable(processes: Processes) -> None:
    """A TRAINER without TRAINERS gets an error that names it."""
    role = {"TRAINING_ROLE": "TRAINER", "TRAINER_ID": "0", "PSERVER_ENDPOINTS": "127.0.0.1:1"}
    trainer = processes.python("trainer", str(EXAMPLES / "transpiler_by_hand.py"), **role)

    assert trainer.status() == 1 and trainer.said("TRAINERS is not set")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("flags", [(), ("--program",)], ids=["eager", "program"])
def test_digits_learns_on_a_gpu(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Two trainers on one GPU reach at least 97 %: gradients and parameters cross between GPU and
    host.
    """
    script = str(EXAMPLES / "digits.py")
    log = launched(tmp_path, "2 x 2", script, "--device", "cuda", *flags).log

    assert accuracy(log) >= 0.97
