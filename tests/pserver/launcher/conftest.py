"""Launches that do not outlive the test that has started them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_launch import DEADLINE, Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[type[Run]]:
    started: list[Run] = []

    class Started(Run):
        def __init__(self, script: str, **more: str) -> None:
            super().__init__(tmp_path, script, **more)
            started.append(self)

    yield Started  # type: ignore[misc]
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
            one.popen.communicate(timeout=DEADLINE)
