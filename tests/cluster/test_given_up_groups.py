"""A process that has given up a group while it came up."""

from __future__ import annotations

import signal

import pytest

from tests.support.processes import Processes

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
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_its_end_comes_after_that_groups(processes: Processes) -> None:
    """The thread that brings it up ends when the store is gone, and not in the middle of the
    interpreter's end, which would abort the process.
    """
    serves = processes.python("serves", "-c", SERVES)
    port = serves.said(r"serves at (\d+)")[1]
    gives_up = processes.python("gives up", "-c", GIVES_UP, port)
    gives_up.said("gives up: trainer 0 is gone")
    gives_up.said(r"waits up to \d+ s for the end of a process group that was given up")

    serves.send(signal.SIGKILL)

    assert gives_up.status() == 0, f"{gives_up}"
