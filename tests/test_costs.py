"""The costs of seven steps at both ends, counted: held against ``tests/testdata/costs/``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.costs import KINDS
from tests.support.pages import ROOT
from tests.support.processes import PATIENCE, Processes
from tests.support.step_costs import CASES
from tests.support.transcript import TESTDATA

MAIN = "from tests.support.step_costs import main; main()"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
BAND = 0.06  # of the counts of many trainers
SWITCHES_TIMES, SWITCHES_MORE = 2, 10  # of a transcript's, and so many more: they may come to that
TRIES = 3  # until they do not
HEAD = """\
# What a step costs: counted, not timed, so the same on a busy machine.
# Calls, locks and system calls of one trainer's step are exact; of 16 trainers' within 6 %.
# Voluntary switches are the fewest of 20 steps, on one processor; a run fails above twice as many
# and 10, three times in a row.
# pytest --rewrite tests/test_costs.py writes it anew; where a number rises the commit says why.
"""
Counts = dict[str, list[int]]  # by end, of each of KINDS


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_a_step_costs_what_it_did(request: pytest.FixtureRequest, case: str) -> None:
    """Calls, locks and system calls are those of the transcript: to the last one where one trainer
    steps, and within ``BAND`` where many do; voluntary switches are not many more.
    """
    if not Path("/proc/self/task").is_dir():
        pytest.skip("only Linux tells the switches of a thread")
    found, path = measured(case), transcript(case)
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shown(case, found))
    if not path.is_file():
        pytest.skip(f"no transcript of Python {VERSION}: pytest --rewrite writes it")
    expected, band = told(path.read_text()), BAND if CASES[case][0] > 1 else 0.0
    wrong = different(expected, found, band)
    for _ in range(TRIES - 1):
        if wrong and all(KINDS[-1] in each for each in wrong):
            wrong = different(expected, measured(case), band)

    assert wrong == [], f"{case}: see the head of {path.name}"


def measured(case: str) -> Counts:
    """The costs of a step, in a process of its own."""
    processes = Processes(ROOT)
    try:
        process = processes.python("costs", "-c", MAIN, case, PYTHONPATH=str(ROOT))
        assert process.status(3 * PATIENCE) == 0, process
        said = json.loads(process.lines[-1])
    finally:
        processes.end()
    assert said["unknown"] == [], "add these threads to an end, in tests/support/costs.py"
    found: Counts = said["costs"]
    return found


def transcript(case: str) -> Path:
    """Of this Python, as others call otherwise."""
    return TESTDATA / "costs" / VERSION / (re.sub(r"\W+", "_", case) + ".txt")


def shown(case: str, found: Counts) -> str:
    """A transcript."""
    rows = [
        ", ".join(f"{count} {kind}" for count, kind in zip(each, KINDS, strict=True))
        for each in found.values()
    ]
    ends = "".join(f"{end}: {row}\n" for end, row in zip(found, rows, strict=True))
    return f"{HEAD}\n{case}\n{ends}"


def told(text: str) -> Counts:
    """What a transcript says."""
    rows = re.findall(r"^(trainer|server): (.*)$", text, re.MULTILINE)
    return {end: [int(number) for number in re.findall(r"\d+", row)] for end, row in rows}


def different(expected: Counts, found: Counts, band: float) -> list[str]:
    """What costs something else than a transcript says."""
    wrong = []
    for end, numbers in expected.items():
        for kind, before, now in zip(KINDS, numbers, found[end], strict=True):
            if kind == KINDS[-1]:
                same = now <= SWITCHES_TIMES * before + SWITCHES_MORE
            else:
                same = abs(now - before) <= band * before
            if not same:
                wrong.append(f"{end}: expected {before} {kind}, got {now}")
    return wrong


def test_a_difference_is_told_by_end_and_kind() -> None:
    """Both more and less; of switches only what is many more."""
    before = {"trainer": [1000, 50, 3, 5], "server": [800, 40, 3, 2]}
    assert different(told(shown("x", before)), before, 0.0) == []
    now = {"trainer": [1001, 50, 3, 15], "server": [800, 39, 3, 200]}
    assert different(before, now, 0.0) == [
        "trainer: expected 1000 Python calls, got 1001",
        "server: expected 40 locks, got 39",
        "server: expected 2 voluntary switches, got 200",
    ]
    now = {"trainer": [1060, 51, 3, 0], "server": [800, 40, 4, 0]}
    assert different(before, now, 0.05) == [
        "trainer: expected 1000 Python calls, got 1060",
        "server: expected 3 system calls, got 4",
    ]
