"""Failures that may be the machine's run once more at the end, alone: what then passes is flaky.
What is exact never runs again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import flakes
from tests.support.pages import ROOT
from tests.support.tiers import RARE

pytestmark = pytest.mark.processes

CONFTEST = """
pytest_plugins = ["tests.support.flakes"]

def pytest_addoption(parser):
    parser.addoption("--tier", default="test")
"""
TESTS = """
import os, random
from pathlib import Path
import pytest

TRIED = Path(__file__).with_name("tried")

def tried(name):
    with open(TRIED, "a") as file:
        print(name, os.getpid(), file=file)
    return sum(line.split()[0] == name for line in TRIED.read_text().splitlines())

def test_right():
    tried("right")

def test_flaky():
    assert tried("flaky") > 1, "late | by 3 s"

@pytest.fixture
def late_fixture():
    assert tried("late_fixture") > 1

def test_with_a_late_fixture(late_fixture): pass

def test_wrong():
    tried("wrong")
    assert False

def test_sums_are_equal():
    assert tried("equal") > 1

@pytest.mark.exact
def test_marked():
    assert tried("marked") > 1

class torch:
    equal = staticmethod(lambda name: tried(name) > 1)

def test_sums():
    assert torch.equal("sums")

def test_of_a_process_that_crashes():
    tried("crashes")
    os._exit(3)

def test_skipped_the_second_time():
    if tried("skipped") > 1:
        pytest.skip("no")
    assert False

def test_of_the_seed():
    tried(f"seed-{random.random()}")
    assert tried("seed") > 1

def test_interrupted():
    tried("interrupted")
    raise KeyboardInterrupt
"""
WORKERS = [RARE(""), "-n 2"]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder of tests, of which each counts how often it has been tried."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_toy.py").write_text(TESTS)
    return tmp_path


def run(toy: Path, names: str, words: str = "") -> tuple[int, list[str], list[str]]:
    """How a run of some tests ends, its lines, and what was tried."""
    command = [sys.executable, "-m", "pytest", "--again", "-p", "no:timeout", *words.split()]
    done = subprocess.run(
        [*command, *(f"test_toy.py::test_{name}" for name in names.split())],
        cwd=toy,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    path = toy / "tried"
    tried = [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []
    return done.returncode, done.stdout.splitlines(), sorted(tried)


@pytest.mark.parametrize("workers", WORKERS)
def test_what_passes_alone_is_flaky_and_does_not_fail_the_run(toy: Path, workers: str) -> None:
    """It is printed, counted in the last line, and an entry of the page."""
    status, lines, tried = run(toy, "right flaky with_a_late_fixture", workers)

    assert status == 0, lines
    assert tried == ["flaky", "flaky", "late_fixture", "late_fixture", "right"]
    assert "FLAKY test_toy.py::test_flaky" in lines
    assert "FLAKY test_toy.py::test_with_a_late_fixture" in lines
    assert "1 passed, 2 flaky in" in lines[-1] and "failed" not in lines[-1]
    found = {name: (cause, seen) for _, name, cause, seen in flakes.entries(toy / flakes.PAGE)}
    assert set(found) == {"test_toy.py::test_flaky", "test_toy.py::test_with_a_late_fixture"}
    assert "late ' by 3 s" in found["test_toy.py::test_flaky"][0]


@pytest.mark.parametrize(
    "name", ["wrong", "skipped_the_second_time"], ids=["fails again", "does not run again"]
)
def test_what_does_not_pass_alone_fails_the_run(toy: Path, name: str) -> None:
    """A failure, and a skip, are not a pass; what is flaky beside it is told all the same."""
    status, lines, tried = run(toy, f"{name} flaky")

    assert status == 1 and len(tried) == 4
    assert f"FAILED AGAIN, alone: test_toy.py::test_{name}" in lines
    assert "FLAKY test_toy.py::test_flaky" in lines
    assert "1 failed, 1 flaky in" in lines[-1]


@pytest.mark.parametrize("name", ["sums_are_equal", RARE("marked"), RARE("sums")])
def test_what_is_exact_is_never_run_again(toy: Path, name: str) -> None:
    """By its name, by its mark, by the statement that failed."""
    status, lines, tried = run(toy, name)

    assert status == 1 and len(tried) == 1
    assert f"not run again, it is exact: test_toy.py::test_{name}" in lines
    assert not (toy / flakes.PAGE).exists()


@pytest.mark.long
def test_the_second_sighting_of_a_name_fails_the_run(toy: Path) -> None:
    """Among the ten newest entries; behind ten others it is forgotten."""
    assert run(toy, "flaky")[0] == 0
    (toy / "tried").unlink()
    status, lines, _ = run(toy, "flaky")
    assert status == 1 and "1 failed in" in lines[-1]
    assert any(line.startswith("FLAKY AGAIN") for line in lines)

    page = toy / flakes.PAGE
    others = "".join(f"| 2026-01-02 | `test_{n}` | slow | logs |\n" for n in range(flakes.MEMORY))
    page.write_text(page.read_text().replace(flakes.RULE, flakes.RULE + others))
    (toy / "tried").unlink()
    assert run(toy, "flaky")[0] == 0
    assert len(flakes.entries(page)) == flakes.MEMORY + 3


def test_a_run_without_failures_says_nothing(toy: Path) -> None:
    """And it writes no page."""
    status, lines, tried = run(toy, "right")

    assert status == 0 and tried == ["right"] and "1 passed in" in lines[-1]
    assert not any("alone" in line or "FLAKY" in line for line in lines)
    assert not (toy / flakes.PAGE).exists()


@pytest.mark.long
def test_a_crash_an_interrupt_and_a_broken_file_fail_the_run(toy: Path) -> None:
    """None of them is run again."""
    status, lines, tried = run(toy, "of_a_process_that_crashes right", "-n 2")
    assert status == 1 and tried.count("crashes") == 1, lines
    assert any(line.startswith("not run again, its process crashed") for line in lines)

    assert run(toy, "interrupted")[0] == 2
    (toy / "test_toy.py").write_text("import nothing_of_this_name\n")
    for words in WORKERS:
        assert run(toy, "right", words)[0] not in (0, 5)


@pytest.mark.long
def test_too_many_failures_are_not_run_again(toy: Path) -> None:
    """So many do not fail by chance."""
    many = "import test_toy\n" + "".join(
        f"def test_late_{n}(): assert test_toy.tried('late{n}') > 1\n"
        for n in range(flakes.MOST + 1)
    )
    (toy / "test_toy.py").write_text(TESTS + many)
    status, lines, tried = run(toy, " ".join(f"late_{n}" for n in range(flakes.MOST + 1)))

    assert status == 1 and len(tried) == flakes.MOST + 1
    assert f"{flakes.MOST + 1} tests failed: more than {flakes.MOST} are not run again" in lines


@pytest.mark.parametrize("workers", WORKERS)
def test_the_second_run_draws_what_the_first_has_drawn(toy: Path, workers: str) -> None:
    """A test that fails by its random numbers fails by them again."""
    _, lines, tried = run(toy, "of_the_seed", workers)

    assert len({name for name in tried if name.startswith("seed-")}) == 1, lines
    assert len(tried) == 4


@pytest.mark.parametrize(
    "nodeid, check, expected",
    [
        ("tests/histories/test_history.py::test_random_histories", "", True),
        ("tests/fuzz/test_fuzz.py::test_fuzz", "", True),
        ("tests/trainer/test_x.py::test_a_step[adam]", "equalities", True),
        ("tests/cluster/test_faults.py::test_no_step_is_lost[sync]", "faults", False),
        ("tests/x.py::test_two_trainers_equal_one[equal]", "", True),
        ("tests/x.py::TestThem::test_it_is_the_same_to_the_bit", "", True),
        ("tests/x.py::test_a_server_starts[same]", "", False),
        ("tests/fuzzy.py::test_a_server_starts", "", False),
    ],
)
def test_what_is_exact(nodeid: str, check: str, expected: bool) -> None:
    """Seeded folders, checks against plain torch, and a promise of equality in a name."""
    assert flakes.exact(nodeid, check) is expected


def test_the_folders_and_checks_of_the_rule_exist() -> None:
    """A folder that moves takes its rule along."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))

    assert [each for each in flakes.FOLDERS if not (ROOT / each).is_dir()] == []
    assert [
        each
        for each in flakes.CHECKS
        if f'@crossed("{each}"' not in tests.replace("@crossed(\n    ", "@crossed(")
    ] == []
