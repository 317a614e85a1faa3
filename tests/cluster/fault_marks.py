"""Files by which the processes of a cluster with a planned fault tell each other that it is time,
and that it has happened.

``FAULT`` is "SIGNAL VICTIM PHASE": the signal that the victim sends to itself, "trainer" or
"server", and the phase of the job.  ``FAULT_DIR`` holds the files.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.load import Deadline

SIGNAL, VICTIM, PHASE = os.environ["FAULT"].split()
FOLDER = Path(os.environ["FAULT_DIR"])
PATIENCE = 60.0


def ask_to_strike() -> None:
    """Tells the server that is to be the victim that the phase has come."""
    (FOLDER / "strike").touch()


def asked() -> bool:
    """Whether the phase has come."""
    return (FOLDER / "strike").exists()


def strike() -> None:
    """Says when, and by whom; then this process gets the signal, from itself."""
    said = FOLDER / "said"
    said.write_text(f"{time.monotonic()} {os.getpid()}")
    said.rename(FOLDER / "struck")
    os.kill(os.getpid(), signal.Signals[SIGNAL])


def say_joined() -> None:
    """Says that trainer 0 has joined every server."""
    (FOLDER / "joined").touch()


def wait_until_joined() -> None:
    """Returns when it has."""
    _wait_for("joined")


def wait_until_struck() -> None:
    """Returns when the fault has happened."""
    _wait_for("struck")


def _wait_for(name: str) -> None:
    deadline = Deadline(PATIENCE)
    while not (FOLDER / name).exists():
        if deadline.over:
            raise TimeoutError(f"nobody has {name} within {deadline.limit:g} s")
        time.sleep(0.01)


def is_first() -> bool:
    """Whether this process is the first that asks: the victim among equal ones."""
    try:
        (FOLDER / "victim").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
