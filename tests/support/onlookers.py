"""Every method that only looks, found in the sources; and how to let one fail."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pserver", "trainer")


@dataclass(frozen=True)
class Looking:
    """A method that is decorated with ``onlooker``.

    Attributes:
        module, cls, method: where it is.
        name: in which it looks.
    """

    module: str
    cls: str
    method: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.cls}.{self.method}"

    @property
    def owner(self) -> Any:
        """The class."""
        return getattr(importlib.import_module(self.module), self.cls)

    def fail(
        self, patch: pytest.MonkeyPatch, error: BaseException, of: type[Any] | None = None
    ) -> None:
        """From now on it raises, inside of its decorator; of this class, where one is given."""

        def raising(*_: Any, **__: Any) -> None:
            raise error

        looks = vars(self.owner)[self.method].decorate(raising)
        patch.setattr(of or self.owner, self.method, looks, raising=of is None)


@cache
def all_onlookers() -> tuple[Looking, ...]:
    """All of them, by module."""
    return tuple(_found())


def _found() -> Iterator[Looking]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if "@onlooker(" not in text or path.name == "onlookers.py":
                continue
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for cls in (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)):
                for node in cls.body:
                    if isinstance(node, ast.FunctionDef) and any(map(_looks, node.decorator_list)):
                        made = vars(getattr(importlib.import_module(module), cls.name))[node.name]
                        yield Looking(module, cls.name, node.name, made.onlooker)


def _looks(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "onlooker"
    )
