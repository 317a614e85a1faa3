"""What a job of two trainers promises, with real processes: two servers and two trainers play one
scene after another.

The scenes are in ``two_trainers.py``; each is a job of its own, so the servers take all these jobs
without a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pserver.launcher.cluster import free_port
from tests.support.processes import Processes, Started

DEADLINE = 3.0
SCENES = Path(__file__).with_name("two_trainers.py")

pytestmark = pytest.mark.processes


@dataclass
class Cast:
    """Two servers' endpoints, and two trainers who wait for their scenes."""

    endpoints: list[str]
    servers: list[Started]
    trainers: list[Started]

    def begin(self, number: int, scene: str, endpoints: list[str] | None = None) -> tuple[int, str]:
        trainer = self.trainers[number]
        line = len(trainer.lines)
        trainer.tell(f"{scene} {','.join(endpoints or self.endpoints)}")
        return line, scene

    def end(self, number: int, begun: tuple[int, str]) -> str:
        line, scene = begun
        return self.trainers[number].said(rf"played {scene}: (.*)", line)[1]

    def one(self, number: int, scene: str, endpoints: list[str] | None = None) -> None:
        """One trainer plays a scene, the other waits."""
        line, _ = begun = self.begin(number, scene, endpoints)
        assert self.end(number, begun) == "ok", self.said(number, line)

    def both(self, scene: str, endpoints: list[str] | None = None, result: str = "ok") -> None:
        """Both play it at the same time."""
        begun = [self.begin(number, scene, endpoints) for number in (0, 1)]
        ends = [self.end(number, each) for number, each in enumerate(begun)]
        assert ends == [result, result], "\n".join(
            self.said(number, line) for number, (line, _) in enumerate(begun)
        )

    def said(self, number: int, line: int) -> str:
        return f"---- trainer {number}\n" + "\n".join(self.trainers[number].lines[line:])


@pytest.fixture(scope="module")
def cast(lasting: Processes) -> Cast:
    servers = lasting.servers(2, DEADLINE)
    endpoints = [endpoint for _, endpoint in servers]
    return Cast(
        endpoints,
        [server for server, _ in servers],
        lasting.trainers(2, endpoints, DEADLINE, str(SCENES)),
    )


def test_two_trainers_compute_what_one_node_computes(cast: Cast) -> None:
    """Parameters equal those of plain torch that steps with the mean of both gradients, to the bit,
    on both trainers.
    """
    cast.both("together")


def test_an_overflow_on_one_trainer_skips_the_step_on_all(cast: Cast) -> None:
    """GradScaler: the step of everybody's, and no other; the count of steps does not move."""
    cast.both("overflow")


def test_all_start_from_trainer_0s_values(cast: Cast) -> None:
    """Different seeds: parameters, frozen parameters and batch-norm buffers are trainer 0's; one
    warning names the first.
    """
    cast.both("start_values")
    cast.both("same_start_values")


def test_a_trainer_that_finishes_early_neither_stalls_nor_distorts_the_others(cast: Cast) -> None:
    """The divisor is the number of those who committed the step."""
    cast.both("early_finish")


def test_a_trainer_that_evaluates_for_longer_than_the_deadline_stops_nobody(cast: Cast) -> None:
    """A deadline means silence, not slowness."""
    cast.both("long_evaluation")


def test_barrier_worker_waits_for_everybody(cast: Cast) -> None:
    """Whoever passes it finds what the others did before it."""
    cast.both("barrier")


@pytest.mark.parametrize("count", [1, 2])
def test_a_saved_job_of_two_trainers_resumes_to_the_bit(cast: Cast, count: int) -> None:
    """Saved on two servers, loaded on as many or on one: parameters, optimizer state, settings and
    step.
    """
    cast.both("save")
    cast.both("resume", cast.endpoints[:count])


def test_one_different_learning_rate_is_told_in_words(cast: Cast) -> None:
    """FingerprintMismatch on the trainer that has it; its model keeps its values; with the right
    rate it takes part.
    """
    cast.both("other_rate")


def test_rates_that_move_apart_end_a_sync_job(cast: Cast) -> None:
    """Both trainers get FingerprintMismatch, which names group and key; the servers take the next
    job.
    """
    cast.both("rate_moves_apart", result="failed with FingerprintMismatch")
    cast.both("together")


def test_a_gradient_that_one_trainer_lacks_counts_as_zero(cast: Cast) -> None:
    """And a parameter that has none on any trainer is skipped."""
    cast.both("absent")


def test_an_async_job_learns_and_its_trainers_leave_when_they_are_done(cast: Cast) -> None:
    """Nobody waits for anybody."""
    cast.both("apart")


def test_a_second_job_on_busy_servers_is_refused_and_disturbs_nothing(cast: Cast) -> None:
    """Busy; the running job goes on to the bit; when it has left, the next needs no restart."""
    cast.one(0, "hold")
    cast.one(1, "second_job")
    cast.one(0, "let_go")
    cast.one(1, "alone")


def test_a_script_whose_role_is_pserver_serves(cast: Cast, processes: Processes) -> None:
    """``fleet.run_server()``: a server like any other, which returns when its job is done."""
    endpoint = f"127.0.0.1:{free_port()}"
    code = (
        "from trainer import fleet; fleet.init(); assert fleet.is_server(); "
        "fleet.init_server(); fleet.run_server(); print('served')"
    )
    role = {
        "TRAINING_ROLE": "PSERVER",
        "TRAINERS": "1",
        "PSERVER_ENDPOINTS": endpoint,
        "CURRENT_ENDPOINT": endpoint,
    }
    server = processes.python("server", "-c", code, **role)
    server.said("pserver ready at")

    cast.one(0, "alone", [endpoint])
    assert server.status() == 0, server
    assert server.lines[-1] == "served", server
