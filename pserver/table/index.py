"""The index of a table, which maps ids to slots of memory.

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
one after another, whatever the table's size, and no call waits for more than a few of them.  Small
parts lie side by side, those that have grown as often in one region: a job may have a hundred small
tables, and each search would be in another page of memory.  From the ``SMALL``-th growth on a part
has two sides of its own, of which it uses one and grows into the other.  The memory of a region
that all parts have left, or of a side, is given back to the system.

[Note: ids that agree]  The hash is known, so ids can be chosen whose places are the same, or fill a
run.  So no id stands further behind its place than ``MOST_PROBES`` entries, and no search goes
further.  Where one would, the places of its part are mixed once more, with a random number: that
costs what growing costs.  The place of an entry changes no result: callers that need an order use
that of the slots, or of the keys, which depend on the hash alone.

Slots are given in order.  Those of removed rows form a list that runs through ``ids``, and are used
again first.

A caller that changes a record calls :meth:`Index.mark` or :meth:`Index.remove` first, or has its
slot from :meth:`Index.insert`: so a watcher of the index knows of every change of a record before
it is made.  It receives the slots that a mark has found, so that each id is looked up once.

[Note: reserved memory]  A table's memory is one anonymous mapping, far larger than what it will
need: addresses cost little, pages come into being when first touched.  So a table grows without
moving a row.  A process has 128 TiB of addresses, though, and a hundred tables of four times a
large machine's memory would take them all: no mapping takes more than a 64th of what is free.
Where that is little, or the system refuses to reserve (a bound on addresses, no overcommitting),
the mapping is as large as needed, and growing copies it.  Once a few MB are in use, the system is
asked for large pages: a table is read at random, and with small pages half of the time goes into
finding the page.

[Note: a record]  Everything that a step needs of a row lies together, so that a row costs one place
in memory, not three::

    values | states                           | padding | words of 8 bytes
    [dim]  | by name, each of all segments    |         | see ``Layout.words``
           | that have it                     |         |
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pserver.table.ids import mix
from pserver.table.kernels import Array, kernel, prefetch

# ---- index kernels ----
#
# The kernels of a table's index: search, insertion and removal in its entries.
#
# See [Note: the index] in index.py.  The kernels take
#
# - ``entries``: int64, two words for each entry;
# - ``base``, ``sizes``: int64[parts], the first entry of each part, and its size;
# - ``seeds``: uint64[parts], with which the places of a part are mixed once more; 0: they are not.
#   None where those of no part are: where that saves a quarter, it is compiled apart;
# - ``counts``, ``reach``: int64[parts], the ids of each part, and how far from its base they stand;
# - ``chain``: int64[slots], the id of each slot; of a free slot, the next free one;
# - ``heads``: the first free slot or -1, and the number of slots ever used;
# - ``fetched``: what to prefetch of a slot that is found: the address of slot 0, bytes from one
#   slot to the next, bytes wanted.


PART_SHIFT = 56
PART_SPAN = 2**32  # keys of a part: see ``key_of``
REST = 24  # bits of a hash that its key does not have
AHEAD = 32  # ids whose entries are prefetched
LINE = 64  # bytes of one prefetch
# entries that an id may be behind its place: ids that differ by chance never come near that, at
# three quarters of a part
MOST_PROBES = 2**10
SLOT = (1 << 36) - 1
EPOCH_SHIFT, EPOCHS = 36, 1 << 12
CALL_SHIFT, CALLS = 48, 1 << 15
PARTS = 256
FIRST = 16  # entries of the smallest part at first
SMALL = 14  # growths of a part from which on it has sides of its own
PAGE_ENTRIES = 2**17  # of a large page


def size_of(grown: float) -> int:
    """The entries of a part that has grown so often."""
    return int(FIRST * 1.5**grown)


# of small parts, by growths and part
SIZES = np.array(
    [[size_of(grown + part / PARTS) for part in range(PARTS)] for grown in range(SMALL)]
)
# Of their regions, by growths: the entries from one part to the next, and the first entry, at a
# large page.  A part is three quarters full at most, so fewer entries than that stand behind its
# end.  A region has two halves: a part that is moved goes to the other one, also where it stays in
# its region, as it is mixed anew.
STRIDES = np.array([size_of(grown + 1) * 7 // 4 + 1 for grown in range(SMALL)])
REGIONS = np.cumsum([0, *(-(-2 * PARTS * STRIDES // PAGE_ENTRIES) * PAGE_ENTRIES)])


@kernel
def key_of(hashed: np.uint64) -> np.uint64:
    """An id's key, from its hash: its part times ``PART_SPAN``, and the 32 bits that give its place
    there.
    """
    key = (hashed >> np.uint64(PART_SHIFT)) << np.uint64(32)
    return key | (hashed & np.uint64(0xFFFFFFFF))


@kernel
def order_of(ids: Array, order: Array) -> None:
    """Writes a number for each id, uint64[n]: its key, and behind that the ``REST`` of its hash.

    Numbers differ where ids do.
    """
    for i in range(len(ids)):
        hashed = mix(np.uint64(ids[i]))
        rest = (hashed >> np.uint64(32)) & np.uint64((1 << REST) - 1)
        order[i] = (key_of(hashed) << np.uint64(REST)) | rest


@kernel
def place_of(value: int, base: Array, sizes: Array, seeds: Array | None) -> int:
    """The entry at which the search for an id begins."""
    hashed = mix(np.uint64(value))
    part = np.int64(hashed >> np.uint64(PART_SHIFT))
    if seeds is not None:
        if seeds[part] != 0:
            hashed = mix(hashed ^ seeds[part])
    into = np.int64(((hashed & np.uint64(0xFFFFFFFF)) * np.uint64(sizes[part])) >> np.uint64(32))
    return base[part] + into  # type: ignore[no-any-return]


@kernel
def places_of(ids: Array, base: Array, sizes: Array, seeds: Array | None, places: Array) -> None:
    """Writes ``place_of`` of each id: without a branch, where it can, as that takes a quarter."""
    for i in range(len(ids)):
        hashed = mix(np.uint64(ids[i]))
        part = np.int64(hashed >> np.uint64(PART_SHIFT))
        low = hashed & np.uint64(0xFFFFFFFF)
        places[i] = base[part] + np.int64((low * np.uint64(sizes[part])) >> np.uint64(32))
    if seeds is not None:
        for i in range(len(ids)):
            places[i] = place_of(ids[i], base, sizes, seeds)


@kernel
def find(entries: Array, base: Array, sizes: Array, seeds: Array, value: int) -> int:
    """The entry of one id; -1 if it has none."""
    first = place_of(value, base, sizes, seeds)
    for place in range(first, first + MOST_PROBES):
        if entries[2 * place + 1] == 0:
            return -1
        if entries[2 * place] == value:
            return place
    return -1


@kernel
def prefetch_slot(fetched: tuple[int, int, int], slot: int) -> None:
    """Prefetches a slot; ``fetched``: see the module's docstring."""
    address = np.uint64(fetched[0]) + np.uint64(slot * fetched[1])
    for line in range(0, fetched[2], LINE):
        prefetch(address + np.uint64(line))


@kernel
def locate(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    ids: Array,
    slots: Array,
    fetched: tuple[int, int, int],
) -> int:
    """Writes the slots of ids, -1 where there is none; returns how many have none."""
    n = len(ids)
    start = entries.ctypes.data
    places_of(ids, base, sizes, seeds, slots)
    missing = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch(start + np.uint64(16 * slots[i + AHEAD]))
        place = slots[i]
        last = place + MOST_PROBES
        value = ids[i]
        slot = -1
        while True:
            word = entries[2 * place + 1]
            if word == 0 or place == last:
                missing += 1
                break
            if entries[2 * place] == value:
                slot = (word & SLOT) - 1
                prefetch_slot(fetched, slot)
                break
            place += 1
        slots[i] = slot
    return missing


@kernel
def mark(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    ids: Array,
    slots: Array,
    fetched: tuple[int, int, int],
    epoch: int,
    call: int,
    words: Array,
) -> tuple[int, bool]:
    """As ``locate``, and notes in the entries that call ``call`` of epoch ``epoch`` changes the
    rows.  Also returns whether some id may have come twice.

    Where ``words``, int64[n] or [0], has room, it gets what the entries said before.
    """
    n = len(ids)
    start = entries.ctypes.data
    places_of(ids, base, sizes, seeds, slots)
    missing, twice = 0, False
    bits = (np.int64(epoch) << EPOCH_SHIFT) | (np.int64(call) << CALL_SHIFT)
    for i in range(n):
        if i + AHEAD < n:
            prefetch(start + np.uint64(16 * slots[i + AHEAD]))
        place = slots[i]
        last = place + MOST_PROBES
        value = ids[i]
        slot = -1
        while True:
            word = entries[2 * place + 1]
            if word == 0 or place == last:
                missing += 1
                break
            if entries[2 * place] == value:
                slot = (word & SLOT) - 1
                prefetch_slot(fetched, slot)
                twice |= (word >> CALL_SHIFT) == call
                if i < len(words):
                    words[i] = word
                entries[2 * place + 1] = (word & SLOT) | bits
                break
            place += 1
        slots[i] = slot
    return missing, twice


@kernel
def move(
    entries: Array,
    begin: int,
    end: int,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    reach: Array,
    part: int,
) -> bool:
    """Moves the entries [begin, end) of a part to its new base, for its new size and seed; the old
    ones stay.  Returns whether all could be entered.
    """
    furthest = 0
    for old in range(begin, end):
        if entries[2 * old + 1] != 0:
            place = place_of(entries[2 * old], base, sizes, seeds)
            last = place + MOST_PROBES
            while place < last and entries[2 * place + 1] != 0:
                place += 1
            if place == last:
                reach[part] = max(furthest, place + 1 - base[part])
                return False
            entries[2 * place] = entries[2 * old]
            entries[2 * place + 1] = entries[2 * old + 1]
            furthest = max(furthest, place + 1 - base[part])
    reach[part] = furthest
    return True


@kernel
def grow_small(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    reach: Array,
    grown: Array,
    which: Array,
    small: int,
    part: int,
) -> bool:
    """Moves a part into the next region of small ones.  Returns False where there is none, or where
    not all its entries can be entered there: nothing is changed then.
    """
    growths = int(grown[part]) + 1
    if growths >= small:
        return False
    begin, size, behind = base[part], sizes[part], base[part] + reach[part]
    half = 1 - which[part]
    base[part] = REGIONS[growths] + (half * PARTS + part) * STRIDES[growths]
    sizes[part] = SIZES[growths, part]
    if not move(entries, begin, behind, base, sizes, seeds, reach, part):
        entries[2 * base[part] : 2 * (base[part] + reach[part])] = 0
        base[part], sizes[part], reach[part] = begin, size, behind - begin
        return False
    entries[2 * begin : 2 * behind] = 0
    grown[part] += 1
    which[part] = half
    return True


@kernel
def insert(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    counts: Array,
    reach: Array,
    grown: Array,
    which: Array,
    small: int,
    ids: Array,
    slots: Array,
    begin: int,
    bits: int,
) -> int:
    """Enters ids that have no entry, from place ``begin`` on; returns the place of the first id
    that cannot be entered: its part must grow before, or, where it has room, be mixed anew.  Small
    parts grow by themselves.
    """
    for i in range(begin, len(ids)):
        part: Any = np.int64(mix(np.uint64(ids[i])) >> np.uint64(PART_SHIFT))
        if 4 * (counts[part] + 1) > 3 * sizes[part]:
            if not grow_small(entries, base, sizes, seeds, reach, grown, which, small, part):
                return i
        place = place_of(ids[i], base, sizes, seeds)
        last = place + MOST_PROBES
        while place < last and entries[2 * place + 1] != 0:
            place += 1
        if place == last:
            return i
        entries[2 * place] = ids[i]
        entries[2 * place + 1] = (slots[i] + 1) | bits
        counts[part] += 1
        reach[part] = max(reach[part], place + 1 - base[part])
    return len(ids)


@kernel
def remove(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array,
    counts: Array,
    ids: Array,
    slots: Array,
) -> int:
    """Removes ids and writes the slots that they had, -1 for those that had none; returns how many
    had one.

    An entry behind a hole moves into it if its search would pass the hole (Knuth, TAOCP 3, 6.4,
    algorithm R).
    """
    removed = 0
    for i in range(len(ids)):
        hole = find(entries, base, sizes, seeds, ids[i])
        if hole < 0:
            slots[i] = -1
            continue
        slots[i] = (entries[2 * hole + 1] & SLOT) - 1
        removed += 1
        counts[np.int64(mix(np.uint64(ids[i])) >> np.uint64(PART_SHIFT))] -= 1
        place = hole + 1
        # what stands further behind the hole than that is none that its search would pass
        while entries[2 * place + 1] != 0 and place - hole < MOST_PROBES:
            if place_of(entries[2 * place], base, sizes, seeds) <= hole:
                entries[2 * hole] = entries[2 * place]
                entries[2 * hole + 1] = entries[2 * place + 1]
                hole = place
            place += 1
        entries[2 * hole + 1] = 0
    return removed


@kernel
def allocate(chain: Array, heads: Array, slots: Array) -> None:
    """Writes slots for new rows, which are not free any more."""
    for i in range(len(slots)):
        if heads[0] >= 0:
            slots[i] = heads[0]
            heads[0] = chain[heads[0]]
        else:
            slots[i] = heads[1]
            heads[1] += 1


@kernel
def free(chain: Array, heads: Array, slots: Array) -> None:
    """Frees slots; -1 is none."""
    for i in range(len(slots)):
        if slots[i] >= 0:
            chain[slots[i]] = heads[0]
            heads[0] = slots[i]


@kernel
def listed(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array,
    chain: Array,
    begin: int,
    end: int,
    epoch: int,
    slots: Array,
) -> tuple[int, int]:
    """Writes the slots from ``begin`` on that hold a row, as many as ``slots`` takes; where
    ``epoch`` is not -1, only of rows that were last changed in it.

    Returns how many, and the slot to continue from.  A free slot's link may look like an id, but
    that id's entry names another slot.
    """
    count = 0
    start = entries.ctypes.data
    for slot in range(begin, end):
        if count == len(slots):
            return count, slot
        if slot + AHEAD < end:
            prefetch(start + np.uint64(16 * place_of(chain[slot + AHEAD], base, sizes, seeds)))
        place = find(entries, base, sizes, seeds, chain[slot])
        if place >= 0:
            word = entries[2 * place + 1]
            if (word & SLOT) - 1 == slot and (
                epoch < 0 or ((word >> EPOCH_SHIFT) & (EPOCHS - 1)) == epoch
            ):
                slots[count] = slot
                count += 1
    return count, end


@kernel
def within(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array,
    begin: int,
    end: int,
    slots: Array,
) -> int:
    """Writes the slots of the ids whose keys are in [begin, end), as many as ``slots`` takes;
    returns how many there are.
    """
    count = 0
    start, stop = np.uint64(begin), np.uint64(end)
    for part in range(begin // PART_SPAN, (end + PART_SPAN - 1) // PART_SPAN):
        low = max(begin - part * PART_SPAN, 0)
        high = min(end - part * PART_SPAN, PART_SPAN) - 1
        size = np.uint64(sizes[part])
        place = base[part] + np.int64((np.uint64(low) * size) >> np.uint64(32))
        last = base[part] + np.int64((np.uint64(high) * size) >> np.uint64(32))
        if seeds[part] != 0:  # its entries stand in another order than the keys
            place, last = base[part], base[part] + sizes[part] - 1
        # an id stands at its own place, or behind it where the entries between are taken
        final = last + MOST_PROBES
        while place <= last or (entries[2 * place + 1] != 0 and place < final):
            word = entries[2 * place + 1]
            if word != 0:
                if start <= key_of(mix(np.uint64(entries[2 * place]))) < stop:
                    if count < len(slots):
                        slots[count] = (word & SLOT) - 1
                    count += 1
            place += 1
    return count


@kernel
def claim(
    slots: Array, words: Array, epochs: tuple[int, int], begin: int, done: Array, claimed: Array
) -> int:
    """Marks as done those of the slots from ``begin`` on that are not, and writes them, each once.
    Returns how many.

    Args:
        epochs: where the first is not -1, only slots whose words are of this epoch are written;
            those whose words are of the second, unless that is -1, are done: they are passed over
            without a look at ``done``, which is far away.
    """
    count = 0
    wanted, after = epochs
    for i in range(len(slots)):
        slot, epoch = slots[i], (words[i] >> EPOCH_SHIFT) & (EPOCHS - 1)
        if epoch != after and begin <= slot < len(done) and not done[slot]:
            done[slot] = True
            if wanted < 0 or epoch == wanted:
                claimed[count] = slot
                count += 1
    return count


@kernel
def note_free(chain: Array, heads: Array, done: Array, most: int) -> bool:
    """Marks the free slots as done; returns False where there are more than so many, of which some
    may be marked.
    """
    slot = heads[0]
    for _ in range(most):
        if slot < 0:
            return True
        done[slot] = True
        slot = chain[slot]
    return slot < 0  # type: ignore[no-any-return]


@kernel
def words_of(
    entries: Array, base: Array, sizes: Array, seeds: Array, ids: Array, words: Array
) -> None:
    """Writes the words of the ids' entries; 0 where there is none."""
    for i in range(len(ids)):
        place = find(entries, base, sizes, seeds, ids[i])
        words[i] = entries[2 * place + 1] if place >= 0 else 0


@kernel
def changed_in(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array,
    ids: Array,
    epoch: int,
    changed: Array,
) -> None:
    """Writes for each id whether it is in the index and was last changed in this epoch."""
    for i in range(len(ids)):
        place = find(entries, base, sizes, seeds, ids[i])
        changed[i] = (
            place >= 0 and ((entries[2 * place + 1] >> EPOCH_SHIFT) & (EPOCHS - 1)) == epoch
        )


# ---- memory ----
#
# The memory of rows, reserved once so that growing never copies; and the layout of a row's record.


# Python names it from 3.12 on
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0x40)
LARGE_PAGE = 2**21
LARGE_FROM = 2**22  # bytes in use from which on large pages are asked for
LEAST_RESERVED = 2**36
LEAST_WORTH = 2**32  # bytes below which nothing is reserved
PARTS_OF_ADDRESSES = 64  # what one mapping reserves, at most: a part of so many of what is free


def reservable() -> int:
    """Bytes to reserve for one table: four times this machine's memory, which no table exceeds."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(4 * pages, LEAST_RESERVED)


def _mapped(size: int, reserve: bool) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (NO_RESERVE if reserve else 0)
    return mmap.mmap(-1, size, flags=flags)


class GrowingArray:
    """A growing array of zeros.  See [Note: reserved memory].

    Args:
        columns: of each row; 0 makes an array of one dimension.
        dtype: of the elements.
        reserved: bytes to reserve; None: :func:`reservable`.
        large: whether it asks for large pages by itself.

    Attributes:
        array: [rows that have a place, columns], zero until written.  Another array takes its place
            when growing has to copy.
        address: of the array's first byte.
        row_bytes: bytes of a row.
    """

    def __init__(
        self, columns: int, dtype: type[np.generic], reserved: int | None = None, large: bool = True
    ) -> None:
        self.columns, self.dtype = columns, np.dtype(dtype)
        self.row_bytes = max(columns, 1) * self.dtype.itemsize
        self._large = not large
        size = reservable() if reserved is None else reserved
        while size >= LEAST_WORTH:
            try:
                _mapped(PARTS_OF_ADDRESSES * size, reserve=True).close()
                self._take(size, reserve=True)
                return
            except OSError:  # the system refuses to reserve so much
                size //= 4
        self._take(2**16, reserve=False)

    def _take(self, size: int, reserve: bool) -> None:
        rows = max(size // self.row_bytes, 1)
        size = -(-rows * self.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = _mapped(size, reserve)
        flat = np.frombuffer(self._map, self.dtype)[: rows * max(self.columns, 1)]
        self.address = int(flat.__array_interface__["data"][0])
        self.array: Array = flat.reshape(rows, self.columns) if self.columns else flat

    def need(self, rows: int) -> None:
        """Makes room for so many rows."""
        if rows > len(self.array):
            held = self.array
            self._take(max(rows + rows // 2, 16) * self.row_bytes, reserve=False)
            self.array[: len(held)] = held
        if not self._large and rows * self.row_bytes >= LARGE_FROM:
            self._large = True
            self.large(0, len(self._map))

    def large(self, begin: int, size: int) -> None:
        """Asks for large pages in these bytes, where the system has any."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, begin, size)
            except OSError:  # the system was built without large pages
                pass

    def forget(self, begin: int, size: int) -> None:
        """Gives these bytes back; they read as zeros from here on.

        ``begin`` is a multiple of a page.
        """
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, begin, size)
        else:  # elsewhere the advice may leave what was there
            np.frombuffer(self._map, np.uint8)[begin : begin + size] = 0

    def clear(self, rows: int) -> None:
        """Gives back the memory of the first ``rows`` rows."""
        size = -(-rows * self.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if size:
            self.forget(0, min(size, len(self._map)))


class Layout:
    """The places of a record's parts.  See [Note: a record].

    Args:
        dim: columns of a row's values.
        dtype: np.float32 or np.float64.
        states: name and width of each state, in order.
        words: names of the 8-byte words that records have, in order.

    Attributes:
        columns: of a whole record, in elements of the dtype.
        states: name -> (first column, width).
        words: name -> index among a record's 8-byte words; -1 for those that it does not have.
            "step": the last step that the row has taken; "pushed": the time of the last push to it,
            in seconds; "order": how many pushes to any row came before that one; "pushes": how many
            came to this row; "show" and "click": its statistics; "unseen": days without a push.
        has_words: whether a record has words at all: only then records are multiples of 8 bytes.
    """

    NAMES = ("step", "pushed", "order", "pushes", "show", "click", "unseen")

    def __init__(
        self,
        dim: int,
        dtype: type[np.generic],
        states: Sequence[tuple[str, int]],
        words: Sequence[str],
    ) -> None:
        self.dim, self.dtype = dim, dtype
        self.states: dict[str, tuple[int, int]] = {}
        at = dim
        for name, width in states:
            self.states[name] = (at, width)
            at += width
        each = 8 // np.dtype(dtype).itemsize
        self.words = dict.fromkeys(self.NAMES, -1)
        if words:
            at = -(-at // each) * each
            self.words.update({name: at // each + index for index, name in enumerate(words)})
            at += len(words) * each
        self.columns = at
        self.has_words = bool(words)


# ---- index ----


KEYS = PARTS * PART_SPAN  # of ids: see :meth:`Index.within`
SMALL_UNRESERVED = 6  # as ``SMALL``, where memory cannot be reserved
SIDE = 2**23  # entries that are reserved for a side
# entries that a side has beyond its part's size, at least; runs and searches need ``MOST_PROBES``
ROOM = 2**12
FETCHED = 256  # bytes of a record that are prefetched, at most, when its slot is found
NOTHING = (0, 0, 0)
UNUSED = 2**15  # bytes below which zeros are written instead of giving them back


class Watcher(Protocol):
    """Is notified of the changes of an index and of its records, before they are made."""

    def changing(self, slots: Array, words: Array) -> None:
        """Notifies of records that are about to change or to go.

        Args:
            slots: int64[n], in which they are; -1 is none.
            words: int64[n], what the entries of their ids have said until now.
        """

    def coming(self, slots: Array) -> None:
        """Notifies of free slots, int64[n], that get an id."""


class Index:
    """A map from int64 ids to slots 0, 1, 2, ...  See [Note: the index].

    One caller changes it at a time; calls of :meth:`locate` may run beside each other.

    Attributes:
        ids: int64[slots], memory of the id of each slot; of a free slot, the next free one.
        watcher: is notified before records change, and of new ids; None: there is none.
    """

    watcher: Watcher | None

    def __init__(self) -> None:
        self.ids = GrowingArray(0, np.int64)
        self._side, self._small = SIDE, SMALL
        self._entries = self._reserved()
        if len(self._entries.array) < self._words:
            self._small = SMALL_UNRESERVED
        while len(self._entries.array) < self._words and self._side > 2 * ROOM:
            self._side //= 2
        self._entries.need(self._words)
        self.watcher = None
        self._reset()

    @property
    def _words(self) -> int:
        """Of all entries, in regions and sides."""
        return 2 * (int(REGIONS[self._small]) + 2 * PARTS * self._side)

    def _reserved(self) -> GrowingArray:
        return GrowingArray(0, np.int64, self._words * 8, large=False)

    def _reset(self) -> None:
        # how often each part has grown; each begins a little larger than the one before
        self._grown = np.arange(PARTS) / PARTS
        self._sizes = SIZES[0].copy()
        self._seeds, self._mixed = np.zeros(PARTS, np.uint64), False
        self._which = np.zeros(PARTS, np.int64)
        self._base = self._begins()
        self._counts, self._reach = np.zeros(PARTS, np.int64), np.zeros(PARTS, np.int64)
        self._heads = np.array([-1, 0], np.int64)
        self._count = 0

    def _begin(self, part: int) -> int:
        """The first entry of a part, as often as it has grown, in the half or side that it uses."""
        grown, which = int(self._grown[part]), int(self._which[part])
        if grown < self._small:
            return int(REGIONS[grown] + (which * PARTS + part) * STRIDES[grown])
        return int(REGIONS[self._small]) + (2 * part + which) * self._side

    def _begins(self) -> Array:
        return np.array([self._begin(part) for part in range(PARTS)], np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def used(self) -> int:
        """The number of slots that were ever used: those that hold a row are below this."""
        return int(self._heads[1])

    @property
    def bytes_held(self) -> int:
        """Memory of entries and ids, in bytes."""
        return int(self._sizes.sum()) * 16 + self.used * 8

    @property
    def _searched(self) -> tuple[Array, Array, Array, Array | None]:
        seeds = self._seeds if self._mixed else None
        return self._entries.array, self._base, self._sizes, seeds

    def locate(self, ids: Array, fetched: tuple[int, int, int] = NOTHING) -> tuple[Array, int]:
        """Finds the slots of ids.

        Args:
            ids: int64[n].
            fetched: the memory to prefetch of each slot: the address of slot 0, bytes from one slot
                to the next, bytes wanted.

        Returns:
            int64[n]: the slot of each id, -1 where it has none; and how many have none.
        """
        slots = np.empty(len(ids), np.int64)
        return slots, locate(*self._searched, ids, slots, fetched)

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
        missing, twice = mark(
            *self._searched, ids, slots, fetched, epoch % EPOCHS, call % CALLS, words
        )
        if self.watcher is not None:
            self.watcher.changing(slots, words)
        return slots, missing, twice

    def insert(self, ids: Array, epoch: int, call: int) -> Array:
        """Gives a slot to each of these ids, which differ and have none yet: int64[n]."""
        slots = np.empty(len(ids), np.int64)
        self.ids.need(self.used + len(ids))
        allocate(self.ids.array, self._heads, slots)
        if self.watcher is not None:
            self.watcher.coming(slots)
        self.ids.array[slots] = ids
        bits = ((epoch % EPOCHS) << EPOCH_SHIFT) | ((call % CALLS) << CALL_SHIFT)
        done, regions = 0, int(self._grown.min())
        while True:
            growing = self._counts, self._reach, self._grown, self._which
            done = insert(*self._searched, *growing, self._small, ids, slots, done, bits)
            if done == len(ids):
                break
            part = int(mix(ids[done].astype(np.uint64))) >> PART_SHIFT
            if 4 * (self._counts[part] + 1) > 3 * self._sizes[part]:
                self._grow(part)
            else:
                self.mix_anew(part)
        self._count += len(ids)
        for left in range(regions, min(int(self._grown.min()), self._small)):  # by all parts
            begin, end = 16 * REGIONS[left], 16 * REGIONS[left + 1]
            self._entries.forget(int(begin), int(end - begin))
        return slots

    def _grow(self, part: int) -> None:
        size = size_of(self._grown[part] + 1)
        if size + max(ROOM, size // 64) > self._side:
            self._widen()
        self._grown[part] += 1
        self._move(part, size)

    def mix_anew(self, part: int) -> None:
        """See [Note: ids that agree]."""
        self._choose_seed(part)
        self._move(part, int(self._sizes[part]))

    def _choose_seed(self, part: int) -> None:
        self._seeds[part], self._mixed = secrets.randbits(64) | 1, True

    def _move(self, part: int, size: int) -> None:
        """Moves a part to its other side, where it has this size."""
        begin = int(self._base[part])
        end = begin + int(self._reach[part])
        self._which[part] ^= 1
        self._base[part] = self._begin(part)
        self._sizes[part] = size
        fresh = int(self._base[part])
        if size * 16 >= LARGE_PAGE:
            self._entries.large(fresh * 16, -(-size * 16 // LARGE_PAGE) * LARGE_PAGE)
        # pages that are read before they are written come in small
        self._entries.array[2 * fresh : 2 * (fresh + size)] = 0
        while not self._moves(begin, end, part):
            self._entries.array[2 * fresh : 2 * (fresh + int(self._reach[part]))] = 0
            self._choose_seed(part)
        self._empty(begin, end)

    def _moves(self, begin: int, end: int, part: int) -> bool:
        entries, base, sizes, seeds = self._searched
        return bool(move(entries, begin, end, base, sizes, seeds, self._reach, part))

    def _empty(self, begin: int, end: int) -> None:
        """Empties the entries that a part has left, and gives whole pages back."""
        if begin >= REGIONS[self._small]:
            # whole large pages, but nothing of the next side: a side may be smaller than one
            end = begin + min(-(-(end - begin) // PAGE_ENTRIES) * PAGE_ENTRIES, self._side)
        first, last = -(-begin * 16 // mmap.PAGESIZE), end * 16 // mmap.PAGESIZE
        if (last - first) * mmap.PAGESIZE < UNUSED:
            self._entries.array[2 * begin : 2 * end] = 0
            return
        self._entries.forget(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
        of_page = mmap.PAGESIZE // 16
        self._entries.array[2 * begin : 2 * first * of_page] = 0
        self._entries.array[2 * last * of_page : 2 * end] = 0

    def _widen(self) -> None:
        """Doubles what is reserved for a side, which copies all entries: only where little could be
        reserved.
        """
        held, base, reach = self._entries.array, self._base, self._reach
        self._side *= 2
        self._entries = self._reserved()
        self._entries.need(self._words)
        self._base = self._begins()
        for part in range(PARTS):
            count = 2 * int(reach[part])
            into, source = 2 * int(self._base[part]), 2 * int(base[part])
            self._entries.array[into : into + count] = held[source : source + count]

    def remove(self, ids: Array) -> Array:
        """Removes ids; returns their former slots, -1 for those that had none: int64[n]."""
        self._tell(ids)
        slots = np.empty(len(ids), np.int64)
        self._count -= remove(
            self._entries.array, self._base, self._sizes, self._seeds, self._counts, ids, slots
        )
        free(self.ids.array, self._heads, slots)
        return slots

    def _tell(self, ids: Array) -> None:
        """Notifies the watcher of the records of these ids, which are about to go."""
        if self.watcher is not None:
            words = np.empty(len(ids), np.int64)
            words_of(self._entries.array, self._base, self._sizes, self._seeds, ids, words)
            self.watcher.changing(self.locate(ids)[0], words)

    def note_free(self, done: Array, most: int) -> bool:
        """Marks the free slots.

        Args:
            done: bool[slots], gets True where a slot is free.
            most: so many are marked.

        Returns:
            Whether these are all.
        """
        return bool(note_free(self.ids.array, self._heads, done, most))

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
        count, after = listed(*state, begin, end, epoch % EPOCHS if epoch >= 0 else -1, slots)
        return slots[:count], -1 if after >= self.used else after

    def within(self, begin: int, end: int) -> Array:
        """Lists the slots of the ids whose keys are in [begin, end).

        A key is of an id's hash: the found ids depend on the ids in the index alone, and not on the
        order in which they were added and removed.  The entries stand in the order of keys, so that
        only those are read.

        Args:
            begin, end: from 0 to ``KEYS``, over which keys are spread evenly.

        Returns:
            int64[n], in any order.
        """
        slots = np.empty(2 * len(self) * (end - begin) // KEYS + 64, np.int64)
        state = (self._entries.array, self._base, self._sizes, self._seeds)
        count = within(*state, begin, end, slots)
        if count > len(slots):
            slots = np.empty(count, np.int64)
            within(*state, begin, end, slots)
        return slots[:count]

    def changed_in(self, ids: Array, epoch: int) -> Array:
        """bool[n]: whether each id is in the index and was last changed in this epoch."""
        changed = np.zeros(len(ids), np.bool_)
        changed_in(
            self._entries.array, self._base, self._sizes, self._seeds, ids, epoch % EPOCHS, changed
        )
        return changed

    def clear(self) -> None:
        """Removes all ids."""
        if self.watcher is not None:
            self._tell(self.ids.array[self.listed(0, self.used)[0]])
        self._entries.forget(0, int(REGIONS[self._small]) * 16)
        for part in np.flatnonzero(self._grown >= self._small).tolist():
            size = -(-(int(self._reach[part]) * 16 + 1) // LARGE_PAGE) * LARGE_PAGE
            self._entries.forget(int(self._base[part]) * 16, size)
        self.ids.clear(self.used)
        self._reset()
