"""A recurrent layer over a free time in a trace: one op, and one for its gradients.

The ops here run on fake tensors alone; programs have kernels of their own (ir/recurrent.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from transpiler.tracing.embedding_lookup import NAMESPACE
from transpiler.tracing.node_lines import followed

FORWARD, GRADIENT = "recurrent", "recurrent_grad"
_LAYER = (
    "Tensor input, Tensor[] hx, Tensor[] params, str kind, bool has_biases, int num_layers, "
    "bool train, bool bidirectional, bool batch_first"
)

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_library.define(f"{FORWARD}({_LAYER}) -> Tensor[]")
_library.define(f"{GRADIENT}({_LAYER}, Tensor?[] grads) -> Tensor[]")


def _fake(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    kind: str,
    has_biases: bool,
    num_layers: int,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Outputs as torch lays them out: time first in memory."""
    rows, time = (0, 1) if batch_first else (1, 0)
    width = hx[0].shape[2] * (2 if bidirectional else 1)
    output = input.new_empty((input.shape[time], input.shape[rows], width))
    final = [torch.empty_like(state, memory_format=torch.contiguous_format) for state in hx]
    return [output.transpose(0, 1) if batch_first else output, *final]


def _fake_gradient(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *settings: Any
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (input, *hx, *params)]


torch.library.register_fake(f"{NAMESPACE}::{FORWARD}", _fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::{GRADIENT}", _fake_gradient, lib=_library)


class _Recurrent(torch.autograd.Function):
    """The op in autograd."""

    @staticmethod
    def forward(
        ctx: Any, tracked: bool, states: int, settings: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Puts the op into the trace."""
        ctx.save_for_backward(*tensors)
        ctx.states, ctx.settings = states, settings
        input, hx, params = tensors[0], list(tensors[1 : 1 + states]), list(tensors[1 + states :])
        with followed(tracked):
            found = torch.ops.pserver.recurrent(input, hx, params, *settings)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Puts the op of the gradients into the trace."""
        tensors, states = ctx.saved_tensors, ctx.states
        input, hx, params = tensors[0], list(tensors[1 : 1 + states]), list(tensors[1 + states :])
        found = torch.ops.pserver.recurrent_grad(input, hx, params, *ctx.settings, list(grads))
        return (None, None, None, *found)


def traced(
    kind: str, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *settings: Any
) -> tuple[Tensor, ...]:
    """One layer or more, without dropout, as one op of the trace.

    Args:
        settings: has_biases, num_layers, train, bidirectional, batch_first.

    Returns:
        The outputs of all time steps, and each final state.
    """
    found: tuple[Tensor, ...] = _Recurrent.apply(  # type: ignore[no-untyped-call]  # torch's own
        torch.is_grad_enabled(), len(hx), (kind, *settings), input, *hx, *params
    )
    return found


def call_of(node: fx.Node) -> tuple[str, Mapping[str, Any]] | None:
    """The op's type and arguments, for a node of such an op; None for others."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return None
    schema = node.target._schema
    op_type = schema.name.partition("::")[2]
    if op_type not in (FORWARD, GRADIENT):
        return None
    named = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    return op_type, {**named, **node.kwargs}
