"""The line of the step for each node of a graph that is being traced, and whether autograd follows
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from transpiler.ir import source_location

_followed: ContextVar[bool] = ContextVar("_followed", default=False)


@contextmanager
def followed(tracked: bool) -> Iterator[None]:
    """Within the forward of an autograd Function, whose ops run without autograd although it
    follows the Function.

    Args:
        tracked: whether it does: the Function was not called under ``torch.no_grad()``.
    """
    token = _followed.set(tracked)
    try:
        yield
    finally:
        _followed.reset(token)


class NodeLines(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's stubs
    """Records the line of the step for every node that an op makes; a backward op has the line of
    its forward op.

    Attributes:
        lines: by the node's name.
        constant: the names of the nodes of ops that ran without autograd, in the forward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stubs
        self.lines: dict[str, str] = {}
        self.constant: set[str] = set()
        self._forward: dict[int, str] = {}

    def _line(self) -> str:
        backward = torch._C._current_autograd_node()
        if backward is not None:
            return self._forward.get(backward._sequence_nr(), "")
        line = source_location.short()
        if line and torch.is_grad_enabled():
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, line)
        return line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line, mode = self._line(), get_proxy_mode()
        tracked = torch.is_grad_enabled() or _followed.get()
        constant = not tracked and torch._C._current_autograd_node() is None
        if mode is None or not (line or constant):
            return func(*args, **(kwargs or {}))
        nodes = mode.tracer.graph.nodes
        before = next(iter(reversed(nodes)), None)
        result = func(*args, **(kwargs or {}))
        for node in reversed(nodes):
            if node is before:
                break
            self.lines[node.name] = line
            if constant:
                self.constant.add(node.name)
        return result
