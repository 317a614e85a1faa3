"""The memory of rows, reserved once so that growing never copies; and the layout of a row's record.

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
import sys
from collections.abc import Sequence

import numpy as np

from pserver.table.kernels import Array

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


class Memory:
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

    @property
    def has_words(self) -> bool:
        """Whether a record has words at all: only then records are multiples of 8 bytes."""
        return any(index >= 0 for index in self.words.values())
