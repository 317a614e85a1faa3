"""In which order a run takes the files: those that start processes by turns with the others, and
what takes long first.

Tests with processes wait much, and the others compute: side by side they keep the cores busy.  A
run ends when its last file does (``--dist loadfile``), so a long one must not be begun last.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by how many tests of theirs start processes, or are slow; a file's tests stay
    together.
    """
    starting: Counter[Path] = Counter()
    slow: Counter[Path] = Counter()
    for item in items:
        starting[item.path] += bool(item.get_closest_marker("processes"))
        slow[item.path] += bool(item.get_closest_marker("slow"))
    begun = sorted((path for path in starting if starting[path]), key=lambda path: -starting[path])
    others = sorted((path for path in slow if not starting[path]), key=lambda path: -slow[path])
    turns = [path for pair in zip_longest(begun, others) for path in pair if path is not None]
    place = {path: number for number, path in enumerate(turns)}
    items.sort(key=lambda item: place[item.path])
