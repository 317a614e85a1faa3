"""``--trainers MIN:MAX``: a job begins with MIN trainers, and others join it later, by the same
command on other hosts.
"""

from __future__ import annotations

import json
import re

import pytest

from pserver.launcher.cluster import free_port
from tests.cluster.scripted_jobs import SCRIPT
from tests.cluster.scripted_trainer import GRADIENT, Plan
from tests.support.processes import Processes, Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
JOINS = ((0, "before 21", "wait joined"), *((n, "joined", "mark joined") for n in (1, 2)))
PLAN = Plan("async", trainers=3, steps=STEPS, at=JOINS)


def launched(
    processes: Processes, port: int, host: str, trainers: str, plan: Plan = PLAN
) -> Started:
    """One host's launch; the first host's name is that of the only server."""
    place = ("--servers", f"127.0.0.1:{port}", "--trainers", trainers, "--host", host)
    words = ("-m", "pserver", "launch", *place, "--log-dir", f"logs-{host}")
    return processes.python(host, *words, SCRIPT, plan.word)


@pytest.mark.long  # the rows of test_trainer_faults.py that join stand for it
def test_a_host_that_comes_later_joins_at_the_slowest_trainers_step(processes: Processes) -> None:
    """By the same command; the job is over when those that have joined are done."""
    port = free_port()
    first = launched(processes, port, "127.0.0.1", "1:3")
    first.said(r"trainer 0 *\| begins at 0 ")
    later = launched(processes, port, "later", "1:3")

    assert later.status(patience=100) == 0 and first.status() == 0, [first, later]
    place = int(later.said(r"joins the job as trainer ([12])$")[1])
    begun = int(later.said(rf"trainer {place} *\| begins at (\d+)")[1])
    assert 0 < begun <= 20
    # what the last one to finish has seen
    text = "\n".join([*first.lines, *later.lines])
    columns = [json.loads(each)["columns"][0] for each in re.findall(r"record (\{.*\})", text)]
    counts = {0: STEPS, place: STEPS - begun}
    assert [[counts.get(n, 0) * GRADIENT] for n in range(3)] in columns, [first, later]


@pytest.mark.long
def test_a_job_that_has_all_its_trainers_takes_no_more(processes: Processes) -> None:
    """The launch says so, and ends."""
    port = free_port()
    first = launched(processes, port, "127.0.0.1", "1:1")
    first.said("begins at 0 ")
    later = launched(processes, port, "later", "1:1")

    assert later.status() == 1, later
    assert "got none: --trainers 1:1 has all it may have" in "\n".join(later.lines)
    (processes.path / "joined").touch()
    assert first.status() == 0, first


@pytest.mark.long
def test_a_job_that_stops_without_a_trainer_has_no_places_to_join(processes: Processes) -> None:
    """It is refused: nobody may be missing."""
    stops = Plan("sync", configs={"lost_trainer": "stop"}, trainers=3)
    first = launched(processes, free_port(), "127.0.0.1", "1:3", stops)

    assert first.status() == 1, first
    assert "min_trainers=1 needs an elastic job" in "\n".join(first.lines), first
