"""``pserver launch`` on a terminal: a panel below the processes' lines, which leaves no trace."""

from __future__ import annotations

import io
import re
import signal
import sys
from pathlib import Path

import pytest

from pserver.launcher.processes import Terminal
from tests.support.on_terminal import OnTerminal
from tests.support.screen import Screen

TRAIN = """
from pathlib import Path
import torch
from trainer import fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
seen = Path("seen")
while not seen.exists():
    for inputs in fleet.shard([torch.ones(2, 4)] * 50, progress=True):
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fleet.report(samples=2, loss=loss, auc=0.5)
print("\\x1b[1mbold\\x1b[0m")
fleet.finish()
print("the last line")
"""
# a job without servers, whose trainers need no torch
LAUNCH = """
import os, sys
from pserver.launcher.cluster import Cluster
from pserver.launcher.launch import launch
trainers = ("127.0.0.1:1", "127.0.0.1:1")
sys.exit(launch(Cluster("script.py", (), (), trainers, log_dir="logs"), os.environ, panel={panel}))
"""


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(columns: int = 20, lines: int = 10) -> tuple[Terminal, FakeTerminal, list[int]]:
    """A terminal with a panel, what is written to it, and its size, which may change."""
    out, size = FakeTerminal(), [lines, columns]
    made = Terminal(out, 9, {"TERM": "xterm"})
    made.size = lambda: (size[0], size[1])  # type: ignore[method-assign]
    made.panel = True
    return made, out, size


def shown(out: FakeTerminal) -> tuple[list[str], bool]:
    screen = Screen()
    screen.write(out.getvalue().replace("\n", "\r\n"))  # as a terminal does
    return screen.shown, screen.cursor


def test_lines_stand_above_the_panel() -> None:
    """Those of all processes, and the owner's whole ones; its unended one is the first row."""
    made, out, _ = terminal()
    made.show([("one", 3), ("two", 3)])
    made.line("trainer 1", "hello")
    made.through("whole\r\nunended \u00e9".encode()[:-1])  # half of a letter
    assert shown(out) == (["trainer 1 | hello", "whole", "unended \ufffd", "one", "two"], False)

    made.through("\u00e9, now whole\r\n".encode()[1:])
    made.show([("three", 5)])
    text = "unended \u00e9, now whole"
    assert shown(out) == (["trainer 1 | hello", "whole", text, "three"], False)

    made.end_panel()
    made.line("trainer 1", "bye")
    made.show([("four", 4)])
    assert shown(out) == (["trainer 1 | hello", "whole", text, "trainer 1 | bye", ""], True)


def test_a_terminal_that_shrinks_keeps_the_lines() -> None:
    """The panel's rows have wrapped, and are gone all the same; of too many rows some are shown."""
    made, out, size = terminal()
    made.line("trainer 1", "hello")
    made.show([("a" * 19, 19), ("b", 1)])
    size[1] = 10
    before = len(out.getvalue())
    made.show([("c", 1)])
    # two lines of the first row, one of the second: from the last one two up
    assert out.getvalue()[before:].startswith("\r\x1b[2A\x1b[J")

    size[0] = 3
    made.show([(str(row), 1) for row in range(9)])
    assert shown(out)[0][-2:] == ["0", "1"]


@pytest.mark.parametrize("display", [b"\r10 %", b"\x1b[?25l", b"...\x08", b"\x1b[2K", b"x" * 70000])
def test_a_display_of_the_owners_gets_the_terminal(display: bytes) -> None:
    """The panel goes, for good, and the bytes pass through as without it."""
    made, out, _ = terminal()
    made.show([("one", 3)])
    made.through(b"\x1b[32mgreen\x1b[0m\r\r\n")
    assert made.panel
    made.through(display[:1])
    made.through(display[1:])
    made.show([("one", 3)])
    made.through(b" 20 %\r")

    assert not made.panel
    assert out.getvalue().endswith(display.decode() + " 20 %\r")


@pytest.mark.processes
def test_a_real_job_shows_its_progress(tmp_path: Path) -> None:
    """The pass, samples, reported values, states and memory; at the end only lines are left."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "pserver", "launch", "--servers", "1", "--trainers", "1"]
    shown = (
        r"pass \d+  .*\d+/50  \d+%",
        r"[\d,]+ samples/s   auc 0\.5   loss -?[\d.e+]+",
        r"server 0   \x1b\[32mserving.*step \d+ +\d+ MB",
        r"trainer 0  \x1b\[32mtraining.*step \d+ +\d+ MB",
    )
    with OnTerminal([*command, "train.py"], tmp_path) as run:
        run.until(lambda written: all(re.search(each, written) for each in shown))
        (tmp_path / "seen").touch()
        status = run.end()
    left = run.screen.shown

    assert status == 0, left
    assert run.screen.cursor and "the last line" in left and left[-1] == ""
    others = ("server 0  | ", "bold", "the last line")  # a server's last word may come last
    assert all(line.startswith(others) for line in left[:-1]), left
    assert "pass 1" not in (tmp_path / "logs" / "trainer-0.log").read_text()  # no second bar


@pytest.mark.processes
def test_ctrl_c_leaves_the_terminal_clean(tmp_path: Path) -> None:
    """The panel goes before launch's own words; without colours where nobody wants them."""
    (tmp_path / "script.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()")
    command = [sys.executable, "-c", LAUNCH.replace("{panel}", "True")]
    with OnTerminal(command, tmp_path, (24, 40), NO_COLOR="1") as run:
        run.until(lambda written: written.count("up") == 2 and "trainer 1  running" in written)
        run.popen.send_signal(signal.SIGINT)
        status = run.end()

    assert status == 128 + signal.SIGINT
    assert run.screen.cursor and not re.search(r"\x1b\[[\d;]*3\dm", run.written)
    said = "pserver launch: SIGINT: passed on; a second signal kills"
    assert said in run.screen.shown and not any("running" in line for line in run.screen.shown)


@pytest.mark.processes
def test_a_failure_is_reported_below_the_lines(tmp_path: Path) -> None:
    """The report is whole, the panel gone, and the cursor visible."""
    script = "import os\nprint('up', flush=True)\nint(os.environ['RANK']) and exit('no data')"
    (tmp_path / "script.py").write_text(script)
    with OnTerminal([sys.executable, "-c", LAUNCH.replace("{panel}", "True")], tmp_path) as run:
        status = run.end()
    report, *_ = [line for line in run.screen.shown if line.startswith("pserver launch:")]

    assert status == 1 and "trainer 1 failed with status 1" in report
    assert run.screen.cursor and not any("0:00:0" in line for line in run.screen.shown)


@pytest.mark.processes
@pytest.mark.parametrize(("panel", "term"), [("False", "xterm"), ("True", "dumb")])
def test_no_panel_where_it_is_not_wanted(panel: str, term: str, tmp_path: Path) -> None:
    """Trainer 0's display passes through as it is; a dumb terminal gets lines alone."""
    # in one write: between two of them a line of trainer 1 may stand
    (tmp_path / "script.py").write_text("import sys\nsys.stdout.write('10 %\\r20 %\\n')")
    command = [sys.executable, "-c", LAUNCH.replace("{panel}", panel)]
    with OnTerminal(command, tmp_path, TERM=term) as run:
        status = run.end()

    assert status == 0 and "trainer 1 | 20 %" in run.screen.shown
    if term == "dumb":
        assert "\x1b" not in run.written and "trainer 0 | 20 %" in run.screen.shown
    else:
        assert "10 %\r20 %" in run.written and "\x1b[J" not in run.written
