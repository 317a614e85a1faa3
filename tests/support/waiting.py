"""Waiting for what other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that within 10 s"
        threading.Event().wait(0.002)
