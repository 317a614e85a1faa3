"""Servers and trainers as real processes, for each test or for a whole file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Processes of one test."""
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes of a whole test file."""
    started = Processes(tmp_path_factory.mktemp("processes"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the test file's ``SCRIPT``."""
    path: Path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(request.module.SCRIPT)
    return str(path)
