"""What becomes of a job whose trainer is killed, paused, terminated, replaced or joins later, in
every phase, and in every mode in which a job outlives a trainer: ``make check-faults`` runs them
all and writes docs/checks/trainer_faults.md.

Two servers and three trainers are real processes.  Each trainer trains columns of its own, which
are spread over both servers, with the same gradient in each step: so each element says how many
steps of its trainer are in it.  Where the members of a step have the mean of their gradients, the
columns of those that are in every step say besides how many members the steps had.  The victim,
trainer 2, sends the signal to itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.load import scaled
from tests.support.matrix import crossed
from tests.support.processes import Processes, Started

HEARTBEAT_TIMEOUT = 3.0
MARGIN = 12.0  # for a machine that others use too
SCRIPT = str(Path(__file__).with_name("lost_trainer.py"))
STEPS, FAULT_STEP = 30, 4  # of each trainer; in which one it happens
VICTIM = 2
ALONE, TWO, THREE = 6.0, 3.0, 2.0  # how far a step moves elements: the gradient, by its members

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
MODES += ["sync", "mixed", "mixed_async"]
TOGETHER = {  # what moves by the mean of a step's members
    "diloco": ["columns"],
    "sync": ["columns"],
    "mixed": ["columns", "rows"],
    "mixed_async": ["columns"],
}
AWAIT = ["sync", "mixed", "mixed_async"]  # the others wait for who takes the victim's place

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
        gone = "preempted after step" if number == "SIGTERM" else "has sent no heartbeat"
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

    if job.victim is not None:
        if done and not any(gone in line for line in job.servers[0][0].lines):
            status = 0
        assert_ended(job.victim, number, status)
        assert told < scaled(HEARTBEAT_TIMEOUT + MARGIN)
    counts = counted(job, mode, later)
    pause = max(longest_pause(each) for each in job.others)
    seen = f"told {told:.1f} s, longest pause {pause:.1f} s"
    record_property("result", seen + lost(job, phase, counts, later))


def counted(job: Job, mode: str, later: Started | None) -> dict[str, list[float]]:
    """In how many steps each trainer was, by what columns, and rows, say: just those that count."""
    finished = [*job.others, *([later] if later is not None else [])]
    last = max(finished, key=lambda each: said_at(each, "^columns"))  # has seen all that is applied
    counts = dict[str, list[float]]()
    for part, distances in moved(last).items():
        if mode == "geo":
            assert_divided(job, distances, later)
            continue
        if part in TOGETHER.get(mode, ()):
            assert all(moved(each)[part] == distances for each in finished), f"{finished}"
            counts[part] = of_members(distances)
            if mode in AWAIT and job.victim is not None and later is not None:
                assert counts[part][VICTIM] == STEPS, f"{job.victim}\n{later}"
        else:
            counts[part] = [distance / ALONE for distance in distances]
        assert_counted(job, counts[part], later)
    return counts


def lost(job: Job, phase: str, counts: dict[str, list[float]], later: Started | None) -> str:
    """What of the step that the victim was in does not count."""
    under_way = answered(job.victim) + (phase in ("sending", "between commits"))
    parts = [part for part, each in counts.items() if each[VICTIM] - answered(later) < under_way]
    if job.victim is None or not parts:
        return ""
    again = later is not None and steps(later)[0][1] <= FAULT_STEP
    what = "" if parts == [*counts] else f" of {parts[0]}"
    return f", step {FAULT_STEP}{what} {'made again' if again else 'lost'}"


def moved(trainer: Started) -> dict[str, list[float]]:
    """How far columns, and rows, have come at a trainer's end, by trainer."""
    found = dict[str, list[float]]()
    for line in trainer.lines:
        if match := re.match(r"(columns|rows) (.*)", line):
            distances = [set(map(float, each.split())) for each in match[2].split(" | ")]
            assert all(len(each) == 1 for each in distances), f"{trainer}"  # on all servers or none
            found[match[1]] = [each.pop() for each in distances]
    return found


def of_members(distances: list[float]) -> list[float]:
    """In how many steps each trainer was, where a step moves elements by the mean of its members.

    The others are in all steps, so how far theirs have come says how many were of three.
    """
    three = (distances[0] - TWO * STEPS) / (THREE - TWO)
    other = THREE * three + TWO * (STEPS - three)
    assert distances == [other, other, THREE * three], distances
    return [STEPS, STEPS, three]


def answered(trainer: Started | None) -> int:
    """How many of its steps were."""
    return 0 if trainer is None else len(steps(trainer))


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


def assert_counted(job: Job, counts: list[float], later: Started | None) -> None:
    """Steps that were answered are in the values; of the victim's at most one more, which it had
    sent whole, and none that came after its loss.
    """
    for trainer, count in zip(job.others, counts, strict=False):
        assert count == answered(trainer), f"{trainer}"
    most = answered(job.victim) + (job.victim is not None)
    more = counts[VICTIM] - answered(later)
    assert answered(job.victim) <= more <= most, f"{job.victim}\n{later}"


def assert_divided(job: Job, distances: list[float], later: Started | None) -> None:
    """Of a geo trainer's steps at least a third is in the values, and of the victim's no more than
    what it had sent; the script does not wait for the answers.
    """
    for trainer, distance in zip(job.others, distances, strict=False):
        assert THREE * answered(trainer) <= distance <= ALONE * answered(trainer), f"{trainer}"
    sent = thirds(answered(job.victim) + (job.victim is not None)) + thirds(answered(later))
    least = THREE * answered(later)
    assert least <= distances[VICTIM] <= sent + 1e-3, f"{job.victim}\n{later}"


def thirds(count: int) -> float:
    """How far so many steps of a geo trainer move elements at most: each one sends a third of what
    has not been sent yet.
    """
    total = kept = 0.0
    for _ in range(count):
        part = (kept + ALONE) / 3
        total, kept = total + part, kept + ALONE - part
    return total


def longest_pause(trainer: Started) -> float:
    """Of its steps; in seconds."""
    times = [at for at, _ in steps(trainer)]
    return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)
