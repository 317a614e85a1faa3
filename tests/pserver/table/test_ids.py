"""Promises about batches of ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pserver.table.ids import all_differ, merge, owners, partition, unique, unique_each


def zipf(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).zipf(1.2, count).astype(np.int64)


ids_of = st.lists(
    st.integers(-4, 4) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), 2**63 - 1]),
    max_size=80,
).map(lambda ids: np.array(ids, np.int64))


@example(zipf(5000), np.float32, 5, True)
@example(zipf(5000) - 2**62, np.float64, 1, False)
@given(ids_of, st.sampled_from([np.float32, np.float64]), st.integers(0, 5), st.booleans())
def test_a_batch_is_what_differs_in_it(ids: np.ndarray, dtype: type, dim: int, wide: bool):
    """Ids come in the order of their first occurrence, each is found again through the inverse,
    and the rows of one are, to the bit, added one after the other.
    """
    found, inverse = unique(ids)
    assert np.array_equal(found[inverse], ids)
    _, first = np.unique(ids, return_index=True)
    assert np.array_equal(found, ids[np.sort(first)])

    values = np.random.default_rng(1).normal(size=(len(ids), dim)).astype(dtype)
    expected = np.zeros((len(found), dim), dtype)
    for place, row in zip(inverse, values, strict=True):
        expected[place] += row
    inverse = inverse.astype(np.int64) if wide else inverse
    assert np.array_equal(merge(inverse, values, len(found)), expected)


@example([zipf(3000), zipf(0), zipf(7), zipf(2000, 1)])
@given(st.lists(ids_of, max_size=6))
def test_runs_of_ids_are_each_a_batch(runs: list[np.ndarray]):
    """Each run has the unique ids that it has alone, and its least and greatest id."""
    sizes = np.array([len(run) for run in runs], np.int64)
    found = unique_each(np.concatenate([np.empty(0, np.int64), *runs]), sizes)
    ids = np.split(found.ids, np.cumsum(found.counts)[:-1]) if runs else []
    inverse = np.split(found.inverse, np.cumsum(sizes)[:-1]) if runs else []
    for run, own, places, (low, high) in zip(runs, ids, inverse, found.bounds, strict=True):
        alone, expected = unique(run)
        assert own.tolist() == alone.tolist() and places.tolist() == expected.tolist()
        assert (low, high) == (run.min(), run.max()) if len(run) else low > high
        assert all_differ(run) == (len(alone) == len(run)) and all_differ(alone)


@example(zipf(4000), 5)
@given(ids_of, st.integers(1, 9))
def test_a_partition_keeps_each_servers_ids_in_order(ids: np.ndarray, servers: int):
    """All ids are dealt out, each to its owner, which is the same in any batch; a server's are in
    the order in which they came.
    """
    owned, (order, offsets) = owners(ids, servers), partition(ids, servers)
    assert owners(ids[::-1].copy(), servers).tolist() == owned[::-1].tolist()
    assert offsets[0] == 0 and offsets[-1] == len(ids) and len(offsets) == servers + 1
    for server in range(servers):
        own = order[offsets[server] : offsets[server + 1]]
        assert np.array_equal(own, np.flatnonzero(owned == server))


@pytest.mark.parametrize("servers", [1, 3, 7])
@pytest.mark.parametrize("pattern", ["in a row", "in strides", "high bits", "random"])
def test_servers_own_equal_parts_of_ids_of_any_pattern(servers: int, pattern: str):
    """No server holds more than a few hundredths above its share."""
    count = np.arange(60_000)
    patterns = {
        "in a row": count,
        "in strides": count * 4096,
        "high bits": count << 44,
        "random": zipf(60_000) * 48271,
    }
    ids = np.unique(patterns[pattern].astype(np.int64))
    held = np.bincount(owners(ids, servers), minlength=servers)
    assert held.max() < len(ids) / servers * 1.05 and held.min() > len(ids) / servers * 0.95


def test_what_is_no_flat_array_of_int64_is_refused():
    """Wrong dtypes, shapes, strides and places say what was expected and what came."""
    with pytest.raises(TypeError, match="unique: expected ids of int64, got an array of float64"):
        unique(np.zeros(3))
    with pytest.raises(
        ValueError, match=r"owners: expected ids of one dimension, got shape \(2, 2\)"
    ):
        owners(np.zeros((2, 2), np.int64), 2)
    with pytest.raises(ValueError, match="contiguous"):
        partition(np.arange(10)[::2], 2)
    with pytest.raises(ValueError, match="expected 1 to 2147483647 servers, got 0"):
        owners(np.arange(3), 0)
    with pytest.raises(ValueError, match="expected places from 0 to 1, got 2 at 1"):
        merge(np.array([0, 2], np.int32), np.zeros((2, 3), np.float32), 2)
    with pytest.raises(ValueError, match=r"expected shapes \[n\] and \[n, d\]"):
        merge(np.array([0], np.int32), np.zeros((2, 3), np.float32), 2)


def test_memory_that_may_not_be_written_is_read():
    """Ids as they come from a message, in read-only memory, give the same."""
    ids = zipf(100)
    found, inverse = unique(np.frombuffer(ids.tobytes(), np.int64))
    assert np.array_equal(found[inverse], ids)
