"""SIGTERM of a process that has a job to tell of it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.fork_server import ROOT, started
from tests.support.load import patiently

BEGIN = """
import atexit, os, select, signal, sys, threading, time
from trainer.communicator.termination import termination

def tell(reason):
    print("told:", reason, flush=True)

def wait():
    print("ready", flush=True)
    threading.Event().wait(60)

"""

pytestmark = pytest.mark.processes


def ended(script: str) -> tuple[int, list[str]]:
    """The exit status and the lines of a process that gets SIGTERM when it says "ready"."""
    process = started(["-c", BEGIN + script], os.environ, ROOT, joined=False)
    assert process.stdin is not None and process.stdout is not None
    lines = []
    try:
        while (line := process.stdout.readline().rstrip("\n")) != "ready":
            assert line, lines
            lines.append(line)
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
        status = patiently(process.wait, 60.0)
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
    return status, [*lines, *said.splitlines()]


def test_the_job_is_told_and_the_script_s_own_endings_run() -> None:
    """``finally`` and ``atexit``, after the others know."""
    status, lines = ended("""
atexit.register(lambda: print("atexit", flush=True))
termination.add(tell)
try:
    wait()
finally:
    print("finally", flush=True)
""")

    assert (status, lines) == (143, ["told: ended by SIGTERM", "finally", "atexit"])


ADD = "termination.add(tell)\n"
# a pipe, and no event of threading: the main thread may hold that one's lock when the handler runs
OWN = """
saved, save = os.pipe()
found = signal.getsignal(signal.SIGTERM)

def own(number, frame):
    print("own", flush=True)
    if {calls} and callable(found):
        found(number, frame)
    os.write(save, b"!")

signal.signal(signal.SIGTERM, own)
"""
SAVES = """
print("ready", flush=True)
select.select([saved], [], [], 60)
threading.Event().wait(0.3)  # for whoever tells others behind the script's back
print("saves, came" if termination.came else "saves", flush=True)
"""
ALLOWS = "termination.allow(tell, 30.0)\n"


@pytest.mark.parametrize("grace", ["", ALLOWS])
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_signal_is_its_handler_s_who_has_it_when_it_comes(
    when: str, calls: bool, grace: str
) -> None:
    """Whether the script's was installed before ours or later: nobody is told, nothing is raised,
    and who is called from inside of it only notes that the signal has come.
    """
    own = OWN.format(calls=calls)
    status, lines = ended((own + ADD if when == "before" else ADD + own) + grace + SAVES)

    noted = calls and when == "after"
    assert (status, lines) == (0, ["own", "saves, came" if noted else "saves"])


def test_a_handler_that_is_given_back_is_ours_again() -> None:
    """As after a trainer's ``fit``: then the job is told, and the process ends."""
    given_back = ADD + OWN.format(calls=True) + "signal.signal(signal.SIGTERM, found)\nwait()"

    assert ended(given_back) == (143, ["told: ended by SIGTERM"])


def test_a_child_that_is_forked_under_another_s_handler_does_not_speak_for_its_parent() -> None:
    """It has the parent's pipe too: the parent would take the child's signal for its own."""
    status, lines = ended(
        ADD
        + OWN.format(calls=True)
        + """
begun = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    os.write(begun[1], b"!")
    time.sleep(60)
    os._exit(1)
os.read(begun[0], 1)
signal.signal(signal.SIGTERM, found)
os.kill(child, signal.SIGTERM)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.3)
print("came" if termination.came else "not told", flush=True)
"""
        + "wait()"
    )

    assert lines[-3:] == ["child 7", "not told", "told: ended by SIGTERM"], lines
    assert status == 143


def test_a_job_that_was_left_is_not_told() -> None:
    """The process still exits with 143."""
    status, lines = ended("termination.add(tell)\ntermination.remove(tell)\nwait()")

    assert (status, lines) == (143, [])


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    """A DataLoader ends its workers with SIGTERM: that ends nobody's job."""
    status, lines = ended("""
termination.add(tell)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print("child", os.WTERMSIG(status), flush=True)
print("came" if termination.came else "not told", flush=True)
wait()
""")

    assert lines[:2] == ["child 15", "not told"]
    assert (status, lines[2:]) == (143, ["told: ended by SIGTERM"])


def test_an_end_that_the_interpreter_ignores_comes_again() -> None:
    """What is raised inside a ``__del__`` goes nowhere: the script would go on for ever."""
    status, lines = ended("""
class Slow:
    def __del__(self):
        wait()

termination.add(tell)
slow = Slow()
del slow
print("went on", flush=True)
try:
    threading.Event().wait(60)
finally:
    print("finally", flush=True)
""")

    assert (status, lines) == (143, ["told: ended by SIGTERM", "went on", "finally"])


def test_a_process_is_told_of_no_signal_of_its_sibling_s() -> None:
    """Both were forked by a process that had imported the trainer, as a fork server has."""
    status, lines = ended("""
asked, answered = os.pipe(), os.pipe()
if (sibling := os.fork()) == 0:
    termination.add(tell)
    while os.read(asked[0], 1):
        os.write(answered[1], b"yn"[not termination.came:][:1])
        threading.Event().wait(0.01)
termination.add(tell)
try:
    wait()
finally:
    found = []
    for _ in range(20):
        os.write(asked[1], b"?")
        found.append(os.read(answered[0], 1))
    os.kill(sibling, signal.SIGKILL)
    print(b"y" in found, os.waitpid(sibling, 0)[1], flush=True)
""")
    assert (status, lines) == (143, ["told: ended by SIGTERM", "False 9"])
