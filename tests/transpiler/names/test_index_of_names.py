"""Promises about the index of names: nothing of the original's list is missing, and what the index
says of a name is so.

A snippet, or a call, has in scope ``torch``, ``np``, ``nn``, ``F`` (torch.nn.functional),
``captured(function, *inputs)``, which captures the function or module, runs the program and gives
what that returns, and the standard inputs: ``x`` and ``y`` float32 [3, 4]; ``p`` [3, 4] between 0.1
and 0.9; ``m`` [4, 4], positive definite; ``v`` [4]; ``i`` int64 [3] of 0 to 3; ``b`` bool [3, 4];
``t`` [2, 3, 8], ``image`` [2, 3, 8, 8] and ``volume`` [1, 2, 4, 4, 4], channels second.

``names.txt`` is the original's list of layers and functions, each name once; ``members.txt`` has
the names of its packages for training, and the methods, fields and keys of its classes.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from pserver.__main__ import COMMANDS
from tests.support.name_entries import OBJECTS, SHORT, check_call, check_snippet, resolved
from transpiler.names import names as index
from transpiler.names.names import KINDS, Name, entry_of, member, members, names, tables
from transpiler.strategy.strategy import CONFIGS

LISTED = Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split()
OF_OWNERS = Path(__file__).with_name("members.txt").read_text(encoding="utf-8").split()
MEMBERS = [entry for section in members().values() for entry in section.values()]
VARIABLES = Path(__file__).parents[3].joinpath("docs", "environment.md").read_text(encoding="utf-8")
ENTRIES = [entry for entries in tables().values() for entry in entries]
MOST_LINES, WIDTH = 25, 100
ROOTS = ("torch", "numpy", "transpiler", "trainer", "pserver")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
IN_NOTES = re.compile(rf"(?<![\w/.])(?:{'|'.join([*ROOTS, *SHORT, *OBJECTS])})(?:\.[A-Za-z_]\w*)+")


def dotted_names(code: str) -> Iterator[str]:
    """The dotted names in an expression that begin with one of our packages, or torch."""
    inner = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node not in inner:
            inner |= set(ast.walk(node.value))
            whole = ast.unparse(node)
            if DOTTED.fullmatch(whole) and whole.partition(".")[0] in (*ROOTS, *SHORT, *OBJECTS):
                yield whole


def asserts(snippet: str) -> bool:
    """Whether a snippet holds a value against another: not a constant alone."""
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call) and "assert_" in ast.unparse(node.func):
            return True
    return False


def test_every_name_has_one_entry_and_no_other_has_one() -> None:
    """The index has the names of the original's list: each once, and none besides."""
    counts = Counter(entry.name for entry in ENTRIES)
    twice = sorted(name for name, count in counts.items() if count > 1)

    assert (twice, sorted(set(counts) - set(LISTED))) == ([], [])
    missing = sorted(set(LISTED) - set(counts))
    first = ", ".join(missing[:20])
    assert not missing, f"{len(missing)} of {len(LISTED)} names have no entry: {first}"


def test_the_list_is_that_of_the_original() -> None:
    """630 distinct names, sorted."""
    assert len(LISTED) == len(set(LISTED)) == 630
    assert sorted(LISTED, key=lambda name: (name.lower(), name)) == LISTED


@pytest.mark.parametrize("table", tables())
def test_a_table_is_sorted(table: str) -> None:
    """By name, without regard to case; its lines are short, and ASCII."""
    found = [entry.name for entry in tables()[table]]
    text = files("transpiler.names").joinpath(table).read_text(encoding="utf-8")

    assert found == sorted(found, key=lambda name: (name.lower(), name))
    assert text.isascii() and [line for line in text.splitlines() if len(line) > WIDTH] == []


def test_every_name_of_an_owner_has_an_entry() -> None:
    """Sorted; a key of a strategy's settings needs none where it exists here."""
    assert sorted(set(OF_OWNERS), key=lambda name: (name.lower(), name)) == OF_OWNERS
    split = (name.partition(".") for name in OF_OWNERS)
    missing = [
        f"{owner}.{name}"
        for owner, _, name in split
        if name not in CONFIGS.get(owner, ()) and not (member(owner, name) or name in names())
    ]

    assert missing == []


def test_the_objects_are_those_of_the_tables() -> None:
    """Each root of an answer stands for an object that has what its owner's names say."""
    assert set(index.OBJECTS) == {*OBJECTS, "fleet"}
    assert set(index.OBJECTS.values()) | {each for v in index.BASES.values() for each in v} <= set(
        members()
    )


@pytest.mark.parametrize("entry", MEMBERS, ids=lambda entry: f"{entry.owner}.{entry.name}")
def test_an_answer_exists(entry: Name) -> None:
    """Each name in it leads to an object, and there is at least one; a reason is a sentence."""
    assert not re.search(r"[\n|]", entry.write + entry.note), "they stand in a table's row"
    assert not entry.note or entry.note.endswith(".")
    for name in IN_NOTES.findall(entry.note):
        resolved(name)
    if entry.kind == "declined":
        assert entry.note
        return
    if entry.write.startswith("pserver "):
        assert entry.write.split()[1] in COMMANDS
        return
    if entry.owner == "environment" and entry.write.isupper():
        assert f"`{entry.write}`" in VARIABLES
        return
    if entry.owner == "import":
        (statement,) = ast.parse(entry.write).body
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        if entry.write != "import torchvision":  # a package that nothing here needs
            exec(entry.write, {})
        return
    found = IN_NOTES.findall(entry.write)
    for name in found:
        resolved(name)
    used = {node.id for node in ast.walk(ast.parse(entry.write)) if isinstance(node, ast.Name)}
    assert found or used & set(dir(builtins))


def test_the_owner_decides() -> None:
    """A name of several modules has the answer of its own; one of none that of another owner."""
    answers = {owner: str(entry_of("split", owner)) for owner in ("distributed", "", "fleet")}

    assert "tensor_plan" in answers["distributed"]
    assert answers[""] == answers["fleet"] == str(names()["split"])
    assert str(entry_of("clear_grad")) == "for clear_grad write optimizer.zero_grad()"
    assert entry_of("transpile") is None and entry_of("zzqqxx", "fleet") is None


def test_the_index_is_read_once() -> None:
    """By name, sorted without regard to case."""
    assert names() is names()
    assert {entry.name: entry for entry in ENTRIES} == dict(names())
    assert list(names()) == sorted(names(), key=lambda name: (name.lower(), name))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_so(entry: Name) -> None:
    """What is to be written exists, calls and snippets hold, a declined name has its reason."""
    assert entry.kind in KINDS
    assert not re.search(r"[\n|]", entry.write + entry.note), "they stand in a table's row"
    if entry.kind == "declined":
        assert entry.note.endswith(".") and not (entry.write or entry.call or entry.snippet)
        return
    assert entry.write and (not entry.note or entry.note.endswith("."))
    if DOTTED.fullmatch(entry.write):
        resolved(entry.write)
    for name in dotted_names(entry.write):
        resolved(name)
    if entry.kind == "torch":
        called = entry.write.partition("(")[0]  # with the arguments that give the original's value
        assert called.split(".")[-1] == entry.name and called.startswith("torch.")
        assert entry.snippet or entry.call
    else:
        assert entry.snippet or (entry.call and entry.kind == "torch_other")
    if entry.call:
        check_call(entry.call)
    if entry.snippet:
        assert len(entry.snippet.strip().splitlines()) <= MOST_LINES and asserts(entry.snippet)
        check_snippet(entry.snippet)
