"""The server as a process of its own: signals, drains, ends, and its exit status."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pserver.config import PROTOCOL, ServerConfig
from pserver.control.control_client import ControlClient
from pserver.errors import ServerLost
from pserver.service.server import Server
from pserver.wire_pb2 import (
    JoinRequest,
)
from tests.support.one_parameter import SECONDS, Trainer, plan_of


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``python -m pserver serve`` and its endpoint; killed at the end if it still runs."""
    command = [sys.executable, "-m", "pserver", "serve", *flags]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        ready = re.fullmatch(
            r"pserver ready at (127\.0\.0\.1:\d+) \((?:shm, )?tcp \d+, grpc\), open to this host\n",
            line,
        )
        assert ready, line
        yield running, ready[1]
    finally:
        running.kill()
        running.communicate()


def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status and what was written to stderr."""
    errors = running.communicate(timeout=SECONDS)[1]
    return running.returncode, errors


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C tell a connected trainer, and the process ends with 0."""
    with process() as (running, endpoint):
        trainer = Trainer(endpoint)
        trainer.step(1, 1.0)
        answer = trainer.channel.begin(trainer.destination)
        running.send_signal(number)
        with pytest.raises(ServerLost, match="is shutting down"):
            answer.result(timeout=SECONDS)
        trainer.client.leave("the server left")

        assert ended(running)[0] == 0


@pytest.mark.processes
def test_a_second_signal_ends_at_once() -> None:
    """Who asks twice does not wait for a trainer that does not let go."""
    with process() as (running, endpoint):
        control = ControlClient(endpoint, SECONDS)
        plan = plan_of()
        manifest, fingerprint = plan.manifest(), plan.fingerprint()
        control.join(
            JoinRequest(
                protocol=PROTOCOL,
                incarnation="a",
                manifest=manifest,
                fingerprint=fingerprint,
                transports=["grpc"],
            )
        )
        running.terminate()
        deadline = time.monotonic() + SECONDS
        while control.status().state != "draining":
            assert time.monotonic() < deadline
        running.terminate()

        assert ended(running)[0] == -signal.SIGTERM
        control.close()


@pytest.mark.processes
def test_drain_ends_the_process() -> None:
    """The Drain call does what SIGTERM does."""
    with process() as (running, endpoint):
        control = ControlClient(endpoint, SECONDS)
        control.drain()
        control.close()

        assert ended(running)[0] == 0


@pytest.mark.processes
@pytest.mark.parametrize("failure", ["", "a mistake in the script"])
def test_once_ends_with_the_job(failure: str) -> None:
    """With --once the process ends after its first job: with 0, or with 1 and the reason in one
    line.
    """
    with process("--once") as (running, endpoint):
        trainer = Trainer(endpoint)
        trainer.step(1, 1.0)
        trainer.client.leave(failure)
        status, errors = ended(running)

    assert status == (1 if failure else 0)
    if failure:
        assert (
            errors.splitlines()[-1]
            == f"pserver: the job failed: trainer 0 ended the job: {failure}"
        )


@pytest.mark.processes
def test_a_server_that_cannot_start_says_why_in_one_line() -> None:
    """A port in use is exit status 1 and one line on stderr that names it."""
    with Server(ServerConfig()) as first:
        command = [sys.executable, "-m", "pserver", "serve", "--endpoint", first.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)

    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr == f"pserver serve: cannot listen on {first.endpoint}: Address already in use\n"
    )
