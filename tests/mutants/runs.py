"""The runs of the mutants: one process imports and collects the tests once, and forks for each.

[Note: two ways]  A mutant of a function's body is put into the forked process as the function's new
code; kernels that reach it are compiled anew.  What runs while modules are imported (the statements
of a module or a class, and functions that they call) cannot be changed so late: such a mutant's
process imports and collects the tests by itself, from the changed source.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import coverage
import numba
import pytest
from hypothesis import Phase, settings
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from tests.mutants.points import COMPILERS, Mutant, mutated
from tests.mutants.processes import Job, Process, in_processes

KILLED, TIMED_OUT, SURVIVED, NOT_EXECUTED = "killed", "timed out", "survived", "not executed"
OPTIONS = ["-x", "-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:randomly"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by then
TO_IMPORT = 97  # the status of a process whose mutant is to be imported: see [Note: two ways]
IMPORTING = "while importing"  # what executes a line before the first test does
TIMES, SECONDS = (
    5.0,
    4.0,
)  # a test's limit, by its time without a mutant: how often, and how much more
COMPILING = 60.0  # more, for its kernels

Lines = dict[str, dict[int, set[str]]]  # by file and line, who executes it


@dataclass(frozen=True)
class Verdict:
    """The fate of a mutant."""

    mutant: Mutant
    outcome: str
    seconds: float


def _outcome(status: int | None) -> str:
    return {None: TIMED_OUT, 0: SURVIVED}.get(status, KILLED)


# ---- without a mutant ----


class _Tracer:
    """Executed lines of the files that have mutants, and in which context."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = {path: os.path.abspath(path) for path in files}
        self._coverage = coverage.Coverage(
            data_file=None, include=[*self._files.values()], config_file=False
        )
        self.start, self.stop = self._coverage.start, self._coverage.stop
        self.enter = self._coverage.switch_context

    def lines(self) -> Lines:
        """Says which tests execute which lines, after the end."""
        with warnings.catch_warnings(action="ignore"):  # that there are none
            data = self._coverage.get_data()
        found = {path: data.contexts_by_lineno(whole) for path, whole in self._files.items()}
        return {path: {n: {*who} for n, who in lines.items()} for path, lines in found.items()}


@dataclass
class _Found:
    """Of the tests without a mutant: the lines that each executes, and its seconds."""

    lines: Lines = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)  # imported by then, from elsewhere
    failure: str = ""

    def executing(self, mutant: Mutant) -> set[str]:
        """The executors of a mutant's lines: tests, files of tests, IMPORTING."""
        lines = self.lines.get(mutant.path, {})
        span = range(mutant.first, mutant.last + 1)
        return set().union(*(lines.get(line, ()) for line in span))

    def cost(self, item: pytest.Item) -> int:
        """The seconds of a test, roughly, so that the order remains otherwise."""
        return round(math.log2(self.seconds.get(item.nodeid, 0.0) + 0.01))

    def limit(self, tests: Iterable[str]) -> float:
        """The seconds that these tests have together with a mutant."""
        return TIMES * sum(self.seconds.get(test, 0.0) for test in tests)


class _Watch:
    """Pytest's plugin of the run without a mutant.

    What a fixture does may be done for every test of its file: it counts for all of them.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._tracer.enter(_file(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._tracer.enter(item.nodeid)
        try:
            return (yield)
        finally:
            self._tracer.enter(_file(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - began


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class _Bounds:
    """Pytest's plugin of a run with a mutant: a test that never ends is soon over.

    Its limit is of a core's time, so that a busy machine kills no mutant.
    """

    def __init__(self, found: _Found, more: float = 0.0) -> None:
        self._found, self.more = found, more

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        most = time.process_time() + self._found.limit([item.nodeid]) + SECONDS + self.more
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(most), resource.RLIM_INFINITY))


def _is_foreign(module: ModuleType) -> bool:
    """Whether a module is imported from elsewhere, and so not changed."""
    path = str(vars(module).get("__file__", ""))
    return "site-packages" in path or not path.startswith(os.getcwd())


def _run_items(items: Sequence[pytest.Item]) -> int:
    """Runs tests until one fails; the exit status."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            return 1
    return 0


# ---- with one ----


class _Collected:
    """Pytest's plugin of the process that has collected the tests."""

    def __init__(self, run: Run, out: Connection) -> None:
        self._run, self._out = run, out
        self._files = sorted({mutant.path for mutant in run.mutants})
        self._imports = _Tracer(self._files)
        self._imports.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Forks for every mutant, and runs no test itself."""
        self._imports.stop()
        if session.testsfailed or not session.items:
            return None  # pytest says how the collection failed
        gc.unfreeze()  # nobody finds what is frozen
        self._items = session.items
        known = gc.get_objects()  # isinstance would ask proxies for their class
        self._functions = [each for each in known if type(each) is FunctionType]
        self._kernels = [each for each in known if issubclass(type(each), Dispatcher)]
        del known
        gc.collect()
        gc.freeze()
        found = self._without_mutant()
        self._items.sort(key=found.cost)
        found.modules = [name for name, module in [*sys.modules.items()] if _is_foreign(module)]
        self._out.send(found)
        if not found.failure:
            for path, lines in self._imports.lines().items():
                for line in lines:
                    found.lines[path].setdefault(line, set()).add(IMPORTING)
            self._bounds = _Bounds(found)
            session.config.pluginmanager.register(self._bounds)
            for mutant, status, took in in_processes(self._jobs(found), self._run.jobs):
                late = TO_IMPORT if status == TO_IMPORT else _outcome(status)
                self._out.send((mutant, late, took))
        self._out.send(None)
        return True

    def _without_mutant(self) -> _Found:
        """Runs all tests in a process of their own."""
        here, there = Pipe(duplex=False)

        def body() -> int:
            tracer = _Tracer(self._files)
            watch = _Watch(tracer)
            self._items[0].config.pluginmanager.register(watch)
            tracer.start()
            status = _run_items(self._items)
            tracer.stop()
            there.send(_Found(tracer.lines(), dict(watch.seconds)))
            return status

        process = Process(Job(None, body))
        there.close()
        try:
            found: _Found = here.recv()
        except EOFError:
            found = _Found()
        process.wait()
        status, _, log = process.end()
        found.failure = f"{log}\nstatus {status}" if status else ""
        return found

    def _jobs(self, found: _Found) -> Iterator[Job]:
        for mutant in self._run.mutants:
            executing = found.executing(mutant)
            if not mutant.inside or IMPORTING in executing:
                self._out.send((mutant, TO_IMPORT, 0.0))
                continue
            items = [
                item
                for item in self._items
                if mutant.compiled or item.nodeid in executing or _file(item) in executing
            ]
            if not items:
                self._out.send((mutant, NOT_EXECUTED, 0.0))
                continue
            body = partial(self._run_mutated, mutant, items)
            self._bounds.more = COMPILING if mutant.compiled else 0.0
            limit = found.limit(item.nodeid for item in items) + self._bounds.more
            yield Job(mutant, body, limit + self._run.timeout)

    def _run_mutated(self, mutant: Mutant, items: Sequence[pytest.Item]) -> int:
        name = os.path.abspath(mutant.path)
        own = [each for each in self._functions if each.__code__.co_filename == name]
        changed = _put(mutated(Path(name).read_text("utf-8"), mutant, name), own)
        _compile_anew(changed, self._kernels)
        return _run_items(items) if changed else TO_IMPORT


def _codes(code: CodeType) -> Iterator[CodeType]:
    """All code of functions in a module's."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _put(code: CodeType, functions: Sequence[FunctionType]) -> list[FunctionType]:
    """Gives functions their new code; those that have another by that."""
    found: dict[tuple[str, int], list[CodeType]] = defaultdict(list)
    for each in _codes(code):
        found[each.co_qualname, each.co_firstlineno].append(each)
    changed = []
    for function in functions:
        new = found[function.__code__.co_qualname, function.__code__.co_firstlineno]
        if len(new) == 1 and new[0] != function.__code__:
            with suppress(ValueError):  # a closure that has lost a variable
                function.__code__ = new[0]
                changed.append(function)
    return changed


def _compile_anew(changed: Sequence[FunctionType], kernels: Sequence[Any]) -> None:
    """Lets numba's cache give nothing for the kernels that reach these functions."""
    reached, size = {id(function) for function in changed}, 0
    while size < len(reached):
        size = len(reached)
        for kernel in kernels:
            function = kernel.py_func
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            used = [*map(function.__globals__.get, function.__code__.co_names), *cells]
            if any(id(getattr(each, "py_func", each)) in reached for each in used):
                reached.add(id(function))
    for kernel in kernels:
        if id(kernel.py_func) in reached:
            kernel._cache = NullCache()


def _import_mutated(mutant: Mutant) -> None:
    """Changes what is imported from now on."""
    name = os.path.abspath(mutant.path)
    source = Path(name).read_text("utf-8")
    code, plain = mutated(source, mutant, name), SourceFileLoader.get_code
    sys.dont_write_bytecode = True

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if self.path == name else plain(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    if any(word in source for word in COMPILERS):
        numba.config.CACHE_DIR = tempfile.mkdtemp()  # a constant may be in any kernel


class _OneFailure:
    """Pytest's plugin of every process: a failure is enough, and none is made smaller."""

    def pytest_sessionstart(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", phases=phases, report_multiple_bugs=False)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(1, f"{report.nodeid}\n{report.longreprtext}\n".encode())


@dataclass
class Run:
    """The mutants, pytest's arguments, how many run at a time, and for how long one may hang."""

    mutants: Sequence[Mutant]
    words: Sequence[str]
    jobs: int
    timeout: float

    def verdicts(self) -> Iterator[Verdict]:
        """The fates of mutants, as they end.

        Raises:
            SystemExit: the tests fail without a mutant.
        """
        here, there = Pipe(duplex=False)
        process = Process(Job(None, lambda: self._pytest(_Collected(self, there))))
        there.close()
        imported: list[Mutant] = []
        try:
            found: _Found = here.recv()
            while (said := here.recv()) is not None:
                mutant, outcome, took = said
                if outcome == TO_IMPORT:
                    imported.append(mutant)
                else:
                    yield Verdict(mutant, outcome, took)
        except EOFError:
            found = _Found(failure="the process that collects the tests has ended")
        process.wait()
        status, _, log = process.end()
        if found.failure:
            sys.exit(f"{log}\n{found.failure}\nthe tests fail without a mutant: {status}")
        for name in found.modules:
            with suppress(Exception):
                importlib.import_module(name)
        for mutant, status, took in in_processes(self._importing(imported, found), self.jobs):
            yield Verdict(mutant, _outcome(status), took)

    def _importing(self, mutants: Sequence[Mutant], found: _Found) -> Iterator[Job]:
        """Jobs that run all tests: who executes such a mutant's lines is not known."""
        limit = found.limit(found.seconds) + self.timeout + COMPILING
        for mutant in mutants:
            yield Job(mutant, partial(self._import_and_run, mutant, found), limit)

    def _import_and_run(self, mutant: Mutant, found: _Found) -> int:
        _import_mutated(mutant)
        return self._pytest(_Bounds(found, COMPILING))

    def _pytest(self, *plugins: object) -> int:
        return int(pytest.main([*OPTIONS, *self.words], plugins=[_OneFailure(), *plugins]))
