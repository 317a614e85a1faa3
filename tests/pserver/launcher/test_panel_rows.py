"""The panel of ``pserver launch``: its rows for terminals of any width, and what they are made
of.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from pserver.launcher.panel import STALE_SECONDS, ProcessLine, View, known, panel_rows
from pserver.launcher.watch import line
from pserver.telemetry.job_view import JobView, headline
from pserver.wire_pb2 import WaitStatus
from tests.support.samples import HERE, THERE, reply, sample

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "testdata" / "panel.txt"
PAGE = ROOT / "docs" / "terminal.md"
PROCESSES = [
    ProcessLine("server 0", "serving", 4204, 212_400_000),
    ProcessLine("server 1", "unreachable", 4203, 1_712_400_000),
    ProcessLine("trainer 0", "training", 4205, 512_000_000),
    ProcessLine("trainer 1", "barrier 'the end of an epoch of every trainer'", 4204, 498_000_000),
    ProcessLine("trainer 2", "exit status 3"),
]
VALUES = {"auc": 0.81231, "learning rate": 0.001, "loss": math.nan, "\x1b[2Jx": 1e9}
WAIT = WaitStatus(trainer_id=0, what="step", number=1, seconds=3.0, for_whom=[1])
PROGRESS = {"number": 3, "batch": 1204, "batches": 3000, "text": "1204/3000  40%  0:01:12 left"}
JOB = {"progress": PROGRESS, "headline": headline(15234.4, VALUES)}
VIEW = View("train", 3725.4, PROCESSES, JOB)
WAITING = View("a script with a long name", 2.0, [ProcessLine("server 0", "starting")])
OPEN_PASS = {"number": 1, "batch": 17, "batches": 0, "text": "batch 17"}
OPEN_END = View("stream", 61.0, PROCESSES[:1], {"progress": OPEN_PASS})
CROWD = View("many", 5.0, [ProcessLine(f"trainer {n}", "training", n) for n in range(40)])


def test_a_panel_fits_every_width(request: pytest.FixtureRequest) -> None:
    """Row by row as tests/testdata/panel.txt shows it; no row is wider than it may be."""
    parts = []
    for width in (120, 80, 40, 12):
        for view in (VIEW, WAITING, OPEN_END, CROWD):
            rows = [row.plain for row in panel_rows(view, width - 1, 10)]
            assert len(rows) <= 10 and max(map(len, rows)) < width
            parts.append(f"{width} columns\n" + "\n".join(rows) + "\n")
    found = "\n".join(parts)
    if request.config.getoption("--rewrite"):
        GOLDEN.write_text(found)

    assert found == GOLDEN.read_text()


def test_the_page_shows_a_panel_as_it_is() -> None:
    """The illustration of docs/terminal.md is what these rows are, on 80 columns."""
    values = {"auc": 0.81231, "learning rate": 0.001, "loss": 0.43121}
    view = dataclasses.replace(VIEW, job={**JOB, "headline": headline(15234.4, values)})
    shown = "\n".join(row.plain for row in panel_rows(view, 79, 10))

    assert PAGE.read_text().partition("```text\n")[2].partition("\n```")[0] == shown


def test_a_process_is_what_the_jobs_state_says() -> None:
    """Through a line of JSON; an old state says nothing of servers now, and keeps its numbers."""
    view = JobView([HERE, THERE])
    view.add(sample(0, reply(0), None))
    job = json.loads(line(view.add(sample(2, reply(2, waits=[WAIT]), None))))

    assert [known(name, {}, 0.0) for name in ("server 0", "trainer 0")] == [("", None)] * 2
    assert known("server 0", job, 1.0) == ("serving", 20)
    assert known("server 0", job, STALE_SECONDS + 1) == ("unreachable", 20)
    assert known("server 1", job, 1.0) == ("unreachable", None)
    assert known("trainer 1", job, 1.0) == ("training", 20)
    assert known("trainer 7", job, 1.0) == ("", None)
    rows = [row.plain for row in panel_rows(View("train", 1.0, PROCESSES[:1], job), 79, 10)]
    said = "trainer 0 waits at step for trainer 1, for 3.0 s (wait 1)"
    assert rows[1:3] == ["1,280 samples/s", said]
