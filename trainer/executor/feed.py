"""What is fed to a program, checked against the program's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transpiler.ir.graph import Role, Variable
from transpiler.program import Program

Value = Tensor | np.ndarray[Any, Any]
Feed = Sequence[Value] | Mapping[str, Value] | None


def check_feed(program: Program, feed: Feed, device: torch.device) -> dict[str, Tensor]:
    """The feed by input name, on the device; arrays of numpy become tensors.

    Raises:
        TypeError: it is no tuple and no dict of tensors or arrays.
        ValueError: an input is missing or unknown, or has another dtype, rank or size than the
            program asks for; the message names the input, what was expected and what came.
    """
    inputs = {variable.name: variable for variable in program.main.variables_of(Role.INPUT)}
    named = _by_name(list(inputs), feed)
    for name in named:
        if name not in inputs:
            raise ValueError(
                f"feed: expected the inputs {', '.join(inputs) or 'none'}, got an unknown one "
                f"{name!r}"
            )
    sizes: dict[str, tuple[int, str]] = {}
    for name, variable in inputs.items():
        if name not in named:
            raise ValueError(f"feed: expected the input {name!r}, {_words(variable)}, got none")
        _check(variable, named[name], sizes)
    return {name: tensor.detach().to(device) for name, tensor in named.items()}


def _by_name(names: list[str], feed: Feed) -> dict[str, Tensor]:
    if feed is None:
        return {}
    if isinstance(feed, Mapping):
        return {name: _tensor(value) for name, value in feed.items()}
    if isinstance(feed, Tensor | np.ndarray) or not isinstance(feed, Sequence):
        raise TypeError(f"feed: expected a tuple or a dict of tensors, got {type(feed).__name__}")
    if len(feed) != len(names):
        raise ValueError(
            f"feed: expected {len(names)} tensors ({', '.join(names) or 'none'}), got {len(feed)}"
        )
    return dict(zip(names, map(_tensor, feed), strict=True))


def _tensor(value: Any) -> Any:
    """An array as a tensor; what is neither stays as it is, and is refused by name."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "bifuc":
        return torch.tensor(value)  # a copy: arrays may be read-only
    return value


def _words(variable: Variable) -> str:
    return f"{variable.dtype}[{', '.join(map(str, variable.shape))}]"


def _check(variable: Variable, tensor: Any, sizes: dict[str, tuple[int, str]]) -> None:
    """``sizes`` collects what the free sizes are in this feed, and which input said so."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"feed: input {variable.name!r}: expected a tensor, {_words(variable)}, got "
            f"{type(tensor).__name__}"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    came = f"{dtype}{list(tensor.shape)}"
    wrong = ValueError(f"feed: input {variable.name!r}: expected {_words(variable)}, got {came}")
    if dtype != variable.dtype or tensor.dim() != len(variable.shape):
        raise wrong
    for extent, size in zip(variable.shape, tensor.shape, strict=True):
        if isinstance(extent, int):
            if extent != size:
                raise wrong
            continue
        symbol, _, minimum = extent.partition(">=")
        if size < (int(minimum) if minimum else 1):
            raise ValueError(f"{wrong}; the captured step holds for {minimum or 1} rows or more")
        known, first = (
            sizes.setdefault(symbol, (size, variable.name)) if symbol.isidentifier() else (size, "")
        )
        if known != size:
            raise ValueError(f"{wrong}; {symbol} is {known} in the input {first!r}")
