"""A trainer that gets SIGTERM with a grace period ends its step and leaves; the others go on, and
nothing that it has taken is lost: with real processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cluster.preempted_trainer import AT, STEPS, TRAINERS
from tests.support.launched import LAUNCH, environment
from tests.support.load import run, scaled
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

SCRIPT = str(Path(__file__).with_name("preempted_trainer.py"))
HEARTBEAT = 20.0  # a timeout that nothing here waits for
TOLD_WITHIN = 8.0  # of a busy machine; a heartbeat comes each second

SLOW = """
import sys, threading, time
import torch
from trainer import fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
enough = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), enough.set()), daemon=True).start()
while True:
    time.sleep(0.2 if fleet.worker_index() == 2 else 0.02)  # what it computes
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if any(fleet.all_gather_object(enough.is_set())):
        break
fleet.finish()
"""

pytestmark = pytest.mark.processes


class Preempted:
    """A job of 2 servers and 3 trainers, one of which gets SIGTERM in step ``AT``."""

    def __init__(self, processes: Processes, mode: str, victim: int, grace: str = "30") -> None:
        self._path = processes.path
        self.servers = processes.servers(2, HEARTBEAT, "--once")
        job = {
            "TRAINING_ROLE": "TRAINER",
            "TRAINERS": str(TRAINERS),
            "PSERVER_ENDPOINTS": ",".join(endpoint for _, endpoint in self.servers),
            "PSERVER_GRACE": grace,
        }
        self.trainers = [
            processes.python(f"trainer {n}", SCRIPT, mode, str(victim), **job, TRAINER_ID=str(n))
            for n in range(TRAINERS)
        ]
        self.victim = self.trainers[victim]
        self.others = [each for each in self.trainers if each is not self.victim]

    def counts(self) -> dict[str, torch.Tensor]:
        """What the servers held in the end, negated: by name, a number for each trainer."""
        values = torch.load(self._path / "counts.pt", weights_only=True)
        return {name: -value for name, value in values.items()}

    def ended_well(self) -> None:
        """The victim has left after its step, and everyone else has finished."""
        assert self.victim.status() == 143, self.trainers
        number = self.trainers.index(self.victim)
        self.victim.said(f"pserver: trainer {number} was preempted after step {AT}$")
        assert [other.status() for other in self.others] == [0, 0], self.trainers
        assert [server.status() for server, _ in self.servers] == [0, 0], self.servers
        for server, _ in self.servers:
            server.said(f"trainer {number} was preempted after step {AT}")


def said_at(process: Started, pattern: str) -> float:
    """When it said so."""
    process.said(pattern)
    return next(
        at for at, line in zip(process.times, process.lines, strict=False) if pattern in line
    )


def together(victim: int) -> torch.Tensor:
    """What steps of all trainers together count at each trainer's place: in each the mean over
    those that are there, as float32 computes it.
    """
    value = torch.zeros(TRAINERS)
    for step in range(1, STEPS + 1):
        there = [n for n in range(TRAINERS) if n != victim or step <= AT]
        total = torch.zeros(TRAINERS)
        total[there] = 1.0
        value -= total * torch.tensor(1 / len(there))
    return -value


@pytest.mark.parametrize("victim", [1, RARE(0), RARE(2)])
@pytest.mark.parametrize("mode", ["sync", RARE("tables")])
def test_a_sync_job_goes_on_with_the_trainers_that_are_left(
    processes: Processes, mode: str, victim: int
) -> None:
    """From the next step on the mean is over them: to the bit, on both servers."""
    job = Preempted(processes, mode, victim)
    job.ended_well()

    found = job.counts()
    expected = together(victim)
    assert torch.equal(found["a"], expected) and torch.equal(found["b"], expected), found
    if mode == "tables":
        assert torch.equal(found["rows.weight"], expected[:, None].expand(-1, 2)), found


@pytest.mark.parametrize("victim", [RARE(0), 2])
@pytest.mark.parametrize(
    "mode", ["async", RARE("merged"), RARE("half_async"), RARE("staleness"), RARE("async tables")]
)
def test_every_step_that_an_asynchronous_trainer_took_was_applied_once(
    processes: Processes, mode: str, victim: int
) -> None:
    """What its queue and its merges had kept, too; and no bound waits for it."""
    job = Preempted(processes, mode, victim)
    job.ended_well()

    taken = torch.full((TRAINERS,), float(STEPS))
    taken[victim] = AT
    found = job.counts()
    assert torch.equal(found["a"], taken) and torch.equal(found["b"], taken), found
    if "tables" in mode:
        assert torch.equal(found["rows.weight"], taken[:, None].expand(-1, 2)), found


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_geo_trainer_sends_its_part_and_the_others_divide_by_who_is_left(
    processes: Processes, victim: int
) -> None:
    """Every third step a part of what has changed leaves, and at the end what there is."""
    job = Preempted(processes, "geo", victim)
    job.ended_well()

    expected = torch.tensor([_geo(n, victim) for n in range(TRAINERS)])
    for found in job.counts().values():
        torch.testing.assert_close(found, expected)


def _geo(trainer: int, victim: int) -> float:
    """What of a geo trainer's steps is on the servers in the end."""
    own = served = 0.0
    for step in range(1, STEPS + 1):
        if trainer == victim and step > AT:
            break
        own += 1.0
        left = trainer == victim and step == AT
        if step % 3 == 0 or left:
            served += (own - served) / (TRAINERS if step <= AT else TRAINERS - 1)
    return served


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_diloco_trainer_s_last_window_counts(processes: Processes, victim: int) -> None:
    """Shorter than the others', in their mean."""
    job = Preempted(processes, "diloco", victim)
    job.ended_well()

    expected = torch.full((TRAINERS,), 3 / 3 + 3 / 3 + 3 / 2)
    expected[victim] = 3 / 3 + 1 / 3
    for found in job.counts().values():
        torch.testing.assert_close(found, expected)


def test_the_others_are_told_by_their_next_heartbeat(processes: Processes) -> None:
    """Each of them logs it."""
    job = Preempted(processes, "sync", 1)
    job.ended_well()

    left = said_at(job.victim, "was preempted after step")
    for other in job.others:
        line = f"trainer 1 was preempted after step {AT}; 2 of 3 trainers continue"
        assert said_at(other, line) - left < scaled(TOLD_WITHIN)


def test_without_a_grace_period_sigterm_ends_the_job(processes: Processes) -> None:
    """As ever."""
    job = Preempted(processes, "sync", 1, grace="0")

    assert job.victim.status() == 143, job.trainers
    assert [other.status() for other in job.others] == [1, 1], job.trainers
    job.others[0].said("trainer 1 ended the job: ended by SIGTERM")


def test_a_mixed_job_that_stops_with_a_trainer_has_no_grace_period(
    processes: Processes,
) -> None:
    """They say why, before they join."""
    job = Preempted(processes, "mixed, stops", 1)

    for trainer in job.trainers:
        trainer.said("PSERVER_GRACE: expected 0 where trainers average gradients among themselves")
        assert trainer.status() == 1


def test_launch_counts_a_preempted_trainer_and_ends_well(tmp_path: Path) -> None:
    """``--grace`` gives trainers their grace period; the last word says who was preempted."""
    done = run(
        [*LAUNCH, "--servers", "2", "--trainers", "3", "--grace", "30", SCRIPT, "sync", "1"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stderr.splitlines() if line.startswith("pserver launch: ")]
    assert lines[-1] == f"pserver launch: trainer 1 was preempted after step {AT}", done.stderr


def test_a_slow_trainer_is_named(processes: Processes) -> None:
    """Though in a sync job every trainer's step takes as long as its own."""
    [(server, endpoint)] = processes.servers(1, HEARTBEAT, "--once", "--straggler-factor", "2.5")
    (processes.path / "slow.py").write_text(SLOW)
    trainers = processes.trainers(3, [endpoint], HEARTBEAT, str(processes.path / "slow.py"))
    named = server.said(r"trainer (\d) is slow: it computes 0\.\d+ s a step, (\d+\.\d) times")
    status = processes.python("status", "-m", "pserver", "status", endpoint)
    status.said(r"trainer 2 joined.*slow: 0\.\d+ s of its own a step, \d+\.\d times the others'")

    assert named[1] == "2" and float(named[2]) > 2.5
    assert status.status() == 0
    for trainer in trainers:
        trainer.tell("enough")
    assert [trainer.status() for trainer in trainers] == [0, 0, 0], trainers
