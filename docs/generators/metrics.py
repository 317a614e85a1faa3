"""The tables of docs/metrics.md, from the calls in the sources that make metrics."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs.generators.tables import filled, table

ROOT = Path(__file__).parent.parent.parent
PAGE = "metrics.md"
FOLDERS = {"metrics of servers": "pserver", "metrics of trainers": "trainer"}
KINDS = {
    "in_seconds": "histogram",
    "in_steps": "histogram",
    "Counter": "counter",
    "TrainerCount": "counter",
}
ABOUT = {"pserver_straggler_ratio": "elasticity.md#a-trainer-that-is-slow"}


class Metric(NamedTuple):
    """A metric as the source makes it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def pages() -> dict[str, str]:
    """The page with its tables."""
    return {PAGE: filled(PAGE, lambda mark: metrics(FOLDERS[mark]))}


def metrics(package: str) -> str:
    """The table of the metrics that a package makes."""
    rows = []
    for each in sorted(_made(package)):
        labels = "{" + ",".join(each.labels) + "}" if each.labels else ""
        name = f"`{each.name}{labels}`"
        about = ABOUT.get(each.name)
        rows.append((f"[{name}]({about})" if about else name, each.kind, each.meaning))
    return table(("metric", "kind", "meaning"), rows)


def _made(package: str) -> Iterator[Metric]:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (found := _metric(node)):
                yield found


def _metric(call: ast.Call) -> Metric | None:
    """The metric that a call makes; None where it makes none."""
    maker = ast.unparse(call.func)
    texts = [each.value for each in call.args[:2] if isinstance(each, ast.Constant)]
    if maker not in ("current", *KINDS) or len(texts) < 2:
        return None
    name, meaning = map(str, texts)
    # of current() the values come before the labels; Counter's are a tuple
    labels = tuple(_words(call.args[3 if maker == "current" else 2 :]))
    counted = name.endswith("_total")
    kind = KINDS.get(maker, "counter" if counted else "gauge")
    name = f"{name}_total" if kind == "counter" and not counted else name
    labels = ("trainer",) if maker == "TrainerCount" else labels
    return Metric(name, kind, labels, meaning.removesuffix("."))


def _words(labels: list[ast.expr]) -> Iterator[str]:
    for each in labels:
        found = ast.literal_eval(each.value if isinstance(each, ast.Starred) else each)
        yield from [found] if isinstance(found, str) else found
