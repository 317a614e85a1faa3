"""Runs registered rules: a block of ops as a torch.optim.Optimizer.

A server, a trainer that steps by itself and a single process run the same class, so they agree to
the bit.

[Note: every element alike]  torch's kernels update a tensor in vectors, and what is left after the
last full one element by element; a ``pow`` or a ``sigmoid`` then rounds otherwise.  A large tensor
is divided among threads, each with such an end.  So that an element has one result wherever its
tensor is cut, and however many threads there are, an element-wise rule runs on parts that torch
does not divide, and a part that is short is padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from transpiler.ir.aten_ops import aten_overload
from transpiler.ir.block import Argument, Block, Op, Ref, Symbol
from transpiler.ir.schema import DTYPES
from transpiler.ir.update_block import (
    NUMBERS,
    expect,
    hparams_of,
    needs_norms,
    results_of,
    states_of,
)


class Update:
    """A registered rule, ready to run.

    Args:
        block: one that :func:`check` accepts.
    """

    def __init__(self, block: Block) -> None:
        self._results = results_of(block)
        self._hparams = hparams_of(block)
        last = {name: index for index, op in enumerate(block.ops) for name in op.inputs}
        kept = set(self._results.values())
        self._calls = [
            (
                _call(op),
                [name for name in set(op.inputs) if last[name] == index and name not in kept],
            )
            for index, op in enumerate(block.ops)
        ]

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        states: Mapping[str, Tensor],
        hparams: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """The new value of the parameter, as "param", and of every state.

        Args:
            param, grad: of one shape and dtype.
            states: by name; of the parameter's shape, or scalars.
            hparams: by name; numbers, or tuples of them.
        """
        values: dict[str, Any] = {"param": param, "grad": grad, **states}
        for name, count in self._hparams.items():
            if count is None:
                values[name] = float(hparams[name])
            else:
                items = zip(range(count), hparams[name], strict=True)
                values |= {f"{name}.{index}": float(item) for index, item in items}
        for call, done in self._calls:
            call(values)
            for name in done:  # so that a large parameter has few temporaries at a time
                values.pop(name, None)
        return {name: values[result] for name, result in self._results.items()}


PART = 32768  # elements that torch never divides among threads
VECTOR = 64  # elements; a multiple of what any of torch's kernels takes at a time


def _call(op: Op) -> Callable[[dict[str, Any]], None]:
    """The op as a function that adds its result to the values."""
    (result,) = op.outputs
    function: Callable[..., Any]
    if op.type in NUMBERS:
        function, keys = NUMBERS[op.type], list(op.arguments)
        op = Op(op.type, {key: op.arguments[key] for key in sorted(keys)}, op.outputs)
        positional = True
    else:
        positional = False
        # a copy: the new value of one variable may be the old one of another
        function = _copied if op.type == "assign" else aten_overload(op.type)
    read = {key: value.name for key, value in op.arguments.items() if isinstance(value, Ref)}
    plain = {key: _value(value) for key, value in op.arguments.items() if key not in read}
    order = list(op.arguments)

    def call(values: dict[str, Any]) -> None:
        arguments = {key: values[read[key]] if key in read else plain[key] for key in order}
        values[result] = function(*arguments.values()) if positional else function(**arguments)

    return call


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _value(argument: Argument) -> Any:
    """An argument that is not a variable, as torch takes it."""
    if isinstance(argument, Symbol):
        return DTYPES[argument.value]  # the schemas of what a rule may use have no other words
    return argument


def check_runs(block: Block, hparams: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Checks, by a step on a tiny tensor, that new values have the shapes of those they replace.

    Args:
        block: one that :func:`check` accepts.
        hparams: as the rule has them.
        dtype: of a parameter.

    Raises:
        ValueError: a result has another shape, or torch refuses an op for this dtype.
    """
    states = {
        name: torch.zeros(3, dtype=dtype) if shaped else torch.zeros(())
        for name, shaped in states_of(block).items()
    }
    param = torch.zeros(3, dtype=dtype)
    try:
        with torch.no_grad():
            results = Update(block)(param, torch.zeros_like(param), states, hparams)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"update: torch refuses it for {dtype}: {error}") from error
    for name, like in {"param": param, **states}.items():
        got = results[name]
        fits = isinstance(got, Tensor) and got.shape == like.shape
        of = list(got.shape) if isinstance(got, Tensor) else "a number"
        expected = "the parameter's shape" if like.dim() else "the shape []"
        expect(fits, f"update: expected {expected} of the new {name!r}, got {of}")
        expect(
            got.is_complex() <= like.is_complex(),
            f"update: expected a {like.dtype} for the new {name!r}, got {got.dtype}",
        )


class RuleOptimizer(torch.optim.Optimizer):
    """Takes the steps of a registered rule, on a server and in a single process alike.

    Args:
        params: parameters, or groups of them.
        block: the rule.
        hparams: by name, of every group that gives no others.
    """

    def __init__(self, params: Iterable[Any], block: Block, hparams: Mapping[str, Any]) -> None:
        self._update = Update(block)
        self._states = states_of(block)
        self._whole = needs_norms(block)
        super().__init__(params, dict(hparams))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Returns:
            The loss that ``closure`` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)
        return loss

    def _step(self, param: Tensor, group: Mapping[str, Any]) -> None:
        states = self.state[param]
        for name, shaped in self._states.items():
            if name not in states:
                states[name] = torch.zeros_like(param) if shaped else torch.zeros(())
        if self._whole and not param.numel():
            return  # the largest of no elements is no number
        grad = param.grad
        assert grad is not None, "step has looked"
        held = {"param": param} | {name: states[name] for name in self._states}
        scalars = {name: held[name] for name, shaped in self._states.items() if not shaped}
        # flat, so that a norm adds in the order in which a server adds; copies where a tensor is
        # not row-major
        flat = {name: value.reshape(-1) for name, value in held.items() if name not in scalars}
        new = self._run({**flat, "grad": grad.reshape(-1)}, scalars, group)
        for name, value in {**flat, **new}.items():
            if value.data_ptr() != held[name].data_ptr():
                held[name].copy_(value.view(held[name].shape))

    def _run(
        self, flat: dict[str, Tensor], scalars: dict[str, Tensor], group: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Steps flat tensors, in place; returns the new scalars.  See [Note: every element
        alike].
        """
        count = flat["param"].numel()
        undivided = self._whole or flat["param"].device.type != "cpu"
        length = max(count, 1) if undivided else PART
        new = scalars
        for begin in range(0, max(count, 1), length):
            part = {name: value[begin : begin + length] for name, value in flat.items()}
            size = part["param"].numel()
            short = 0 if undivided else -size % VECTOR
            given = (
                {name: pad(value, (0, short)) for name, value in part.items()} if short else part
            )
            shaped = {name: given[name] for name in self._states if name in given}
            new = self._update(given["param"], given["grad"], {**shaped, **scalars}, group)
            for name in ("param", *shaped):
                part[name].copy_(new.pop(name)[:size])
        return new
