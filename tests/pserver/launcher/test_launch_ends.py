"""Promises of ``pserver launch`` about how it ends: its status, whom it stops, and that nobody
stays.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.tiny_launch import DEADLINE, HANG, SHOW, Run

pytestmark = pytest.mark.processes


def alive(pid: int) -> bool:
    """A zombie, which only waits to be collected, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    end = time.monotonic() + DEADLINE
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_a_trainer_that_fails_ends_the_job_with_its_status_and_its_last_lines(
    run: type[Run],
) -> None:
    """The rest is stopped, though it would run for ever; stderr shows the guilty log."""
    script = HANG.replace(
        "signal.pause()",
        "int(os.environ['TRAINER_ID']) and exit('no such file: data.csv')\nsignal.pause()",
    )
    one = run(script, server="")
    started = time.monotonic()
    status, out, err = one.end()

    assert status == 1 and time.monotonic() - started < 30
    assert (
        "trainer 1 failed with status 1; the last lines of" in err
        and "no such file: data.csv" in err
    )
    assert gone(*map(int, re.findall(r"pid (\d+)", out)))


TOLD = """
import os, sys
print("warning: the stream of trainer 1 broke", flush=True)
meeting = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meeting")
try:
    os.mkfifo(meeting)
except FileExistsError:
    pass
open(meeting, "r" if os.environ["TRAINER_ID"] == "1" else "w").close()  # waits for the other
if os.environ["TRAINER_ID"] == "1":
    def load():
        raise RuntimeError("no such column")
    try:
        {}["key"]
    except KeyError:
        load()
print("Traceback (most recent call last):")
sys.exit("pserver.errors.JobFailed: trainer 1 ended the job: RuntimeError: no such column")
"""


@pytest.mark.long  # test_supervisor.py stands for it
def test_the_cause_comes_first_with_its_traceback(run: type[Run]) -> None:
    """Whoever ended first: then one line for each process that was told of it."""
    status, _, err = run(TOLD, server="").end()
    lines = [line.removeprefix("pserver launch: ") for line in err.splitlines()]

    assert status == 1
    assert lines[0].startswith("trainer 1 failed with status 1; the last lines of")
    assert lines[1] == "    Traceback (most recent call last):" and "KeyError: 'key'" in err
    at = lines.index("    RuntimeError: no such column")
    assert "    During handling of the above exception, another exception occurred:" in lines[:at]
    assert lines[at + 1].startswith(
        "trainer 0 failed with status 1, reported by others: pserver.errors.JobFailed: "
        "trainer 1 ended"
    )
    assert err.count("Traceback") == 2 and "the stream of trainer 1 broke" not in err


@pytest.mark.long  # test_supervisor.py stands for it
def test_a_suspended_process_has_its_line(
    run: type[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named as what the others have lost, before what they say, and killed."""
    script = """
import os, signal, sys, time
if os.environ["TRAINER_ID"] == "1":
    print("pid", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit("pserver.errors.TrainerLost: trainer 1 has sent no heartbeat for 5 s")
"""
    monkeypatch.setenv("STOPPED", str(tmp_path / "stopped"))
    one = run(script.replace("sys.argv[1]", "os.environ['STOPPED']"))
    pid = int(one.wait_for("trainer-1.log", r"pid (\d+)"))
    end = time.monotonic() + DEADLINE
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.01)
    Path(os.environ["STOPPED"]).touch()
    status, _, err = one.end()
    lines = err.splitlines()

    assert status == 1 and gone(pid)
    assert "trainer 1 was suspended (by SIGSTOP, or in a debugger)" in lines[0]
    assert "trainer 0 failed with status 1, reported by others: pserver.errors.TrainerL" in lines[1]
    assert len(lines) == 2


def test_a_server_that_stays_after_the_job_is_asked_to_end(run: type[Run]) -> None:
    """Servers that no trainer ever joined get SIGTERM, and the job's status is still 0."""
    one = run("", server="print('pid', __import__('os').getpid(), flush=True)")

    assert one.end()[0] == 0
    assert gone(int(re.findall(r"pid (\d+)", (one.logs / "server-0.log").read_text())[0]))


@pytest.mark.long  # test_supervisor.py stands for it
def test_the_status_is_the_scripts_own(run: type[Run]) -> None:
    """sys.exit(7) in a trainer makes launch end with 7."""
    assert run("import sys; sys.exit(7)", trainers="1").end()[0] == 7


@pytest.mark.long  # test_supervisor.py stands for it
def test_a_server_killed_with_9_stops_the_rest_within_seconds(run: type[Run]) -> None:
    """Status 128 + 9, whatever the others then say about it; and nobody is left."""
    victim = "server-0.log"
    one = run(HANG, server="import os; print('pid', os.getpid(), flush=True)")
    pids = {
        name: int(one.wait_for(name, r"pid (\d+)"))
        for name in ("server-0.log", "trainer-0.log", "trainer-1.log")
    }
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    status, _, err = one.end()

    assert status == 137 and time.monotonic() - killed < 15
    assert f"{victim.replace('-', ' ').removesuffix('.log')} failed with status 137" in err
    assert gone(*pids.values())


@pytest.mark.long  # test_supervisor.py stands for it
def test_a_server_that_never_gets_ready_fails_the_launch(run: type[Run]) -> None:
    """A server that ends before its readiness line (a port in use) is reported; no trainer
    starts.
    """
    status, out, err = run(SHOW, before="sys.exit('port 6174 is in use')").end()

    assert status == 1 and "port 6174 is in use" in err and "TRAINER_ID" not in out


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on(run: type[Run], number: int, expected: int) -> None:
    """Ctrl-C reaches trainers as KeyboardInterrupt; launch ends with 128 + the signal when they
    have ended.
    """
    one = run(
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "print('pid', os.getpid(), flush=True)\n"
        "try:\n    signal.pause()\nexcept KeyboardInterrupt:\n    print('left in order', "
        "flush=True)"
    )
    for name in ("trainer-0.log", "trainer-1.log"):
        one.wait_for(name, r"pid (\d+)")
    one.popen.send_signal(number)
    status, out, _ = one.end()

    assert status == expected and out.count("left in order") == 2


def test_the_traceback_of_ctrl_c_is_in_the_log_alone(run: type[Run]) -> None:
    """The script's output of that time is shown."""
    one = run(
        "import atexit, os, signal\natexit.register(print, 'said at the end')\n"
        "print('pid', os.getpid(), flush=True)\nsignal.pause()"
    )
    for name in ("trainer-0.log", "trainer-1.log"):
        one.wait_for(name, r"pid (\d+)")
    one.popen.send_signal(signal.SIGINT)
    status, out, err = one.end()

    assert status == 130 and out.count("said at the end") == 2
    assert "Traceback" not in out + err and "KeyboardInterrupt" not in out + err
    for name in ("trainer-0.log", "trainer-1.log"):
        one.wait_for(name, r"Traceback(?s:.*)KeyboardInterrupt()")


@pytest.mark.long  # test_supervisor.py stands for it
def test_a_second_signal_kills(run: type[Run]) -> None:
    """Who ignores the first Ctrl-C does not survive the second."""
    one = run("import signal\nsignal.signal(2, signal.SIG_IGN)\n" + HANG, trainers="1")
    pid = int(one.wait_for("trainer-0.log", r"pid (\d+)"))
    one.popen.send_signal(signal.SIGINT)
    assert one.popen.stderr is not None and "a second signal kills" in one.popen.stderr.readline()
    started = time.monotonic()
    one.popen.send_signal(signal.SIGINT)

    assert one.end()[0] == 130 and time.monotonic() - started < 4
    assert gone(pid)


FAILS = """
import os, signal, sys
print("begun", flush=True)
if os.environ["TRAINER_ID"] == "1":
    sys.exit(3)
# launch stops the others, and then gets a signal itself
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
while True:
    signal.pause()
"""


@pytest.mark.long  # test_supervisor.py stands for it
def test_a_signal_while_a_job_fails_ends_it(run: type[Run]) -> None:
    """It is not started again; the status is the failed trainer's."""
    status, out, err = run(FAILS, max_restarts="2", server="").end()

    assert status == 3 and out.count("begun") == 2
    assert "starts the job again" not in err


def test_nobody_outlives_a_launch_that_is_killed(run: type[Run]) -> None:
    """kill -9 of launch itself takes servers, trainers and the trainers' children with it."""
    one = run(
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import signal; "
        "signal.pause()'])\n"
        "print('child', child.pid, flush=True)\n" + HANG,
        server="import os; print('pid', os.getpid(), flush=True)",
    )
    pids = [
        int(one.wait_for(name, r"pid (\d+)"))
        for name in ("server-0.log", "trainer-0.log", "trainer-1.log")
    ]
    pids += [int(one.wait_for("trainer-0.log", r"child (\d+)"))]
    one.popen.kill()
    one.popen.communicate(timeout=DEADLINE)

    assert gone(*pids)
