"""Checks: the complete matrices, one result a line in build/checks/NAME.jsonl, one table a test in
docs/checks/NAME.md.

::

    pytest --check faults                    make check-faults
    pytest --check any --sample 100          a sample of all matrices, as CI takes it

A check that was interrupted goes on where it was: a combination that has passed is not run again,
unless the source has changed since.  ``tests/support/matrix.py`` says which combinations there are.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tables import details, table

ROOT = Path(__file__).parents[2]
RESULTS, PAGES = ROOT / "build" / "checks", ROOT / "docs" / "checks"
SOURCES = ("transpiler", "pserver", "trainer", "tests")
_checks = pytest.StashKey["Check"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--check`` and ``--sample``."""
    parser.addoption("--check", default="", help="run the matrix of this name, or 'any', complete")
    parser.addoption("--sample", type=int, default=0, help="of a check, only so many combinations")


class Check:
    """What one run of a check knows.

    Args:
        name: of the check; "any" is all of them.
        sample: how many combinations to take, 0 for all; a sample leaves no results.

    Attributes:
        done: node ids that have passed, of this source.
        cases: node id -> {"test": name, "axes": {axis: value}}, of all combinations.
    """

    def __init__(self, name: str, sample: int) -> None:
        self.name, self.sample = name, sample
        self.source = digest()
        self.done: list[str] = []
        self.cases: dict[str, dict[str, Any]] = {}
        self.path = RESULTS / f"{name}.jsonl"

    def begin(self) -> None:
        """Reads what an earlier run has left, or begins anew where the source is another one."""
        if self.sample:
            return
        first, *results = self._lines() or [{}]
        if first.get("source") == self.source:
            self.done = [line["id"] for line in results if line["outcome"] == "passed"]
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"source": self.source}) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def chosen(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """The check's combinations that have yet to run; of a sample, each source has its own."""
        mine = []
        for item in items:
            mark = item.get_closest_marker("check")
            in_sample = not self.sample or item.get_closest_marker("matrix") is not None
            if mark is not None and self.name in (mark.args[0], "any") and in_sample:
                name = getattr(item, "originalname", item.name)
                self.cases[item.nodeid] = {"test": name, "axes": mark.args[1]}
                mine.append(item)
        left = [item for item in mine if item.nodeid not in set(self.done)]
        if not 0 < self.sample < len(left):
            return left
        taken = random.Random(self.source).sample(range(len(left)), self.sample)
        return [left[index] for index in sorted(taken)]

    def record(self, report: pytest.TestReport) -> None:
        """Appends a result."""
        if not self.sample:
            line = {"id": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            line.update(report.user_properties)
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")

    def write(self) -> Path:
        """The page of tables."""
        lines = {line["id"]: line for line in self._lines()[1:]}
        outcomes = {id_: line["outcome"] for id_, line in lines.items()}
        results = [(case, outcomes.get(id_, "")) for id_, case in self.cases.items()]
        count = {end: sum(o == end for _, o in results) for end in ("passed", "failed", "skipped")}
        path = PAGES / f"{self.name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (
            f"# make check-{self.name}\n\n"
            f"{datetime.date.today()}, {os.cpu_count()} cores, torch {torch.__version__}:\n"
            f"{count['passed']} of {len(results)} combinations passed, {count['failed']} failed, "
            f"{count['skipped']} were skipped, {len(results) - sum(count.values())} not run yet.\n"
        )
        for test in dict.fromkeys(case["test"] for case, _ in results):
            own = [(case["axes"], outcome) for case, outcome in results if case["test"] == test]
            text += f"\n## {test.removeprefix('test_').replace('_', ' ')}\n\n{table(own)}"
            found = [
                (case["axes"], lines.get(id_, {}).get("result", ""))
                for id_, case in self.cases.items()
                if case["test"] == test
            ]
            if any(result for _, result in found):
                text += f"\nWhat was seen:\n\n{details(found)}"
        path.write_text(text)
        return path


def digest() -> str:
    """Of every source that a result depends on."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


# ---- hooks: a worker of pytest-xdist is told what has passed, and tells what there is ----


def pytest_configure(config: pytest.Config) -> None:
    """Begins a check, or goes on with it."""
    if not config.getoption("--check"):
        return
    check = config.stash[_checks] = Check(config.getoption("--check"), config.getoption("--sample"))
    if hasattr(config, "workerinput"):
        check.done = config.workerinput["done"]
    else:
        check.begin()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker's input."""
    if _checks in node.config.stash:
        node.workerinput["done"] = node.config.stash[_checks].done


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the check's combinations, and leaves out what has passed."""
    if _checks in config.stash:
        chosen = config.stash[_checks].chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


class _Recorder:
    """Results as they come."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._check.record(report)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Results are recorded in one process."""
    config = session.config
    if _checks in config.stash and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config.stash[_checks]), "check-recorder")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has said which combinations there are."""
    if _checks in node.config.stash:
        node.config.stash[_checks].cases.update(getattr(node, "workeroutput", {}).get("cases", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker says which combinations there are; the process that has them all writes the page."""
    config = session.config
    if _checks not in config.stash:
        return
    check = config.stash[_checks]
    if hasattr(config, "workeroutput"):
        config.workeroutput["cases"] = check.cases
    elif check.cases and not check.sample and not config.getoption("collectonly"):
        print(f"\nwritten: {check.write().relative_to(ROOT)}")
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and check.done:
        session.exitstatus = pytest.ExitCode.OK
