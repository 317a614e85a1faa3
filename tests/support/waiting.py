"""Waiting for what other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.support.load import Deadline


def eventually(holds: Callable[[], bool]) -> None:
    deadline = Deadline(10)
    while not holds():
        assert not deadline.over, f"it did not come to that within {deadline.limit:g} s"
        threading.Event().wait(0.002)
