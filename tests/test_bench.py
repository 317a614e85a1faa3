"""The benchmark itself: its arithmetic, and that its rows run at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.tiers import RARE

BENCHMARKS = Path(__file__).parent / "benchmarks"


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """Runs alternate, the medians are those of the rounds after the first, and a ratio says how
    many times as fast we are.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import Promise, Row, alternate

    clock, order = count(1), []
    medians = alternate(
        {name: lambda name=name: order.append(name) or float(next(clock)) for name in ("a", "b")},
        runs=3,
    )
    assert order == ["a", "b"] * 4
    assert medians == {"a": 5.0, "b": 6.0}
    fast = Row(Promise("wire/x", "y", 1.5), value=2.0, baseline=4.0, runs=3)
    assert (fast.ratio, fast.met) == (2.0, True)
    small = Row(Promise("wire/x", "y", 0.4, most=True), value=2.0, baseline=4.0, runs=3)
    assert (small.ratio, small.met) == (0.5, False)
    assert Row(Promise("wire/x", "y", 1.0), skipped="no").plain()["ratio"] is None


def test_the_picture_has_a_bar_for_each_row_with_a_target(monkeypatch: pytest.MonkeyPatch):
    """To the right where the target is met, whether it is a least or a most; as long as the
    doublings, up to two.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import Promise, Row
    from plot import nearness, picture

    twice = Row(Promise("wire/a & b", "y", 1.0), value=1.0, baseline=2.0)
    double = Row(Promise("memory", "y", 1.0, most=True), value=8.0, baseline=1.0)
    without = [
        Row(Promise("shown", "y", None), 1.0, 1.0),
        Row(Promise("none", "y", 1.0), skipped="no"),
    ]
    assert [nearness(row) for row in (twice, double, *without)] == [1.0, -3.0, None, None]
    drawn = ElementTree.fromstring(picture([twice, double, *without]))
    shown = [bar.attrib for bar in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert [(float(bar["x"]), float(bar["width"])) for bar in shown] == [(470, 105), (260, 210)]


@pytest.mark.processes
@pytest.mark.parametrize("only", [RARE("wire/program"), "wire/shm async", RARE("writes")])
def test_rows_are_measured_printed_and_written(only: str, tmp_path: Path):
    """A row at a tiny size ends in the table and, whole, in the JSON file."""
    output = tmp_path / "bench.json"
    command = [
        sys.executable,
        str(BENCHMARKS),
        "--tiny",
        "--runs",
        "1",
        "--only",
        only,
        "--output",
        str(output),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "<svg" in output.with_suffix(".svg").read_text()
    (row,) = json.loads(output.read_text())
    assert row["name"].startswith(only) and not row["skipped"], row
    assert row["value"] > 0 and row["baseline"] > 0
    larger_is_better = row["bound"] == "least"
    ratio = row["baseline"] / row["value"] if larger_is_better else row["value"] / row["baseline"]
    assert row["ratio"] == pytest.approx(ratio)
    assert {"unit", "target", "runs", "against"} <= set(row)
    assert row["name"] in ended.stdout
