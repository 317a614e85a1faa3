"""Examples under ``pserver launch`` with real processes, and what they say."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import Processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "trainer" / "examples"
SECONDS = 280.0
LAUNCH = (sys.executable, "-m", "pserver", "launch")


class Said(NamedTuple):
    """The command's output, its errors among it, and trainer 0's log where there is one."""

    output: str
    log: str


def environment(**role: str) -> dict[str, str]:
    """This process's environment for one that it starts, on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **role}


def launched(cwd: Path, cluster: str, *words: str, command: Sequence[str] = LAUNCH[1:]) -> Said:
    """Runs ``python COMMAND``, unless said otherwise ``pserver launch``, to its end, which has to
    be a good one.

    Args:
        cluster: "SERVERS x TRAINERS"; "" where ``words`` say it.

    Returns:
        what it said.
    """
    servers, _, trainers = cluster.partition(" x ")
    counts = ["--servers", servers, "--trainers", trainers] if cluster else []
    processes = Processes(cwd)
    try:
        process = processes.python("command", *command, *counts, *words)
        status = process.status(patience=SECONDS)
    finally:
        processes.end()
    path = cwd / "logs" / "trainer-0.log"
    log = path.read_text() if path.exists() else ""
    assert status == 0, f"{process}\n{log}"
    return Said("\n".join(process.lines), log)


def accuracy(text: str) -> float:
    """The last accuracy that was printed."""
    return float(re.findall(r"accuracy (0\.\d+|1\.0+)", text)[-1])
