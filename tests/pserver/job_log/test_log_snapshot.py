"""Where the job's log stands, for a server that comes back; and what is lost there."""

from __future__ import annotations

import pytest

from pserver.job_log.coordinator import Coordinator
from pserver.job_log.records import (
    Applied,
    Decided,
    LogSnapshot,
    Loss,
    Process,
    ProcessSnapshot,
    ProcessStep,
    Record,
    Staged,
    losses,
    records_bytes,
)

FIRST, SECOND, AGAIN, THIRD = Process(0, "a"), Process(1, "b"), Process(0, "c"), Process(2, "d")


def stage(coordinator: Coordinator, process: Process, step: int, *servers: int) -> list[Record]:
    """These servers have a step, which changes rows on each."""
    notice = ProcessStep(process, step)
    return [
        record
        for server in servers
        for record in coordinator.staged(server, Staged(0, notice, 10 + server), 1.0)
    ]


def begun() -> Coordinator:
    """A job of two servers and two trainers, of which each has had two steps decided."""
    coordinator = Coordinator(2, [False], lambda lane: [])
    for process in (FIRST, SECOND):
        coordinator.join(process, (), 1.0)
        for step in (1, 2):
            assert stage(coordinator, process, step, 0, 1)
    return coordinator


def test_what_a_lost_server_had_staged_is_staged_again() -> None:
    """What is decided stays so; the rest needs the server that has come back."""
    coordinator = begun()
    stage(coordinator, FIRST, 3, 1)
    stage(coordinator, SECOND, 3, 0)
    coordinator.server_lost(1)

    assert not stage(coordinator, FIRST, 3, 0)
    assert not stage(coordinator, FIRST, 2, 1)  # sent again, and decided before
    (first,) = stage(coordinator, FIRST, 3, 1)
    (second,) = stage(coordinator, SECOND, 3, 1)
    assert first.what == Decided(0, (ProcessStep(FIRST, 3),))
    assert second.what == Decided(0, (ProcessStep(SECOND, 3),))


def test_the_log_stands_where_its_last_record_does() -> None:
    """It names those who take part, were lost or have left, with their steps and that server's
    rows.
    """
    coordinator = begun()
    coordinator.lose(FIRST, "silent", 2.0)
    coordinator.join(AGAIN, (2,), 2.0)
    coordinator.leave(SECOND, 7)
    standing = coordinator.snapshot(1)

    assert standing == LogSnapshot(
        8,
        (
            ProcessSnapshot(FIRST, (), (2,), (22,), lost="silent"),
            ProcessSnapshot(SECOND, (), (2,), (22,), left=True, preempted_after=7),
            ProcessSnapshot(AGAIN, (2,), (2,), (0,)),
        ),
    )
    assert [each.present for each in standing.processes] == [False, False, True]
    assert LogSnapshot.of(standing.to_bytes()) == standing


def test_records_are_no_standing() -> None:
    """A server that comes back may get some before; other bytes are refused."""
    assert LogSnapshot.of(records_bytes([Record(1, 0.5, Decided(0))])) is None
    with pytest.raises(ValueError, match="expected messages"):
        LogSnapshot.of(b"\xff")


def test_what_is_lost_was_decided_and_is_not_in_the_save() -> None:
    """Of a process in the save what came after; of one that has joined since all; of one that had
    ended before, nothing.
    """
    standing = LogSnapshot(
        99,
        (
            ProcessSnapshot(FIRST, (0, 0), (10, 5), (100, 0), lost="it was"),
            ProcessSnapshot(SECOND, (0, 0), (8, 8), (80, 0)),
            ProcessSnapshot(AGAIN, (6, 6), (9, 6), (30, 0)),
            ProcessSnapshot(THIRD, (7, 7), (9, 9), (20, 0)),
        ),
    )
    saved = {AGAIN: [Applied(7, 12), Applied(6)], SECOND: [Applied(8, 80)]}

    assert losses(standing, saved) == {0: Loss(2, 18), 1: Loss(8, 0), 2: Loss(4, 20)}
    assert losses(standing, {}) == {0: Loss(18, 130), 1: Loss(16, 80), 2: Loss(4, 20)}
