"""``pserver plan``: runs a trainer's script up to its plan, which the script prints instead of
joining servers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ONLY = "PSERVER_PLAN_ONLY"  # read in trainer/environment


def show(
    script: str,
    arguments: Sequence[str],
    servers: int,
    trainers: int,
    environment: Mapping[str, str],
) -> int:
    """Runs the script as trainer 0 of such a job.

    Args:
        script, arguments: of the trainer.
        servers, trainers: how many the job would have.
        environment: the script's environment variables, besides those of its role.

    Returns:
        The script's exit status.

    Raises:
        ValueError: there is no such script.
    """
    if not Path(script).is_file():
        raise ValueError(f"no script at {script!r}")
    role = {
        "TRAINING_ROLE": "TRAINER",
        "TRAINER_ID": "0",
        "TRAINERS": str(trainers),
        "PSERVER_ENDPOINTS": ",".join(f"server-{index}:6174" for index in range(servers)),
        ONLY: "1",
    }
    return subprocess.run(
        [sys.executable, script, *arguments], env={**environment, **role}, check=False
    ).returncode
