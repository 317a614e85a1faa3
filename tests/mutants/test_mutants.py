"""Mutants are found, chosen and compared, and a run tells those that tests see from others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutants.__main__ import compare
from tests.mutants.points import mutants, mutated, sample
from tests.support.load import scaled
from tests.support.sources import ROOT

KINDS = [
    ("x = a < b", ["comparison '<' -> '<='"]),
    ("x = a >= b != c", ["comparison '>=' -> '>'", "comparison '!=' -> '=='"]),
    ("x = a not in b", ["comparison 'not in' -> 'in'"]),
    ("x = a is b", ["comparison 'is' -> 'is not'"]),
    ("x = a or b", ["boolean 'or' -> 'and'"]),
    ("x = not a", ["not 'not a' -> 'a'"]),
    ("x = [1, True]", ["constant '1' -> '2'", "constant 'True' -> 'False'"]),
    ("x = a + b * c", ["arithmetic '+' -> '-'", "arithmetic '*' -> '//'"]),
    ("x += y", ["arithmetic '+=' -> '-='", "dropped 'x += y' -> 'pass'"]),
    ("f(x)", ["dropped 'f(x)' -> 'pass'"]),
    ("x.y = z", ["dropped 'x.y = z' -> 'pass'"]),
    ("x[y]: int = z", ["dropped 'x[y]: int = z' -> 'pass'"]),
    ("if a: x = y", ["condition 'a' -> 'not a'"]),
    ("if a == b: x = y", ["comparison '==' -> '!='"]),  # which is its negation
    ("if not a: x = y", ["not 'not a' -> 'a'"]),
    ("while a: break", ["condition 'a' -> 'not a'", "dropped 'break' -> 'pass'"]),
    ("def f(): return x", ["return 'return x' -> 'return None'"]),
    ("def f(): return", ["dropped 'return' -> 'pass'"]),
    ("raise KeyError(a + 1)", ["dropped 'raise KeyError(a + 1)' -> 'pass'"]),
    ("x = lambda: a - b", ["arithmetic '-' -> '+'"]),
]
LEFT_OUT = [
    "'''a docstring'''",
    "x: list[a < b]",
    "def f(x: a + b) -> a - b: pass",
    "@f(True)\ndef g(): pass",
    "assert a < b, f(1)",
    "x = zip(a, b, strict=True)",
    "if TYPE_CHECKING: f(1)",
    "__all__ = [1]",
    "log.warning('%s', 1)",
    "def __repr__(self): return f(1)",
    "x = f'{a + 1}' + y",
    "x = KeyError(a + 1)",
    "MOST = 2**10 - 1",
]
PRODUCT = """
    import time

    from numba import njit

    FACTORS = {"double": 2, "triple": 3}

    def scaled(value, name="double"):
        if value < 0:
            raise ValueError(value)
        return value * FACTORS[name]

    def wait(done):
        while not done:
            time.sleep(0.001)

    def unused():
        return [5]

    @njit(cache=True)
    def inner(x):
        return x - 1

    @njit(cache=True)
    def outer(x):
        return inner(x)
"""
TESTS = """
    import product

    def test_values_are_scaled():
        assert product.scaled(3) == 6

    def test_waits_end():
        product.wait(True)

    def test_kernels_call_each_other():
        assert product.outer(3) == 2
"""
JOBS = """
    import resource, time
    from tests.mutants import processes
    from tests.mutants.processes import Job, in_processes

    def grow():
        kept = []
        while True:
            kept.append(bytearray(1 << 20))

    def spin():
        resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
        while True:
            pass

    def fail():
        raise ValueError

    processes.MEMORY = 1 << 28
    jobs = [
        Job("grows", grow), Job("spins", spin), Job("sleeps", lambda: time.sleep(1000), 0.1),
        Job("ends", lambda: 0), Job("says 3", lambda: 3), Job("fails", fail),
    ]
    for subject, status, _ in in_processes(iter(jobs), 2):
        print(subject, status)
"""


def names(source: str) -> list[str]:
    """The mutants of a source, without their places."""
    return [f"{x.kind} {x.before!r} -> {x.after!r}" for x in mutants(source, "x.py")]


@pytest.mark.parametrize(("source", "expected"), KINDS, ids=[source for source, _ in KINDS])
def test_each_kind_of_code_has_its_mutants(source: str, expected: list[str]) -> None:
    """They stand in the order of the source, and each compiles to other code."""
    assert names(source) == expected
    plain = compile(source, "x.py", "exec")
    for each in mutants(source, "x.py"):
        assert mutated(source, each, "x.py") != plain


@pytest.mark.parametrize("source", LEFT_OUT)
def test_code_that_promises_nothing_has_none(source: str) -> None:
    """Texts, types and names for numbers are not what a test holds."""
    assert names(source) == []


def test_a_mutant_knows_its_statement_and_its_function() -> None:
    """The lines tell which tests execute it; a default is computed when the module is imported."""
    source = (
        "def f(x=1):\n    if (\n        x\n        > 2\n    ):\n        x = g(\n            3)\n"
    )
    found = {each.before: each for each in mutants(source, "x.py")}
    assert not found["1"].inside and found["2"].inside
    assert (found["2"].first, found["2"].last) == (2, 5)
    assert (found["3"].first, found["3"].last) == (6, 7)


def test_a_sample_has_its_share_of_each_file() -> None:
    """The same for the same seed; no mutant comes twice."""
    found = [each for path in ("a", "b", "c") for each in mutants("x = [0, 1, 2, 3] + y", path)]
    chosen = sample(found, 6, seed=1)
    assert chosen == sample(found, 6, seed=1) and len(set(chosen)) == 6
    assert [each.path for each in chosen] == ["a", "a", "b", "b", "c", "c"]
    assert any(sample(found, 6, seed) != chosen for seed in range(2, 5))
    assert sample(found, 99, seed=1) == found


def test_a_comparison_names_what_is_no_longer_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is 1 then."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    outcomes = ("killed", "timed out", "survived", "not executed")
    said = {f"{a} {b}": (a, b) for a in outcomes for b in outcomes}
    for path, which in ((old, 0), (new, 1)):
        found = {name: [pair[which], 0.1] for name, pair in said.items()}
        path.write_text(json.dumps({"mutants": found}))

    assert compare(old, new) == 1
    assert capsys.readouterr().out.splitlines() == [
        "lost: killed survived",
        "lost: killed not executed",
        "lost: timed out survived",
        "lost: timed out not executed",
        "16 mutants in both: 4 lost, 4 won",
    ]
    assert compare(old, old) == 0


@pytest.mark.processes
def test_a_process_ends_at_each_limit() -> None:
    """Those of its time, of a core's time and of memory; with its own status otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(JOBS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60.0),
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        "ends 0",
        "fails 70",
        "grows None",
        "says 3 3",
        "sleeps None",
        "spins None",
    ]


def run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """All mutants of the product, held against these tests."""
    (folder / "product.py").write_text(dedent(PRODUCT))
    (folder / "test_product.py").write_text(dedent(tests))
    words = [
        "--files",
        "product.py",
        "--tests",
        "test_product.py",
        "--timeout",
        "2",
        "--json",
        "o.json",
    ]
    return subprocess.run(
        [sys.executable, "-m", "tests.mutants", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        capture_output=True,
        text=True,
        timeout=scaled(100.0),
    )


@pytest.mark.processes
def test_a_run_tells_mutants_that_tests_see_from_others(tmp_path: Path) -> None:
    """In functions, in kernels that others call, and in what an import runs; no file changes."""
    done = run(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "o.json").read_text())["mutants"]
    outcomes = {name.partition(" ")[2]: outcome for name, (outcome, _) in found.items()}
    assert len(found) == len(outcomes) and outcomes == {
        "constant '2' -> '3'": "killed",
        "constant '3' -> '4'": "survived",
        "comparison '<' -> '<='": "survived",
        "condition 'value < 0' -> 'not value < 0'": "killed",
        "constant '0' -> '1'": "survived",
        "dropped 'raise ValueError(value)' -> 'pass'": "not executed",
        "arithmetic '*' -> '//'": "killed",
        "return 'return value * FACTORS[name]' -> 'return None'": "killed",
        "not 'not done' -> 'done'": "timed out",
        "dropped 'time.sleep(0.001)' -> 'pass'": "not executed",
        "return 'return [5]' -> 'return None'": "not executed",
        "constant '5' -> '6'": "not executed",
        "arithmetic '-' -> '+'": "killed",
        "constant '1' -> '2'": "killed",
        "return 'return x - 1' -> 'return None'": "killed",
        "return 'return inner(x)' -> 'return None'": "killed",
    }
    assert (tmp_path / "product.py").read_text() == dedent(PRODUCT)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (TESTS.replace("== 6", "== 7"), "assert 6 == 7"),
        (f"{TESTS}\n    import missing", "No module named 'missing'"),
        ("", "no tests ran"),
    ],
    ids=["fail", "cannot be imported", "are none"],
)
def test_tests_that_fail_anyway_kill_nothing(tmp_path: Path, tests: str, said: str) -> None:
    """The run says how they fail, and ends."""
    done = run(tmp_path, tests)
    assert done.returncode == 1
    assert said in done.stderr and "fail without a mutant" in done.stderr
    assert not (tmp_path / "o.json").exists()
