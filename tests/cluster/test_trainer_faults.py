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
from dataclasses import dataclass, replace

import pytest

from tests.cluster.scripted_jobs import Job, moved, said_at, steps
from tests.cluster.scripted_trainer import GRADIENT, Plan
from tests.support.load import scaled
from tests.support.matrix import crossed
from tests.support.processes import Processes, Started

HEARTBEAT_TIMEOUT = 3.0
MARGIN = 12.0  # for a machine that others use too
NOBODY_COMES = 8  # seconds; no less than what trainers need to begin
TRAINERS, STEPS, FAULT_STEP, HOLD = 3, 30, 4, 20  # of each trainer; in which one it happens
VICTIM = 2
ALONE, TWO, THREE = (GRADIENT / members for members in (1, 2, 3))  # how far a step moves elements

# what happens: the signal, and whether another process takes the victim's place
FAULTS = {
    "kill -9": ("SIGKILL", False),
    "kill -9, and another process": ("SIGKILL", True),
    "a pause that is taken for its end": ("SIGSTOP", False),
    "a pause, and another process": ("SIGSTOP", True),
    "SIGTERM with a grace period": ("SIGTERM", False),
    "joining later": ("", True),
}
# see scripted_trainer.py; in the mixed modes the others have a trainer's count of gradients when it
# is lost while it sends, and wait for these
PHASES = {
    "sending": f"sending {FAULT_STEP}",
    "between commits": f"between commits {FAULT_STEP}",
    "committed": f"committed {FAULT_STEP}",
    "between steps": f"before {FAULT_STEP}",
    "finishing": "ends",
}
MODES = ["async", "half_async", "staleness", "geo", "diloco", "tables"]
MODES += ["sync", "mixed", "mixed_async"]
PROGRAMS = {"programs": "mixed", "async programs": "mixed_async"}
TOGETHER = {  # what moves by the mean of a step's members
    "diloco": ["columns"],
    "sync": ["columns"],
    "mixed": ["columns", "rows"],
    "mixed_async": ["columns"],
}
AWAIT = ["sync", "mixed", "mixed_async"]  # the others wait for who takes the victim's place

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Loss:
    """A job, and the victim of one combination.

    Attributes:
        later: starts the victim's number in another process.
    """

    job: Job
    others: list[Started]
    victim: Started | None
    later: Callable[[], Started]


def begun(
    processes: Processes,
    what: str,
    mode: str,
    phase: str,
    *flags: str,
    policy: str = "",
    early: tuple[str, ...] = (),
) -> Loss:
    """Starts a job, without its last trainer where that joins later.

    Args:
        flags: of the servers.
        policy: for a lost trainer; "": what fits the fault.
        early: what all do when they have joined.
    """
    number, joins = FAULTS[what]
    programs, mode = mode in PROGRAMS, PROGRAMS.get(mode, mode)
    least = () if number else ("--min-trainers", "2")
    job = Job(processes, HEARTBEAT_TIMEOUT, *least, *flags, trainers=TRAINERS)
    configs = {"lost_trainer": policy or ("wait" if joins else "go_on")} if mode in AWAIT else {}
    plan = Plan(mode, programs, configs, TRAINERS, STEPS, pause=0.02)
    actions = [(place, each) for place in ("joined", "joined again") for each in early]
    if joins:
        hold = [(f"before {HOLD}", "wait joined")] if phase != "finishing" else []
        actions += [*hold, ("ends", "wait joined")]
    role = {"PSERVER_GRACE": "30" if number == "SIGTERM" else "0"}

    def trainer(trainer_id: int, *more: tuple[str, str]) -> Started:
        at = tuple((trainer_id, *each) for each in (*more, *actions))
        return job.trainer(trainer_id, replace(plan, at=at), **role)

    place = PHASES[phase]
    if "mixed" in mode and phase == "sending":
        place = f"averaging {FAULT_STEP}"
    others = [trainer(0), trainer(1)]
    victim = trainer(VICTIM, (place, number)) if number else None
    comes = [(place, "mark joined") for place in ("joined", "joined again")]
    return Loss(job, others, victim, lambda: trainer(VICTIM, *comes))


@crossed(
    "trainer_faults",
    rows=[
        ("kill -9", "sync", "between commits"),
        ("kill -9, and another process", "mixed", "committed"),
        ("a pause that is taken for its end", "staleness", "finishing"),
        ("a pause, and another process", "tables", "sending"),
        ("SIGTERM with a grace period", "geo", "sending"),
        ("SIGTERM with a grace period", "sync", "between steps"),
        ("joining later", "mixed_async", "between steps"),
    ],
    what=FAULTS,
    mode=[*MODES, *PROGRAMS],
    phase=PHASES,
)
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
    loss = begun(processes, what, mode, phase)
    mode = PROGRAMS.get(mode, mode)
    server, told, later = loss.job.servers[0], 0.0, None
    done = number == "SIGTERM" and phase == "finishing"  # it may end with the others
    status = 143
    if loss.victim is not None:
        at = said_at(loss.victim, "^strikes")
        gone = "preempted after step" if number == "SIGTERM" else "has sent no heartbeat"
        told = said_at(server, f"trainer {VICTIM} .*{f'(left|{gone})' if done else gone}") - at
    else:
        loss.others[0].said(f"^step {FAULT_STEP}$")
    if joins:
        later = loss.later()
        later.said("^begins at")
    if loss.victim is not None and number == "SIGSTOP":
        os.kill(loss.victim.pid, signal.SIGCONT)
    for each in [*loss.others, *([later] if later is not None else [])]:
        assert each.status() == 0, f"{processes.all}"
    assert loss.job.statuses() == [0, 0], f"{processes.all}"

    if loss.victim is not None:
        if done and not any(gone in line for line in server.lines):
            status = 0
        assert_ended(loss.victim, number, status)
        assert told < scaled(HEARTBEAT_TIMEOUT + MARGIN)
        if number == "SIGTERM" and not done:
            step = FAULT_STEP if phase == "between steps" else r"\d+"
            for each in loss.others:
                each.said(f"trainer {VICTIM} was preempted after step {step}; 2 of 3 trainers")
    counts = counted(loss, mode, later)
    pause = max(longest_pause(each) for each in loss.others)
    seen = f"told {told:.1f} s, longest pause {pause:.1f} s"
    record_property("result", seen + lost(loss, phase, counts, later))


@pytest.mark.observes("a_sync_configs.lost_trainer")
@crossed(
    "trainer_faults",
    rows=[("stop", "sync", "between commits")],
    policy=["wait", "stop"],
    mode=[*AWAIT, *PROGRAMS],
    phase=["sending", "between commits", "committed"],
)
def test_nobody_comes_in_the_place_of_a_killed_trainer(
    processes: Processes, policy: str, mode: str, phase: str
) -> None:
    """The others wait up to the start timeout, and go on; or they stop, with TrainerLost."""
    timeout = ("--start-timeout", str(NOBODY_COMES))
    loss = begun(processes, "kill -9", mode, phase, *timeout, policy=policy)
    assert loss.victim is not None
    assert loss.victim.status() == -signal.SIGKILL
    if policy == "stop":
        for other in loss.others:
            assert other.status() == 1, f"{other}"
            other.said("(TrainerLost|JobFailed): .*trainer 2 ")
        assert 0 not in loss.job.statuses()
        loss.job.servers[0].said("the job failed: .*trainer 2 ")
        return
    assert [other.status() for other in loss.others] == [0, 0], f"{processes.all}"
    assert loss.job.statuses() == [0, 0]
    seconds = processes.scaled(NOBODY_COMES)
    loss.job.servers[0].said(f"no process takes trainer 2's place within {seconds:g} s")
    counted(loss, PROGRAMS.get(mode, mode), None)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["mixed", "mixed_async"])
def test_another_process_loads_what_the_others_have_loaded(processes: Processes, mode: str) -> None:
    """A checkpoint, before it trains: it has the values of now."""
    early = ("save early", "load early")
    what = "kill -9, and another process"
    loss = begun(processes, what, mode, "sending", early=early)
    loss.job.servers[0].said("another process may take its place")
    later = loss.later()

    assert [each.status() for each in (*loss.others, later)] == [0, 0, 0], f"{processes.all}"
    counted(loss, mode, later)


def counted(loss: Loss, mode: str, later: Started | None) -> dict[str, list[float]]:
    """In how many steps each trainer was, by what columns, and rows, say: just those that count."""
    finished = [*loss.others, *([later] if later is not None else [])]
    last = max(finished, key=lambda each: said_at(each, "^record"))  # has seen all that is applied
    counts = dict[str, list[float]]()
    for part, distances in moved(last).items():
        if mode == "geo":
            assert_divided(loss, distances, later)
            continue
        if part in TOGETHER.get(mode, ()):
            assert all(moved(each)[part] == distances for each in finished), f"{finished}"
            counts[part] = of_members(distances)
            if mode in AWAIT and loss.victim is not None and later is not None:
                assert counts[part][VICTIM] == STEPS, f"{loss.victim}\n{later}"
        else:
            counts[part] = [distance / ALONE for distance in distances]
        assert_counted(loss, counts[part], later)
    return counts


def lost(loss: Loss, phase: str, counts: dict[str, list[float]], later: Started | None) -> str:
    """What of the step that the victim was in does not count."""
    under_way = answered(loss.victim) + (phase in ("sending", "between commits", "committed"))
    parts = [part for part, each in counts.items() if each[VICTIM] - answered(later) < under_way]
    if loss.victim is None or not parts:
        return ""
    again = later is not None and steps(later)[0][1] <= FAULT_STEP
    what = "" if parts == [*counts] else f" of {parts[0]}"
    return f", step {FAULT_STEP}{what} {'made again' if again else 'lost'}"


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


def assert_counted(loss: Loss, counts: list[float], later: Started | None) -> None:
    """Steps that were answered are in the values; of the victim's at most one more, which it had
    sent whole, and none that came after its loss.
    """
    for trainer, count in zip(loss.others, counts, strict=False):
        assert count == answered(trainer), f"{trainer}"
    most = answered(loss.victim) + (loss.victim is not None)
    more = counts[VICTIM] - answered(later)
    assert answered(loss.victim) <= more <= most, f"{loss.victim}\n{later}"


def assert_divided(loss: Loss, distances: list[float], later: Started | None) -> None:
    """Of a geo trainer's steps at least a third is in the values, and of the victim's no more than
    what it had sent; the script does not wait for the answers.
    """
    for trainer, distance in zip(loss.others, distances, strict=False):
        assert THREE * answered(trainer) <= distance <= ALONE * answered(trainer), f"{trainer}"
    sent = thirds(answered(loss.victim) + (loss.victim is not None)) + thirds(answered(later))
    least = THREE * answered(later)
    assert least <= distances[VICTIM] <= sent + 1e-3, f"{loss.victim}\n{later}"


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
