"""Which files a run begins with: those that start processes, as they take longest.

A run ends when its last file does (``--dist loadfile``), so a long one must not be begun last.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by how many tests of theirs start processes; a file's tests stay together."""
    starting: Counter[Path] = Counter()
    for item in items:
        starting[item.path] += bool(item.get_closest_marker("processes"))
    items.sort(key=lambda item: -starting[item.path])
