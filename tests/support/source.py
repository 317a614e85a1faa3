"""What the tests of the layout read from the source: imports, rooms, and lines of code."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("transpiler", "pserver", "trainer")
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def relative(path: Path) -> str:
    """The path as a reader of the repository writes it."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def imported(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module, or name of a module, that a file imports, with the line; wherever it stands."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: expected an absolute import"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return tuple(found)


@functools.cache
def imports(path: Path) -> set[str]:
    """The first names of all modules that a file imports."""
    return {name.partition(".")[0] for name, _ in imported(path)}


def module_name(path: Path) -> str:
    """``pserver.table.ids`` for pserver/table/ids.py, ``pserver.table`` for its ``__init__``."""
    return relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room(module: str) -> str:
    """A folder of a package is a room, and so is each module at a package's root."""
    return ".".join(module.split(".")[:2])


def arrows() -> dict[str, dict[str, str]]:
    """For each room the rooms that it imports, with one place where it does.

    What a package's root gathers for its users (``__init__``) is no arrow.
    """
    names = {module_name(path) for path in MODULES}
    found: dict[str, dict[str, str]] = {}
    for path in MODULES:
        if path.name == "__init__.py" and path.parent.parent == ROOT:
            continue
        here = room(module_name(path))
        for name, line in imported(path):
            module = name if name in names else name.rpartition(".")[0]
            if module in names and room(module) != here:
                found.setdefault(here, {}).setdefault(room(module), f"{relative(path)}:{line}")
    return found


@functools.cache
def code_lines(path: Path) -> set[int]:
    """The numbers of the lines that hold code: no docstring, no comment, no blank line."""
    documentation: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | Definition) and ast.get_docstring(node) is not None:
            documentation |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    source = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - documentation


def definitions(path: Path) -> Iterator[tuple[Definition, int]]:
    """Every function and class of a file, nested ones too, with its number of lines of code."""
    lines = sorted(code_lines(path))
    for node in ast.walk(tree(path)):
        if isinstance(node, Definition):
            yield node, bisect_right(lines, node.end_lineno or 0) - bisect_left(lines, node.lineno)
