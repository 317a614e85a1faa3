"""Finds a place for a launch that joins a job under way."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping

from pserver.config import START_TIMEOUT_SECONDS
from pserver.errors import Refused
from pserver.launcher.cluster import Cluster
from transpiler.files import bounded_json

FREE_PLACE = (sys.executable, "-m", "pserver.launcher.free_place")
MORE_SECONDS = 30.0  # for the process that asks to begin and to end


def find_place(cluster: Cluster, token: str, environment: Mapping[str, str]) -> int:
    """A free place.  Two launches that ask at once may rarely get the same one, as each draws among
    all; the server then refuses the second.

    Args:
        cluster: which it joins.
        token: the path of the job's token file, or "".
        environment: the variables of ``launch``; PSERVER_KEYS counts.

    Raises:
        Refused: there is no place, or no server to ask.
    """
    seconds = cluster.start_timeout_seconds or START_TIMEOUT_SECONDS
    keys, least = environment.get("PSERVER_KEYS", ""), str(cluster.least_trainers)
    command = [*FREE_PLACE, token, keys, cluster.servers[0], least, str(seconds)]
    asked = subprocess.run(
        command,
        timeout=2 * seconds + MORE_SECONDS,
        check=True,
        stdout=subprocess.PIPE,
    )
    said = bounded_json.loads(asked.stdout)
    if not said["free"]:
        most = len(cluster.trainers)
        raise Refused(
            f"no place to join: {said['reason']}"
            if said["reason"]
            else f"expected a job at {cluster.servers[0]} with a place that is free, of those "
            f"from {least} to {most - 1}; got none: --trainers {least}:{most} has all it may have"
        )
    return int(random.SystemRandom().choice(said["free"]))
