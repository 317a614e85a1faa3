"""The panel of ``pserver launch``: its rows for terminals of any width, and what they are made
of.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from pserver import wire_pb2 as wire
from pserver.launcher.panel import STALE_SECONDS, DataProgress, Feed, ProcessLine, View, panel_rows
from pserver.launcher.watch import NO_ANSWER, panel_answer

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "testdata" / "panel.txt"
PAGE = ROOT / "docs" / "terminal.md"
PROCESSES = [
    ProcessLine("server 0", "serving", 4204, 212_400_000),
    ProcessLine("server 1", "no answer", None, 1_712_400_000),
    ProcessLine("trainer 0", "training", 4205, 512_000_000),
    ProcessLine("trainer 1", "barrier 'the end of an epoch of every trainer'", 4204, 498_000_000),
    ProcessLine("trainer 2", "exit status 3"),
]
VALUES = {"auc": 0.81231, "learning rate": 0.001, "loss": math.nan, "\x1b[2Jx": 1e9}
VIEW = View("train", 3725.4, PROCESSES, DataProgress(3, 1204, 3000, 72.9), 15234.4, VALUES)
WAITING = View("a script with a long name", 2.0, [ProcessLine("server 0", "starting")])
OPEN_END = View("stream", 61.0, PROCESSES[:1], DataProgress(1, 17, 0))
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
    view = dataclasses.replace(VIEW, values=values)
    shown = "\n".join(row.plain for row in panel_rows(view, 79, 10))

    assert PAGE.read_text().partition("```text\n")[2].partition("\n```")[0] == shown


def status(batch: int, samples: int, loss: float, batches: int = 100) -> wire.StatusReply:
    """A server's answer, with a trainer that is so far and one that is two batches ahead."""
    reply = wire.StatusReply(state="serving", version=batch)
    for number, ahead in ((0, 2), (1, 0)):
        report = wire.TrainerReport(
            samples=samples, passes=2, batch=batch + ahead, batches=batches, values={"loss": loss}
        )
        report.values[f"own {number}"] = number
        reply.trainers.add(
            trainer_id=number, state="joined", step=batch, activity=f"step {batch}", report=report
        )
    return reply


def test_what_servers_say_becomes_a_view() -> None:
    """The pass of the trainer that is least far, its time left, samples of all, means of values."""
    feed = Feed()
    assert (feed.server(0, 0.0), feed.trainer(0), feed.version(0)) == ("", ("", None), None)

    feed.update([panel_answer(status(10, 640, 0.5)), NO_ANSWER], now=100.0)
    first = feed.view("train", 1.0, [])
    feed.update([panel_answer(status(30, 1920, 0.25)), NO_ANSWER], now=104.0)
    second = feed.view("train", 5.0, [])

    assert first.progress == DataProgress(2, 10, 100, None) and first.samples_per_second is None
    assert second.progress == DataProgress(2, 30, 100, 14.0)
    assert second.samples_per_second == 2 * 1280 / 4
    assert second.values == {"loss": 0.25, "own 0": 0.0, "own 1": 1.0}
    assert (feed.server(0, 104.0), feed.server(1, 104.0)) == ("serving", "no answer")
    assert (feed.trainer(1), feed.version(0)) == (("training", 30), 30)
    assert feed.server(0, 105.0 + STALE_SECONDS) == "no answer"


def test_what_a_trainer_does_is_shown() -> None:
    """Instead of its step; a trainer whose servers have ended runs on, with the last numbers."""
    reply = status(10, 640, math.inf)
    reply.trainers[0].activity = "saving"
    reply.trainers[1].state = "lost"
    feed = Feed()
    feed.update([panel_answer(reply)], now=1.0)
    assert (feed.trainer(0), feed.trainer(1)) == (("saving", 10), ("lost", 10))
    assert feed.view("", 0.0, []).values["loss"] == math.inf

    feed.update([NO_ANSWER], now=2.0)
    assert (feed.trainer(0), feed.trainer(7)) == (("running", None), ("", None))
    assert feed.view("", 0.0, []).progress == DataProgress(2, 10, 100, None)


def test_a_new_pass_is_timed_anew() -> None:
    """The time left is that of the pass that runs; batches of unknown number have none."""
    feed = Feed()
    for now, batch, batches in ((1.0, 90, 100), (2.0, 100, 100), (9.0, 4, 100), (10.0, 14, 100)):
        feed.update([panel_answer(status(batch, 0, 0.0, batches))], now=now)
    assert feed.view("", 0.0, []).progress == DataProgress(2, 14, 100, 8.6)

    feed.update([panel_answer(status(20, 0, 0.0, 0))], now=11.0)
    feed.update([panel_answer(status(21, 0, 0.0, 0))], now=12.0)
    assert feed.view("", 0.0, []).progress == DataProgress(2, 21, 0, None)
