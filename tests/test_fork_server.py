"""Forked processes begin, and end, as those that an interpreter begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import FORK_SERVER, Forked, finished, started
from tests.support.processes import Processes
from tests.support.waiting import eventually

LAUNCHED = """
import os, sys, time
print("process", os.getpid(), "of", os.getpgrp(), flush=True)
print("shown", sys.argv, __name__, sys.path[0], os.getcwd(), sys.stdin.read(), flush=True)
print("shown", os.environ["RANK"], os.environ["GIVEN"], flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""

SHOWN = """
import atexit, os, sys, threading
import __main__
class Last:
    def __del__(self, write=os.write):
        write(1, b"gone\\n")
LAST, FILE = Last(), open(f"written by {os.getpid()}", "w")
FILE.write("written")
atexit.register(print, "at exit")
print(sys.argv, __name__, __file__ if "__file__" in globals() else "no file")
print(sys.orig_argv[1:], sys.begun)
print(sys.path[0], os.getcwd(), __main__.SHOWN, os.environ["SAID"], sys.stdin.readline().strip())
print([each.name for each in threading.enumerate()], sys.stdout.write_through)
sys.exit(int(os.environ["STATUS"]))
"""

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("way", ["script", "-c", "-m"])
def test_what_a_process_sees_is_what_an_interpreter_shows_it(
    way: str, unbuffered: str, tmp_path: Path
) -> None:
    """Arguments, ``__main__``, paths, environment, input, threads; and how it ends, with its
    objects and files.
    """
    (tmp_path / "shown.py").write_text("SHOWN = 3\n" + SHOWN)
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.begun = sys.orig_argv[-2:]")
    words = {"script": ["shown.py"], "-c": ["-c", "SHOWN = 3\n" + SHOWN], "-m": ["-m", "shown"]}[
        way
    ]
    environment = {
        **os.environ,
        "SAID": "this",
        "STATUS": "5",
        "PYTHONUNBUFFERED": unbuffered,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    found = []
    for process in (
        FORK_SERVER.start([*words, "a", "b"], environment, tmp_path, joined=True),
        subprocess.Popen(
            [sys.executable, *words, "a", "b"],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ),
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("told\n")
        process.stdin.close()
        end = process.stdout.read(), process.wait(60)
        found.append((*end, (tmp_path / f"written by {process.pid}").read_text()))
        process.stdout.close()

    assert found[0] == found[1] and found[0][1:] == (5, "written")
    assert "at exit" in found[0][0] and "gone" in found[0][0]


def test_signals_reach_it_and_it_ends_by_them(tmp_path: Path) -> None:
    """A negative status says which."""
    process = started(
        ["-c", "import time; print('up', flush=True); time.sleep(60)"], {**os.environ}, tmp_path
    )
    assert isinstance(process, Forked) and process.stdout is not None
    assert process.stdout.readline() == "up\n" and process.poll() is None
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == process.poll() == -signal.SIGTERM
    process.stdin.close()
    process.stdout.close()


def test_what_an_interpreter_reads_when_it_begins_makes_another_interpreter(tmp_path: Path) -> None:
    """Variables of Python's and of torch's; commands that import no torch."""
    for words, more in ((["-c", "pass"], {"PYTHONHASHSEED": "3"}), (["-m", "pserver"], {})):
        with started(words, {**os.environ, **more}, tmp_path) as process:
            assert isinstance(process, subprocess.Popen)


@pytest.mark.parametrize("more", [{}, {"PYTHONHASHSEED": "3"}])
def test_a_process_at_its_end_has_said_what_it_has_to(more: dict[str, str], tmp_path: Path) -> None:
    """On each of its streams, forked or not; what does not end in time is killed."""
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = finished(["-c", script], {**os.environ, **more}, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        finished(["-c", "import signal; signal.pause()"], {**os.environ, **more}, seconds=0.1)

    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


LAUNCH = ("-m", "pserver", "launch", "--nccl2", "--trainers", "1", "shown.py")


def shown(processes: Processes, *words: str) -> tuple[int, list[str]]:
    """The status of a launch, and what its trainer has shown."""
    (processes.path / "shown.py").write_text(LAUNCHED)
    launch = processes.python("launch", *words, "0", "5", GIVEN="this")
    return launch.status(), [line for line in launch.lines if "| shown" in line]


def test_what_launch_forks_is_what_it_starts(tmp_path: Path) -> None:
    """Its trainer sees the same, and ends alike."""
    processes = Processes(tmp_path)
    try:
        forked, begun = (shown(processes, *flag, *LAUNCH) for flag in ((), ("-u",)))
    finally:
        processes.end()

    assert forked == begun and forked[0] == 5 and len(forked[1]) == 2


def test_what_launch_forks_ends_with_it(tmp_path: Path) -> None:
    """Also by kill -9: it is in the group of launch's guard."""
    (tmp_path / "shown.py").write_text(LAUNCHED)
    processes = Processes(tmp_path)
    try:
        launch = processes.python("launch", *LAUNCH, "60", "0", GIVEN="this")
        trainer, group = launch.said(r"process (\d+) of (\d+)").groups()
        assert trainer != group and Path(f"/proc/{trainer}").exists()
        launch.send(signal.SIGKILL)

        assert launch.status() == -signal.SIGKILL
        eventually(lambda: not Path(f"/proc/{trainer}").exists())
    finally:
        processes.end()
