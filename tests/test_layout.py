"""Promises about the source itself: which way imports go, what every module says of itself, how
long files get.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("transpiler", "pserver", "trainer")
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
)
LONGEST_FILE, LONGEST_FUNCTION = 400, 50
# What a package may import besides the standard library.
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
EXCEPT = {
    "transpiler/formats/serialize.py": {"os"},  # Program.save syncs and renames
    "transpiler/tracing/equivalence_check.py": {
        "random"
    },  # what a rehearsed step draws is put back
}
TABLES = (
    "eviction ids index initial kernels missed missed_adam presence records row_optimizer "
    "row_rules rows sparse stepper"
)
PURE = (
    "pserver/dense/merge.py",
    "pserver/dense/slice_store.py",
    "pserver/table/chunks.py",
    "pserver/table/admission.py",
)
PURE += tuple(f"pserver/{name}.py" for name in TABLES.split())
FORBIDDEN_IN_PURE = {"grpc", "pyarrow", "threading", "time", "socket", "queue", "concurrent"}
FORBIDDEN_ANYWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
READS_ENVIRONMENT = {"pserver/__main__.py", "trainer/role.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> set[str]:
    """The first names of all modules that a file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: expected an absolute import"
            found.add((node.module or "").partition(".")[0])
    return found


def test_imports_go_one_way() -> None:
    """transpiler <- pserver <- trainer: nothing imports what comes after it."""
    for path in MODULES:
        later = PACKAGES[PACKAGES.index(relative(path).partition("/")[0]) + 1 :]

        assert not imports(path) & set(later), relative(path)


def test_the_transpiler_touches_no_thread_socket_clock_or_environment() -> None:
    """The same input gives the same output in every process, because there is nothing else to
    depend on.
    """
    for path in MODULES:
        if relative(path).startswith("transpiler/"):
            outside = {
                name
                for name in imports(path)
                if name not in sys.stdlib_module_names and name not in TRANSPILER
            }

            forbidden = FORBIDDEN_THERE - EXCEPT.get(relative(path), set())

            assert not outside and not imports(path) & forbidden, relative(path)


def test_the_servers_arithmetic_is_pure() -> None:
    """Merging and tables import neither transports nor threads nor time."""
    for name in PURE:
        assert not imports(ROOT / name) & FORBIDDEN_IN_PURE, name


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

        assert relative(path) in READS_ENVIRONMENT or not names & {"environ", "getenv"}, relative(
            path
        )


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is_and_stays_short(path: Path) -> None:
    """A docstring, at most 400 lines, functions of at most 50, and return annotations on all of
    them.
    """
    module = tree(path)

    assert ast.get_docstring(module), "no docstring"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, (
                f"{node.name} is too long"
            )
            assert node.returns is not None, f"{node.name} has no return annotation"


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
