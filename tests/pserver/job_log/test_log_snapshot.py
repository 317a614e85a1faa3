"""Where the job's log stands, for a server that comes back; and what is lost there."""

from __future__ import annotations

import pytest

from pserver.job_log.records import (
    Applied,
    Decided,
    LogSnapshot,
    Loss,
    Process,
    ProcessSnapshot,
    Record,
    losses,
    records_bytes,
)

FIRST, SECOND, AGAIN, THIRD = Process(0, "a"), Process(1, "b"), Process(0, "c"), Process(2, "d")


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
