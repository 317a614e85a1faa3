"""A process of servers without torch's compiler.

[Note: without the compiler]  The first optimizer of a process imports ``torch._dynamo``, of which
an optimizer that is never compiled needs two functions that then do nothing.  The import takes half
as long as that of torch itself, and 70 MB.  A server's process steps optimizers and compiles
nothing, so a module of these two functions stands there in its place.  Whoever asks that module for
anything else gets the real one, which takes its place from then on: so nothing is lost where a
later torch asks for more, or a script of the same process compiles its model.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class EagerOnly(ModuleType):
    """Stands for ``torch._dynamo``.  See [Note: without the compiler]."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._loading = threading.Lock()

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        """A function that is not compiled: the function; without one, a decorator that gives it."""
        return (lambda given: given) if fn is None else fn

    def graph_break(self, msg: str = "") -> None:
        """Ends a compiled graph, of which there is none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect looks at every module's file
            raise AttributeError(name)
        with self._loading:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def without_compiler() -> None:
    """Makes this process do without torch's compiler, unless it has imported it, or needs it
    later.
    """
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = EagerOnly()
