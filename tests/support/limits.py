"""The limit of a test, which grows with the load as the limits of waits do: see [Note: limits and
load].

pytest-timeout takes the limit away when a test has failed, as a debugger may look at it then: the
teardown of a failed test could hang for ever, and the run with it.  Here each phase that fails
gives what is left of the test the whole limit once more.  What hangs where no signal reaches it, in
a library's code, ends with its process: that says where all threads are, and xdist which test it
was.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from typing import Any

import pytest
import pytest_timeout

from tests.support import load

GRACE = 60.0  # seconds beyond a test's highest limit, after which its process ends
_file = pytest.StashKey[str]()
_stderr = pytest.StashKey[int]()
_settings = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the stderr of the run, which is not captured yet."""
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closes it."""
    os.close(config.stash[_stderr])


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
        faulthandler.cancel_dump_traceback_later()

    item.stash[_settings] = settings
    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    most = settings.timeout * load.MOST + GRACE
    faulthandler.dump_traceback_later(most, file=item.config.stash[_stderr], exit=True)
    return True


@pytest.hookimpl(trylast=True)  # pytest-timeout takes its limit away, and pytest its watchdog
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Gives what is left of a test that failed, its teardown, the limit once more."""
    if (settings := node.stash.get(_settings, None)) and not node.config.getoption("usepdb"):
        pytest_timeout_set_timer(node, settings)
