"""A process that has given up a group while it came up."""

from __future__ import annotations

import signal

import pytest

from tests.support.processes import Processes, Started

SERVES = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print("serves at", store.port, flush=True)
sys.stdin.read()
"""
GIVES_UP = """
import logging, sys
from datetime import timedelta
from functools import partial
import torch
from torch.distributed import TCPStore
from pserver.errors import TrainerLost
from trainer.collective import process_groups

logging.basicConfig(format="%(message)s")
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=300))

class Groups(process_groups.ProcessGroups):
    def __init__(self):
        pass

    def look(self, what):
        raise TrainerLost("trainer 0 is gone")

try:
    make = partial(process_groups._gloo, store, 1, 2, "127.0.0.1", 60.0)
    Groups()._watched(make, torch.device("cpu"))
except TrainerLost as error:
    print("gives up:", error, flush=True)
    if sys.argv[2:]:
        raise
"""


pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def given_up(processes: Processes, *words: str) -> tuple[Started, Started]:
    """A process that serves a store, and another one that has given up a group."""
    serves = processes.python("serves", "-c", SERVES)
    port = serves.said(r"serves at (\d+)")[1]
    gives_up = processes.python("gives up", "-c", GIVES_UP, port, *words)
    gives_up.said("gives up: trainer 0 is gone")
    return serves, gives_up


def test_its_end_comes_after_that_groups(processes: Processes) -> None:
    """The thread that brings it up ends when the store is gone, and not in the middle of the
    interpreter's end, which would abort the process.
    """
    serves, gives_up = given_up(processes)
    gives_up.said(r"waiting up to \d+ s for the end of a process group that was given up")

    serves.send(signal.SIGKILL)

    assert gives_up.status() == 0, f"{gives_up}"


def test_a_process_that_fails_does_not_wait(processes: Processes) -> None:
    """The others are to hear of its end at once."""
    serves, gives_up = given_up(processes, "fails")

    assert gives_up.status(patience=30) == 1, f"{gives_up}"
    assert serves.running and not any("waiting up to" in line for line in gives_up.lines)
