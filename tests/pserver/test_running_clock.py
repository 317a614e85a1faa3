"""Promises of the clock by which a process measures the silence of others."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest

from pserver.config import ServerConfig
from pserver.errors import TrainerLost
from pserver.job_log.leader import CoordinatorLinks
from pserver.membership.members import Announcements
from pserver.running_clock import (
    COUNTED_SECONDS,
    RUNNING,
    STILL_SECONDS,
    TICK_SECONDS,
    RunningClock,
)
from pserver.wire_pb2 import StatusRequest
from tests.support.job_frames import Clock
from tests.support.reloading_jobs import World

TIMEOUT = 5.0


class System:
    """The system's clock, and a process that ticks while it runs."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = RunningClock(lambda: self.now)

    def run(self, seconds: float) -> float:
        """The process runs for so long; what its clock has counted."""
        begun = self.clock()
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_SECONDS)
            self.clock()
        return self.clock() - begun

    def stop(self, seconds: float) -> float:
        """It is stopped for so long; what its clock has counted."""
        begun = self.clock()
        self.now += seconds
        return self.clock() - begun


def test_time_in_which_a_process_runs_counts() -> None:
    """All of it."""
    assert System().run(60.0) == pytest.approx(60.0)


@pytest.mark.parametrize("seconds", [1.5, 30.0, 8 * 3600.0])
def test_a_pause_counts_for_nothing_and_others_have_time_to_be_heard_again(seconds: float) -> None:
    """As long as the pause was, up to some seconds; then time goes on."""
    system = System()
    system.run(60.0)
    still = min(seconds, STILL_SECONDS)

    assert system.stop(seconds) == pytest.approx(COUNTED_SECONDS)
    assert system.run(still) == pytest.approx(0.0)
    assert system.run(7.0) == pytest.approx(7.0)
    assert system.clock.away_since(system.now - still - 7.1) == pytest.approx(seconds)
    assert system.clock.away_since(system.now) == 0.0


@pytest.mark.parametrize(("runs", "stops"), [(0.2, 2.0), (0.5, 2.0), (1.0, 10.0), (0.0, 1.1)])
def test_a_process_that_hardly_ever_runs_still_loses_who_is_dead(runs: float, stops: float) -> None:
    """Pauses without end do not hold the clock: each counts for a second."""
    system = System()
    system.run(60.0)
    begun, cycles = system.clock(), 0
    while system.clock() - begun <= TIMEOUT:
        system.run(runs)
        system.stop(stops)
        cycles += 1

        assert cycles < (TIMEOUT + STILL_SECONDS) / COUNTED_SECONDS


def test_the_clock_never_goes_back() -> None:
    """Whatever the process does, and also for what was asked beside the ticks."""
    chance, system, shown = random.Random(3), System(), 0.0
    for _ in range(3000):
        system.now += chance.choice([0.001, 0.1, 0.9, 1.2, 40.0])
        found = system.clock()

        assert found >= shown
        shown = found


# ---- who measures by it ----


def quiet(clock: RunningClock) -> Iterator[str]:
    """Who was silent for too long, as each of those says it that measure silence."""
    announcements = Announcements()
    announcements.announce(1, "a", clock(), 9)
    lost: list[int] = []
    links = CoordinatorLinks(
        lambda index, message: None,
        lambda index, error: lost.append(index),
        heartbeat_timeout_seconds=TIMEOUT,
        clock=clock,
    )
    links.expect("f", 2)
    links._followers[1].linked = True
    while True:
        announcements.lose_silent(clock(), TIMEOUT)
        links.tick()
        told = announcements.lost(1, clock(), clock(), TIMEOUT)
        said = ["announcements"] * isinstance(told, TrainerLost) + ["links"] * bool(lost)
        yield " ".join(said)


def test_nobody_is_blamed_for_a_pause_of_who_measures_it() -> None:
    """Where all were stopped, and run again one after the other; who then stays silent is lost."""
    system = System()
    system.run(60.0)
    said = quiet(system.clock)

    assert next(said) == ""
    system.run(1.0)
    system.stop(30.0)
    assert next(said) == ""
    system.run(8.0)
    assert next(said) == ""
    system.run(STILL_SECONDS + TIMEOUT)
    assert next(said) == "announcements links"


@pytest.mark.parametrize("awaits", [True, False])
def test_a_server_that_was_paused_blames_no_trainer(
    awaits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any kind of job; without this clock it would."""
    for real in (True, False):
        world = World(await_servers=awaits)
        try:
            running = RunningClock(world.clock) if real else world.clock
            for each in (world.zero.job, world.zero.job.lifecycle):
                monkeypatch.setattr(each, "_clock", running)
            world.clock.time += 1.0
            world.zero.job.tick()
            world.clock.time += 300.0
            world.zero.job.tick()
            states = [each.state for each in world.zero.job.status(StatusRequest()).trainers]

            assert ("lost" in states or world.zero.job.failure is not None) is not real
        finally:
            world.end()


def test_the_wall_clock_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It jumps by a day, and by years, forth and back: no trainer is lost, and time goes on."""
    world, wall = World(), Clock()
    monkeypatch.setattr(time, "time", wall)
    try:
        for step, jump in enumerate((86_400.0, -86_400.0, 4e8, -5000.0), 1):
            wall.time += jump
            world.step(0, step)
            for each in (world.zero, world.one):
                each.job.tick()
        states = [each.state for each in world.zero.job.status(StatusRequest()).trainers]

        assert states == ["joined", "joined"] and world.zero.job.failure is None
        begun = RUNNING()
        wall.time += 1e9
        assert 0.0 <= RUNNING() - begun < 60.0
    finally:
        world.end()


# ---- the thread that ticks ----


def ticking() -> int:
    """How many threads tick."""
    return sum(thread.name == "running clock" for thread in threading.enumerate())


def test_a_thread_ticks_while_somebody_measures() -> None:
    """One for all, and none afterwards."""
    clock = RunningClock()
    before = ticking()
    with clock.ticking(), clock.ticking():
        assert ticking() == before + 1
        assert clock() <= clock()
    end = time.monotonic() + 10.0
    while ticking() > before:
        assert time.monotonic() < end
        threading.Event().wait(0.01)


@pytest.mark.processes
def test_a_forked_child_has_a_clock_of_its_own() -> None:
    """Although a thread of its parent may have held the lock."""
    with RUNNING.ticking():
        begun = RUNNING()
        with RUNNING._lock:
            child = os.fork()
            if child == 0:
                with RUNNING.ticking():
                    os._exit(0 if 0.0 <= RUNNING() - begun < 60.0 and ticking() == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_server_s_job_measures_by_this_clock() -> None:
    """Unless it is given another one."""
    from pserver.job.job import Job

    assert Job(ServerConfig(endpoint="127.0.0.1:0"), {})._clock is RUNNING
