"""How much memory this process has."""

from __future__ import annotations

import os
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_bytes(statm: Path = STATM) -> int:
    """Bytes of this process that are in memory now; 0 where the system has no such file.

    Args:
        statm: Linux's file of sizes in pages; the second number is the resident one.

    Example:
        >>> resident_bytes(Path("/nowhere"))
        0
    """
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
