"""Which tests a run takes: ``--tier fast``, ``test`` (unless said otherwise) or ``all``.

==========  ========================================================================================
fast        starts no process, and takes no function that is slow (``tests/support/times.py``);
            leaves out ``long``, ``matrix`` and ``containers``, too
test        leaves out what is marked ``matrix``, of each matrix it takes the diagonal; ``long``,
            for which other tests stand; and ``containers``.  Of a function with many cases it takes
            those that fit into ``CASES_SECONDS``, and ``FEWEST`` anyway: the others are ``long``
all         everything
==========  ========================================================================================

At the end a run says what its tier has left out.  In every tier a test that starts a process has to
be marked ``processes``: a process that starts in another one is refused.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support import times
from tests.support.fork_server import ForkServer

SLOW_SECONDS = 0.03  # of a function's mean case
CASES_SECONDS, FEWEST = 1.0, 2
LEFT_OUT = {
    "fast": ("matrix", "long", "containers", "processes", "slow"),
    "test": ("matrix", "long", "containers"),
    "all": (),
}
WORDS = {
    "matrix": "of the complete matrices (make check-equalities, check-faults, ...)",
    "long": "for which others of their class stand (make check-long)",
    "containers": "of the image (make check-image)",
    "processes": "that start processes",
    "slow": "that take long each",
}
# a parameter like another one that ``make test`` takes, as both need seconds of processes
RARE = functools.partial(pytest.param, marks=pytest.mark.long)
_left_out = pytest.StashKey[Counter[str]]()
_forbidden: list[str] = []  # the test that runs now, where it may not start processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--tier``."""
    parser.addoption(
        "--tier",
        choices=list(LEFT_OUT),
        default="test",
        help="which tests: see tests/support/tiers.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Nothing has been left out yet."""
    config.stash[_left_out] = Counter()


def taken(cases: int, seconds: float) -> Sequence[int]:
    """The places of the cases that ``make test`` takes: the first, and others evenly behind it.

    Args:
        cases: the number of a function's cases.
        seconds: the mean of what a case takes.

    Example::

        >>> taken(9, 0.25)
        [0, 2, 4, 6]
        >>> taken(3, 60.0)
        [0, 1]
    """
    fitting = int(CASES_SECONDS / seconds) if seconds else cases
    number = min(cases, max(FEWEST, fitting))
    return [place * cases // number for place in range(number)]


def _declared(item: pytest.Item) -> tuple[Sequence[int], str]:
    """The place of a case among its function's, however a seed has mixed them."""
    case = getattr(item, "callspec", None)
    return tuple(case.indices.values()) if case else (), item.nodeid


def _marks(item: pytest.Item) -> set[str]:
    """Their names, from its own to its module's."""
    return {mark.name for mark in item.iter_markers()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the tier leaves out; a check (``--check``) takes its own choice."""
    if config.getoption("--check"):
        return
    seconds = times.read()
    functions = defaultdict(list)
    for item in items:
        if seconds.get(times.function(item.nodeid), 0.0) > SLOW_SECONDS:
            item.add_marker("slow")
        if _marks(item).isdisjoint(LEFT_OUT["test"]):
            functions[times.function(item.nodeid)].append(item)
    for name, cases in functions.items():
        kept = set(taken(len(cases), seconds.get(name, 0.0)))
        for place, item in enumerate(sorted(cases, key=_declared)):
            if place not in kept:
                item.add_marker("long")
    counts, kept, left = config.stash[_left_out], [], []
    reasons = LEFT_OUT[config.getoption("--tier")]
    for item in items:
        marks = _marks(item)
        reason = next((mark for mark in reasons if mark in marks), None)
        (kept if reason is None else left).append(item)
        if reason is not None:
            counts[reason] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


# ---- what was left out, also where workers have collected the tests ----


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that has started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[_left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every worker collects the same tests: one's counts are all."""
    node.config.stash[_left_out] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """One line for each kind of test that was left out."""
    for mark, count in sorted(config.stash[_left_out].items()):
        terminalreporter.write_line(f"left out: {count} tests {WORDS[mark]}")


# ---- processes ----


def _guard(owner: Any, name: str) -> None:
    """Lets a function that starts processes refuse where none may start.

    (An audit hook would see them all, but Python code in it makes ``sys.settrace`` of two threads,
    as coverage calls it, fail.)
    """
    start = getattr(owner, name)

    @functools.wraps(start)
    def checked(*arguments: Any, **named: Any) -> Any:
        if _forbidden:
            raise RuntimeError(f"{_forbidden[0]} starts a process and is not marked `processes`")
        return start(*arguments, **named)

    setattr(owner, name, checked)


_guard(multiprocessing.process.BaseProcess, "start")
_guard(subprocess.Popen, "__init__")
_guard(ForkServer, "order")
for _name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
    _guard(os, _name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """While a test without the mark runs, no process starts."""
    if not item.get_closest_marker("processes"):
        _forbidden.append(item.nodeid)
    try:
        return (yield)
    finally:
        _forbidden.clear()
