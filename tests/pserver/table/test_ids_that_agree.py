"""Ids that were chosen so that their hashes agree: every search ends soon, and nothing else is
another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pserver.table import ids as id_arithmetic
from pserver.table.ids import mix, unique
from pserver.table.index import MOST_PROBES, PARTS, Index, find, place_of
from pserver.table.kernels import Array
from pserver.table.table import SparseTable
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table

MASK = 2**64 - 1


def _unshifted(value: int, shift: int) -> int:
    """Which number ``x ^ (x >> shift)`` is this one."""
    found = value
    for _ in range(64 // shift + 1):
        found = value ^ (found >> shift)
    return found


def with_hash(hashed: int) -> int:
    """The id of a hash: the mixing function has no secret."""
    value = _unshifted(hashed, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    value = _unshifted(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    value = (_unshifted(value, 30) - 0x9E3779B97F4A7C15) & MASK
    return value - 2**64 if value >= 2**63 else value


def hash_of(value: int) -> np.uint64:
    """That of an id."""
    return np.uint64(mix(np.uint64(int(value) & MASK)))


def same_place(count: int, part: int = 7) -> Array:
    """Ids of one part and one place, whatever the part's size."""
    return np.array([with_hash(part << 56 | i << 32) for i in range(count)], np.int64)


def at_the_end(count: int) -> Array:
    """Ids of the last place of the last part."""
    return np.array([with_hash(0xFF << 56 | i << 32 | 0xFFFFFFFF) for i in range(count)], np.int64)


def in_a_run(count: int) -> Array:
    """Ids whose places lie side by side, so that a search that begins there passes them all."""
    step = 2**32 // (4 * count)
    return np.array([with_hash(3 << 56 | i << 32 | i * step) for i in range(count)], np.int64)


def by_chance(count: int) -> Array:
    """Ids that nobody has chosen."""
    return np.unique(np.random.default_rng(0).integers(-(2**62), 2**62, count))


def probes(index: Index, ids: Array) -> list[int]:
    """How far behind its place each id stands."""
    state = (index._base, index._sizes, index._seeds)
    places = [find(index._entries.array, *state, value) for value in ids]
    assert min(places) >= 0
    return [at - place_of(value, *state) for at, value in zip(places, ids, strict=True)]


def filled(ids: Array, batch: int = 1000) -> Index:
    index = Index()
    for begin in range(0, len(ids), batch):
        index.insert(ids[begin : begin + batch], 0, 0)
    return index


def test_the_ids_here_agree() -> None:
    """All bits of the hash that give part and place are the same."""
    assert (
        len(
            {
                int(mix(np.uint64(each & MASK))) & 0xFF000000FFFFFFFF
                for each in map(int, same_place(50))
            }
        )
        == 1
    )


@pytest.mark.parametrize("chosen", [same_place, at_the_end, in_a_run])
def test_no_search_is_long(chosen: Callable[[int], Array]) -> None:
    """40,000 chosen ids: each stands near its place, together little further than ids by chance.
    Ids that are not there are not searched for longer either.
    """
    ids = chosen(40_000)
    index = filled(ids)
    counts, usual = probes(index, ids), probes(filled(by_chance(40_000)), by_chance(40_000))
    assert max(counts) < MOST_PROBES
    # up to MOST_PROBES may agree in their places before anything is done about it
    assert sum(counts) <= 20 * sum(usual) + MOST_PROBES**2
    slots, missing = index.locate(ids)
    assert missing == 0 and slots.tolist() == list(range(len(ids)))
    assert index.locate(chosen(80_000)[40_000:])[1] == 40_000


def test_ids_by_chance_are_never_mixed_anew() -> None:
    """Nor those that are counted up, or come in strides: they cost what they did."""
    for ids in (by_chance(300_000), np.arange(300_000), np.arange(300_000) * 2**20):
        assert not filled(ids, 30_000)._mixed


def test_a_table_is_the_same_wherever_its_entries_stand() -> None:
    """Rows, states, chunks and what is shrunk: of a table whose every part is mixed anew, and of
    one whose are not.
    """
    table = Table("emb", 4, (Segment(0, 4, 0),))
    rule = Rule("adagrad", {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10})
    pair = [SparseTable(table, [rule]) for _ in range(2)]
    rng = np.random.default_rng(0)
    for step in range(6):
        if step == 2:
            for part in range(PARTS):
                pair[1]._rows.index.mix_anew(part)
        ids = rng.permutation(3000)[:800]
        rows = rng.standard_normal((800, 4)).astype(np.float32)
        for each in pair:
            each.update(ids.copy(), rows.copy(), [{}])
    assert not pair[0]._rows.index._mixed and pair[1]._rows.index._mixed
    chunks = [each.scan(0, 10_000)[0] for each in pair]
    assert chunks[0].keys() == chunks[1].keys()
    for name, column in chunks[0].items():
        assert np.array_equal(column, chunks[1][name])
    found = [np.empty((3000, 4), np.float32) for _ in pair]
    for each, out in zip(pair, found, strict=True):
        each.lookup(np.arange(3000), out)
    assert np.array_equal(*found)


def test_places_of_a_batch_are_salted() -> None:
    """Which ids differ, and where, is the same; ids that agree in the hash do not share a place."""
    ids = np.repeat(same_place(20_000), 2)
    found, inverse = unique(ids)
    assert np.array_equal(found, ids[::2]) and np.array_equal(found[inverse], ids)
    salt, last = int(id_arithmetic.SALT), 2**17 - 1
    places = {int(mix(np.uint64((int(each) & MASK) ^ salt))) & last for each in ids}
    assert len(places) > 15_000
