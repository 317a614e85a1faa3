"""What becomes of a job whose trainer is killed, paused, terminated, replaced or joins later, in
every phase and mode in which steps need no trainer: ``make check-faults`` runs them all and writes
docs/checks/trainer_faults.md.

Two servers and three trainers are real processes.  Each trainer trains columns of its own, which
are spread over both servers, with gradients of ones: so each element says how many steps of its
trainer are in it.  The victim, trainer 2, sends the signal to itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.matrix import crossed
from tests.support.processes import Processes, Started

HEARTBEAT_TIMEOUT = 3.0
MARGIN = 12.0  # for a machine that others use too
SCRIPT = str(Path(__file__).with_name("lost_trainer.py"))
STEPS, FAULT_STEP = 30, 4  # of each trainer; in which one it happens
VICTIM = 2

# what happens: the signal, and whether another process takes the victim's place
FAULTS = {
    "kill -9": ("SIGKILL", False),
    "kill -9, and another process": ("SIGKILL", True),
    "a pause that is taken for its end": ("SIGSTOP", False),
    "a pause, and another process": ("SIGSTOP", True),
    "SIGTERM with a grace period": ("SIGTERM", False),
    "joining later": ("", True),
}
PHASES = ["sending", "between commits", "between steps", "finishing"]
MODES = ["async", "half_async", "staleness", "geo", "diloco", "tables"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Job:
    """Two servers and the trainers of one combination.

    Attributes:
        later: the victim's number, in another process; it has not started yet.
    """

    servers: list[tuple[Started, str]]
    others: list[Started]
    victim: Started | None
    later: Callable[[], Started]


def begun(processes: Processes, what: str, mode: str, phase: str) -> Job:
    """Starts a job, without its last trainer where that joins later."""
    number, _ = FAULTS[what]
    least = () if number else ("--min-trainers", "2")
    servers = processes.servers(2, HEARTBEAT_TIMEOUT, "--once", *least)
    job = {
        "TRAINING_ROLE": "TRAINER",
        "TRAINERS": "3",
        "PSERVER_ENDPOINTS": ",".join(endpoint for _, endpoint in servers),
        "PSERVER_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT),
        "PSERVER_GRACE": "30" if number == "SIGTERM" else "0",
        "JOINS": str(int(FAULTS[what][1])),
    }

    def trainer(trainer_id: int, fault: str = "") -> Started:
        words = (SCRIPT, mode, fault, phase, str(STEPS), str(FAULT_STEP))
        name = f"trainer {trainer_id}"
        return processes.python(name, *words, **job, TRAINER_ID=str(trainer_id))

    others = [trainer(0), trainer(1)]
    victim = trainer(VICTIM, number) if number else None
    return Job(servers, others, victim, lambda: trainer(VICTIM))


def steps(trainer: Started) -> list[tuple[float, int]]:
    """When it has taken which steps."""
    lines = zip(list(trainer.times), list(trainer.lines), strict=False)
    found = [(at, re.match(r"step (\d+)$", line)) for at, line in lines]
    return [(at, int(match[1])) for at, match in found if match]


def struck(job: Job) -> float:
    """Waits until the fault has happened.

    Returns:
        When.
    """
    assert job.victim is not None, "there is one"
    job.victim.said("^strikes")
    return next(
        at
        for at, line in zip(job.victim.times, job.victim.lines, strict=False)
        if line.startswith("strikes")
    )


def said_at(started: Started, pattern: str) -> float:
    """When a process has said something; waits for it."""
    started.said(pattern)
    lines = zip(started.times, started.lines, strict=False)
    return next(at for at, line in lines if re.search(pattern, line))


@crossed("trainer_faults", what=FAULTS, mode=MODES, phase=PHASES)
def test_the_job_goes_on_after(
    processes: Processes,
    record_property: Callable[[str, object], None],
    what: str,
    mode: str,
    phase: str,
) -> None:
    """The others finish; a step counts on both servers or on none; what was answered counts, and
    nothing that a lost process sends afterwards; another process takes its place.
    """
    number, joins = FAULTS[what]
    job = begun(processes, what, mode, phase)
    told, later = 0.0, None
    done = number == "SIGTERM" and phase == "finishing"  # it may end with the others
    status = 143
    if job.victim is not None:
        at = struck(job)
        gone = "preempted after step" if number == "SIGTERM" else "has shown no heartbeat"
        said = f"(left|{gone})" if done else gone
        told = said_at(job.servers[0][0], f"trainer {VICTIM} .*{said}") - at
    else:
        job.others[0].said(f"^step {FAULT_STEP}$")
    if joins:
        later = job.later()
        later.said("^begins at")
    if job.victim is not None and number == "SIGSTOP":
        os.kill(job.victim.pid, signal.SIGCONT)
    finished = [*job.others, *([later] if later is not None else [])]
    for each in finished:
        assert each.status() == 0, f"{processes.all}"
    for server, _ in job.servers:
        assert server.status() == 0, f"{processes.all}"

    last = max(finished, key=counted_at)  # it has seen all that is applied
    counted = last.said(r"^counted (.*)$")[1].split(" | ")
    each_number = [[float(value) for value in column.split()] for column in counted]
    assert all(len(set(column)) == 1 for column in each_number), f"{processes.all}"
    if job.victim is not None:
        if done and not any(gone in line for line in job.servers[0][0].lines):
            status = 0
        assert_ended(job.victim, number, status)
        assert told < HEARTBEAT_TIMEOUT + MARGIN
    if mode not in ("geo", "diloco"):  # which divide
        assert_counted(job, each_number, later)
    pause = max(longest_pause(each) for each in job.others)
    record_property("result", f"told {told:.1f} s, longest pause {pause:.1f} s")


def counted_at(trainer: Started) -> float:
    """When it said what the parameters count."""
    places = [n for n, line in enumerate(trainer.lines) if line.startswith("counted")]
    return trainer.times[places[0]]


def assert_ended(victim: Started, number: str, in_order: int) -> None:
    """A paused one learns that it was lost; one with a grace period has left, with the status
    ``in_order``.
    """
    status = victim.status()
    if number == "SIGTERM":
        assert status == in_order, f"{victim}"
    elif number == "SIGKILL":
        assert status == -signal.SIGKILL, f"{victim}"
    else:
        assert status not in (0, -signal.SIGKILL), f"{victim}"
        assert re.search("TrainerLost|ServerLost", "\n".join(victim.lines)), f"{victim}"


def assert_counted(job: Job, columns: list[list[float]], later: Started | None) -> None:
    """Steps that were answered are in the values; of the victim's at most one more, which it had
    sent whole, and none that came after its loss.
    """
    for trainer, column in zip(job.others, columns, strict=False):
        assert column[0] == len(steps(trainer)), f"{trainer}"
    first = 0 if job.victim is None else len(steps(job.victim))
    more = 0 if later is None else len(steps(later))
    assert first + more <= columns[VICTIM][0] <= first + more + 1, f"{job.victim}\n{later}"


def longest_pause(trainer: Started) -> float:
    """Of its steps; in seconds."""
    times = [at for at, _ in steps(trainer)]
    return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)
