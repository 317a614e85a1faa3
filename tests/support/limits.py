"""The limit of a test, which grows with the load as the limits of waits do: see [Note: limits and
load].
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import pytest_timeout

from tests.support import load

_file = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each file meets a load of its own."""
    path = item.nodeid.partition("::")[0]
    if item.config.stash.get(_file, "") != path:
        item.config.stash[_file] = path
        load.begin()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Ends the test at its limit, as pytest-timeout does; when it comes the load is read again."""
    main = threading.current_thread() is threading.main_thread()
    if settings.method != "signal" or not main:
        return None
    deadline = load.Deadline(settings.timeout)

    def late(number: int, frame: object) -> None:
        __tracebackhide__ = True
        if left := deadline.left:
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            pytest_timeout.timeout_sigalrm(item, settings._replace(timeout=deadline.limit))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
