"""The loop of every wait that tries again and again: it ends at a timeout, and a long wait is
logged.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator

from pserver.running_clock import RUNNING

NOTICE_SECONDS = 3.0  # a wait that lasts longer is logged, once
FIRST_PAUSE_SECONDS = 0.005


def poll(
    log: logging.Logger,
    text: Callable[[], str],
    timeout_seconds: float = math.inf,
    pause_seconds: float = 0.0,
) -> Iterator[float]:
    """Yields before each try, until the timeout has passed.

    ::

        for _ in poll(log, lambda: f"waiting for trainers {missing()}", 300.0, 0.25):
            if not missing():
                return
        raise TimedOut(f"expected all trainers within 300 s, got none of {missing()}")

    Args:
        log: the logger of the module that waits.
        text: gives the warning that is logged when the wait has lasted ``NOTICE_SECONDS``: it names
            the awaited processes.
        pause_seconds: the longest pause between two tries; pauses begin with 5 ms and grow by
            half.  0: the loop's body waits by itself.

    Yields:
        The seconds waited so far.
    """
    began, waited = RUNNING(), 0.0
    pause, noticed = min(FIRST_PAUSE_SECONDS, pause_seconds), False
    while waited <= timeout_seconds:
        yield waited
        waited = RUNNING() - began
        if not noticed and waited > NOTICE_SECONDS:
            noticed = True
            log.warning("%s", text())
        if pause:
            time.sleep(min(pause, max(timeout_seconds - waited, 0.0)))
            pause = min(pause * 1.5, pause_seconds)
            waited = RUNNING() - began
