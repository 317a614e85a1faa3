"""The job's log as messages."""

from __future__ import annotations

import pytest

from pserver.job_log.records import (
    Call,
    Decided,
    Joined,
    Left,
    Loaded,
    Lost,
    Notice,
    Process,
    ProcessStep,
    Record,
    Silence,
    Staged,
    notices_bytes,
    notices_of,
    records_bytes,
    records_of,
)

FIRST, SECOND = Process(0, "a"), Process(7, "b")


def test_notices_travel() -> None:
    """Several in one message, in their order."""
    notices: list[Notice] = [
        Staged(3, ProcessStep(SECOND, 2**40)),
        Silence(FIRST, "no heartbeat for 3 s"),
        Call(SECOND, "save", 2**40),
    ]

    assert notices_of(notices_bytes(notices)) == notices
    assert notices_of(notices_bytes([])) == []


def test_records_travel() -> None:
    """Every kind, with its number and its time."""
    records = [
        Record(1, 0.5, Joined(FIRST)),
        Record(2, 1e9, Joined(SECOND, (3, 0))),
        Record(3, 1e9, Decided(1, (ProcessStep(FIRST, 1), ProcessStep(SECOND, 4)))),
        Record(4, 2e9, Lost(FIRST, "silent")),
        Record(5, 2e9, Call(SECOND, "shrink", 7)),
        Record(6, 2e9, Left(SECOND)),
        Record(7, 2e9, Left(FIRST, 0)),
        Record(8, 2e9, Loaded()),
    ]

    assert records_of(records_bytes(records)) == records


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x00", b"\x0a\x02\x08\x01"])
def test_other_bytes_are_refused(data: bytes) -> None:
    """Not a message, or one of a later version."""
    with pytest.raises(ValueError, match=r"expected|record"):
        records_of(data)
    with pytest.raises(ValueError, match="expected"):
        notices_of(data)
