"""What the snippets and calls of the index of names (``transpiler/names``) can use."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import DataParallel, Executor, fleet
from trainer.metrics import AUC
from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    InputSpec,
    Program,
    capture,
    program_guard,
)

SHORT = {"np": "numpy", "nn": "torch.nn", "F": "torch.nn.functional", "fleet": "trainer.fleet"}
# what a script has under the names of transpiler/names/names.py, OBJECTS
WEIGHT = nn.Parameter(torch.zeros(1))
OBJECTS = {
    "DataParallel": DataParallel,
    "dataset": fleet.InMemoryDataset,
    "DistributeTranspiler": DistributeTranspiler,
    "DistributeTranspilerConfig": DistributeTranspilerConfig(),
    "executor": Executor,
    "loss": WEIGHT,
    "metric": AUC(),
    "model": nn.Module(),
    "optimizer": torch.optim.SGD([WEIGHT], lr=0.1),
    "program": Program,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
    "strategy": DistributedStrategy(),
    "tensor": WEIGHT,
}


def resolved(dotted: str) -> Any:
    """The object that a dotted name leads to, through modules and attributes."""
    first, *rest = dotted.split(".")
    if first in OBJECTS:
        return functools.reduce(getattr, rest, OBJECTS[first])
    path = [*SHORT.get(first, first).split("."), *rest]
    found, whole = import_module(path[0]), path[0]
    for part in path[1:]:
        whole = f"{whole}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(whole)  # a room that nothing has imported yet
    return found


def inputs() -> dict[str, Tensor]:
    """The standard inputs, made anew; the same values each time."""
    made = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    square = normal(4, 4)
    return {
        "x": normal(3, 4),
        "y": normal(3, 4),
        "p": torch.rand(3, 4, generator=made) * 0.8 + 0.1,
        "m": square @ square.T + 4 * torch.eye(4),
        "v": normal(4),
        "i": torch.tensor([2, 0, 3]),
        "b": normal(3, 4) > 0,
        "t": normal(2, 3, 8),
        "image": normal(2, 3, 8, 8),
        "volume": normal(1, 2, 4, 4, 4),
    }


class _Applied(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *batch: Tensor) -> Any:
        return self.function(*batch)


def captured(function: Callable[..., Any], *batch: Tensor) -> Any:
    """What the captured program of a function, or of a module, gives for these inputs.

    Returns:
        A tensor, or a tuple of tensors where the function returns several.
    """
    model = function if isinstance(function, nn.Module) else _Applied(function)
    results: list[str] = []

    def step(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        found = model(*batch)
        named = {"result": found}
        if not isinstance(found, Tensor):
            named = {f"result{number}": each for number, each in enumerate(found)}
        results[:] = named
        return named

    specs = [
        InputSpec(list(tensor.shape), tensor.dtype, f"input{number}")
        for number, tensor in enumerate(batch)
    ]
    with program_guard(Program(()), Program(())), Executor() as executor:
        program, _ = capture(model, step, example=batch, inputs=specs)
        found = executor.run(program, batch, results)
    return found[0] if results == ["result"] else tuple(found)


def scope() -> dict[str, Any]:
    """What a snippet has: the standard inputs and a few modules."""
    return {"torch": torch, "np": np, "nn": nn, "F": F, "captured": captured, **inputs()}


def check_call(call: str) -> None:
    """Holds the captured value of an expression over the standard inputs against its eager one."""
    code = compile(call, call, "eval")
    used = {node.id for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)}
    batch = {name: tensor for name, tensor in inputs().items() if name in used}
    assert batch, f"{call}: expected one of the standard inputs"
    names = scope()

    def function(*tensors: Tensor) -> Any:
        return eval(code, names | dict(zip(batch, tensors, strict=True)))

    torch.manual_seed(0)
    eager = function(*inputs_like(batch))
    torch.manual_seed(0)
    found = captured(function, *inputs_like(batch))
    if not isinstance(eager, Tensor):
        eager = tuple(eager)
    torch.testing.assert_close(found, eager, rtol=0, atol=0, equal_nan=True)


def inputs_like(batch: dict[str, Tensor]) -> list[Tensor]:
    """Copies, which an op that works in place may change."""
    return [tensor.clone() for tensor in batch.values()]


def check_snippet(snippet: str) -> None:
    """Runs the statements."""
    torch.manual_seed(0)
    exec(compile(snippet, "<snippet>", "exec"), scope())
