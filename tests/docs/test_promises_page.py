"""Promises about docs/concepts/promises.md: each promise there has a test that is there."""

from __future__ import annotations

import ast
import re

from tests.support.pages import ROOT
from tests.test_promises import DONE_BETTER

PAGE = ROOT / "docs" / "concepts" / "promises.md"
ROW = re.compile(r"^- (?P<promise>.+?):$(?P<tests>(?:\n  .+)+)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"\n  `(tests/[\w/]+\.py)`\n  `::(\w+)`")


def rows() -> list[tuple[str, str]]:
    """Each promise of the page, with the lines below it."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Outside of these\n")[0]
    items = re.split(r"\n(?=- |\n)", text.rstrip())
    found = [ROW.fullmatch(item) for item in items if item.startswith("- ")]
    assert None not in found, "expected - A promise:, and below it `tests/file.py`, `::test`"
    return [(row["promise"], row["tests"]) for row in found if row is not None]


def collectable(file: str) -> set[str]:
    """The tests that a file defines."""
    path = ROOT / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    functions = (node.name for node in body if isinstance(node, ast.FunctionDef))
    return {name for name in functions if name.startswith("test_")}


def test_every_promise_has_a_test() -> None:
    """A row has a promise that no other has, and names one test or more."""
    promises = [promise for promise, _ in rows()]

    assert len(promises) > 50
    assert sorted(set(promises)) == sorted(promises)
    assert [promise for promise, tests in rows() if not TEST.sub("", tests) == ""] == []


def test_every_test_of_a_promise_is_there() -> None:
    """The file exists, and defines the test."""
    named = [match for _, tests in rows() for match in TEST.findall(tests)]

    assert [f"{file}::{name}" for file, name in named if name not in collectable(file)] == []


def test_the_page_has_what_the_design_promises() -> None:
    """Each promise of tests/test_promises.py in which this system is better than the one before it
    stands on the page, by its test.
    """
    named = {name for _, tests in rows() for _, name in TEST.findall(tests)}

    assert sorted(set(DONE_BETTER.values()) - named) == []
