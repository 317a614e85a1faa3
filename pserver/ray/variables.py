"""The environment variables of the processes of a job on Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pserver.ray.request import JobRequest

OURS = re.compile(r"PSERVER_\w+")
# of a node's own environment: another job's, or another launcher's
DROPPED = (
    "TRAINING_ROLE",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def own_variables(
    request: JobRequest, kind: str, number: int, endpoints: Sequence[str] = ()
) -> dict[str, str]:
    """What a process finds in its environment besides what its node has.

    Args:
        kind: "server" or "trainer".
        endpoints: of all servers, for a trainer.
    """
    threads = str(max(1, int(request.resources(kind)["CPU"])))
    role = {
        "TRAINING_ROLE": "TRAINER",
        "PSERVER_ENDPOINTS": ",".join(endpoints),
        "TRAINERS": str(request.trainers),
        "TRAINER_ID": str(number),
    }
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PSERVER_JOB": request.name,
        **(request.environment or {}),
        **(role if kind == "trainer" else {}),
    }


def without_other_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """A node's environment without what would tell a process another role.

    Ray may have been started by a process of another job, or in a shell with settings of
    ``pserver``; what counts here is said to ``run``.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in DROPPED and not OURS.match(name)
    }
