"""The index of a table: which slot of memory holds an id's row.

It is a hash table in parts, each of which grows by itself.

[Note: the index]  An entry is two words: the id, and a word about it::

    bits  0 to 35   its slot + 1; 0 for an empty entry
    bits 36 to 47   the epoch of its last change
    bits 48 to 62   the call that made that change

An id's hash gives its part (8 bits) and, by the product of 32 other bits with the part's size, its
place there; an id that finds its place taken stands behind.  The product keeps the order of the
hashes, so a part that grows is read and written nearly from front to back.  No place is computed
modulo the size: a part runs over its end into memory that is reserved for it anyway.

Parts begin in different sizes and grow by half, each when it is three quarters full.  So they grow
one after another, whatever the table's size, and no call waits for more than a few of them.  A part
has two sides, of which it uses one and grows into the other; the memory of the side that it leaves
is given back to the system.

[Note: ids that agree]  The hash is known, so ids can be chosen whose places are the same, or fill a
run.  So no id stands further behind its place than ``MOST_PROBES`` entries, and no search goes
further.  Where one would, the places of its part are mixed once more, with a random number: that
costs what growing costs.  Where an entry stands changes no result: who needs an order has that of
the slots, or of the keys, which are of the hash alone.

Slots are given in order.  Those of removed rows form a list that runs through ``ids``, and are used
again first.

Who changes a record calls :meth:`Index.mark` or :meth:`Index.remove` first, or has its slot from
:meth:`Index.insert`: so a watcher of the index knows of every change of a record before it is made.
It is given the slots that a mark has found, so that each id is looked up once.
"""

from __future__ import annotations

import secrets
from typing import Protocol

import numpy as np

from pserver.table import index_kernels
from pserver.table.ids import mix
from pserver.table.index_kernels import (
    CALL_SHIFT,
    CALLS,
    EPOCH_SHIFT,
    EPOCHS,
    PART_SHIFT,
    PART_SPAN,
)
from pserver.table.kernels import Array
from pserver.table.memory import LARGE_PAGE, Memory

PARTS = 256
KEYS = PARTS * PART_SPAN  # of ids: see :meth:`Index.within`
FIRST = 16  # entries of the smallest part at first
SIDE = 2**23  # entries that are reserved for a side
ROOM = 2**12  # entries that a side has beyond its part's size, at least
FETCHED = 256  # bytes of a record that are prefetched, at most, when its slot is found
NOTHING = (0, 0, 0)
UNUSED = 2**15  # bytes of a side below which zeros are written instead of giving it back


class Watcher(Protocol):
    """Is told of the changes of an index and of its records, before they are made."""

    def changing(self, slots: Array, words: Array) -> None:
        """Records are about to change or to go.

        Args:
            slots: int64[n], in which they are; -1 is none.
            words: int64[n], what the entries of their ids have said until now.
        """

    def coming(self, slots: Array) -> None:
        """These slots, int64[n], which were free, get an id."""


class Index:
    """A map from int64 ids to slots 0, 1, 2, ...  See [Note: the index].

    One caller changes it at a time; calls of :meth:`locate` may run beside each other.

    Attributes:
        ids: int64[slots], memory of the id of each slot; of a free slot, the next free one.
        watcher: is told before records change, and of ids that come; None: nobody is.
    """

    watcher: Watcher | None

    def __init__(self) -> None:
        self.ids = Memory(0, np.int64)
        self._side = SIDE
        self._entries = Memory(0, np.int64, 4 * PARTS * self._side * 8, large=False)
        while len(self._entries.array) < 4 * PARTS * self._side and self._side > 2 * ROOM:
            self._side //= 2
        self._entries.need(4 * PARTS * self._side)
        self.watcher = None
        self._reset()

    def _reset(self) -> None:
        # how often each part has grown; each begins a little larger than the one before
        self._grown = np.arange(PARTS) / PARTS
        self._sizes = self._sizes_of(self._grown)
        self._seeds: Array | None = None
        self._which = np.zeros(PARTS, np.int64)
        self._base = 2 * self._side * np.arange(PARTS, dtype=np.int64)
        self._counts, self._reach = np.zeros(PARTS, np.int64), np.zeros(PARTS, np.int64)
        self._heads = np.array([-1, 0], np.int64)
        self._count = 0

    def _sizes_of(self, grown: Array) -> Array:
        return (FIRST * 1.5**grown).astype(np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def used(self) -> int:
        """How many slots were ever used: those that hold a row are below this."""
        return int(self._heads[1])

    @property
    def bytes_held(self) -> int:
        """Memory of entries and ids, in bytes."""
        return int(self._sizes.sum()) * 16 + self.used * 8

    def locate(self, ids: Array, fetched: tuple[int, int, int] = NOTHING) -> tuple[Array, int]:
        """Finds the slots of ids.

        Args:
            ids: int64[n].
            fetched: what to prefetch of each slot: the address of slot 0, bytes from one slot to
                the next, bytes wanted.

        Returns:
            int64[n]: the slot of each id, -1 where it has none; and how many have none.
        """
        slots = np.empty(len(ids), np.int64)
        return slots, index_kernels.locate(
            self._entries.array, self._base, self._sizes, self._seeds, ids, slots, fetched
        )

    def mark(
        self, ids: Array, epoch: int, call: int, fetched: tuple[int, int, int] = NOTHING
    ) -> tuple[Array, int, bool]:
        """As :meth:`locate`, and notes that a call changes these rows.

        Args:
            ids: int64[n].
            epoch: counts the saves of a table.
            call: counts the calls.
            fetched: as of :meth:`locate`.

        Returns:
            Slots; how many ids have none; and whether an id may have come twice.  (It may also have
            come in a call whose number is equal in the bits that are kept.)
        """
        slots = np.empty(len(ids), np.int64)
        words = np.empty(0 if self.watcher is None else len(ids), np.int64)
        state = (self._entries.array, self._base, self._sizes, self._seeds)
        missing, twice = index_kernels.mark(
            *state, ids, slots, fetched, epoch % EPOCHS, call % CALLS, words
        )
        if self.watcher is not None:
            self.watcher.changing(slots, words)
        return slots, missing, twice

    def insert(self, ids: Array, epoch: int, call: int) -> Array:
        """Gives a slot to each of these ids, which differ and have none yet: int64[n]."""
        slots = np.empty(len(ids), np.int64)
        self.ids.need(self.used + len(ids))
        index_kernels.take(self.ids.array, self._heads, slots)
        if self.watcher is not None:
            self.watcher.coming(slots)
        self.ids.array[slots] = ids
        bits = ((epoch % EPOCHS) << EPOCH_SHIFT) | ((call % CALLS) << CALL_SHIFT)
        done = 0
        while True:
            state = (
                self._entries.array,
                self._base,
                self._sizes,
                self._seeds,
                self._counts,
                self._reach,
            )
            done = index_kernels.insert(*state, ids, slots, done, bits)
            if done == len(ids):
                break
            part = int(mix(ids[done].astype(np.uint64))) >> PART_SHIFT
            if 4 * (self._counts[part] + 1) > 3 * self._sizes[part]:
                self._grow(part)
            else:
                self.mix_anew(part)
        self._count += len(ids)
        return slots

    def _grow(self, part: int) -> None:
        self._grown[part] += 1
        size = int(self._sizes_of(self._grown[part]))
        if size + max(ROOM, size // 64) > self._side:
            self._widen()
        self._move(part, size)

    def mix_anew(self, part: int) -> None:
        """See [Note: ids that agree]."""
        self._choose_seed(part)
        self._move(part, int(self._sizes[part]))

    def _choose_seed(self, part: int) -> None:
        if self._seeds is None:
            self._seeds = np.zeros(PARTS, np.uint64)
        self._seeds[part] = secrets.randbits(64) | 1

    def _move(self, part: int, size: int) -> None:
        """Moves a part to its other side, where it has this size."""
        begin = int(self._base[part])
        end = begin + int(self._reach[part])
        self._which[part] ^= 1
        self._base[part] = (2 * part + self._which[part]) * self._side
        self._sizes[part] = size
        fresh = int(self._base[part])
        if size * 16 >= LARGE_PAGE:
            self._entries.large(fresh * 16, -(-size * 16 // LARGE_PAGE) * LARGE_PAGE)
        # pages that are read before they are written come in small
        self._entries.array[2 * fresh : 2 * (fresh + size)] = 0
        while not index_kernels.move(
            self._entries.array,
            begin,
            end,
            self._base,
            self._sizes,
            self._seeds,
            self._reach,
            part,
        ):
            self._entries.array[2 * fresh : 2 * (fresh + int(self._reach[part]))] = 0
            self._choose_seed(part)
        if (end - begin) * 16 < UNUSED:
            self._entries.array[2 * begin : 2 * end] = 0
        else:
            self._entries.forget(begin * 16, -(-(end - begin) * 16 // LARGE_PAGE) * LARGE_PAGE)

    def _widen(self) -> None:
        """Doubles what is reserved for a side, which copies all entries: only where little could be
        reserved.
        """
        held, base, reach = self._entries.array, self._base.copy(), self._reach
        self._side *= 2
        self._entries = Memory(0, np.int64, 4 * PARTS * self._side * 8, large=False)
        self._entries.need(4 * PARTS * self._side)
        self._base = (2 * np.arange(PARTS, dtype=np.int64) + self._which) * self._side
        for part in range(PARTS):
            count = 2 * int(reach[part])
            into, source = 2 * int(self._base[part]), 2 * int(base[part])
            self._entries.array[into : into + count] = held[source : source + count]

    def remove(self, ids: Array) -> Array:
        """Removes ids; returns their former slots, -1 for those that had none: int64[n]."""
        self._tell(ids)
        slots = np.empty(len(ids), np.int64)
        self._count -= index_kernels.remove(
            self._entries.array, self._base, self._sizes, self._seeds, self._counts, ids, slots
        )
        index_kernels.free(self.ids.array, self._heads, slots)
        return slots

    def _tell(self, ids: Array) -> None:
        """The records of those of these ids that are here are about to go."""
        if self.watcher is not None:
            words = np.empty(len(ids), np.int64)
            index_kernels.words_of(
                self._entries.array, self._base, self._sizes, self._seeds, ids, words
            )
            self.watcher.changing(self.locate(ids)[0], words)

    def note_free(self, done: Array, most: int) -> bool:
        """Marks the free slots.

        Args:
            done: bool[slots], gets True where a slot is free.
            most: so many are marked.

        Returns:
            Whether these are all.
        """
        return bool(index_kernels.note_free(self.ids.array, self._heads, done, most))

    def listed(
        self, begin: int, limit: int, epoch: int = -1, end: int | None = None
    ) -> tuple[Array, int]:
        """Lists slots that hold a row, in order.

        Args:
            begin: the first slot to look at.
            limit: slots in the list, at most.
            epoch: only rows that were last changed in it; -1: all.
            end: the slot behind the last one to look at; None: all are looked at.

        Returns:
            int64[at most limit]; and where to go on, -1 at the end of all.
        """
        end = self.used if end is None else end
        slots = np.empty(min(limit, max(end - begin, 0)), np.int64)
        state = (self._entries.array, self._base, self._sizes, self._seeds, self.ids.array)
        count, after = index_kernels.listed(
            *state, begin, end, epoch % EPOCHS if epoch >= 0 else -1, slots
        )
        return slots[:count], -1 if after >= self.used else after

    def within(self, begin: int, end: int) -> Array:
        """Lists the slots of the ids whose keys are in [begin, end).

        A key is of an id's hash: which ids are found follows from the ids that are here alone, and
        not from the order in which they have come and gone.  The entries stand in the order of
        keys, so that only those are read.

        Args:
            begin, end: from 0 to ``KEYS``, over which keys are spread evenly.

        Returns:
            int64[n], in any order.
        """
        slots = np.empty(2 * len(self) * (end - begin) // KEYS + 64, np.int64)
        state = (self._entries.array, self._base, self._sizes, self._seeds)
        count = index_kernels.within(*state, begin, end, slots)
        if count > len(slots):
            slots = np.empty(count, np.int64)
            index_kernels.within(*state, begin, end, slots)
        return slots[:count]

    def changed_in(self, ids: Array, epoch: int) -> Array:
        """bool[n]: which of these ids are here and were last changed in this epoch."""
        changed = np.zeros(len(ids), np.bool_)
        index_kernels.changed_in(
            self._entries.array, self._base, self._sizes, self._seeds, ids, epoch % EPOCHS, changed
        )
        return changed

    def clear(self) -> None:
        """Removes all ids."""
        if self.watcher is not None:
            self._tell(self.ids.array[self.listed(0, self.used)[0]])
        for part in range(PARTS):
            size = -(-(int(self._reach[part]) * 16 + 1) // LARGE_PAGE) * LARGE_PAGE
            self._entries.forget(int(self._base[part]) * 16, size)
        self.ids.clear(self.used)
        self._reset()
