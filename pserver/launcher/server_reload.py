"""What a server that has died here goes on from, as the others say it and as its checkpoint is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from pserver.launcher.process import Process
from pserver.launcher.question import Question, patience
from pserver.launcher.started_processes import StartedProcesses

LOST_SERVER = (sys.executable, "-m", "pserver.launcher.lost_server")
UNKNOWN = "the other servers do not say how the job goes on"


def ask_for_reload(
    started: StartedProcesses, ended: Process, environment: Mapping[str, str]
) -> Question:
    """Asks for the ``path`` of what a dead server has saved, if its job goes on with that;
    otherwise "", and the ``reason``.

    Args:
        started: the processes of this host; ``events`` gets None when the question is answered.
        ended: the server.
        environment: the variables of ``launch``; PSERVER_KEYS counts.
    """
    index = started.index_of(ended)
    own = started.endpoints.get(ended)
    others = [each for each in started.asked if each != own]
    command = [*LOST_SERVER, started.tokens.operator, environment.get("PSERVER_KEYS", "")]
    places = [",".join(others), str(index), started.checkpoint, started.write_ahead_log]
    seconds = patience(started.cluster.heartbeat_timeout_seconds)
    return Question([*command, *places, f"{seconds:g}"], partial(started.events.put, None))
