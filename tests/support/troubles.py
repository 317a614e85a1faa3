"""The messages that docs/troubleshooting.md quotes, and the strings of the sources that they come
from.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("transpiler", "pserver", "trainer")
VARIES = "\0"  # in a string of the sources, what is only known when it runs
DIRECTIVE = re.compile(r"%(?:\.\d+)?[sdrgfe]")  # of a log line
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
LETTERS = 12  # a shorter quote would be found everywhere


def quotes() -> list[str]:
    """The messages of the page: the code that begins a table's row and is a sentence."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [quote for quote in found if " " in quote]


def pattern(quote: str) -> re.Pattern[str]:
    """What finds a quote in a string: its ``...`` stands for any text."""
    parts = quote.removesuffix("...").removeprefix("...").split("...")
    assert sum(map(str.isalpha, "".join(parts))) >= LETTERS, f"too short to be found: {quote}"
    return re.compile(".*".join(map(re.escape, parts)), re.DOTALL)


def quoting(message: str) -> list[str]:
    """The quotes that a message is found by."""
    return [quote for quote in quotes() if pattern(quote).search(message)]


@functools.cache
def said() -> tuple[str, ...]:
    """Every string of the sources, docstrings left out, with VARIES for what it inserts."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                found += _strings(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(found)


def _strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if not isinstance(node, ast.Expr) and (text := _text(child)) is not None:
                yield DIRECTIVE.sub(VARIES, text)


def _text(node: ast.AST) -> str | None:
    """A string, an f-string, or a sum of such."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or VARIES for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = _text(node.left), _text(node.right)
        return None if parts == (None, None) else "".join(part or VARIES for part in parts)
    return None
