"""Logs that an earlier job has left in a folder, of processes that this job does not have."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import count
from pathlib import Path

NAME = re.compile(r"(server|trainer)-(0|[1-9][0-9]*)\.log")
ASIDE = ".old"  # a page shows the files *.log


def set_aside(folder: Path, written: Collection[str]) -> list[str]:
    """Gives such logs names that nobody takes for this job's; nothing is removed.

    Args:
        folder: of the logs; it need not be there.
        written: the names of the files that this job writes.

    Returns:
        A line for each.
    """
    if not folder.is_dir():
        return []
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name in written or not NAME.fullmatch(path.name) or not path.is_file():
            continue
        names = (f"{path.name}{ASIDE}{number or ''}" for number in count())
        free = next(folder / name for name in names if not (folder / name).exists())
        path.rename(free)
        lines.append(f"{path} is of an earlier job: it is {free.name} now")
    return lines
