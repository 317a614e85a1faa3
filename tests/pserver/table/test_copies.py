"""The servers' values of rows that a trainer steps by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pserver.table.copies import ServedCopies

DIM = 3


def slots(*given: int) -> np.ndarray:
    return np.array(given, np.int64)


def values(count: int, seed: int, dtype: type[np.generic] = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(dtype)


@pytest.fixture(params=[np.float32, np.float64])
def copies(request: pytest.FixtureRequest) -> ServedCopies:
    """Of five slots."""
    made = ServedCopies(DIM, request.param)
    made.need(5)
    return made


def dtype_of(copies: ServedCopies) -> type[np.generic]:
    return copies.values(slots(0)).dtype.type


def test_a_copy_is_stale_until_it_was_asked_for(copies: ServedCopies) -> None:
    """A slot without a row, one without a copy, and one that is marked; all others are fresh."""
    held = values(2, 1, dtype_of(copies))
    copies.put(slots(1, 3), held)
    assert copies.stale(slots(-1, 1, 2, 3)).tolist() == [0, 2]
    assert copies.known(slots(-1, 1, 2, 3)).tolist() == [False, True, False, True]
    copies.mark_stale(slots(3))
    assert copies.stale(slots(3, 1)).tolist() == [0]
    assert copies.known(slots(3)).all() and (copies.values(slots(3)) == held[1]).all()

    copies.mark_all_stale()
    assert copies.stale(slots(3, 1)).tolist() == [0, 1]
    copies.put(slots(1), held[:1])
    assert copies.stale(slots(3, 1)).tolist() == [0]
    copies.put(slots(2), held[:1], fresh=False)
    assert copies.known(slots(2)).all() and len(copies.stale(slots(2)))
    copies.clear(5)
    assert not copies.known(slots(0, 1, 2, 3, 4)).any()


def test_rows_move_as_torch_would_move_them(copies: ServedCopies) -> None:
    """x + (z - y), to the bit; z where that is not finite, or where the row begins anew."""
    kind = dtype_of(copies)
    before, rows, served = (values(4, seed, kind) for seed in (1, 2, 3))
    rows[1, 1], rows[2, 0] = np.nan, np.inf
    copies.put(slots(0, 1, 2, 3), before)
    x, y, z = (torch.from_numpy(each.copy()) for each in (rows, before, served))
    expected = x + (z - y)
    expected = torch.where(expected.isfinite(), expected, z)

    copies.mark_stale(slots(0, 1, 2, 3))
    copies.move(slots(0, 1, 2, 3), rows, served)
    assert torch.equal(torch.from_numpy(rows), expected)
    assert (copies.values(slots(0, 1, 2, 3)) == served).all()
    assert not len(copies.stale(slots(0, 1, 2, 3)))

    copies.restart()
    copies.put(slots(3), served[3:])  # asked for since
    rows, again = values(4, 4, kind), values(4, 5, kind)
    kept = rows.copy()
    copies.move(slots(0, 1, 2, 3), rows, again)
    assert (rows[:3] == again[:3]).all()
    moved = torch.from_numpy(kept[3]) + torch.from_numpy(again[3] - served[3])
    assert torch.equal(torch.from_numpy(rows[3]), moved)


def test_a_window_ends_with_what_was_trained_in_it(copies: ServedCopies) -> None:
    """Each row once; its divided change, to the bit as torch's, by which its copy moves."""
    kind = dtype_of(copies)
    before = values(5, 1, kind)
    copies.put(slots(0, 1, 2, 3, 4), before)
    assert copies.train(slots(1, 3)).tolist() == [1, 3]
    assert copies.train(slots(3, 4)).tolist() == [4]
    assert copies.untrained(slots(0, 1, 2)).tolist() == [0, 2]

    trained, rows = slots(1, 3, 4), values(3, 2, kind)
    x, y = torch.from_numpy(rows.copy()), torch.from_numpy(before[[1, 3, 4]])
    expected = (x - y).div_(3)
    copies.end_window(trained, rows, 3)
    assert torch.equal(torch.from_numpy(rows), expected)
    assert torch.equal(torch.from_numpy(copies.values(trained)), y + expected)
    assert (copies.values(slots(0, 2)) == before[[0, 2]]).all()
    assert copies.train(slots(1)).tolist() == [1]  # another window
