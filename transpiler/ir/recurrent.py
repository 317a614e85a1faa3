"""Recurrent layers over a time that stays free: one op for all steps, and one for its gradients.

A program has no loops.  Where the number of time steps is fixed, a layer is written out step by
step; where it is free, one op runs torch's own layer.

oneDNN's kernels round differently where autograd will need more of a layer than its results.  So
``tracked`` marks a layer that is trained, and it is run as such.

[Note: running a layer again]  ``recurrent_grad`` runs the layer once more, under autograd, and
differentiates that.  The gradients are those of the first run, because a layer without dropout
draws nothing: dropout between layers is an op of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from transpiler.ir.schema import (
    BOOLEAN,
    COUNT,
    VARIABLE,
    VARIABLES,
    ArgumentKind,
    Parameter,
    Schema,
    many,
    optional,
)

KINDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "lstm": torch.lstm,
        "gru": torch.gru,
        "rnn_tanh": torch.rnn_tanh,
        "rnn_relu": torch.rnn_relu,
    }
)
_KIND = ArgumentKind(
    f"one of {', '.join(KINDS)}", lambda value: isinstance(value, str) and value in KINDS
)
_LAYER = {
    "input": Parameter(VARIABLE),
    "hx": Parameter(VARIABLES),
    "params": Parameter(VARIABLES),
    "kind": Parameter(_KIND),
    "has_biases": Parameter(BOOLEAN),
    "num_layers": Parameter(COUNT),
    "train": Parameter(BOOLEAN),
    "bidirectional": Parameter(BOOLEAN),
    "batch_first": Parameter(BOOLEAN),
    "tracked": Parameter(BOOLEAN, required=False),
}
SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        # the outputs of all time steps, and each final state
        "recurrent": Schema(MappingProxyType(_LAYER), None, 2),
        # with the gradients of these: those of the input, of each first state and parameter
        "recurrent_grad": Schema(
            MappingProxyType({**_LAYER, "grads": Parameter(many(optional(VARIABLE)))}), None, 3
        ),
    }
)


def recurrent(
    op: Any,
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    kind: str,
    has_biases: bool,
    num_layers: int,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    tracked: bool = False,
) -> tuple[Tensor, ...]:
    """The kernel of ``recurrent``: the outputs of all time steps, and each final state."""
    if tracked and not torch.is_grad_enabled():
        with torch.enable_grad():
            own = [tensor.detach().requires_grad_() for tensor in params]
            settings = (kind, has_biases, num_layers, train, bidirectional, batch_first)
            return tuple(each.detach() for each in recurrent(op, input, hx, own, *settings))
    first: Any = list(hx) if kind == "lstm" else hx[0]
    found: tuple[Tensor, ...] = KINDS[kind](
        input, first, list(params), has_biases, num_layers, 0.0, train, bidirectional, batch_first
    )
    return found


def recurrent_grad(
    op: Any,
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    **settings: Any,
) -> tuple[Tensor, ...]:
    """The kernel of ``recurrent_grad``.

    See [Note: running a layer again].
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (input, *hx, *params)]
    states = len(hx)
    with torch.enable_grad():
        results = recurrent(op, leaves[0], leaves[1 : 1 + states], leaves[1 + states :], **settings)
    given = [(one, grad) for one, grad in zip(results, grads, strict=True) if grad is not None]
    found = torch.autograd.grad(
        [one for one, _ in given], leaves, [grad for _, grad in given], allow_unused=True
    )
    pairs = zip(leaves, found, strict=True)
    return tuple(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs)


KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"recurrent": recurrent, "recurrent_grad": recurrent_grad}
)
