"""An index is a dictionary from ids to slots, whatever comes and goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pserver.table import index
from pserver.table.ids import mix
from pserver.table.index import (
    CALL_SHIFT,
    CALLS,
    EPOCH_SHIFT,
    EPOCHS,
    KEYS,
    PARTS,
    Index,
    key_of,
    order_of,
)
from pserver.table.kernels import Array
from pserver.telemetry import memory
from tests.pserver.table.test_ids_that_agree import at_the_end, in_a_run, same_place

EXTREME = np.array([0, 1, -1, 2**63 - 1, -(2**63)])
# ids that agree, so that parts grow and are mixed anew, and ids that do not
POOL = np.unique(
    np.concatenate(
        [same_place(1500), at_the_end(1200), in_a_run(600), np.arange(600) << 40, EXTREME]
    )
)
KEY_OF = np.array([int(key_of(np.uint64(mix(np.uint64(int(each) % 2**64))))) for each in POOL])
# by the hash, so that neighbours agree
POOL = POOL[np.argsort(KEY_OF, kind="stable")]
KEY_OF.sort(kind="stable")

some = st.builds(
    lambda begin, count, step: np.unique((begin + step * np.arange(count)) % len(POOL)),
    st.integers(0, len(POOL) - 1),
    st.integers(1, 30) | st.sampled_from([400, 1500, 3000]),
    st.sampled_from([1, 1, 7]),
)
epochs = st.sampled_from([0, 1, 2, EPOCHS - 1, EPOCHS, EPOCHS + 1])
keys = st.integers(0, KEYS) | st.sampled_from([0, 2**32, KEYS, *(KEY_OF[::500].tolist())])


def refusing(size: int, reserve: bool, mapped: Any = index._mapped) -> Any:
    """A system that reserves no addresses."""
    if reserve:
        raise OSError("Cannot allocate memory")
    return mapped(size, reserve)


class Notes:
    """A watcher that notes what it is told."""

    def __init__(self) -> None:
        self.changed: list[tuple[Array, Array]] = []
        self.came: list[Array] = []

    def changing(self, slots: Array, words: Array) -> None:
        self.changed.append((slots.copy(), words.copy()))

    def coming(self, slots: Array) -> None:
        self.came.append(slots.copy())


class IndexMachine(RuleBasedStateMachine):
    """The slot of each id of the pool, -1 for none, and the epoch and call of its last change."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.slots = np.full(len(POOL), -1)
        self.epoch, self.call = np.zeros_like(self.slots), np.zeros_like(self.slots)
        self.calls, self.used, self.free = 0, 0, set[int]()

    @initialize(reserves=st.booleans(), small=st.sampled_from([1, 2, index.SMALL]))
    def begin(self, reserves: bool, small: int) -> None:
        self.patch.setattr(index, "SMALL", small)
        self.patch.setattr(index, "SMALL_UNRESERVED", min(small, index.SMALL_UNRESERVED))
        if not reserves:
            self.patch.setattr(index, "_mapped", refusing)
            self.patch.setattr(index, "SIDE", 2 * index.MOST_PROBES)
            self.patch.setattr(index, "ROOM", index.MOST_PROBES)
        self.index = Index()

    def teardown(self) -> None:
        self.patch.undo()

    def word(self, at: Array) -> Array:
        """The words of the entries."""
        bits = (self.epoch[at] << EPOCH_SHIFT) | (self.call[at] << CALL_SHIFT)
        return np.where(self.slots[at] < 0, 0, (self.slots[at] + 1) | bits)

    def told(self, at: Array, slots: Array, words: Array) -> None:
        """A watcher was told of these records, as they were."""
        if isinstance(self.index.watcher, Notes):
            (found, said) = self.index.watcher.changed.pop()
            assert found.tolist() == slots.tolist()
            # of ids without a record nothing is said
            assert said[slots >= 0].tolist() == words[slots >= 0].tolist()

    @rule(watched=st.booleans())
    def watch(self, watched: bool) -> None:
        self.index.watcher = Notes() if watched else None

    @rule(at=some, epoch=epochs)
    def insert(self, at: Array, epoch: int) -> None:
        at, self.calls = at[self.slots[at] < 0], self.calls + 1
        slots = self.index.insert(POOL[at], epoch, self.calls)
        if isinstance(self.index.watcher, Notes):
            assert self.index.watcher.came.pop().tolist() == slots.tolist()

        new = set(slots.tolist())
        # those of removed ids first
        fresh = range(self.used, self.used + max(len(at) - len(self.free), 0))
        assert len(new) == len(at) and new <= self.free.union(fresh) and new.issuperset(fresh)
        self.free -= new
        self.used += len(fresh)
        self.slots[at], self.epoch[at] = slots, epoch % EPOCHS
        self.call[at] = self.calls

    @rule(at=some, twice=st.booleans())
    def remove(self, at: Array, twice: bool) -> None:
        given = np.repeat(at, 2) if twice and self.index.watcher is None else at
        before, words = self.slots[at], self.word(at)
        slots = self.index.remove(POOL[given])
        self.told(at, before, words)

        assert slots[:: len(given) // len(at)].tolist() == before.tolist()
        assert given is at or (slots[1::2] == -1).all()
        self.free.update(before[before >= 0].tolist())
        self.slots[at] = -1

    @rule(at=some, epoch=epochs, again=st.booleans(), wraps=st.booleans())
    def mark(self, at: Array, epoch: int, again: bool, wraps: bool) -> None:
        """Of ids that differ, or one of them twice; calls are counted anew at ``CALLS``."""
        self.calls += 1
        given = np.append(at, at[-1]) if again and self.index.watcher is None else at
        before, words = self.slots[at], self.word(at)
        slots, missing, twice = self.index.mark(
            POOL[given], epoch, self.calls + CALLS * wraps, index.NOTHING
        )
        self.told(at, before, words)

        assert slots.tolist() == self.slots[given].tolist() and missing == sum(slots < 0)
        assert twice == (given is not at and before[-1] >= 0)
        here = at[before >= 0]
        self.epoch[here], self.call[here] = epoch % EPOCHS, self.calls

    @rule(part=st.sampled_from([0, 3, 7, PARTS - 1]))
    def mix_anew(self, part: int) -> None:
        self.index.mix_anew(part)

    @precondition(lambda self: self.used > 1000)
    @rule()
    def clear(self) -> None:
        held = np.flatnonzero(self.slots >= 0)
        held = held[np.argsort(self.slots[held])]
        slots, words = self.slots[held], self.word(held)
        self.index.clear()
        self.told(held, slots, words)
        self.slots[:], self.used, self.free = -1, 0, set()

    # ---- what is held ----

    @invariant()
    def every_id_is_found(self) -> None:
        slots, missing = self.index.locate(POOL)
        held = self.slots >= 0
        assert slots.tolist() == self.slots.tolist() and missing == (~held).sum()
        assert len(self.index) == held.sum() and self.index.used == self.used
        assert self.index.ids.array[self.slots[held]].tolist() == POOL[held].tolist()

    @rule(epoch=epochs)
    def changed_in(self, epoch: int) -> None:
        wanted = (self.slots >= 0) & (self.epoch == epoch % EPOCHS)
        assert self.index.changed_in(POOL, epoch).tolist() == wanted.tolist()

    @rule(
        epoch=epochs | st.just(-1),
        begin=st.integers(0, 50),
        limit=st.sampled_from([1, 100, 10_000]),
        end=st.none() | st.integers(0, 2000),
    )
    def listed(self, epoch: int, begin: int, limit: int, end: int | None) -> None:
        """Slots in order, a list after the other; to the end or a bound."""
        end = None if end is None else min(end, self.used)
        wanted = self.slots if epoch < 0 else self.slots[self.epoch == epoch % EPOCHS]
        wanted = np.sort(wanted[(wanted >= begin) & (wanted < (self.used if end is None else end))])
        found, cursor = [], begin
        while cursor >= 0 and (end is None or cursor < end):
            slots, after = self.index.listed(cursor, limit, epoch, end)
            assert len(slots) <= limit and (after < 0 or after > cursor)
            found, cursor = [*found, *slots.tolist()], after
            if limit == 1 and len(found) > 20:
                wanted = wanted[: len(found)]
                break
        assert found == wanted.tolist()

    @rule(begin=keys, end=keys)
    def within(self, begin: int, end: int) -> None:
        begin, end = sorted((begin, end))
        held = (self.slots >= 0) & (begin <= KEY_OF) & (end > KEY_OF)
        assert sorted(self.index.within(begin, end).tolist()) == sorted(self.slots[held].tolist())

    @rule(most=st.sampled_from([0, 1, 10_000]))
    def note_free(self, most: int) -> None:
        done = np.zeros(self.used, np.bool_)
        assert self.index.note_free(done, most) == (most >= len(self.free))
        assert set(np.flatnonzero(done).tolist()) <= self.free
        assert done.sum() == min(most, len(self.free))


test_an_index_is_a_dictionary = IndexMachine.TestCase


def test_a_part_that_grows_leaves_the_others_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side is smaller than a large page where little is reserved."""
    monkeypatch.setattr(index, "_mapped", refusing)
    ids = np.arange(1, 2_000_000)
    part = mix(ids.astype(np.uint64)) >> np.uint64(index.PART_SHIFT)
    held = Index()
    held.insert(others := ids[part != 7][:20_000], 0, 1)
    held.insert(grown := ids[part == 7], 0, 2)
    assert len(grown) > 7000
    assert held.locate(np.concatenate([others, grown]))[1] == 0


@pytest.mark.skipif(not memory.STATM.exists(), reason="this system does not say it")
def test_small_indices_lie_close_and_give_back_what_they_leave() -> None:
    """A model may have a hundred tables of few ids: no part of them has a page of its own."""
    ids = np.unique(np.random.default_rng(0).integers(-(2**62), 2**62, 60_000))
    filled(ids[:100])  # compiles
    before = memory.resident_bytes()
    small = [filled(ids[:500]) for _ in range(50)]
    held = memory.resident_bytes() - before
    assert held < 50 * 2**19, held
    grown = [filled(ids) for _ in range(5)]
    for each in (*small, *grown):
        each.clear()
    assert memory.resident_bytes() - before < 2**23


def filled(ids: Array) -> Index:
    """An index whose ids came one thousand after the other."""
    made = Index()
    for begin in range(0, len(ids), 1000):
        made.insert(ids[begin : begin + 1000], 0, 0)
    return made


def test_ids_have_the_order_of_their_keys_and_differ_in_it() -> None:
    """That of ids with one key is given by the rest of their hashes."""
    order = np.empty(len(POOL), np.uint64)
    order_of(POOL, order)
    assert ((order >> np.uint64(24)).astype(np.int64) == KEY_OF).all()
    assert len(np.unique(order)) == len(POOL)
