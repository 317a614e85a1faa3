"""What is kept of the rows that trainers look up, and for how long."""

from __future__ import annotations

import numpy as np

from pserver.table.table import RowsRead


def ids(*given: int) -> np.ndarray:
    return np.array(given, np.int64)


def rows(*given: float) -> np.ndarray:
    return np.repeat(np.array(given, np.float32)[:, None], 2, 1)


def test_each_trainer_has_the_rows_that_it_has_read_last() -> None:
    """One that it has not read is not known; an id may come twice in one lookup."""
    read = RowsRead(2, np.float32, 3)
    read.note(0, ids(5, -7, 5), rows(1, 2, 1))
    read.note(0, ids(5), rows(3))
    read.note(1, ids(5), rows(4))

    asked = ids(5, -7, 9)
    found = [read.take_message(trainer, asked) for trainer in range(3)]
    assert [rows[:, 0].tolist() for rows, _ in found] == [[3, 2, 0], [4, 0, 0], [0, 0, 0]]
    assert [known.tolist() for _, known in found] == [
        [True, True, False],
        [True, False, False],
        [False, False, False],
    ]


def test_a_row_is_kept_for_so_many_messages_and_not_for_ever() -> None:
    """At least ``kept`` of its trainer's, at most twice as many; then its memory is free."""
    read = RowsRead(2, np.float32, 3)
    read.note(0, ids(5), rows(1))
    known = [read.take_message(0, ids(5))[1].tolist() == [True] for _ in range(8)]

    assert all(known[:4]) and not any(known[6:])
    held = read.bytes_held
    for step in range(100):
        read.note(0, np.arange(step * 10, step * 10 + 10), rows(*range(10)))
        read.take_message(0, ids(5))
    assert read.bytes_held - held < 2 * 6 * 10 * 100
    read.clear()
    assert read.bytes_held == 0


def test_a_row_that_is_read_again_stays() -> None:
    """A read between two generations counts for both."""
    read = RowsRead(2, np.float32, 1)
    for step in range(1, 6):
        read.note(0, ids(5), rows(step))
        assert read.take_message(0, ids(5))[0][0, 0] == step
