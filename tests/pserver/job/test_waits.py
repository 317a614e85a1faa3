"""Promises of the waits of a job's threads, and of updates that come one by one."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pserver.errors import JobFailed, PServerError
from pserver.lane import tasks as update_task
from pserver.lane.tasks import Batch, UpdateTask
from pserver.membership.lifecycle import JobState, Lifecycle
from pserver.membership.waits import WaitEvent, Waits
from tests.support.waiting import eventually

SECONDS = 20.0
pytestmark = pytest.mark.usefixtures("patient_waits")


def stands(event: WaitEvent, threads: int = 1) -> None:
    eventually(lambda: event.standing == threads)


def test_an_event_wakes_those_that_stand_there_and_no_other() -> None:
    """Who waits for something else does not even ask again."""
    waits = Waits()
    told, other = waits.event(), waits.event()
    come, asked = list[int](), list[int]()

    def ask() -> bool:
        asked.append(1)
        return len(asked) > 1

    with ThreadPoolExecutor(3) as pool:
        own = [pool.submit(wait, waits, told, lambda: bool(come)) for _ in range(2)]
        others = pool.submit(wait, waits, other, ask)
        stands(told, 2)
        stands(other)
        with waits.lock:
            come.append(1)
            told.notify()
        assert [each.result(SECONDS) for each in own] == [True, True]
        assert len(asked) == 1 and other.standing == 1 and not told.standing
        with waits.lock:
            waits.wake_all()
        assert others.result(SECONDS)


def wait(waits: Waits, event: WaitEvent, done: Callable[[], bool]) -> bool:
    with waits.lock:
        return waits.wait(event, done)


def test_an_event_may_tell_one_thread() -> None:
    """The others stand on; each telling wakes another one."""
    waits, free = Waits(), [0]
    event = waits.event()

    def take() -> bool:
        with waits.lock:
            waits.wait(event, lambda: free[0] > 0)
            free[0] -= 1
        return True

    with ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(take) for _ in range(3)]
        for left in (3, 2, 1):
            stands(event, left)
            with waits.lock:
                free[0] += 1
                event.notify(1)
            eventually(lambda left=left: sum(each.done() for each in taken) == 4 - left)


def test_a_wait_has_a_deadline_and_names_for_whom_when_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line is logged once, in time, although nobody wakes the thread."""
    monkeypatch.setattr("pserver.polling.NOTICE_SECONDS", 0.01)
    waits = Waits()
    with caplog.at_level(logging.WARNING), waits.lock:
        end = time.monotonic() + 0.05
        assert not waits.wait(waits.event(), lambda: False, lambda: "trainer 1 waits", end)

    assert time.monotonic() >= end
    assert [each.message for each in caplog.records] == ["trainer 1 waits"]


@pytest.mark.parametrize("ends", ["fail", "drain"])
def test_the_end_of_a_job_ends_every_wait(ends: str) -> None:
    """Wherever the threads stand."""
    job = Lifecycle()
    job.state = JobState.SERVING
    events = [job.changed, job.waits.event(), job.waits.event()]

    def wait(event: WaitEvent) -> None:
        with job.lock:
            job.wait(event, lambda: False)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(wait, event) for event in events]
        for event in events:
            stands(event)
        job.fail(JobFailed("over")) if ends == "fail" else job.drain()
        for each in waiting:
            with pytest.raises(PServerError, match=r"over|shutting down"):
                each.result(SECONDS)


# ---- updates that come one by one: see [Note: going on] in tasks.py ----


class Chain:
    """Updates of one lane, each of which a thread waits for."""

    def __init__(self, work: Callable[[Batch], None] = lambda batch: None) -> None:
        self.waits, self.last = Waits(), UpdateTask()
        self.order: list[str] = []
        self.threads: dict[str, int] = {}
        self.ended: list[BaseException | None] = []
        self._work = work

    def add(self, *batches: str) -> UpdateTask:
        with self.waits.lock:
            names = [(name,) for name in batches]
            self.last = UpdateTask(self.waits, names, self._update, self.ended.append, self.last)
            return self.last

    def _update(self, batch: Batch) -> None:
        self._work(batch)
        self.order += batch
        self.threads[batch[0]] = threading.get_ident()


def standing(task: UpdateTask) -> int:
    return sum(event.standing for event in task._events.values())


def test_who_ends_an_update_goes_on_with_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, each batch once; their threads wake when all of theirs is there."""
    monkeypatch.setattr(update_task, "GO_ON_SECONDS", SECONDS)
    go = threading.Event()

    def work(batch: Batch) -> None:
        assert batch != ("0",) or go.wait(SECONDS)

    chain = Chain(work)
    tasks = [chain.add("0"), *(chain.add(f"{n}a", f"{n}b") for n in range(1, 5))]
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(tasks[0].finish)
        eventually(lambda: tasks[0]._running == 1)
        others = [pool.submit(task.finish) for task in tasks[1:]]
        eventually(lambda: all(standing(task) for task in tasks[1:]))
        go.set()
        for each in (first, *others):
            each.result(SECONDS)

    assert chain.order == ["0", *(f"{n}{part}" for n in range(1, 5) for part in "ab")]
    assert chain.threads["0"] == chain.threads["1a"] and len(chain.ended) == 5


def test_who_has_ended_a_large_update_answers_its_trainer_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of the next one goes on with that."""
    monkeypatch.setattr(update_task, "GO_ON_SECONDS", 0.0)
    go = threading.Event()

    def work(batch: Batch) -> None:
        assert batch != ("0",) or go.wait(SECONDS)

    chain = Chain(work)
    first, second = chain.add("0"), chain.add("1")
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(first.finish)]
        eventually(lambda: first._running == 1)
        made.append(pool.submit(second.finish))
        eventually(lambda: standing(second) == 1)
        go.set()
        for each in made:
            each.result(SECONDS)

    assert chain.order == ["0", "1"] and chain.threads["0"] != chain.threads["1"]


def test_whoever_waits_updates_what_its_threads_have_left() -> None:
    """A thread that has begun an update may be held up by its trainer between two batches."""
    chain = Chain()
    held, behind = chain.add("a", "b", "c"), chain.add("d")
    held.wait_for("a")
    behind.wait_for("d")

    assert chain.order == ["a", "b", "c", "d"] and held.finished


def test_an_update_that_fails_ends_those_behind_it() -> None:
    """Also those that begin later: each is told, once, and nothing of them runs."""
    go = threading.Event()

    def work(batch: Batch) -> None:
        assert go.wait(SECONDS)
        raise ValueError("no update")

    chain = Chain(work)
    tasks = [chain.add("0"), chain.add("1", "2"), chain.add("3")]
    with ThreadPoolExecutor(3) as pool:
        failing = [pool.submit(tasks[0].finish)]
        eventually(lambda: tasks[0]._running == 1)
        failing += [pool.submit(task.finish) for task in tasks[1:]]
        eventually(lambda: all(standing(task) for task in tasks[1:]))
        go.set()
        for each in failing:
            with pytest.raises(ValueError, match="no update"):
                each.result(SECONDS)
    with pytest.raises(ValueError, match="no update"):
        chain.add("4").finish()

    assert not chain.order and [str(each) for each in chain.ended] == ["no update"] * 4


@pytest.mark.parametrize("seed", range(4))
def test_no_wake_up_is_lost_among_many_threads(seed: int) -> None:
    """Updates of many trainers, of one batch or of several, read whole or part by part; none begins
    before the one before it is done.
    """
    random_ = random.Random(seed)
    chain = Chain(lambda batch: None if random_.random() < 0.9 else time.sleep(0.001))
    begun: list[str] = []

    def trainer(number: int) -> None:
        own = random.Random(number + 100 * seed)
        for step in range(40):
            names = [f"{number}.{step}.{part}" for part in range(own.choice([1, 1, 3]))]
            with chain.waits.lock:
                begun.extend(f"{number}.{step}" for _ in names)
                task = chain.add(*names)
            if own.random() < 0.7:
                task.finish()
            for name in names:
                task.wait_for(name)
            task.wait_for()

    with ThreadPoolExecutor(24) as pool:
        made: list[Future[None]] = [pool.submit(trainer, number) for number in range(24)]
        for each in made:
            each.result(SECONDS)

    assert [name.rpartition(".")[0] for name in chain.order] == begun
    assert len(chain.ended) == 24 * 40
