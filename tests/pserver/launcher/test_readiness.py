"""Promises of ``pserver status --ready``, which containers are probed with."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pserver.__main__ import main
from pserver.config import ServerConfig
from pserver.launcher.cluster import free_port
from pserver.launcher.readiness import obstacle, show
from pserver.service.server import Server

SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    """A running one."""
    with Server(ServerConfig()) as running:
        yield running


def test_a_server_is_ready_until_it_drains(server: Server) -> None:
    """It says so before it ends: no new client is sent to it."""
    out = io.StringIO()
    assert show([server.endpoint], out) == 0
    assert out.getvalue() == f"{server.endpoint}: ready\n"
    server._control.drain()

    assert show([server.endpoint], out) == 1
    assert out.getvalue().splitlines()[1] == f"{server.endpoint}: not ready: it is shutting down"


def test_one_that_is_not_ready_is_enough(server: Server) -> None:
    """Each server has its line, and the status is 1."""
    gone = f"127.0.0.1:{free_port()}"
    out = io.StringIO()

    assert show([server.endpoint, gone], out) == 1
    assert out.getvalue() == (
        f"{server.endpoint}: ready\n"
        f"{gone}: not ready: connection refused: no process listens there\n"
    )


def test_a_process_that_does_not_answer_is_not_ready() -> None:
    """The probe ends within its timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reason = obstacle(f"127.0.0.1:{silent.getsockname()[1]}", 0.3)

    assert reason.startswith("no answer to a health check: ")


@pytest.mark.processes
def test_a_probe_imports_no_torch(server: Server) -> None:
    """It costs a container's cores little, every few seconds."""
    code = (
        "import sys, pserver.__main__ as m; status = m.main(['status', '--ready', sys.argv[1]]); "
        "print(status, *{'torch', 'numpy', 'numba', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.endpoint],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )

    assert done.stdout == f"{server.endpoint}: ready\n0\n", done.stderr


def test_bytes_of_variables_belong_to_the_whole_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--variables beside --ready would have no effect."""
    assert main(["status", "--ready", "--variables", "a:1"]) == 2
    assert "--variables: has no effect with --ready" in capsys.readouterr().err
