"""How a job ends, with real processes: who knows after how long, and with which status each process
exits.  Each row is a job and what becomes of one of its processes; for every phase and every mode
see test_process_faults.py.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, replace

import pytest

from tests.cluster.scripted_jobs import Job, launched, said_at
from tests.cluster.scripted_trainer import Plan
from tests.support.load import scaled
from tests.support.processes import Processes

LONG = 20.0  # a heartbeat timeout that no ending here waits for
SHORT = 3.0
STOPPED = 7.0  # seconds
TOLD_WITHIN = 8.0  # of a busy machine; far below the long timeout

RUNS = Plan("sync", steps=10**9, pause=0.01)
FINISHES = replace(RUNS, steps=3)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Row:
    """A job, and what becomes of it.

    Attributes:
        name: a sentence on it.
        plans: of trainers.
        ends: the exit status of each process: of trainers, then of servers.
        said: by process, what it says.
        victim: which process gets the signal, when all are at their third step, or when it has
            been through ``fleet.init``; "": none does.
        timeout: for heartbeats.
        late: trainer 1 starts when the other one has joined.
        told: the other one knows within some seconds of the signal.
    """

    name: str
    plans: tuple[Plan, ...]
    ends: tuple[int, ...]
    said: tuple[tuple[str, str], ...]
    victim: str = ""
    signal: signal.Signals = signal.SIGTERM
    servers: int = 1
    timeout: float = LONG
    late: bool = False
    told: bool = False
    long: bool = True


def at(plan: Plan, trainer: int, place: str, action: str) -> Plan:
    """A plan in which the trainer does something."""
    return replace(plan, at=((trainer, place, action),))


def waits(trainer: int) -> Plan:
    """The trainer has been through ``fleet.init``, and never joins."""
    return at(RUNS, trainer, "joins", "wait never")


def of_two(mode: str) -> tuple[Plan, Plan]:
    """Two trainers that run."""
    return (replace(RUNS, mode=mode),) * 2


MIXED = (replace(RUNS, mode="mixed", configs={"lost_trainer": "stop"}),) * 2
BY_SIGTERM = "JobFailed: .*trainer 1 ended the job: ended by SIGTERM"
STOPS = "(ServerLost|Draining|JobFailed).*is shutting down"
ROWS = [
    *(
        Row(
            f"SIGTERM of a trainer is told to everyone, {mode}",
            of_two(mode),
            (1, 143, 1, 1),
            (("trainer 0", BY_SIGTERM),),
            "trainer 1",
            servers=2,
            told=True,
        )
        for mode in ("sync", "async")
    ),
    Row(
        "SIGTERM ends a trainer whose main thread is outside of Python",
        (RUNS, at(RUNS, 1, "stepped 3", "outside 60")),
        (1, 143, 1),
        (("trainer 0", BY_SIGTERM),),
        "trainer 1",
        told=True,
    ),
    Row(
        "the servers' heartbeat timeout holds among trainers, too",
        MIXED,
        (1, 1),
        (("trainer 0", "TrainerLost.*trainer 1 (is lost .silent for|has sent no heartbeat for)"),),
        "trainer 1",
        signal.SIGSTOP,
        timeout=SHORT,
    ),
    *(
        Row(
            f"a server that is told to stop says so to everyone, {mode}",
            of_two(mode),
            (1, 1, 1, 143),
            (("trainer 0", STOPS), ("trainer 1", STOPS)),
            "server 1",
            servers=2,
            told=True,
        )
        for mode in ("sync", "async")
    ),
    Row(
        "a script that catches the error does not end the job well",
        (replace(RUNS, trainers=1, caught="finishes"),),
        (1, 1, -9),
        (
            ("trainer 0", "caught ServerLost"),
            ("server 0", "the job failed: (trainer 0 ended the job: ServerLost|server 1: it has)"),
        ),
        "server 1",
        signal.SIGKILL,
        servers=2,
        timeout=SHORT,
    ),
    Row(
        "a script that ignores the job's failure does not exit with 0; a status of its own stands",
        (replace(RUNS, caught="ends"), replace(RUNS, caught="exit 75")),
        (1, 75, 143),
        (
            ("trainer 0", "caught .*is shutting down"),
            ("trainer 1", "caught .*is shutting down"),
        ),
        "server 0",
    ),
    Row(
        "a trainer that has finished fails with a job that fails later",
        (replace(FINISHES, mode="async"), replace(RUNS, mode="async")),
        (1, 143, 1),
        (("trainer 1", "finally at"),),
        "trainer 1",
    ),
    Row(
        "a script that forgets finish has not said that it is done",
        (FINISHES, at(FINISHES, 1, "finishing", "exit 0")),
        (1, 1, 1),
        (
            ("trainer 0", "JobFailed: .*trainer 1 ended the job: it ended without fleet.finish()"),
            (
                "trainer 1",
                "trainer 1: it ended without fleet.finish.. or Executor.close..; the job",
            ),
        ),
        long=False,
    ),
    Row(
        "a trainer that raises ends the job for the others at once",
        (RUNS, at(RUNS, 1, "sending 3", "raise")),
        (1, 1, 1),
        (
            (
                "trainer 0",
                "JobFailed: .*trainer 1 ended the job: ArithmeticError: the data are gone",
            ),
            ("trainer 1", "^ArithmeticError"),
        ),
        long=False,
    ),
    *(
        Row(
            f"trainer {number} is killed before it joins, and fleet.init has announced it",
            (waits(0), RUNS) if number == 0 else (RUNS, waits(1)),
            (-9, 1) if number == 0 else (1, -9, 1),
            (
                (
                    f"trainer {1 - number}",
                    f"TrainerLost: .*trainer {number} ended before it joined: it has sent no",
                ),
            ),
            f"trainer {number}",
            signal.SIGKILL,
            timeout=SHORT,
        )
        for number in (0, 1)
    ),
    *(
        Row(
            f"an end right after init is known: {action}",
            (RUNS, at(RUNS, 1, "joins", action)),
            (1, status),
            (("trainer 0", f"trainer 1 ended before it joined: .*{known}"),),
            servers=2,
            timeout=SHORT,
            late=True,
        )
        for action, status, known in (
            ("exit 0", 0, "its script has ended"),
            ("SIGKILL", -9, "no heartbeat"),
        )
    ),
    Row(
        "a trainer that fails before it joins is named at once",
        (RUNS, waits(1)),
        (1, 143),
        (("trainer 0", "trainer 1 ended before it joined: ended by SIGTERM"),),
        "trainer 1",
        late=True,
    ),
]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.long] * row.long) for row in ROWS]
)
def test_everybody_learns_how_a_job_ends(processes: Processes, row: Row) -> None:
    """Each process ends with the row's status, and says what it says; no process of a failed job
    exits with 0, but a script that says so itself.
    """
    job = Job(processes, row.timeout, servers=row.servers, trainers=len(row.plans))
    for number, plan in enumerate(row.plans):
        if number and row.late:
            job.servers[-1].said("trainer 0 joined")
        job.trainer(number, plan)
    victim = {each.name: each for each in processes.all}.get(row.victim)
    at = time.monotonic()
    if victim is not None:
        never = "never" in str(row.plans)  # then nobody steps
        for each in [victim] if never else job.trainers:
            each.said("^(step 3|waits for never)$")
        for trainer in job.trainers:
            job.servers[0].said(f"{trainer.name} is on its way")
        at = time.monotonic()
        victim.send(row.signal)

    every = [*job.trainers, *job.servers]
    if row.signal is signal.SIGSTOP:  # it does not end
        every = [each for each in every if each is not victim]
    found = [each.status() for each, _ in zip(every, row.ends, strict=False)]
    assert found == [*row.ends], processes.all
    named = {each.name: each for each in every}
    for name, pattern in row.said:
        named[name].said(pattern)
        if row.told:
            assert said_at(named[name], "^finally at") - at < scaled(TOLD_WITHIN)


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("async", "geo"))]
)
def test_a_job_that_is_stopped_and_continued_goes_on(processes: Processes, mode: str) -> None:
    """As by a laptop's lid: all of it, for longer than the heartbeat timeout, in any order, and
    continued one after the other; nobody is blamed for what no process has run.
    """
    job = Job(processes, SHORT)
    for number in (0, 1):
        job.trainer(
            number, at(replace(FINISHES, mode=mode, steps=20), number, "before 6", "wait over")
        )
    for trainer in job.trainers:
        trainer.said("^waits for over$")
    for order, sent in ((1, signal.SIGSTOP), (2, signal.SIGCONT)):
        for each in random.Random(order).sample(processes.all, len(processes.all)):
            each.send(sent)
            time.sleep(0.7 if sent == signal.SIGCONT else 0.0)  # what takes the time is tested
        time.sleep(STOPPED if sent == signal.SIGSTOP else 0.0)
    (processes.path / "over").touch()

    for each in processes.all:
        assert each.status() == 0, processes.all


@pytest.mark.long  # the pauses of test_trainer_faults.py stand for it
def test_a_trainer_that_wakes_says_that_it_was_away(processes: Processes) -> None:
    """When the others have lost it meanwhile; not that a server was."""
    job = Job(processes, SHORT)
    goes_on = at(replace(FINISHES, mode="async", steps=20), 0, "before 10", "wait over")
    job.trainer(0, goes_on)
    away = job.trainer(1, replace(RUNS, mode="async"))
    away.said("^step 3$")
    away.send(signal.SIGSTOP)
    job.servers[0].said("trainer 1 has sent no heartbeat")
    away.send(signal.SIGCONT)
    told = away.said(r"^pserver\.errors\.(\w+): (.*)")
    (processes.path / "over").touch()

    assert told[1] == "TrainerLost", told[0]
    assert "did not run for" in told[2] or "trainer 1 has sent no heartbeat" in told[2]
    assert [trainer.status() for trainer in job.trainers] == [0, 1], processes.all
    assert not [line for line in away.lines if "ServerLost" in line]


@pytest.mark.long  # tests/pserver/job/test_attendance.py stands for it
def test_servers_outlive_a_failed_job_and_serve_another_one(processes: Processes) -> None:
    """A trainer is killed, and then a server stands still; after both another job is trained."""
    servers = processes.servers(1, SHORT, "--keep-failed", "0")
    job = Job(processes, SHORT, running=servers)
    for number in (0, 1):
        job.trainer(
            number, at(replace(RUNS, configs={"lost_trainer": "stop"}), 1, "sending 3", "SIGKILL")
        )
    assert [trainer.status() for trainer in job.trainers] == [1, -9], processes.all
    job.servers[0].said("the job failed: .*trainer 1 has sent no heartbeat")
    (processes.path / "struck").unlink()
    for marker in processes.path.glob("*begun"):
        marker.unlink()
    stopped = Job(processes, SHORT, running=servers)
    for number in (0, 1):
        stopped.trainer(number, RUNS)
    for trainer in stopped.trainers:
        trainer.said("^step 3$")
    (server, endpoint), line = servers[0], len(servers[0][0].lines)
    server.send(signal.SIGSTOP)
    for trainer in stopped.trainers:
        assert trainer.status() == 1
        trainer.said(f"(ServerLost|JobFailed): .*server 0 at {endpoint}")
    server.send(signal.SIGCONT)
    server.said("the job failed: ", line)
    again = Job(processes, SHORT, running=servers)
    for number in (0, 1):
        again.trainer(number, FINISHES)
    assert [trainer.status() for trainer in again.trainers] == [0, 0], processes.all


@pytest.mark.parametrize(
    ("who", "place", "ends", "status"),
    [
        (0, "leaving", "SIGKILL", 0),
        *(
            pytest.param(who, place, ends, status, marks=pytest.mark.long)
            for who, place, ends, status in (
                (1, "leaving", "SIGKILL", 0),
                (0, "finished", "SIGKILL", 0),
                (1, "finished", "SIGKILL", 0),
                (1, "finished", "exit 3", 3),
                (1, "finished", "exit 143", 0),
            )
        ),
    ],
)
def test_a_job_without_servers_that_is_complete_is_done(
    processes: Processes, who: int, place: str, ends: str, status: int
) -> None:
    """Whatever becomes of a process in ``finish()`` or after it, also where a handler has answered
    SIGTERM with its status; an error of the script keeps its status.  Nothing is begun again.
    """
    plan = at(replace(FINISHES, mode="collective"), who, place, ends)
    launch = launched(processes, plan, 0, "--max-restarts", "2", GLOO_SOCKET_IFNAME="lo")

    assert launch.status() == status, launch
    assert sum("| begins at 0" in line for line in launch.lines) == 2, launch
    if not status:
        died = 143 if ends == "exit 143" else 137
        launch.said(f"trainer {who} ended with status {died} .*when it had finished the job")
        launch.said(f"the job is done without trainer {who}")
