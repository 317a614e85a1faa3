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

from tests.support import times


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by the seconds of their tests; a file's tests stay together."""
    means = times.read()
    seconds: Counter[Path] = Counter()
    for item in items:
        seconds[item.path] += means.get(times.function(item.nodeid), 0.0)
    starting = set[Path]()
    for item in items:
        if item.path not in starting and item.get_closest_marker("processes"):
            starting.add(item.path)
    order = sorted(seconds, key=lambda path: -seconds[path])
    begun = [path for path in order if path in starting]
    others = [path for path in order if path not in starting]
    turns = [path for pair in zip_longest(begun, others) for path in pair if path is not None]
    place = {path: number for number, path in enumerate(turns)}
    items.sort(key=lambda item: place[item.path])
