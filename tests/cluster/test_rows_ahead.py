"""Rows that are looked up ahead where processes die: the job ends with the values of one in which
none has died, and in which nothing is looked up ahead.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.cluster.scripted_jobs import ended, said, servers_of
from tests.support.processes import Processes, Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).with_name("ahead_trainer.py"))
SAVES = ("--checkpoint", "saved", "--every", "0.05", "--keep", "3")


def launched(processes: Processes, depth: int, dies: str, *flags: str) -> Started:
    """A job of two servers and two trainers."""
    words = ("-m", "pserver", "launch", "--servers", "2", "--trainers", "2", *flags)
    role = {"PSERVER_HEARTBEAT_TIMEOUT": "5"}
    return processes.python("launch", *words, SCRIPT, str(depth), dies, **role)


def digest(text: str) -> str:
    """That of both trainers."""
    (found,) = set(re.findall(r"digest (\w+)", text))
    return str(found)


@pytest.mark.parametrize("dies", ["trainer", "server"])
def test_a_process_dies_while_a_refresh_waits(processes: Processes, dies: str) -> None:
    """One trainer waits in a step, and has asked for what that changes of coming rows.  The other
    one's successor takes its place there; or all go back to the last checkpoint.
    """
    expected = digest(ended(launched(processes, 0, "")))
    launch = launched(processes, 2, dies, *SAVES, "--max-restarts", "1")
    if dies == "server":
        said(launch, "now$", 1)
        servers_of(launch)[-1].send_signal(signal.SIGKILL)
        (processes.path / "killed").touch()
    text = ended(launch)

    again = "continues from" if dies == "server" else "joins the others after 8 steps"
    assert re.search(rf"trainer 1 *\| {again}", text), text
    assert digest(text) == expected, text
    assert all(float(each) > 0 for each in re.findall(r"ahead (\S+)", text)), text
