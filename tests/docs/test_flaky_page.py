"""Promises of docs/checks/flaky.md: a committed entry says its cause, and what was looked at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import flakes
from tests.support.pages import ROOT

pytestmark = pytest.mark.processes  # git says what is committed


def committed() -> str:
    """The page as the last commit has it: what a run has written since is not looked at yet.  Where
    there is no git, the file.
    """
    try:
        command = ["git", "show", f"HEAD:{flakes.PAGE.as_posix()}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode != 0:
        return (ROOT / flakes.PAGE).read_text(encoding="utf-8")
    return done.stdout


def faults(text: str, folder: Path) -> list[str]:
    """What is wrong with the entries of a page."""
    (folder / "flaky.md").write_text(text)
    found, rows = [], text.partition(flakes.RULE)[2].splitlines()
    entries = flakes.entries(folder / "flaky.md")
    if len(rows) != len(entries):
        found.append(f"{len(rows)} rows, of which {len(entries)} are entries")
    dates = [date for date, *_ in entries]
    if dates != sorted(dates, reverse=True):
        found.append("the newest entry does not stand first")
    for _, name, cause, looked in entries:
        if not cause or cause.startswith(flakes.UNKNOWN.strip()):
            found.append(f"{name}: no cause or suspicion")
        if not looked or looked.startswith(flakes.UNKNOWN.strip()):
            found.append(f"{name}: nothing was looked at")
        if not exists(name) and not ("successor" in cause and exists(cause.split("`")[1])):
            found.append(f"{name}: expected a test, or a cause that names its `successor`")
    return found


def exists(name: str) -> bool:
    """Whether there is a test of this name."""
    path, _, function = name.partition("[")[0].partition("::")
    file = ROOT / path
    return file.is_file() and f"def {function.rpartition('::')[2]}(" in file.read_text()


def test_every_committed_entry_says_what_was_looked_at(tmp_path: Path) -> None:
    """A cause or a suspicion, too; and a test that is gone has a successor."""
    assert faults(committed(), tmp_path) == []


@pytest.mark.parametrize(
    "row, expected",
    [
        ("{me} | a late thread | the log, 100 runs at load 20", ""),
        ("{me} | not yet: `assert 3 > 4` | the log", "no cause or suspicion"),
        ("{me} |  | the log", "no cause or suspicion"),
        ("{me} | a late thread | not yet:", "nothing was looked at"),
        ("{me} | a late thread |", "nothing was looked at"),
        ("`tests/gone.py::test_it` | a late thread | the log", "expected a test"),
        ("`tests/gone.py::test_it` | its successor is {me} | the log", ""),
        ("{me} | a row of three cells", "1 rows, of which 0"),
    ],
)
def test_an_entry_that_says_less_is_refused(row: str, expected: str, tmp_path: Path) -> None:
    """The entry that a run has written is one, until somebody has completed it."""
    me = "`tests/docs/test_flaky_page.py::test_an_entry_that_says_less_is_refused[3]`"
    text = f"{flakes.HEAD}| 2026-01-02 | {row.format(me=me)} |\n"
    found = faults(text, tmp_path)

    assert len(found) == bool(expected) and expected in "".join(found)
