"""The coordinator of a job's log: what is decided, what is dropped, and what is ignored."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from pserver.job_log.coordinator import Coordinator
from pserver.job_log.records import (
    Call,
    Decided,
    Joined,
    Lost,
    Process,
    ProcessStep,
    Record,
    Staged,
    records_bytes,
    records_of,
    resumes,
)

FIRST, SECOND, AGAIN = Process(0, "a"), Process(1, "b"), Process(0, "c")


def staged(process: Process, step: int, lane: int = 0) -> Staged:
    return Staged(lane, ProcessStep(process, step))


class Job:
    """A coordinator of two lanes, the first of rounds, with the trainers that are awaited."""

    def __init__(self, servers: int = 2) -> None:
        self.awaited = {0, 1}
        self.coordinator = Coordinator(servers, [True, False], lambda lane: self.awaited)

    def say(self, server: int, *notices: Staged) -> list[Record]:
        return [record for each in notices for record in self.coordinator.staged(server, each, 1.0)]


def whats(records: list[Record]) -> list[object]:
    return [record.what for record in records]


def test_a_step_is_decided_when_every_server_has_staged_it() -> None:
    """Not before, and once."""
    job, step = Job(servers=3), staged(FIRST, 1, lane=1)

    assert not job.say(0, step) + job.say(2, step) + job.say(2, step)
    assert whats(job.say(1, step)) == [Decided(1, (step.step,))]
    assert not job.say(1, step) + job.say(0, step)


def test_a_call_is_in_the_log_when_every_server_is_ready() -> None:
    """Once; one of a process that is lost, or older than one that is there, never is."""
    coordinator = Job(servers=2).coordinator
    first, second = Call(FIRST, "save", 1), Call(FIRST, "save", 2)

    def say(server: int, call: Call) -> list[object]:
        return whats(coordinator.call(server, call, 1.0))

    assert not say(1, first) + say(1, first) + say(0, second)
    assert say(1, second) == [second]
    assert not say(0, first) + say(0, second) + say(1, second)  # too late, or again
    other = Call(FIRST, "shrink", 1)
    assert not say(0, other)
    coordinator.lose(FIRST, "silent", 2.0)
    assert not say(1, other) + say(0, other)
    assert coordinator.snapshot(0).processes[0].calls == {"save": 2}


def test_a_server_that_is_lost_is_ready_for_nothing() -> None:
    """Until it says so again."""
    coordinator, call = Job(servers=2).coordinator, Call(FIRST, "save", 1)
    coordinator.call(1, call, 1.0)
    coordinator.server_lost(1)

    assert not coordinator.call(0, call, 1.0)
    assert whats(coordinator.call(1, call, 1.0)) == [call]


def test_one_server_decides_at_once() -> None:
    """Without another message."""
    assert whats(Job(servers=1).say(0, staged(SECOND, 1, lane=1))) == [
        Decided(1, (ProcessStep(SECOND, 1),))
    ]


def test_a_round_needs_every_awaited_trainer_on_every_server() -> None:
    """Its record names them in their order; the next round begins without them."""
    job = Job()

    assert not job.say(0, staged(SECOND, 1), staged(FIRST, 1)) + job.say(1, staged(SECOND, 1))
    (record,) = job.say(1, staged(FIRST, 1))

    assert record.what == Decided(0, (ProcessStep(FIRST, 1), ProcessStep(SECOND, 1)))
    assert not job.say(0, staged(FIRST, 2)) + job.say(1, staged(FIRST, 2))


def test_a_round_is_complete_without_a_trainer_that_is_not_awaited_any_more() -> None:
    """Where something is staged."""
    job = Job()
    assert not job.say(0, staged(FIRST, 1)) + job.say(1, staged(FIRST, 1))
    job.awaited = {0}

    assert whats(job.coordinator.complete(0, 1.0)) == [Decided(0, (ProcessStep(FIRST, 1),))]
    assert not job.coordinator.complete(0, 1.0)


def test_a_round_has_the_last_step_of_a_trainer_that_is_not_awaited_any_more() -> None:
    """It waits until every server has that step, too."""
    job = Job()
    job.awaited = {0}
    assert not job.say(0, staged(SECOND, 1), staged(FIRST, 1)) + job.say(1, staged(FIRST, 1))

    (record,) = job.say(1, staged(SECOND, 1))

    assert record.what == Decided(0, (ProcessStep(FIRST, 1), ProcessStep(SECOND, 1)))


def test_what_a_lost_trainer_has_staged_is_dropped_and_what_is_decided_counts() -> None:
    """Neither what it sends later, nor what another server tells later, counts."""
    job = Job()
    job.coordinator.join(FIRST, (), 1.0)
    job.say(0, staged(FIRST, 1, lane=1), staged(FIRST, 2, lane=1))
    assert len(job.say(1, staged(FIRST, 1, lane=1))) == 1

    assert whats(job.coordinator.lose(FIRST, "silent", 1.0)) == [Lost(FIRST, "silent")]

    assert not job.coordinator.lose(FIRST, "silent", 1.0)
    assert not job.say(1, staged(FIRST, 2, lane=1)) + job.say(0, staged(FIRST, 3, lane=1))


def test_a_number_joins_again_with_another_incarnation_once_it_was_lost() -> None:
    """It begins where its record says: an earlier step is one that counts already."""
    job = Job()
    assert whats(job.coordinator.join(FIRST, (0, 0), 1.0)) == [Joined(FIRST, (0, 0))]
    assert not job.coordinator.join(FIRST, (0, 0), 1.0)
    with pytest.raises(ValueError, match="trainer 0 has already joined"):
        job.coordinator.join(AGAIN, (4, 7), 1.0)
    job.coordinator.lose(FIRST, "", 1.0)
    with pytest.raises(ValueError, match="trainer 0 was lost"):
        job.coordinator.join(FIRST, (4, 7), 1.0)

    assert whats(job.coordinator.join(AGAIN, (4, 7), 1.0)) == [Joined(AGAIN, (4, 7))]
    for server in range(2):
        assert not job.say(server, staged(AGAIN, 7, lane=1))
    job.say(0, staged(AGAIN, 8, lane=1))
    assert len(job.say(1, staged(AGAIN, 8, lane=1))) == 1


def test_a_number_joins_again_once_its_process_has_left() -> None:
    """One that was preempted; a process that left earlier changes nothing."""
    job = Job()
    job.coordinator.join(FIRST, (0, 0), 1.0)
    job.coordinator.leave(FIRST)
    assert whats(job.coordinator.join(AGAIN, (4, 7), 1.0)) == [Joined(AGAIN, (4, 7))]

    job.coordinator.leave(FIRST)

    with pytest.raises(ValueError, match="trainer 0 has already joined"):
        job.coordinator.join(FIRST, (4, 7), 1.0)


def test_records_are_numbered_and_their_time_never_goes_back() -> None:
    """Whatever the clock does."""
    coordinator = Coordinator(1, [False], lambda lane: ())
    found = [
        record
        for step, now in enumerate((5.0, 3.0, 7.0), 1)
        for record in coordinator.staged(0, staged(FIRST, step), now)
    ]

    assert [(record.number, record.time) for record in found] == [(1, 5.0), (2, 5.0), (3, 7.0)]


def test_a_lane_that_the_plan_does_not_have_is_refused() -> None:
    """A server of another job."""
    with pytest.raises(ValueError, match="expected a lane below 2, got 2"):
        Job().say(0, staged(FIRST, 1, lane=2))


# ---- another one in its place: see [Note: a coordinator that comes back] ----


@pytest.mark.parametrize("seed", range(50))
def test_a_coordinator_that_takes_the_place_of_another_knows_what_it_knew(seed: int) -> None:
    """From all that it knew at one moment, and each change since; but for what is staged."""
    chance = random.Random(seed)
    written: list[list[Any]] = []
    coordinator = Coordinator(2, [False, False], lambda lane: ())
    coordinator.write = lambda *entry: written.append(json.loads(json.dumps(entry)))
    begins: list[list[Any]] = []
    there: dict[int, Process] = {}
    for count in range(60):
        if count == chance.randrange(60):
            begins, written[:] = json.loads(json.dumps(coordinator.entries())), []
        trainer = chance.randrange(3)
        process = there.get(trainer, Process(trainer, f"of {count}"))
        match chance.randrange(8):
            case 0:
                coordinator.lose(process, "gone", float(count))
                there.pop(trainer, None)
            case 1 if trainer in there:
                coordinator.leave(there.pop(trainer), chance.choice([None, count]))
            case 2 if trainer not in there:
                coordinator.join(process, (count, 0), float(count))
                there[trainer] = process
            case _:
                lane, step = chance.randrange(2), ProcessStep(process, count)
                for server in (0, 1):
                    told = Staged(lane, step, count, ((0, count, count + 1),))
                    coordinator.staged(server, told, float(count))
    other = Coordinator(2, [False, False], lambda lane: ())
    for entry in (*begins, *written):
        other.restore_entry(*entry)

    assert [other.snapshot(each) for each in (0, 1)] == [
        coordinator.snapshot(each) for each in (0, 1)
    ]
    assert other.entries() == coordinator.entries()
    for last in (0, coordinator.last - 3, coordinator.last):
        assert other.since(last) == coordinator.since(last)
    assert other.since(coordinator.last + 1) is None
    for each in (coordinator, other):
        for process in there.values():
            with pytest.raises(ValueError, match="has already joined"):
                each.join(Process(process.trainer, "another"), (0, 0), 99.0)
            each.lose(process, "gone", 99.0)
        each.join(Process(0, "another"), (0, 0), 99.0)
    assert other.entries() == coordinator.entries()


def test_a_record_says_which_samples_its_steps_consume() -> None:
    """As server 0 has said it, on the wire, too; a step of a lost trainer leaves nothing behind."""
    job = Job()
    consumed = ((0, 4, 8), (1, 0, 2))
    job.say(0, Staged(1, ProcessStep(FIRST, 1), 0, consumed), staged(SECOND, 1, lane=1))
    (record,) = job.say(1, staged(FIRST, 1, lane=1))

    assert record.what == Decided(1, (ProcessStep(FIRST, 1),), (consumed,))
    assert records_of(records_bytes([record])) == [record]
    assert not resumes(records_bytes([record]))
    assert resumes(records_bytes([record], resumes=True))
    assert whats(job.say(1, staged(SECOND, 1, lane=1))) == [Decided(1, (ProcessStep(SECOND, 1),))]


# ---- any order ----


@pytest.mark.parametrize("seed", range(200))
def test_every_step_counts_everywhere_or_nowhere_whatever_the_order(seed: int) -> None:
    """Three servers hear of the steps of three trainers, of which some are lost, in any order and
    more than once: no step is decided twice, none that was not staged everywhere, none after its
    trainer's loss, and every one whose trainer is there.
    """
    chance = random.Random(seed)
    trainers = [Process(number, "a") for number in range(3)]
    coordinator = Coordinator(3, [False], lambda lane: ())
    lost = set(chance.sample(trainers, chance.randrange(3)))
    # each trainer's steps come in their order, as a trainer sends them
    queues = {(t, s): list(range(1, 6)) for t in trainers for s in range(3)}
    heard, decided = Counter[tuple[Process, int]](), Counter[tuple[Process, int]]()
    gone: set[Process] = set()
    while any(queues.values()):
        if chance.random() < 0.05 and lost - gone:
            victim = chance.choice(sorted(lost - gone))
            coordinator.lose(victim, "", 0.0)
            gone.add(victim)
            continue
        trainer, server = chance.choice([key for key, steps in queues.items() if steps])
        step = queues[trainer, server][0]
        if chance.random() < 0.8:
            queues[trainer, server].pop(0)
            heard[trainer, step] += 1
        for record in coordinator.staged(server, staged(trainer, step), 0.0):
            assert isinstance(record.what, Decided) and trainer not in gone
            decided.update((each.process, each.step) for each in record.what.steps)

    assert set(decided.values()) <= {1}
    assert {each for each in heard if each[0] not in lost} <= set(decided)
    assert all(heard[each] >= 2 for each in decided)
