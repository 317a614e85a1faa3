"""Writes docs/strategy_keys.md: every setting of a strategy, from the tables of settings, with the
tests that observe its effect.

A test says ``@pytest.mark.observes("amp", "amp_configs.incr_ratio")`` of the settings whose effect
it observes.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from transpiler.strategy.strategy import Row, documentation

ROOT = Path(__file__).parent.parent.parent
FIRST = """# Every key of a strategy

`make reference` writes this page from the tables of settings.
[Strategy keys](strategy.md) says what they are for.
"Acts in" names the update modes of a job with servers, then the kinds of jobs without servers and
of programs.
Where a key does not act, another value than its default raises, with the reason.
The test observes the effect outside the strategy's own code.

| key | effect | default | type | range | acts in | test |
|---|---|---|---|---|---|---|
"""


def observers() -> dict[str, list[str]]:
    """The tests that observe each setting: full name -> "tests/...py::test_...", in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "observes(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                for key in _observed(node):
                    found[key].append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return dict(found)


def _observed(test: ast.FunctionDef) -> Iterator[str]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.observes":
            yield from (ast.literal_eval(argument) for argument in mark.args)


def _line(row: Row, tests: list[str]) -> str:
    links = [f"[{test.partition('::')[2]}](../{test.partition('::')[0]})" for test in tests[:1]]
    cells = [
        f"`{row.key}`",
        row.sentence,
        f"`{row.default}`",
        row.type,
        row.range,
        ", ".join(row.modes) or "no job: it raises",
        links[0] if links else "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def pages() -> dict[str, str]:
    """The text of the page."""
    tests = observers()
    lines = (_line(row, tests.get(row.key, [])) for row in documentation())
    return {"strategy_keys.md": FIRST + "".join(lines)}
