"""What a server that has died here goes on from, as the others say it and as its checkpoint is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from pserver.launcher.process import Process
from pserver.launcher.started_processes import StartedProcesses
from transpiler.files import bounded_json

LOST_SERVER = (sys.executable, "-m", "pserver.launcher.lost_server")
ASK_SECONDS = 30.0  # for the other servers to answer, and the manifests to be read


def save_to_reload(
    started: StartedProcesses, ended: Process, environment: Mapping[str, str]
) -> tuple[str, str]:
    """The path of what a dead server has saved, if its job goes on with that; otherwise "", and the
    reason.

    Args:
        started: the processes of this host.
        ended: the server.
        environment: the variables of ``launch``; PSERVER_KEYS counts.
    """
    index = started.index_of(ended)
    own = started.endpoints.get(ended)
    others = [each for each in started.asked if each != own]
    command = [*LOST_SERVER, started.tokens.operator, environment.get("PSERVER_KEYS", "")]
    with suppress(subprocess.TimeoutExpired, ValueError, KeyError):
        asked = subprocess.run(
            [*command, ",".join(others), str(index), started.checkpoint, started.write_ahead_log],
            timeout=ASK_SECONDS,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        said = bounded_json.loads(asked.stdout)
        return str(said["path"]), str(said["reason"])
    return "", "the other servers do not say how the job goes on"
