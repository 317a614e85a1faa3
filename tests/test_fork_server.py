"""Forked processes begin, and end, as those that an interpreter begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import FORK_SERVER, Forked, started

SHOWN = """
import atexit, os, sys, threading
import __main__
atexit.register(print, "at exit")
print(sys.argv, __name__, __file__ if "__file__" in globals() else "no file")
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
    """Arguments, ``__main__``, paths, environment, input, threads; and how it ends."""
    (tmp_path / "shown.py").write_text("SHOWN = 3\n" + SHOWN)
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
        found.append((process.stdout.read(), process.wait(60)))
        process.stdout.close()

    assert found[0] == found[1] and found[0][1] == 5


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
