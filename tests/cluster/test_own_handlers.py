"""A script that has its own handler of SIGTERM saves and leaves, whenever it has installed it: with
real processes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.own_handlers import AT, WAITS
from tests.support.processes import Processes
from tests.support.tiers import RARE

SCRIPT = str(Path(__file__).with_name("own_handlers.py"))
LAUNCH = ("-m", "pserver", "launch")

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("when", ["calling", RARE("after"), RARE("before")])
@pytest.mark.parametrize("mode", ["sync", RARE("async"), RARE("diloco")])
def test_the_script_goes_on_and_saves(processes: Processes, mode: str, when: str) -> None:
    """Status 0, every trainer leaves at the step of the signal, and the checkpoint is whole."""
    cluster = ("--servers", "2", "--trainers", "2")
    launch = processes.python("launch", *LAUNCH, *cluster, SCRIPT, mode, when)

    assert launch.status() == 0, launch
    for trainer in (0, 1):
        launch.said(rf"trainer {trainer} \| left after {AT} of {AT} steps, saved True")


@pytest.mark.long  # the test before, and test_preemption.py, stand for it
@pytest.mark.parametrize("servers", [["--servers", "1"], ["--nccl2"]], ids=["ps", "nccl2"])
def test_a_launch_that_is_told_to_end_lets_the_script_save(
    processes: Processes, servers: list[str]
) -> None:
    """Its servers stay until the trainers have ended; then its status is the signal's."""
    flags = (*servers, "--trainers", "2", "--grace", "60")
    launch = processes.python("launch", *LAUNCH, *flags, SCRIPT, WAITS, "after")
    for trainer in (0, 1):
        launch.said(rf"trainer {trainer} \| trains")
    launch.send(signal.SIGTERM)

    assert launch.status() == 128 + signal.SIGTERM, launch
    for trainer in (0, 1):
        launch.said(rf"trainer {trainer} \| left after .* saved True")
