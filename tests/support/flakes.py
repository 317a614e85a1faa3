"""Failures that may be the machine's: ``--again`` runs each failing test once more, at the end and
alone.

==================  ================================================================================
passes then         it is FLAKY: printed, counted in the last line, and an entry of the page
                    docs/checks/flaky.md; the run does not fail
fails again         the run fails
seen before         among the ten newest entries of the page: the run fails
``exact``           never run again, the run fails: see below
a crash, no test    a worker that died, a file that could not be collected, an interrupt: the run
                    fails, and no second try would say more
more than ten       so many do not fail by chance: the run fails, and none is run again
==================  ================================================================================

[Note: exact tests]  Where a result must be the same to the bit, or follows from a seed, one failure
in a thousand runs is a race or a wrong sum: a finding.  A second run would hide it.  So a test is
``exact``, and never run again, if it

- is marked so, or
- lies in one of ``FOLDERS``, whose histories and inputs are drawn from seeds, or
- is a combination of one of the ``CHECKS``, which compare with plain torch, or
- promises equality by its name, with one of the ``WORDS``;

and so is, in whatever test, a failure whose failing statement is one of the ``COMPARISONS``.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDERS = ("tests/histories", "tests/fuzz")
CHECKS = ("equalities", "pairs", "lives", "strategies", "sharding", "checkpoints")
WORDS = {"equal", "equals", "bit", "bits", "exact", "exactly", "same"}
COMPARISONS = re.compile(r"\b(torch\.equal|assert_close|\w*array_equal|assert_equal\w*)\(")
MOST = 10  # failures that are run again
MEMORY = 10  # entries of the page among which a name must not come again
SECONDS = 1800.0  # for one test; its own limit ends a hang much sooner
PHASES = ("setup", "call", "teardown")
PAGE = Path("docs", "checks", "flaky.md")
ROW = re.compile(r"^\| (\d{4}-\d\d-\d\d) \| `(.+?)` \| (.*?) *\| *(.*?) *\|$", re.MULTILINE)
RULE = "| --- | --- | --- | --- |\n"
TABLE = f"| date | test | cause or suspicion | looked at |\n{RULE}"
HEAD = f"# Flaky tests\n\n{TABLE}"
UNKNOWN = "not yet: "  # how an entry begins that a run has written, and nobody has looked at


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--again``."""
    parser.addoption(
        "--again",
        action="store_true",
        help="run what fails once more at the end, alone: see tests/support/flakes.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Does the second runs in the process that has all results."""
    config.addinivalue_line("markers", "exact: equal to the bit, or seeded: never run again")
    if config.getoption("--again") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SecondRuns(config), "second-runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is exact; reports carry the mark to the process that has all results."""
    for item in items:
        check = item.get_closest_marker("check")
        if exact(item.nodeid, check.args[0] if check is not None else ""):
            item.add_marker("exact")


def exact(nodeid: str, check: str = "") -> bool:
    """Whether a test is exact by where it lies, its check, or its name: see [Note: exact tests]."""
    path, _, rest = nodeid.partition("::")
    words = set(rest.partition("[")[0].rpartition("::")[2].split("_"))
    folder = path.startswith(tuple(f"{each}/" for each in FOLDERS))
    return folder or check in CHECKS or bool(words & WORDS)


def compares(report: pytest.TestReport) -> bool:
    """Whether the statement that failed compares values; a process's output counts as well."""
    marked = (line for line in report.longreprtext.splitlines() if line[:1] in (">", "E"))
    return any(COMPARISONS.search(line) for line in marked)


class _SecondRuns:
    """What fails, what came of it when it ran alone, and what was seen before."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: list[str] = []
        self._flaky: dict[str, list[pytest.TestReport]] = {}

    @property
    def _stats(self) -> dict[str, list[object]]:
        reporter: pytest.TerminalReporter = self._config.pluginmanager.getplugin("terminalreporter")
        return reporter.stats

    @pytest.hookimpl(tryfirst=True)  # while others have not begun to end this process
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        failed: dict[str, list[pytest.TestReport]] = {}
        for report in [*self._stats.get("failed", []), *self._stats.get("error", [])]:
            if isinstance(report, pytest.TestReport):
                failed.setdefault(report.nodeid, []).append(report)
        chosen = {name: reports for name, reports in failed.items() if self._may(name, reports)}
        if len(chosen) > MOST:
            self._say(f"{len(chosen)} tests failed: more than {MOST} are not run again")
            return
        before = [name for _, name, _, _ in entries(self._page)[:MEMORY]]
        for name, reports in chosen.items():
            if not passes(self._config, name):
                self._say(f"FAILED AGAIN, alone: {name}")
                continue
            if cell(name) in before:
                self._say(f"FLAKY AGAIN, and so it fails: {name}; see {PAGE}")
            else:
                self._flaky[name] = reports
            add(self._page, name, reports[0])
        self._forgive(session)

    @property
    def _page(self) -> Path:
        return self._config.rootpath / PAGE

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _may(self, name: str, reports: Sequence[pytest.TestReport]) -> bool:
        """Whether these failures of a test may be the machine's."""
        if any(report.when not in PHASES for report in reports):
            self._say(f"not run again, its process crashed: {name}")
        elif any("exact" in report.keywords or compares(report) for report in reports):
            self._say(f"not run again, it is exact: {name}")
        else:
            return True
        return False

    def _forgive(self, session: pytest.Session) -> None:
        """Counts what is flaky as that; where nothing else has failed, the run has not."""
        for kind in ("failed", "error"):
            left = [each for each in self._stats.pop(kind, []) if not self._is_flaky(each)]
            if left:
                self._stats[kind] = left
        if self._flaky:
            reporter = self._config.pluginmanager.getplugin("terminalreporter")
            reporter._add_stats("flaky", [reports[0] for reports in self._flaky.values()])
            if not self._stats.get("failed") and not self._stats.get("error"):
                session.exitstatus = pytest.ExitCode.OK

    def _is_flaky(self, report: object) -> bool:
        return isinstance(report, pytest.TestReport) and report.nodeid in self._flaky

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """How what is flaky failed at first, and what the second runs have shown."""
        if not self._lines and not self._flaky:
            return
        terminalreporter.section("run again, alone")
        for name, reports in self._flaky.items():
            for report in reports:
                terminalreporter.write_line(f"{name}, {report.when}:")
                terminalreporter.write_line(report.longreprtext)
        for line in self._lines:
            terminalreporter.write_line(line)
        for name in self._flaky:
            terminalreporter.write_line(f"FLAKY {name}")


def passes(config: pytest.Config, name: str) -> bool:
    """Whether a test passes in a process of its own, in which nothing else runs; with the same
    seed, for else another draw would be taken for luck.
    """
    words = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    if hasattr(config.option, "tier"):
        words += ["--tier", "all"]  # whatever this run has left out or sampled
    if (seed := getattr(config.option, "randomly_seed", None)) is not None:
        words += [f"--randomly-seed={seed}"]
    if not config.pluginmanager.hasplugin("randomly"):
        words += ["-p", "no:randomly"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        words += [f"--junitxml={result}", f"--rootdir={config.rootpath}", name]
        command = [sys.executable, "-m", "pytest", *words]
        try:
            done = subprocess.run(
                command,
                cwd=config.rootpath,
                env=dict(os.environ),
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0 or not result.is_file():
            return False
        cases = list(ElementTree.parse(result).iter("testcase"))
        return len(cases) == 1 and all(each.tag in _SAID for each in cases[0])


_SAID = ("properties", "system-out", "system-err")  # what a testcase that passed may have


# ---- the page ----


def entries(page: Path) -> list[tuple[str, str, str, str]]:
    """Of a page, the newest first: the date, the test, the cause or the suspicion, what was looked
    at.
    """
    if not page.is_file():
        return []
    return [match.groups() for match in ROW.finditer(page.read_text(encoding="utf-8"))]  # type: ignore[misc]


def cell(name: str) -> str:
    """A test's name, as a cell of the page has it."""
    return name.replace("|", "\\|")


def add(page: Path, name: str, report: pytest.TestReport) -> None:
    """Writes an entry above the others, for whoever commits it."""
    text = page.read_text(encoding="utf-8") if page.is_file() else HEAD
    errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line[:1] == "E"]
    said = re.sub(r"[|`]", "'", (errors or ["no words"])[0])[:160]
    safe = said.encode("ascii", "replace").decode()
    row = f"| {datetime.date.today()} | `{cell(name)}` | {UNKNOWN}`{safe}` | {UNKNOWN.strip()} |\n"
    if RULE not in text:  # a table without rows is none on a code host, or in the site
        text = f"{text.rstrip()}\n\n{TABLE}"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text.replace(RULE, RULE + row, 1), encoding="utf-8")
