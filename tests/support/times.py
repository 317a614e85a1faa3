"""How long tests take: seconds of a function's mean case, in tests/testdata/times.txt.

::

    make test ARGS=--times          measures them anew

The tiers (``tests/support/tiers.py``) and the order of files (``tests/support/order.py``) read
them.  A function that is not there, as it is new or takes less than ``LEAST``, counts as 0 s.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = ROOT / "tests" / "testdata" / "times.txt"
LEAST = 0.01


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--times``."""
    parser.addoption("--times", action="store_true", help="write tests/testdata/times.txt anew")


def function(nodeid: str) -> str:
    """The name of a test without that of its case."""
    return nodeid.partition("[")[0]


@functools.cache
def read() -> Mapping[str, float]:
    """By function, seconds of its mean case."""
    lines = PATH.read_text().splitlines()
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines)}


class _Clock:
    """Adds up what the phases of each test took."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def write(self) -> None:
        """Writes the means of what has run; the rest keeps what it had, or goes with its file."""
        cases: defaultdict[str, list[float]] = defaultdict(list)
        for nodeid, seconds in self._seconds.items():
            cases[function(nodeid)].append(seconds)
        means = dict(read()) | {name: sum(each) / len(each) for name, each in cases.items()}
        files = {name: ROOT / name.partition("::")[0] for name in means}
        kept = sorted(name for name in means if means[name] >= LEAST and files[name].exists())
        lines = [f"{means[name]:.2f} {name}\n" for name in kept]
        PATH.write_text("".join(lines))


def pytest_configure(config: pytest.Config) -> None:
    """The clock stands in the process that has all results."""
    if config.getoption("--times") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Clock(), "times")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Writes them."""
    if (clock := config.pluginmanager.get_plugin("times")) is not None:
        clock.write()
