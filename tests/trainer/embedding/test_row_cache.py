"""The trainer's cache of rows: never older than its bound, never larger, and counted."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.embedding.rows import RowCache


def rows_of(ids: np.ndarray, step: int) -> np.ndarray:
    """Rows that tell their id and when they were pulled."""
    return np.stack([ids.astype(np.float32), np.full(len(ids), step, np.float32)], 1)


def pull(cache: RowCache, ids: np.ndarray, step: int) -> np.ndarray:
    out = np.full((len(ids), 2), -1, np.float32)
    missing = cache.read(ids, step, out)
    out[missing] = rows_of(ids[missing], step)
    cache.keep(ids[missing], out[missing], step)
    return out


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_row_is_read_again_up_to_the_bound_and_never_after(staleness: int) -> None:
    """A row pulled in step t is what a read gets up to step t + staleness; the next one is told to
    pull it.
    """
    cache, ids = RowCache(64, 2, staleness), np.array([7, -3, 2**62])

    pulled = [pull(cache, ids, step)[:, 1].max() for step in range(9)]

    assert pulled == [step - step % (staleness + 1) for step in range(9)]
    assert cache.counters()["misses"] == 3 * len(set(pulled))
    assert cache.counters()["hits"] == 3 * 9 - cache.counters()["misses"]


@pytest.mark.parametrize("places", [1, 3, 4, 30, 1000])
def test_rows_are_their_own_ids_and_no_more_than_there_is_room_for(places: int) -> None:
    """Whatever ids come, in however small a cache: a row that is read is the id's own, young
    enough, and rows stay few.
    """
    cache, random = RowCache(places, 2, staleness=2), np.random.default_rng(1)
    asked = 0
    for step in range(60):
        ids = np.unique(random.zipf(1.3, 200) % 500 - 250)
        asked += len(ids)

        read = pull(cache, ids, step)

        assert np.array_equal(read[:, 0], ids.astype(np.float32))
        assert (step - read[:, 1] <= 2).all() and (read[:, 1] >= 0).all()
        assert len(cache) <= places
    counters = cache.counters()
    assert counters["hits"] + counters["misses"] == asked
    assert counters["evictions"] > 0 and counters["rows"] == len(cache)
    assert places < 4 or counters["hits"] > 0


def test_what_was_read_lately_stays() -> None:
    """Of a set's four rows the one that was not read for longest makes room."""
    cache = RowCache(4, 2, staleness=100)
    for step, one in enumerate([10, 20, 30, 40, 10, 50]):  # 50 takes the place of 20
        pull(cache, np.array([one]), step)
    out = np.empty((5, 2), np.float32)

    missing = cache.read(np.array([10, 20, 30, 40, 50]), 6, out)

    assert missing.tolist() == [1]
    assert cache.counters()["evictions"] == 1


def test_rows_can_be_dropped() -> None:
    """A row that is dropped, or all of them, is pulled at the next read; the others stay."""
    cache = RowCache(40, 2, staleness=9)
    ids = np.arange(10)
    pull(cache, ids, 0)

    cache.drop(np.array([3, 4, 99]))

    assert cache.read(ids, 1, np.empty((10, 2), np.float32)).tolist() == [3, 4]
    cache.clear()
    assert len(cache) == 0 and len(cache.read(ids, 1, np.empty((10, 2), np.float32))) == 10


def test_no_ids_are_no_rows() -> None:
    """An empty lookup reads and keeps nothing."""
    cache, none = RowCache(8, 2, 1), np.empty(0, np.int64)

    assert pull(cache, none, 0).shape == (0, 2)
    assert cache.counters() == {"hits": 0, "misses": 0, "evictions": 0, "rows": 0}


@pytest.mark.parametrize(("rows", "staleness"), [(0, 1), (4, -1)])
def test_bounds_make_sense(rows: int, staleness: int) -> None:
    """A cache of no rows, and an age below 0, are refused."""
    with pytest.raises(ValueError, match="expected"):
        RowCache(rows, 2, staleness)
