"""Which trainers are there, as one of them knows it."""

from __future__ import annotations

import pytest

from pserver.client.replies import Absences
from trainer.senders.live_trainers import LiveTrainers


def absences(changes: int, *absent: int, **preempted: int) -> Absences:
    """What server 0 says."""
    return Absences(changes, frozenset(absent), {int(n[1:]): s for n, s in preempted.items()})


def test_the_least_trainer_that_is_there_does_what_one_does_for_all() -> None:
    """Trainer 0 first; a lost one is as little there as one that was preempted."""
    rolls = [LiveTrainers(3, own=number) for number in range(3)]
    assert [live.is_leader for live in rolls] == [True, False, False]
    for live in rolls:
        live.learn(absences(4, 0, t0=57))
    assert [live.is_leader for live in rolls] == [False, True, False]
    assert rolls[2].count == 2
    rolls[2].learn(absences(5, 0, 1, t0=57))

    assert rolls[2].is_leader and rolls[2].count == 1


def test_an_older_answer_changes_nothing() -> None:
    """Barriers and heartbeats are answered on several connections."""
    live = LiveTrainers(3, own=1)
    live.learn(absences(4, 0, t0=57))
    live.learn(absences(3))
    assert live.leader == 1
    live.learn(absences(4))  # who leaves is no change yet
    assert live.leader == 1
    live.learn(absences(5))

    assert live.leader == 0, "it has joined again"


def test_each_that_was_preempted_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its last step, and the new leader."""
    live = LiveTrainers(3, own=1)
    for _ in range(3):
        live.learn(absences(4, 0, t0=57))

    assert [record.getMessage() for record in caplog.records] == [
        "trainer 0 was preempted after step 57; 2 of 3 trainers continue, and trainer 1 is now the "
        "leader"
    ]
