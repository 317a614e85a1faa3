"""What ``pserver launch`` makes of trainers that leave in order after SIGTERM."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pserver.launcher.cluster import Cluster
from tests.support.tiny_launch import Run

# leaves as a trainer with a grace period does; trainer 0 goes on until it has
LEAVES = """
import os, sys, time
number, gone = int(os.environ["TRAINER_ID"]), os.path.join(os.path.dirname(__file__), "gone")
pid = gone + ".pid"
if number == 0:
    with open(pid, "w") as file:
        file.write(str(os.getpid()))
while not os.path.exists(pid) or not open(pid).read():
    time.sleep(0.02)
if number {which}:
    print(f"pserver: trainer {{number}} was preempted after step 57", file=sys.stderr, flush=True)
    open(gone, "w").close()
    sys.exit(143)
end = time.monotonic() + 20
while not os.path.exists(gone) and time.monotonic() < end:
    time.sleep(0.02)
"""
# the process of trainer 1 ends behind that of trainer 0
OUTLIVES = """
    end = time.monotonic() + 20
    while os.path.exists("/proc/" + open(pid).read()) and time.monotonic() < end:
        time.sleep(0.02)
    sys.exit(143)
"""
# trainer 1 fails behind the end of trainer 0, and the server behind that of trainer 1: a process
# that launch has seen to end has no directory any more
IN_TURN = """
import os, sys, time
def behind(number):
    name, end = os.path.join(os.path.dirname(__file__), f"pid.{number}"), time.monotonic() + 20
    while not os.path.exists(name) and time.monotonic() < end:
        time.sleep(0.02)
    while os.path.exists("/proc/" + open(name).read()) and time.monotonic() < end:
        time.sleep(0.02)
"""
FAILS = """
number = int(os.environ["TRAINER_ID"])
name = os.path.join(os.path.dirname(__file__), f"pid.{number}")
with open(name + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + ".new", name)
if number == 1:
    behind(0)
    sys.exit(143)
"""


@pytest.mark.processes
def test_a_trainer_that_was_preempted_has_not_failed(run: type[Run]) -> None:
    """The others go on; when they have finished the status is 0, and the last word names it."""
    status, _, err = run(LEAVES.format(which="== 1")).end()

    assert status == 0, err
    said = "pserver launch: trainer 1 was preempted after step 57"
    first, last = (line for line in err.splitlines() if "preempted" in line and "launch" in line)
    assert (first, last) == (f"{said}; the others go on", said)


@pytest.mark.processes
def test_a_job_whose_trainers_were_all_preempted_has_not_ended_well(run: type[Run]) -> None:
    """Its status is theirs."""
    status, _, err = run(LEAVES.format(which=">= 0")).end()

    assert status == 128 + signal.SIGTERM, err
    for number in (0, 1):
        assert f"trainer {number} was preempted after step 57" in err


@pytest.mark.processes
def test_only_who_says_that_it_has_left_is_preempted(run: type[Run]) -> None:
    """Another process that exits with 143 has failed, unless the servers say the job is done."""
    status, _, err = run(IN_TURN + FAILS, server=IN_TURN + "behind(1)\nsys.exit(1)").end()

    assert status == 143 and "trainer 1 failed with status 143" in err
    assert "preempted" not in err


def test_a_grace_period_is_a_number_of_seconds(tmp_path: Path) -> None:
    """The message names the flag.  Without servers it is the time of scripts' own handlers."""
    script = tmp_path / "train.py"
    script.write_text("")
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="--grace: expected a number of seconds from 0 on"):
            Cluster(str(script), (), ("127.0.0.1:0",), ("",), grace_seconds=seconds)
    assert Cluster(str(script), (), (), ("",), grace_seconds=5.0).grace_seconds == 5.0


@pytest.mark.processes
def test_the_others_may_end_before_a_preempted_trainer_s_process(run: type[Run]) -> None:
    """It is still no failure: the job has gone on without it."""
    script = LEAVES.format(which="== 1").replace("    sys.exit(143)\n", OUTLIVES)
    status, _, err = run(script).end()

    assert status == 0, err
