"""The benchmark itself: its arithmetic, and that its rows run at tiny sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from docs.generators import benchmarks
from docs.pictures import measured_code
from tests.support.tiers import RARE

BENCHMARKS = Path(__file__).parent / "benchmarks"
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
COMMIT = "[0-9a-f]{12}"
SVG = "{http://www.w3.org/2000/svg}"


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
    quick = Row(Promise("wire/x", "y", 1.5, "samples/s"), value=4.0, baseline=2.0, runs=3)
    assert (quick.ratio, quick.met) == (2.0, True)
    small = Row(Promise("wire/x", "y", 0.4, most=True), value=2.0, baseline=4.0, runs=3)
    assert (small.ratio, small.met) == (0.5, False)
    assert Row(Promise("wire/x", "y", 1.0), skipped="no").plain()["ratio"] is None


def test_an_auc_is_reached_between_two_passes(monkeypatch: pytest.MonkeyPatch):
    """As on a line; at once where the first pass reaches it, and never where none does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from movielens import seconds_until

    curve = [(0.0, 0.5), (2.0, 0.7), (6.0, 0.8)]
    assert seconds_until(0.75, curve) == [pytest.approx(4.0)]
    assert seconds_until(0.6, curve) == [pytest.approx(1.0)]
    assert seconds_until(0.9, curve) == []


def test_the_picture_has_a_bar_for_each_row_with_a_target(monkeypatch: pytest.MonkeyPatch):
    """To the right where the target is met, whether it is a least or a most; as long as the
    doublings, up to two; and a miss says so in words, and is hatched.
    """
    monkeypatch.syspath_prepend(str(PICTURES))
    from benchmark_rows import grouped, missed
    from benchmarks import BARS, LEFT, picture

    twice = row("wire/a & b", 1.0, 2.0, 2.0, 1.0)
    double = row("wire/memory", 8.0, 1.0, 8.0, 1.0, "most")
    shown, none = row("wire/shown", 1.0, 1.0, 1.0, None), row("wire/none", None, None, None, 1.0)
    every = [twice, double, shown, none]
    assert [each.nearness for each in every] == [1.0, -3.0, None, None]
    assert missed(every) == [double]
    drawn = ElementTree.fromstring(picture(grouped(every)))
    bars = [p.attrib for p in drawn.iter(f"{SVG}path") if p.attrib["d"].endswith("z")]
    begins = [float(bar["d"].split()[1]) for bar in bars]
    ends = [float(bar["d"].partition(" L ")[2].split()[0]) for bar in bars]
    middle = LEFT + BARS / 2
    assert begins == [middle, middle] and ends == [middle + BARS / 4, middle - BARS / 2]
    assert [bar["fill"] == "url(#missed)" for bar in bars] == [False, True]
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert [each for each in words if each and "met" in each] == ["\u2713 met"]
    assert [each for each in words if each and "missed" in each] == ["\u2715 missed"]
    assert {"a & b", "2.00, at least 1", "8.00, at most 1"} <= set(words)
    title, described = drawn.find(f"{SVG}title"), drawn.find(f"{SVG}desc")
    assert title is not None and title.text and title.text.endswith("1 of 2 targets met")
    assert described is not None and "wire/memory 8.00, at most 1, missed" in str(described.text)


def row(
    name: str,
    value: float | None,
    baseline: float | None,
    ratio: float | None,
    target: float | None,
    bound: str = "least",
) -> Any:
    """A row of docs/pictures, in ms."""
    from benchmark_rows import Row

    return Row(name, value, "ms", baseline, "y", ratio, target, bound, 3, "2026-01-01", "here")


def test_kept_rows_take_the_place_of_those_of_the_same_name(monkeypatch: pytest.MonkeyPatch):
    """Others stay; a new row stands behind its group; one of --tiny shows nothing, and is
    refused.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kept import merged

    old = [{"name": name, "value": 1} for name in ("wire/a", "wire/b", "table/c")]
    new = [{"name": name, "value": 2} for name in ("wire/b", "wire/d", "survival/e")]
    assert [(row["name"], row["value"]) for row in merged(old, new)] == [
        ("wire/a", 1),
        ("wire/b", 2),
        ("wire/d", 2),
        ("table/c", 1),
        ("survival/e", 2),
    ]
    with pytest.raises(ValueError, match="wire/a: expected a whole measurement"):
        merged(old, [{"name": "wire/a", "tiny": True}])


@pytest.mark.processes
def test_each_row_that_the_documentation_has_is_one_that_is_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    """With the target, the unit and the setting that the benchmark has now; and its ratio is that
    of its values.
    """
    monkeypatch.syspath_prepend(str(PICTURES))
    from benchmark_rows import GROUPS, rows

    promised = promises()
    beginnings = tuple(word for _, words in GROUPS.values() for word in words)
    assert [name for name in promised if not name.startswith(beginnings)] == []
    for each in rows():
        assert each.name.startswith(beginnings), each.name
        assert each.value and each.baseline and each.ratio and each.runs, each.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", each.date), each.name
        larger = each.bound == "most" or each.unit.endswith("/s")
        values = (each.value, each.baseline) if larger else (each.baseline, each.value)
        assert each.ratio == pytest.approx(values[0] / values[1], rel=0.01), each.name
        if not each.name.startswith("paddle/"):  # which make bench does not measure
            told = {"against": each.against, "target": each.target, "unit": each.unit}
            told |= {"most": each.bound == "most", "setting": each.setting, "name": each.name}
            assert told == promised[each.name]


def test_each_row_says_its_commit_and_what_it_measures():
    """Folders that are there, so that a page can say which rows are old."""
    facts = json.loads((PICTURES.parent / "benchmarks.json").read_text())
    assert [row["name"] for row in facts if not re.fullmatch(COMMIT, row["commit"])] == []
    for row in facts:
        for folder in measured_code.folders(row["name"]):
            assert (measured_code.ROOT / folder).is_dir(), f"{row['name']}: {folder}"


@pytest.mark.processes
def test_the_gate_is_a_choice_of_the_measured_rows(monkeypatch: pytest.MonkeyPatch):
    """By name, where other choices go by how names begin; with fewer runs, unless said."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gate import GATE, ROWS, taken

    assert len(set(ROWS)) == len(ROWS) and set(ROWS) <= set(promises())
    assert [name for name in ROWS if not taken(name, GATE)] == []
    assert not taken("wire/tls 64 MB", GATE) and taken("wire/tls 64 MB", "wire")
    show = "import runpy, sys; a = runpy.run_path(sys.argv[1], run_name='x')['parsed']; "
    show += "print(a(['--only', 'gate']).runs, a([]).runs, a(['--only=gate', '--runs=5']).runs)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '{BENCHMARKS}'); {show}"]
    done = subprocess.run(
        [*command, str(BENCHMARKS / "__main__.py")], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["3", "9", "5"], done.stderr


@pytest.mark.processes
def test_a_row_is_old_when_its_code_has_changed_since(tmp_path: Path):
    """Committed or not; by another folder's change it is not; and of a commit that git does not
    know, nothing is said.
    """

    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    def is_old(commit: str) -> bool | None:
        measured_code.changed.cache_clear()
        return measured_code.changed(commit, ("pserver/job", "trainer"), tmp_path)

    assert measured_code.head(tmp_path) == "" and is_old("a" * 12) is None
    git("init")
    for folder in ("pserver/job", "pserver/web", "trainer"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "step.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "first")
    first = measured_code.head(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{12}", first) and is_old(first) is False
    (tmp_path / "pserver/web/step.py").write_text("2\n")
    assert measured_code.head(tmp_path) == f"{first}-changed"
    assert is_old(first) is False and is_old(f"{first}-changed") is True
    (tmp_path / "pserver/job/step.py").write_text("2\n")
    assert is_old(first) is True
    git("commit", "-am", "second")
    assert is_old(first) is True and is_old(measured_code.head(tmp_path)) is False
    assert is_old("a" * 12) is None and is_old("") is None


def test_a_mark_stays_where_git_knows_nothing(monkeypatch: pytest.MonkeyPatch):
    """And comes and goes where it does; without the marks the page is the same."""
    lines = {}
    for known in (False, True, None):
        monkeypatch.setattr(benchmarks, "changed", lambda *_, known=known: known)
        lines[known] = benchmarks.pages()["benchmarks.md"]
    names = {row["name"] for row in json.loads((PICTURES.parent / "benchmarks.json").read_text())}
    page = (PICTURES.parent / "benchmarks.md").read_text()
    assert measured_code.marked(lines[False]) == set()
    assert measured_code.marked(lines[True]) == names
    assert measured_code.marked(lines[None]) == measured_code.marked(page)
    assert len({measured_code.unmarked(each) for each in lines.values()}) == 1


PROMISED = """
import dataclasses, importlib, json, runpy, sys
sys.path.insert(0, sys.argv[1])
groups = runpy.run_path(sys.argv[1] + "/__main__.py", run_name="listed")["GROUPS"]
found = [each for group in groups for each in importlib.import_module(group).PROMISES]
found += importlib.import_module("log_cost").PROMISES.values()  # it needs another tree
print(json.dumps([dataclasses.asdict(each) for each in found]))
"""


def promises() -> dict[str, dict[str, Any]]:
    """What each row of the benchmark is to show, from a process of its own: its modules' names are
    short.
    """
    command = [sys.executable, "-c", PROMISED, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


@pytest.mark.processes
@pytest.mark.parametrize(
    "only",
    [
        RARE("wire/program"),
        "wire/shm async",
        RARE("writes"),
        RARE("movielens/1 x 1"),
        RARE("overlap/tables async"),
        RARE("table/pull"),
    ],
)
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
    larger = row["bound"] == "most" or row["unit"].endswith("/s")
    ratio = row["value"] / row["baseline"] if larger else row["baseline"] / row["value"]
    assert row["ratio"] == pytest.approx(ratio)
    assert {"unit", "target", "runs", "against", "date"} <= set(row) and row["tiny"]
    assert row["name"] in ended.stdout
