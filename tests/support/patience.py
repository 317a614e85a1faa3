"""``--patient-waits``: no thread of a server asks again by itself, here and in other processes.

A wait of a server's thread asks again after ``WAKE_SECONDS``, as a net: see [Note: one wake for one
waiter] in pserver/membership/waits.py.  With this option that is an hour, so a wake-up that was
missed is a test that hangs, and not one that is slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pserver.membership import waits

HOUR = 3600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--patient-waits``."""
    parser.addoption(
        "--patient-waits",
        action="store_true",
        help="a missed wake-up of a server's thread is a hang: see tests/support/patience.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before a process is started, so that others begin alike: patient/sitecustomize.py."""
    if config.getoption("--patient-waits"):
        waits.WAKE_SECONDS = HOUR
        found = [str(Path(__file__).parent / "patient"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, found))


@pytest.fixture
def patient_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same, of the threads of this process, for one test."""
    with monkeypatch.context() as patched:
        patched.setattr(waits, "WAKE_SECONDS", HOUR)
        yield
