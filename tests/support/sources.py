"""The sources as data: files, their syntax trees, which module imports which."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("transpiler", "pserver", "trainer")
GENERATED = ("_pb2", "_pb2_grpc")


def files_of(*folders: str) -> list[Path]:
    """The Python files below these folders that people wrote."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if not path.stem.endswith(GENERATED))


MODULES = files_of(*PACKAGES)


def relative(path: Path) -> str:
    """The path from the root of the checkout, as a test's id."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


# ---- imports ----


def module_of(path: Path) -> str:
    """``pserver/job/job.py`` as ``pserver.job.job``, and ``pserver/job/__init__.py`` as
    ``pserver.job``.
    """
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


NAMES = {module_of(path): path for path in MODULES}


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, wherever the import stands: in functions too."""
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: expected an absolute import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(whole if whole in NAMES else str(node.module))
    return tuple(found)


def first_names(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imported(path)}


def room_of(module: str) -> str:
    """The folder of a module, or the module itself where it lies at its package's root."""
    parts = module.split(".")
    inside = len(parts) > 2 or NAMES[module].name == "__init__.py"
    return ".".join(parts[:2]) if inside else module


Graph = Mapping[str, set[str]]


@functools.cache
def modules_graph() -> Graph:
    """Module -> the modules of ours that it imports; a package's face, which exports, is left
    out.
    """
    graph: dict[str, set[str]] = defaultdict(set)
    for name, path in NAMES.items():
        if name not in PACKAGES:
            own = {other for other in imported(path) if other in NAMES} - {name, *PACKAGES}
            graph[name] |= own
    return graph


def rooms_graph(package: str) -> Graph:
    """Room -> the rooms of the same package that its files import."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, others in modules_graph().items():
        if name.startswith(f"{package}."):
            near = {room_of(other) for other in others if other.startswith(f"{package}.")}
            graph[room_of(name)] |= near - {room_of(name)}
    return graph


def levels(graph: Graph) -> dict[str, int]:
    """How many imports lie below each node.

    Raises:
        AssertionError: there is a cycle; the message shows it.
    """
    found: dict[str, int] = {}

    def level(node: str, path: tuple[str, ...]) -> int:
        assert node not in path, " -> ".join((*path[path.index(node) :], node))
        if node not in found:
            below = [level(other, (*path, node)) for other in sorted(graph.get(node, ()))]
            found[node] = 1 + max(below, default=-1)
        return found[node]

    for node in graph:
        level(node, ())
    return found
