"""What a failed job has left, saved below ``--data-dir`` before its servers end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

KEEP_SECONDS = 60.0  # for how long servers wait to be saved
SAVE_SECONDS = 600.0
SAVE = (sys.executable, "-m", "pserver", "save")


def rescue(endpoints: Sequence[str], data_dir: str, environ: Mapping[str, str]) -> str:
    """Runs ``pserver save``.

    Args:
        endpoints: all servers of the job.
        data_dir: below which the checkpoint goes, in a directory of its own: ``failed-...``.
        environ: the command's variables, with the operator's key.

    Returns:
        What became of it, as a sentence.
    """
    path = Path(data_dir) / time.strftime("failed-%Y%m%d-%H%M%S")
    command = [*SAVE, ",".join(endpoints), str(path)]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=SAVE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"what the servers held is not saved: it took more than {SAVE_SECONDS:.0f} s"
    with suppress(IndexError):
        if done.returncode == 0:
            return f"{done.stdout.splitlines()[0]} (fleet.load reads it)"
        return f"what the servers held is not saved: {done.stderr.splitlines()[-1]}"
    return "what the servers held is not saved"
