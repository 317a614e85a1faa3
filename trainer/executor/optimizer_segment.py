"""Optimizer ops, run by torch's own optimizers.

Where the process holds the user's optimizer, one ``step()`` of it runs all ops: its state, its
hooks and the hyper-parameters that a scheduler changed are those of an eager script.  A program
that was loaded has no such optimizer; then each group gets one made from its ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainer.executor.table_handle import TableHandle
from transpiler.ir.graph import Op, Ref
from transpiler.ir.ops import rule_of_op
from transpiler.ir.rules import Rule, make
from transpiler.ir.table_ops import updates_rows


def _name(op: Op, argument: str) -> str:
    value = op.arguments[argument]
    assert isinstance(value, Ref), "checked against the schema"
    return value.name


def _fusion(op: Op) -> dict[str, bool]:
    """Which of torch's kernels an op asks for."""
    return {key: bool(op.arguments[key]) for key in ("foreach", "fused") if key in op.arguments}


@contextmanager
def _flagged(
    optimizer: torch.optim.Optimizer, flags: Mapping[Any, Mapping[str, bool]]
) -> Iterator[None]:
    """The optimizer's groups have the flags of their ops, which a strategy may have set."""
    kept = []
    try:
        for index, said in flags.items():
            group = optimizer.param_groups[index]
            for key in {"foreach", "fused"} & set(group):
                kept.append((group, key, group[key]))
                group[key] = said.get(key)
        yield
    finally:
        for group, key, value in kept:
            group[key] = value


class OptimizerSegment:
    """A run of optimizer ops of a program.

    Args:
        ops: of the run.
        tensors: the parameters by name; updated in place.
        optimizer: the live one whose parameters they are, or None.
        tables: those whose rows the ops update, by name.
        states: where there is no optimizer, the states to go on from, by parameter's name and
            state; the dicts have the present ones afterwards.

    Attributes:
        grads: the variable of each parameter's gradient, by the parameter's name.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        tables: Mapping[str, TableHandle] = MappingProxyType({}),
        states: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        self.grads = {_name(op, "param"): _name(op, "grad") for op in ops}
        self._tables = {
            _name(op, "param"): tables[_name(op, "param")] for op in ops if updates_rows(op)
        }
        self._tensors = tensors
        self._live = optimizer
        self._flags = {
            op.arguments["group"]: flags
            for op in ops
            if not updates_rows(op) and (flags := _fusion(op))
        }
        dense = [op for op in ops if not updates_rows(op)]
        made = {} if states is None else states
        self._optimizers = [optimizer] if optimizer is not None else self._made(dense, made)

    def _made(
        self, ops: Sequence[Op], states: dict[str, dict[str, Tensor]]
    ) -> list[torch.optim.Optimizer]:
        groups: dict[object, tuple[Rule, list[str]]] = {}
        for op in ops:
            _, members = groups.setdefault(op.arguments["group"], (rule_of_op(op), []))
            members.append(_name(op, "param"))
        optimizers = []
        for rule, members in groups.values():
            optimizer = make(rule, [self._tensors[name] for name in members])
            for name in members:
                parameter, held = self._tensors[name], states.setdefault(name, {})
                held |= {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in (held or optimizer.state.get(parameter, {})).items()
                }
                optimizer.state[parameter] = held
            optimizers.append(optimizer)
        return optimizers

    def __call__(self, values: Mapping[str, Any]) -> None:
        """One step.

        ``p.grad`` is borrowed and given back: it is neither read nor changed by running a program.
        """
        members = [
            p
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        kept = [(parameter, parameter.grad) for parameter in members]
        try:
            for parameter in members:
                parameter.grad = None
            with ExitStack() as stack:
                for name, grad in self.grads.items():
                    if name in self._tables:
                        stack.enter_context(self._tables[name].stepping(values[grad]))
                    else:
                        self._tensors[name].grad = values[grad]
                if self._live is not None:
                    stack.enter_context(_flagged(self._live, self._flags))
                for optimizer in self._optimizers:
                    optimizer.step()
        finally:
            for parameter, grad in kept:
                parameter.grad = grad

    def state(self, param: str, key: str) -> Tensor | None:
        """A state of a parameter; None before the first step."""
        for optimizer in self._optimizers:
            value = optimizer.state.get(self._tensors[param], {}).get(key)
            if value is not None:
                return torch.as_tensor(value)
        return None
