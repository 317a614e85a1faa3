"""Limits grow with the load that a wait meets, up to a bound that still ends a hang."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support import load
from tests.support.pages import ROOT
from tests.support.processes import Processes
from tests.support.waiting import eventually


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """``loaded(20)``: the load is 20 from now on, on a machine of 2 cores; first it is none."""

    def become(value: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (value, 0.0, 0.0))

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    become(0.0)
    load.begin()
    yield become
    load.begin()


@pytest.mark.parametrize(
    "value, expected", [(0.0, 1.0), (4.0, 1.0), (6.0, 1.5), (20.0, 5.0), (24.0, 6.0), (400.0, 6.0)]
)
def test_limits_grow_in_proportion_and_have_a_bound(
    loaded: Callable[[float], None], value: float, expected: float
) -> None:
    """Not at the load that ``make test`` makes itself; at load 20 of two cores fivefold."""
    loaded(value)

    assert load.scaled(20.0) == 20.0 * expected
    assert load.Deadline(10.0).limit == 10.0 * expected


class Clock:
    """A clock that goes on where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of limits."""
    made = Clock()
    monkeypatch.setattr(load, "time", made)
    return made


def test_the_load_counts_that_comes_while_a_wait_goes_on(
    loaded: Callable[[float], None], clock: Clock
) -> None:
    """It is read again when the limit has come; and stays, when the load goes, for the file."""
    deadline = load.Deadline(20.0)
    clock.now = 21.0
    assert deadline.over
    loaded(4000.0)
    assert not deadline.over and deadline.limit == 120.0 and deadline.left == 99.0
    loaded(0.0)
    assert deadline.limit == 120.0
    clock.now = 121.0
    assert deadline.over
    load.begin()
    assert deadline.limit == 20.0


def test_a_patient_wait_goes_on_while_the_load_grows(
    loaded: Callable[[float], None], clock: Clock
) -> None:
    """Whether it returns False or raises; at the end it is late, whatever the load."""
    tried: list[float] = []

    def attempt(left: float) -> bool:
        tried.append(left)
        clock.now += left
        loaded(10.0 * len(tried))
        return False

    def raises(left: float) -> bool:
        attempt(left)
        raise queue.Empty

    assert load.patiently(attempt, 20.0) is False
    assert tried == [20.0, 30.0, 50.0, 20.0]

    tried.clear()
    loaded(0.0)
    load.begin()
    with pytest.raises(queue.Empty):
        load.patiently(raises, 20.0)
    assert tried == [20.0, 30.0, 50.0, 20.0]
    assert load.patiently(lambda left: 0, 0.0) == 0  # a result that is no "not yet"


def test_a_future_that_holds_a_timeout_is_not_asked_again() -> None:
    """Its exception is its result."""
    future: Future[int] = Future()
    future.set_exception(TimeoutError("of the product"))
    with pytest.raises(TimeoutError, match="of the product"):
        load.result(future, 60.0)

    other: Future[int] = Future()
    threading.Timer(0.01, other.set_result, [3]).start()
    assert load.result(other, 60.0) == 3


def test_waiting_for_what_never_holds_ends(loaded: Callable[[float], None], clock: Clock) -> None:
    """With the limit that it had."""

    def never() -> bool:
        clock.now += 1.0
        loaded(clock.now)
        return False

    with pytest.raises(AssertionError, match="within 60 s"):
        eventually(never)


@pytest.mark.processes
def test_a_command_has_its_output_and_its_limit(loaded: Callable[[float], None]) -> None:
    """As ``subprocess.run`` gives it; a late one is killed."""
    echo = [sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(3)"]
    done = load.run(echo, input="said", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "")
    with pytest.raises(subprocess.CalledProcessError):
        load.run(echo, input="said", capture_output=True, text=True, timeout=60, check=True)
    endless = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with pytest.raises(subprocess.TimeoutExpired):
        load.run(endless, timeout=0.05)


@pytest.mark.processes
def test_the_deadlines_of_processes_are_those_of_the_load(
    loaded: Callable[[float], None], tmp_path: Path
) -> None:
    """By flag and by variable; those of one job are the same, though the load changes."""
    loaded(20.0)
    processes = Processes(tmp_path)
    loaded(0.0)
    show = "import os, sys; print(sys.argv[1:], os.environ['PSERVER_START_TIMEOUT'])"
    words = ["-c", show, "--heartbeat-timeout", "3", "--once", "--start-timeout", "4"]
    shown = processes.python("it", *words, PSERVER_START_TIMEOUT="20")
    assert shown.status() == 0
    assert shown.lines == [
        "['--heartbeat-timeout', '15.0', '--once', '--start-timeout', '20.0'] 100.0"
    ]
    processes.end()


HANGS = """
import os, threading
os.cpu_count = lambda: 2
os.getloadavg = lambda: (LOAD, 0.0, 0.0)

def test_hangs():
    threading.Event().wait(SECONDS)
"""


@pytest.mark.processes
@pytest.mark.parametrize("value, status", [(0.0, 1), (6.0, 1), (400.0, 0)])
def test_a_tests_own_limit_grows_and_ends_a_hang(value: float, status: int, tmp_path: Path) -> None:
    """A wait of 0.9 s under a limit of 0.3 s fails at the usual load and passes at sixfold; a hang
    ends.
    """
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.limits"]\n')
    (tmp_path / "test_it.py").write_text(f"LOAD, SECONDS = {value}, 0.9\n{HANGS}")
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0.3", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = load.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == status, done.stdout
    assert ("Timeout (>" in done.stdout) == (status == 1)


HANGS_AT_ITS_END = """
import ctypes, threading
import pytest

@pytest.fixture(autouse=True)
def teardown():
    yield
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    WAIT

def test_fails():
    assert False, "at first"
"""
WAITS = {"a wait": "threading.Event().wait()", "a call of C": "lock(mutex)"}


@pytest.mark.processes
@pytest.mark.parametrize("wait", WAITS)
def test_the_teardown_of_a_failed_test_has_a_limit(wait: str, tmp_path: Path) -> None:
    """A wait in Python fails the teardown; what no signal reaches ends the process, and all threads
    say where they are.
    """
    body = "from tests.support import limits, load\nlimits.GRACE, load.MOST = 0.3, 1.0\n"
    (tmp_path / "conftest.py").write_text(f'{body}pytest_plugins = ["tests.support.limits"]\n')
    (tmp_path / "test_it.py").write_text(HANGS_AT_ITS_END.replace("WAIT", WAITS[wait]))
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0.3", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = load.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 1, done.stdout
    if wait == "a wait":
        assert "at first" in done.stdout
        assert "Timeout (>" in done.stdout
    else:
        assert "in teardown" in done.stderr, done.stderr
