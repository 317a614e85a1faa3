"""Who waits for whom, without servers: which rings there are, for how long they stand, and what
gives way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from pserver import polling
from pserver.membership.waits import (
    ENDS_BY_ITSELF,
    LINGER_SECONDS,
    SAVE_SECONDS,
    STEPS_SECONDS,
    Wait,
    WaitKind,
    WaitTable,
    in_words,
    rings,
    saves_of,
)

FAILS_AFTER = 10.0


class Clock:
    """Seconds that the test counts."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """A table, and a clock that ticks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.table = WaitTable(self.clock)

    def wait(self, trainer: int, kind: WaitKind, *whom: int, what: str = "") -> None:
        """A call that has waited, in vain."""
        with self.table.held(trainer, kind, what or kind.value, lambda: whom):
            pass

    def ticks(self, seconds: float, calls: Iterable[tuple[int, WaitKind, int]] = ()) -> list[Wait]:
        """The first ring that is due within so many seconds of looks.

        Args:
            calls: that trainers make again each time: who, where and for whom.
        """
        end = self.clock.now + seconds
        while self.clock.now < end:
            for trainer, kind, whom in calls:
                self.wait(trainer, kind, whom)
            if ring := self.table.ring(FAILS_AFTER):
                return ring
            self.clock.now += 0.25
        return []


@pytest.fixture
def job() -> Job:
    return Job()


SAVE_AND_SAMPLES = ((0, WaitKind.SAVE, 1), (1, WaitKind.SAMPLES, 0))
BARRIER_AND_SAMPLES = ((0, WaitKind.BARRIER, 1), (1, WaitKind.SAMPLES, 0))


def test_a_save_gives_way_and_a_barrier_fails_the_job(job: Job) -> None:
    """Each after a while of its own, in which others may come."""
    assert not job.ticks(SAVE_SECONDS - 0.5, SAVE_AND_SAMPLES)
    ring = job.ticks(1.0, SAVE_AND_SAMPLES)
    assert [wait.trainer for wait in saves_of(ring)] == [0]

    job = Job()
    assert not job.ticks(FAILS_AFTER - 0.5, BARRIER_AND_SAMPLES)
    ring = job.ticks(1.0, BARRIER_AND_SAMPLES)
    assert not saves_of(ring)
    assert in_words(ring) == (
        "trainer 0 waits at barrier for trainer 1; trainer 1 waits at samples for trainer 0"
    )


def test_a_save_for_which_only_steps_wait_gives_way_soon(job: Job) -> None:
    """Who waits in a step can't come to it."""
    job.table.steps({(1, "step 3"): lambda: [0]})
    ring = job.ticks(STEPS_SECONDS + 0.5, [(0, WaitKind.SAVE, 1)])
    assert [str(wait) for wait in ring] == [
        "trainer 0 waits at save for trainer 1",
        "trainer 1 waits at step 3 for trainer 0",
    ]
    job.table.steps({})
    assert not job.ticks(SAVE_SECONDS + 1.0, [(0, WaitKind.SAVE, 1)])


def test_another_wait_of_the_same_trainers_is_another_ring(job: Job) -> None:
    """Time counts from its first sight; so a ring that comes and goes never stands long enough."""
    for _ in range(5):
        assert not job.ticks(SAVE_SECONDS - 1.0, SAVE_AND_SAMPLES)
        job.table.over(1, WaitKind.SAMPLES, "samples")
        assert not job.ticks(0.25, [(0, WaitKind.SAVE, 1)])


def test_a_ring_that_nobody_asks_for_any_more_is_none(job: Job) -> None:
    """A trainer that does something else waits nowhere, though its last call was in vain."""
    assert not job.ticks(FAILS_AFTER / 2, BARRIER_AND_SAMPLES)
    assert not job.ticks(2 * FAILS_AFTER, [(0, WaitKind.BARRIER, 1)])
    assert [wait.trainer for wait in job.table.waits()] == [0]
    job.clock.now += LINGER_SECONDS + 1.0
    assert not job.table.waits()


def test_a_server_that_did_not_run_begins_to_look_anew(job: Job) -> None:
    """What stands after its pause may have stood for an instant only."""
    assert not job.ticks(SAVE_SECONDS - 0.5, SAVE_AND_SAMPLES)
    job.table.paused()
    job.clock.now += 60.0
    assert not job.ticks(SAVE_SECONDS - 0.5, SAVE_AND_SAMPLES)
    assert job.ticks(1.0, SAVE_AND_SAMPLES)


def test_one_who_has_gone_waits_no_more(job: Job) -> None:
    """Nor does a ring stand in which it was."""
    assert not job.ticks(SAVE_SECONDS - 0.5, SAVE_AND_SAMPLES)
    job.table.drop(1)
    assert not job.ticks(1.0, [(0, WaitKind.SAVE, 1)])
    assert not rings(job.table.waits())


def test_a_wait_that_lasts_is_told(job: Job) -> None:
    """To its trainer, with the number that it keeps from call to call."""
    job.wait(0, WaitKind.SAMPLES, 1)
    number = job.table.waits()[0].number
    assert not job.table.long(0)
    for _ in range(8):
        job.clock.now += polling.NOTICE_SECONDS / 4
        job.wait(0, WaitKind.SAMPLES, 1)
    assert [wait.number for wait in job.table.long(0)] == [number]
    assert not job.table.long(1)


@pytest.mark.parametrize("kind", sorted(ENDS_BY_ITSELF, key=lambda kind: kind.value))
def test_waits_that_end_by_themselves_are_in_no_ring(job: Job, kind: WaitKind) -> None:
    """They are shown, and that is all."""
    assert not job.ticks(2 * FAILS_AFTER, [(0, kind, 1), (1, WaitKind.BARRIER, 0)])
    assert len(job.table.waits()) == 2


def test_steps_alone_are_no_ring(job: Job) -> None:
    """A lane's step may be on its way while another lane's waits."""
    job.table.steps({(0, "step 1"): lambda: [1], (1, "step 1 of lane 1"): lambda: [0]})
    assert not job.ticks(2 * FAILS_AFTER)


def drawn(seed: int) -> tuple[int, list[Wait]]:
    """Waits of a few trainers, each for some others."""
    draw = random.Random(seed)
    trainers = draw.randint(2, 7)
    kinds = [
        WaitKind.STEP,
        WaitKind.BARRIER,
        WaitKind.SAVE,
        WaitKind.SAMPLES,
        WaitKind.ROUND,
        WaitKind.JOIN,
    ]
    waits = []
    for trainer in range(trainers):
        for _ in range(draw.choice((0, 1, 1, 1, 2))):
            others = [each for each in range(trainers) if each != trainer]
            whom = frozenset(draw.sample(others, draw.randint(0, min(2, len(others)))))
            waits.append(Wait(trainer, draw.choice(kinds), "x", len(waits) + 1, 0.0, whom))
    return trainers, waits


def stuck(trainers: int, waits: list[Wait]) -> set[int]:
    """Those that never go on, found in another way: again and again, who waits for nobody that
    waits goes on.
    """
    left = {t: [w for w in waits if w.trainer == t] for t in range(trainers)}
    while going := [t for t, own in left.items() if not any(w.for_whom & left.keys() for w in own)]:
        for trainer in going:
            del left[trainer]
    return set(left)


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_there_is_a_ring_wherever_trainers_stand_still(first: int) -> None:
    """And nowhere else; who gives way, or fails, is in it, and without it the others go on."""
    found = 0
    for seed in range(first, first + 500):
        trainers, waits = drawn(seed)
        blocking = [w for w in waits if w.kind is not WaitKind.JOIN]
        real = [w for w in blocking if w.kind is not WaitKind.STEP]
        still = stuck(trainers, blocking)
        ringed = [w for ring in rings(waits) for w in ring]
        found += bool(ringed)

        assert {w.trainer for w in ringed} <= still, seed
        if still and all(w.kind is not WaitKind.STEP for w in blocking if w.trainer in still):
            assert ringed, (seed, still)
        assert bool(ringed) <= bool(real), seed
        for ring in rings(waits):
            inside = {w.trainer for w in ring}
            assert len(inside) > 1, seed
            assert all(w.for_whom & inside for w in ring), seed
        # once every ring is broken nobody stands still, but where steps alone are in a ring
        left = [w for w in blocking if w not in ringed]
        while again := rings(left):
            left = [w for w in left if all(w not in ring for ring in again)]
        if stuck(trainers, left):
            assert stuck(trainers, [w for w in left if w.kind is WaitKind.STEP]), seed
    assert found > 50
