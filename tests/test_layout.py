"""Promises about the source itself: which way imports go, what every module says of itself, how
long files get.
"""

from __future__ import annotations

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.source import (
    MODULES,
    PACKAGES,
    ROOT,
    TESTS,
    arrows,
    code_lines,
    definitions,
    imports,
    relative,
    tree,
)

# Lines of code, without docstrings, comments and blank lines; and columns.
MOST_IN_A_FILE, MOST_IN_A_CLASS, MOST_IN_A_FUNCTION, COLUMNS = 300, 250, 50, 100
PRAGMA = re.compile(r" +# (noqa|type: ignore).*")  # a remark to a tool makes no line long
# What the transpiler may import besides the standard library.
# torch's symbolic sizes are sympy's
TRANSPILER = {"transpiler", "torch", "numpy", "safetensors", "google", "sympy"}
FORBIDDEN_THERE = {
    "threading",
    "socket",
    "time",
    "os",
    "subprocess",
    "multiprocessing",
    "concurrent",
    "asyncio",
}
EXCEPT = {"transpiler/formats/serialize.py": {"os"}}  # Program.save syncs and renames
PURE = ("pserver/dense", "pserver/table")
NOT_PURE = {"pserver/table/disk_tier.py", "pserver/table/tiered_table.py"}  # rows on disk
FORBIDDEN_IN_PURE = {"grpc", "pyarrow", "threading", "time", "socket", "queue", "concurrent"}
FORBIDDEN_ANYWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
READS_ENVIRONMENT = {"pserver/__main__.py", "trainer/role.py"}


def test_imports_go_one_way() -> None:
    """transpiler <- pserver <- trainer: nothing imports what comes after it."""
    for path in MODULES:
        later = PACKAGES[PACKAGES.index(relative(path).partition("/")[0]) + 1 :]

        assert not imports(path) & set(later), relative(path)


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_are_layers(package: str) -> None:
    """Between folders imports go one way, those inside functions too."""
    found = {
        here: {there: line for there, line in others.items() if there.startswith(f"{package}.")}
        for here, others in arrows().items()
        if here.startswith(f"{package}.")
    }
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]
        lines = [found[here][there] for here, there in zip(cycle, cycle[1:], strict=False)]
        pytest.fail(f"{' -> '.join(cycle)}: {', '.join(lines)}")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_hides_what_its_package_exports(package: str) -> None:
    """``from trainer import x`` gives what the root exports, never a folder that is called so."""
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    exported = bound(tree(ROOT / package / "__init__.py"))

    assert not folders & exported


def test_the_transpiler_touches_no_thread_socket_clock_or_environment() -> None:
    """The same input gives the same output in every process, because there is nothing else to
    depend on.
    """
    for path in MODULES:
        if relative(path).startswith("transpiler/"):
            outside = imports(path) - TRANSPILER - sys.stdlib_module_names
            forbidden = FORBIDDEN_THERE - EXCEPT.get(relative(path), set())

            assert not outside and not imports(path) & forbidden, relative(path)


def test_the_servers_arithmetic_is_pure() -> None:
    """Merging and tables import neither transports nor threads nor time, folder by folder."""
    for folder in PURE:
        assert (ROOT / folder).is_dir(), folder
    for path in MODULES:
        if relative(path).startswith(PURE) and relative(path) not in NOT_PURE:
            assert not imports(path) & FORBIDDEN_IN_PURE, relative(path)


def test_nothing_unpickles_or_evaluates() -> None:
    """Data never becomes code: no pickle, eval, exec, or import by name."""
    for path in MODULES:
        calls = {
            node.func.id
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }

        assert not imports(path) & FORBIDDEN_ANYWHERE, relative(path)
        assert not calls & {"eval", "exec", "__import__"}, relative(path)


def test_the_environment_is_read_in_two_places() -> None:
    """Everything else is told by arguments."""
    for path in MODULES:
        names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        reads = bool(names & {"environ", "getenv"})

        assert relative(path) in READS_ENVIRONMENT or not reads, relative(path)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is(path: Path) -> None:
    """A docstring for the module, return annotations on all functions."""
    assert ast.get_docstring(tree(path)), "no docstring"
    for node, _ in definitions(path):
        if not isinstance(node, ast.ClassDef):
            assert node.returns is not None, f"{node.name} has no return annotation"


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=relative)
def test_every_file_stays_short(path: Path) -> None:
    """At most 300 lines of code, 250 in a class, 50 in a function, and 100 columns; tests too."""
    total = len(code_lines(path))
    assert total <= MOST_IN_A_FILE
    for node, lines in definitions(path):
        most = MOST_IN_A_CLASS if isinstance(node, ast.ClassDef) else MOST_IN_A_FUNCTION
        assert lines <= most, f"{node.name} is too long"
    lines = [PRAGMA.sub("", line) for line in path.read_text().splitlines()]
    long = [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
    assert not long, f"lines {long} are longer than {COLUMNS} columns"


def bound(module: ast.Module) -> set[str]:
    """The names that a module's top level imports (for type checkers alone, too), defines or
    assigns.
    """
    found: set[str] = set()
    for node in [
        *module.body,
        *(inner for block in module.body if isinstance(block, ast.If) for inner in block.body),
    ]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_public_names_are_sorted() -> None:
    """Where a module lists ``__all__``, the list is sorted and every name in it exists."""
    for path in MODULES:
        module = tree(path)
        for node in module.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed = ast.literal_eval(node.value)

                assert listed == sorted(listed, key=str.lower), relative(path)
                assert set(listed) <= bound(module), relative(path)


def test_sources_are_ascii() -> None:
    """Comments and names are ASCII; a string that is not says so with an escape."""
    for path in MODULES:
        assert path.read_text(encoding="utf-8").isascii(), relative(path)
