"""Which row of memory an id has: a hash table in parts, each of which grows by itself.

[Note: the index]  An entry is two words: the id, and what is kept of it::

    bits 0 to 35: its slot + 1, 0 for an empty entry | 36 to 47: the epoch of its last change | 48 to 62: the call that made it

An id's hash gives its part (8 bits) and, by the product of 32 other bits with the part's size, its
place there; what finds its place taken stands behind.  The product keeps the order of the hashes,
so a part that grows is read and written nearly from front to back.  No place is computed modulo the
size: a part runs over its end into memory that is reserved for it anyway.

Parts begin in different sizes and grow by half, each when it is three quarters full.  So they grow
one after another, whatever the table's size, and no call waits for more than a few of them.  A part
has two sides, of which it uses one and grows into the other; what it leaves is given back to the
system.

Slots are handed out in order.  Those of removed rows form a list that runs through ``ids``, and go
first.
"""

from __future__ import annotations

import numpy as np

from pserver.table.ids import mix
from pserver.table.kernels import Array, kernel, prefetch
from pserver.table.memory import LARGE_PAGE, Memory

PARTS = 256
PART_SHIFT = 56
FIRST = 16  # entries of the smallest part at first
SIDE = 2**23  # entries that are reserved for a side
ROOM = 2**12  # entries that a side has beyond its part's size, at least
AHEAD = 32  # ids whose entries are being fetched
LINE = 64  # bytes that are fetched at once
FETCHED = 256  # bytes of a record that are, at most, when its slot is found
NOTHING = (0, 0, 0)
SLOT = (1 << 36) - 1
EPOCH_SHIFT, EPOCHS = 36, 1 << 12
CALL_SHIFT, CALLS = 48, 1 << 15
UNUSED = 2**15  # bytes of a side below which it is emptied by hand
ANYWHERE = (-(2**63), 2**63 - 1)


@kernel
def _place(value: int, base: Array, sizes: Array) -> int:
    """The entry at which the search for an id begins."""
    hashed = mix(np.uint64(value))
    part = np.int64(hashed >> np.uint64(PART_SHIFT))
    into = np.int64(((hashed & np.uint64(0xFFFFFFFF)) * np.uint64(sizes[part])) >> np.uint64(32))
    return base[part] + into  # type: ignore[no-any-return]


@kernel
def _find(entries: Array, base: Array, sizes: Array, value: int) -> int:
    """The entry of one id; -1 if it has none."""
    place = _place(value, base, sizes)
    while True:
        word = entries[2 * place + 1]
        if word == 0:
            return -1
        if entries[2 * place] == value:
            return place
        place += 1


@kernel
def _fetch(fetched: tuple[int, int, int], slot: int) -> None:
    """Has what lies in a slot fetched.

    ``fetched``: the first slot's address, bytes from one to the next, bytes wanted.
    """
    address = np.uint64(fetched[0]) + np.uint64(slot * fetched[1])
    for line in range(0, fetched[2], LINE):
        prefetch(address + np.uint64(line))


@kernel
def _locate(
    entries: Array,
    base: Array,
    sizes: Array,
    ids: Array,
    slots: Array,
    fetched: tuple[int, int, int],
) -> int:
    """Slots of ids, -1 where there is none; returns how many have none."""
    n = len(ids)
    start = entries.ctypes.data
    for i in range(n):
        slots[i] = _place(ids[i], base, sizes)
    missing = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch(start + np.uint64(16 * slots[i + AHEAD]))
        place = slots[i]
        value = ids[i]
        slot = -1
        while True:
            word = entries[2 * place + 1]
            if word == 0:
                missing += 1
                break
            if entries[2 * place] == value:
                slot = (word & SLOT) - 1
                _fetch(fetched, slot)
                break
            place += 1
        slots[i] = slot
    return missing


@kernel
def _mark(
    entries: Array,
    base: Array,
    sizes: Array,
    ids: Array,
    slots: Array,
    fetched: tuple[int, int, int],
    epoch: int,
    call: int,
) -> tuple[int, bool]:
    """As ``_locate``, and notes the change in the entries; also whether some id seems to have come
    twice.
    """
    n = len(ids)
    start = entries.ctypes.data
    for i in range(n):
        slots[i] = _place(ids[i], base, sizes)
    missing, twice = 0, False
    bits = (np.int64(epoch) << EPOCH_SHIFT) | (np.int64(call) << CALL_SHIFT)
    for i in range(n):
        if i + AHEAD < n:
            prefetch(start + np.uint64(16 * slots[i + AHEAD]))
        place = slots[i]
        value = ids[i]
        slot = -1
        while True:
            word = entries[2 * place + 1]
            if word == 0:
                missing += 1
                break
            if entries[2 * place] == value:
                slot = (word & SLOT) - 1
                _fetch(fetched, slot)
                twice |= (word >> CALL_SHIFT) == call
                entries[2 * place + 1] = (word & SLOT) | bits
                break
            place += 1
        slots[i] = slot
    return missing, twice


@kernel
def _insert(
    entries: Array,
    base: Array,
    sizes: Array,
    counts: Array,
    reach: Array,
    ids: Array,
    slots: Array,
    begin: int,
    bits: int,
) -> int:
    """Enters ids that have no entry, from ``begin`` on; returns where it had to stop because a part
    must grow.
    """
    for i in range(begin, len(ids)):
        part = np.int64(mix(np.uint64(ids[i])) >> np.uint64(PART_SHIFT))
        if 4 * (counts[part] + 1) > 3 * sizes[part]:
            return i
        place = _place(ids[i], base, sizes)
        while entries[2 * place + 1] != 0:
            place += 1
        entries[2 * place] = ids[i]
        entries[2 * place + 1] = (slots[i] + 1) | bits
        counts[part] += 1
        reach[part] = max(reach[part], place + 1 - base[part])
    return len(ids)


@kernel
def _move(
    entries: Array, begin: int, end: int, base: Array, sizes: Array, reach: Array, part: int
) -> None:
    """Enters anew what stands in entries [begin, end), whose part has got another base and size."""
    furthest = 0
    for old in range(begin, end):
        if entries[2 * old + 1] != 0:
            place = _place(entries[2 * old], base, sizes)
            while entries[2 * place + 1] != 0:
                place += 1
            entries[2 * place] = entries[2 * old]
            entries[2 * place + 1] = entries[2 * old + 1]
            furthest = max(furthest, place + 1 - base[part])
    reach[part] = furthest


@kernel
def _remove(
    entries: Array, base: Array, sizes: Array, counts: Array, ids: Array, slots: Array
) -> int:
    """Takes ids out and says which slots they had, -1 for those that had none; returns how many
    there were.

    What stands behind a hole moves up if its search would pass the hole (Knuth, TAOCP 3, 6.4,
    algorithm R).
    """
    removed = 0
    for i in range(len(ids)):
        hole = _find(entries, base, sizes, ids[i])
        if hole < 0:
            slots[i] = -1
            continue
        slots[i] = (entries[2 * hole + 1] & SLOT) - 1
        removed += 1
        counts[np.int64(mix(np.uint64(ids[i])) >> np.uint64(PART_SHIFT))] -= 1
        place = hole + 1
        while entries[2 * place + 1] != 0:
            if _place(entries[2 * place], base, sizes) <= hole:
                entries[2 * hole] = entries[2 * place]
                entries[2 * hole + 1] = entries[2 * place + 1]
                hole = place
            place += 1
        entries[2 * hole + 1] = 0
    return removed


@kernel
def _take(chain: Array, heads: Array, slots: Array) -> None:
    """Slots for new rows.

    ``heads``: the first free slot or -1, and the number of slots ever used.
    """
    for i in range(len(slots)):
        if heads[0] >= 0:
            slots[i] = heads[0]
            heads[0] = chain[heads[0]]
        else:
            slots[i] = heads[1]
            heads[1] += 1


@kernel
def _free(chain: Array, heads: Array, slots: Array) -> None:
    for i in range(len(slots)):
        if slots[i] >= 0:
            chain[slots[i]] = heads[0]
            heads[0] = slots[i]


@kernel
def _listed(
    entries: Array,
    base: Array,
    sizes: Array,
    chain: Array,
    begin: int,
    end: int,
    epoch: int,
    slots: Array,
) -> tuple[int, int]:
    """Slots from ``begin`` on that hold a row (with ``epoch`` >= 0: one of that epoch), as many as
    ``slots`` takes.

    Returns how many, and the slot to go on from.  A free slot's link may look like an id, but that
    id's entry names another slot.
    """
    count = 0
    start = entries.ctypes.data
    for slot in range(begin, end):
        if count == len(slots):
            return count, slot
        if slot + AHEAD < end:
            prefetch(start + np.uint64(16 * _place(chain[slot + AHEAD], base, sizes)))
        place = _find(entries, base, sizes, chain[slot])
        if place >= 0:
            word = entries[2 * place + 1]
            if (word & SLOT) - 1 == slot and (
                epoch < 0 or ((word >> EPOCH_SHIFT) & (EPOCHS - 1)) == epoch
            ):
                slots[count] = slot
                count += 1
    return count, end


@kernel
def _noted(entries: Array, base: Array, sizes: Array, ids: Array, epoch: int, noted: Array) -> None:
    for i in range(len(ids)):
        place = _find(entries, base, sizes, ids[i])
        noted[i] = place >= 0 and ((entries[2 * place + 1] >> EPOCH_SHIFT) & (EPOCHS - 1)) == epoch


@kernel
def outside(ids: Array, low: int, high: int) -> int:
    """The place of the first id that is not in [low, high); -1 if all are."""
    some = False
    for i in range(len(ids)):
        some |= (ids[i] < low) | (ids[i] >= high)
    if some:
        for i in range(len(ids)):
            if ids[i] < low or ids[i] >= high:
                return i
    return -1


class Index:
    """A map from int64 ids to slots 0, 1, 2, ...  See [Note: the index].

    Attributes:
        ids: memory of the id of each slot; of a free slot, the next free one.
    """

    def __init__(self) -> None:
        self.ids = Memory(0, np.int64)
        self._side = SIDE
        self._entries = Memory(0, np.int64, 4 * PARTS * self._side * 8, large=False)
        while len(self._entries.array) < 4 * PARTS * self._side and self._side > 2 * ROOM:
            self._side //= 2
        self._entries.need(4 * PARTS * self._side)
        self._reset()

    def _reset(self) -> None:
        # how often; each part began a little larger than the one before
        self._grown = np.arange(PARTS) / PARTS
        self._sizes = self._sizes_of(self._grown)
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
        """Slots that were ever used: all that hold something are below."""
        return int(self._heads[1])

    @property
    def bytes_held(self) -> int:
        """Of entries and ids."""
        return int(self._sizes.sum()) * 16 + self.used * 8

    def locate(self, ids: Array, fetched: tuple[int, int, int] = NOTHING) -> tuple[Array, int]:
        """int64[n]: the slot of each id, -1 where it has none; and how many have none.

        ``fetched``: what lies in the slots is wanted soon: its first address, bytes from one slot
        to the next, bytes wanted.
        """
        slots = np.empty(len(ids), np.int64)
        return slots, _locate(self._entries.array, self._base, self._sizes, ids, slots, fetched)

    def mark(
        self, ids: Array, epoch: int, call: int, fetched: tuple[int, int, int] = NOTHING
    ) -> tuple[Array, int, bool]:
        """As :meth:`locate`, noting a change; also whether an id may have come twice (or was noted
        in an equal call before).
        """
        slots = np.empty(len(ids), np.int64)
        state = (self._entries.array, self._base, self._sizes)
        missing, twice = _mark(*state, ids, slots, fetched, epoch % EPOCHS, call % CALLS)
        return slots, missing, twice

    def insert(self, ids: Array, epoch: int, call: int) -> Array:
        """Gives each of these ids, which differ and have none yet, a slot: int64[n]."""
        slots = np.empty(len(ids), np.int64)
        self.ids.need(self.used + len(ids))
        _take(self.ids.array, self._heads, slots)
        self.ids.array[slots] = ids
        bits = ((epoch % EPOCHS) << EPOCH_SHIFT) | ((call % CALLS) << CALL_SHIFT)
        done = 0
        while True:
            state = (self._entries.array, self._base, self._sizes, self._counts, self._reach)
            done = _insert(*state, ids, slots, done, bits)
            if done == len(ids):
                break
            self._grow(int(mix(ids[done].astype(np.uint64))) >> PART_SHIFT)
        self._count += len(ids)
        return slots

    def _grow(self, part: int) -> None:
        self._grown[part] += 1
        size = int(self._sizes_of(self._grown[part]))
        if size + max(ROOM, size // 64) > self._side:
            self._widen()
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
        _move(self._entries.array, begin, end, self._base, self._sizes, self._reach, part)
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
        """Takes ids out; their former slots, -1 for those that had none: int64[n]."""
        slots = np.empty(len(ids), np.int64)
        self._count -= _remove(
            self._entries.array, self._base, self._sizes, self._counts, ids, slots
        )
        _free(self.ids.array, self._heads, slots)
        return slots

    def listed(self, begin: int, most: int, epoch: int = -1) -> tuple[Array, int]:
        """Slots in use from ``begin`` on, in order, at most ``most``; and where to go on, -1 at the
        end.

        ``epoch``: only those that were last changed in it.
        """
        slots = np.empty(min(most, max(self.used - begin, 0)), np.int64)
        state = (self._entries.array, self._base, self._sizes, self.ids.array)
        count, after = _listed(
            *state, begin, self.used, epoch % EPOCHS if epoch >= 0 else -1, slots
        )
        return slots[:count], -1 if after >= self.used else after

    def noted(self, ids: Array, epoch: int) -> Array:
        """bool[n]: which of these ids are here and were last changed in this epoch."""
        noted = np.zeros(len(ids), np.bool_)
        _noted(self._entries.array, self._base, self._sizes, ids, epoch % EPOCHS, noted)
        return noted

    def clear(self) -> None:
        """Takes everything out."""
        for part in range(PARTS):
            size = -(-(int(self._reach[part]) * 16 + 1) // LARGE_PAGE) * LARGE_PAGE
            self._entries.forget(int(self._base[part]) * 16, size)
        self.ids.clear(self.used)
        self._reset()
