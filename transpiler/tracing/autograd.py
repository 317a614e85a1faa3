"""The gradients of a step's results, and the functions behind them with a backward in Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_OURS = __name__.removesuffix("tracing.autograd")  # "transpiler.", and what it lies in


def gradients_of(targets: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the sum of all targets; None for a tensor that no target depends on.

    Raises:
        ValueError: no target depends on anything that requires a gradient.
    """
    known = [target for target in targets if target.requires_grad]
    if not known:
        raise ValueError("expected a target that requires a gradient, got none")
    ones = [None if not target.dim() else torch.ones_like(target) for target in known]
    return list(torch.autograd.grad(known, wanted, ones, allow_unused=True))


def python_functions(outputs: Iterable[Tensor]) -> tuple[str, ...]:
    """The names of the user's own autograd functions that results come from."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(waiting), dict[str, None]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not _ours(node):
            found[type(node).__name__.removesuffix("Backward")] = None
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return tuple(found)


def _ours(node: Any) -> bool:
    """Whether it is the function of an op of ours, whose gradients a program has."""
    if type(node).__name__.startswith("PyFunc"):
        return False
    return str(getattr(node, "_forward_cls", type(node)).__module__).startswith(_OURS)
