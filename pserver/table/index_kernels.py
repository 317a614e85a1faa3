"""The kernels of a table's index: search, insertion and removal in its entries.

See [Note: the index] in index.py.  The kernels take

- ``entries``: int64, two words for each entry;
- ``base``, ``sizes``: int64[parts], the first entry of each part, and its size;
- ``seeds``: uint64[parts], with which the places of a part are mixed once more; 0: they are not;
  None: those of no part are, which is compiled apart, as every search asks for it;
- ``counts``, ``reach``: int64[parts], the ids of each part, and how far from its base they stand;
- ``chain``: int64[slots], the id of each slot; of a free slot, the next free one;
- ``heads``: the first free slot or -1, and the number of slots ever used;
- ``fetched``: what to prefetch of a slot that is found: the address of slot 0, bytes from one slot
  to the next, bytes wanted.
"""

from __future__ import annotations

import numpy as np

from pserver.table.ids import mix
from pserver.table.kernels import Array, kernel, prefetch

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
def find(entries: Array, base: Array, sizes: Array, seeds: Array | None, value: int) -> int:
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
def insert(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    counts: Array,
    reach: Array,
    ids: Array,
    slots: Array,
    begin: int,
    bits: int,
) -> int:
    """Enters ids that have no entry, from place ``begin`` on; returns the place of the first id
    that cannot be entered: its part must grow before, or, where it has room, be mixed anew.
    """
    for i in range(begin, len(ids)):
        part = np.int64(mix(np.uint64(ids[i])) >> np.uint64(PART_SHIFT))
        if 4 * (counts[part] + 1) > 3 * sizes[part]:
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
def remove(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
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
def take(chain: Array, heads: Array, slots: Array) -> None:
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
    seeds: Array | None,
    chain: Array,
    begin: int,
    end: int,
    epoch: int,
    slots: Array,
) -> tuple[int, int]:
    """Writes the slots from ``begin`` on that hold a row, as many as ``slots`` takes; where
    ``epoch`` is not -1, only of rows that were last changed in it.

    Returns how many, and the slot to go on from.  A free slot's link may look like an id, but that
    id's entry names another slot.
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
    seeds: Array | None,
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
        if seeds is not None:
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
    entries: Array, base: Array, sizes: Array, seeds: Array | None, ids: Array, words: Array
) -> None:
    """Writes what the entries of ids say; 0 where there is none."""
    for i in range(len(ids)):
        place = find(entries, base, sizes, seeds, ids[i])
        words[i] = entries[2 * place + 1] if place >= 0 else 0


@kernel
def changed_in(
    entries: Array,
    base: Array,
    sizes: Array,
    seeds: Array | None,
    ids: Array,
    epoch: int,
    changed: Array,
) -> None:
    """Writes which of the ids are here and were last changed in this epoch."""
    for i in range(len(ids)):
        place = find(entries, base, sizes, seeds, ids[i])
        changed[i] = (
            place >= 0 and ((entries[2 * place + 1] >> EPOCH_SHIFT) & (EPOCHS - 1)) == epoch
        )
