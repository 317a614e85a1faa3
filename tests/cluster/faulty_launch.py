"""``pserver launch`` of a cluster with a planned fault; prints which processes there are, and how
and when each ended.

::

    python faulty_launch.py SERVERS TRAINERS HEARTBEAT_TIMEOUT SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pserver.launcher import launch, processes, started_processes, supervisor
from pserver.launcher.cluster import Cluster, cluster_endpoints
from tests.support.load import scaled

SERVER = str(Path(__file__).with_name("faulty_server.py"))
READY_SECONDS = 20.0  # 120 otherwise: how long a server that stops while it starts is waited for


def _say(line: str) -> None:
    """One write: other threads write too."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _watched(make: Callable[..., Any]) -> Callable[..., Any]:
    """Processes whose begins and ends are printed."""

    def started(*arguments: Any, ended: Callable[[Any], None], **named: Any) -> Any:
        def over(made: Any) -> None:
            _say(f"ended {made.name} {made.status} {time.monotonic()}")
            ended(made)

        made = make(*arguments, ended=over, **named)
        _say(f"started {made.name} {made._popen.pid}")
        return made

    return started


if __name__ == "__main__":
    _, servers, trainers, timeout, script, *words = sys.argv
    vars(started_processes)["ChildProcess"] = _watched(processes.ChildProcess)
    supervisor.READY_SECONDS = scaled(READY_SECONDS)
    endpoints = cluster_endpoints(servers, trainers, None)
    cluster = Cluster(script, tuple(words), *endpoints, heartbeat_timeout_seconds=float(timeout))
    sys.exit(launch.launch(cluster, os.environ, serve=(sys.executable, SERVER)))
