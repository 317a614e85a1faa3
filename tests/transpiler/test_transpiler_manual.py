"""The manual (transpiler/__init__.py) shows what the package does, and its examples run."""

from __future__ import annotations

import ast
import doctest
import re
import textwrap
from pathlib import Path

import pytest
import torch

import transpiler
from transpiler import Program, program_guard

ROOT = Path(transpiler.__file__).parent
MANUAL = transpiler.__doc__ or ""
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if not path.stem.endswith("_pb2")]


def listed() -> list[str]:
    """The rooms and root files of the manual, in its order."""
    section = MANUAL.partition("The rooms, in reading order")[2].partition("Glossary")[0]
    return re.findall(r"^    (\w+(?:/|\.py)) ", section, re.MULTILINE)


def place(module: str) -> str:
    """The room or root file of a module: ``ir/``, ``clip.py``."""
    parts = module.split(".")
    return f"{parts[1]}/" if (ROOT / parts[1]).is_dir() else f"{parts[1]}.py"


def test_the_printed_programs_are_those_that_print() -> None:
    """The code of the manual makes the three programs that stand below it."""
    code = MANUAL.partition("::\n\n    model =")[2].partition("\n\n``print")[0]
    names = {name: getattr(transpiler, name) for name in transpiler.__all__} | {"torch": torch}
    with program_guard(Program(()), Program(())):
        exec(textwrap.dedent("    model =" + code), names)
    t = names["t"]

    for program in (
        names["main"],
        t.get_trainer_program(),
        t.get_pserver_program("a:6174"),
    ):
        assert textwrap.indent(str(program), "    ") in MANUAL


def test_the_manual_lists_every_room_and_file() -> None:
    """No room and no file at the root is missing, and none is listed that does not exist."""
    there = {f"{path.name}/" for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in SOURCES if path.parent == ROOT} - {"__init__.py"}

    assert sorted(listed()) == sorted(there)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_up_the_manual(path: Path) -> None:
    """A room or file imports only what the manual lists above it, function-level imports
    included.
    """
    if path == ROOT / "__init__.py":
        return
    own = path.relative_to(ROOT).parts
    here = f"{own[0]}/" if len(own) > 1 else own[0]
    order = listed()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("transpiler."):
            other = place(module)

            assert other == here or order.index(other) < order.index(here), module


@pytest.mark.parametrize("name", transpiler.__all__)
def test_examples_run(name: str) -> None:
    """The examples of everything that the package exports print what they show."""
    runner = doctest.DocTestRunner(verbose=False)
    exported = {each: getattr(transpiler, each) for each in transpiler.__all__}
    exported |= {"torch": torch, "transpiler": transpiler}
    with program_guard(Program(()), Program(())):
        for test in doctest.DocTestFinder().find(getattr(transpiler, name), name, globs=exported):
            runner.run(test)

    assert runner.summarize(verbose=False).failed == 0
