"""Promises about every file: its docstrings, and calls that it never makes."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import MODULES, files_of, first_names, nodes, relative, tree

EVERYTHING = [*MODULES, *files_of("tests", "docs")]
FORBIDDEN_ANYWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
READS_ENVIRONMENT = {
    "pserver/__main__.py",
    "pserver/ray/actor.py",  # an actor hands its node's environment on, and reads no setting
    "trainer/environment/environment.py",
    "trainer/notebook.py",  # gives this process a trainer's environment, and hands its own on
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(path: Path) -> list[str]:
    """The module, classes and functions of a file that lack a docstring or a return annotation."""
    found = [] if ast.get_docstring(tree(path)) else ["no docstring"]
    for node in nodes(path):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            sentence = ast.get_docstring(node) or ""
            if not sentence or sentence.startswith("See the module"):
                found.append(f"class {node.name} has no docstring of its own")
        if isinstance(node, Function) and node.returns is None:
            found.append(f"{node.name} has no return annotation")
    return [f"{relative(path)}: {each}" for each in found]


def test_modules_and_classes_have_docstrings() -> None:
    """Each module and public class has a docstring; each function has a return annotation."""
    assert not [each for path in MODULES for each in undocumented(path)]


def test_every_test_is_a_promise() -> None:
    """A test's docstring is the sentence that it holds."""
    assert not [
        f"{relative(path)}: {node.name}"
        for path in files_of("tests")
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]


def test_nothing_unpickles_or_evaluates() -> None:
    """Data never becomes code: no pickle, eval, exec, or import by name."""
    for path in MODULES:
        calls = {
            node.func.id
            for node in nodes(path)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }

        assert not first_names(path) & FORBIDDEN_ANYWHERE, relative(path)
        assert not calls & {"eval", "exec", "__import__"}, relative(path)


def test_the_environment_is_read_in_two_places() -> None:
    """Everything else is told by arguments."""
    for path in MODULES:
        names = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}

        assert relative(path) in READS_ENVIRONMENT or not names & {"environ", "getenv"}, path


def bound(module: ast.Module) -> set[str]:
    """The names that a module's top level imports, defines or assigns, for type checkers too."""
    found: set[str] = set()
    inner = (node for block in module.body if isinstance(block, ast.If) for node in block.body)
    for node in [*module.body, *inner]:
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
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed = ast.literal_eval(node.value)

                assert listed == sorted(listed, key=str.lower), relative(path)
                assert set(listed) <= bound(tree(path)), relative(path)


def test_sources_are_ascii() -> None:
    """Comments and names are ASCII; a string that is not says so with an escape."""
    for path in MODULES:
        assert path.read_text(encoding="utf-8").isascii(), relative(path)


def test_no_program_takes_a_part_of_a_flags_name() -> None:
    """A flag that comes later would change what the short form means; and a mistake is one."""
    for path in EVERYTHING:
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "argparse.ArgumentParser":
                said = {each.arg: ast.unparse(each.value) for each in node.keywords}

                assert said.get("allow_abbrev") == "False", f"{relative(path)}:{node.lineno}"


def test_files_of_tests_have_names_of_their_own() -> None:
    """Pytest imports them by their names alone: of two, one process could read only the first."""
    names = [path.name for path in files_of("tests") if path.name.startswith("test_")]

    assert sorted(names) == sorted(set(names))
