"""The memory of a server that a job's slices leave to its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pserver.errors import Refused

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


class MemoryBudget:
    """Says no before rows take more memory than the server may have.

    A row is made by the first push to it, so a table's size is not known when its program comes.

    Args:
        limit_bytes: that slices and tables may take together.
        slices_bytes: that the slices and their optimizer states take.
        tables: the server's, by name.
        texts: gives the bytes of what trainers have told one another.
    """

    def __init__(
        self,
        limit_bytes: int,
        slices_bytes: int,
        tables: Mapping[str, LockedTable],
        texts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._limit, self._slices, self._tables = limit_bytes, slices_bytes, tables
        self._texts = texts

    def has_room(self, arriving: Mapping[str, int]) -> bool:
        """Whether there is room for so many new rows, by table."""
        return self._growth(arriving) <= self.left

    @property
    def left(self) -> int:
        """The bytes that the server may still take."""
        held = sum(table.bytes_held for table in self._tables.values())
        return self._limit - self._slices - held - self._texts()

    def _growth(self, arriving: Mapping[str, int]) -> int:
        return sum(self._tables[name].growth(count) for name, count in arriving.items())

    def check(self, arriving: Mapping[str, int]) -> None:
        """Returns if there is room for so many new rows, by table.

        Raises:
            Refused: there is not.
        """
        left, more = self.left, self._growth(arriving)
        if more > left:
            names = ", ".join(map(repr, arriving))
            raise Refused(
                f"expected rows for {left / 1e6:.1f} MB or less, "
                f"got new ones of table {names} for {more / 1e6:.1f} MB: this server takes "
                f"{self._limit / 1e9:.1f} GB (--max-memory); use more servers, a capacity, or "
                "memory_bytes with the rest on disk"
            )
