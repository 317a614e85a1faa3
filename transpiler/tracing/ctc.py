"""``ctc_loss`` in a trace: the sizes of what torch keeps for its backward depend on data.

A program holds torch's own two ops.  Those here run on fake tensors alone, and say an upper bound
of the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from transpiler.tracing.embedding_lookup import NAMESPACE
from transpiler.tracing.node_lines import followed

FORWARD, GRADIENT = "ctc_loss", "ctc_loss_backward"
_TYPES: Mapping[str, str] = MappingProxyType(
    {FORWARD: "aten._ctc_loss.Tensor", GRADIENT: "aten._ctc_loss_backward.Tensor"}
)
_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_MEAN, _SUM = 1, 2  # torch's numbers of reductions

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_library.define(f"{FORWARD}({_GIVEN}, int blank, bool zero_infinity) -> (Tensor, Tensor)")
_library.define(
    f"{GRADIENT}(Tensor grad, {_GIVEN}, Tensor neg_log_likelihood, Tensor log_alpha, int blank, "
    "bool zero_infinity) -> Tensor"
)


def _fake(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    steps, rows = log_probs.shape[0], log_probs.shape[1]
    longest = 2 * targets.shape[-1] + 1
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, steps, longest))


def _fake_gradient(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


torch.library.register_fake(f"{NAMESPACE}::{FORWARD}", _fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::{GRADIENT}", _fake_gradient, lib=_library)


class _Losses(torch.autograd.Function):
    """The op in autograd: the loss of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        tracked: bool,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> Tensor:
        """Puts the op into the trace."""
        given = (log_probs, targets, input_lengths, target_lengths)
        with followed(tracked):
            found = torch.ops.pserver.ctc_loss(*given, blank, zero_infinity)
        losses: Tensor = found[0]
        ctx.save_for_backward(*given, losses, found[1])
        ctx.settings = (blank, zero_infinity)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Puts the op of the gradient into the trace."""
        found = torch.ops.pserver.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.settings)
        return (None, found, None, None, None, None, None)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """``torch.ctc_loss`` for a trace; the reduction is ordinary compute."""
    batched = log_probs.dim() == 3
    each: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]  # torch's own
        torch.is_grad_enabled(),
        log_probs if batched else log_probs.unsqueeze(1),
        targets,
        input_lengths,
        target_lengths,
        blank,
        zero_infinity,
    )
    if zero_infinity:
        each = torch.where(each == float("inf"), each.new_zeros(()), each)
    if reduction == _MEAN:
        return (each / target_lengths.to(each).clamp_min(1)).mean()
    if reduction == _SUM:
        return each.sum()
    return each if batched else each.squeeze(0)


def call_of(node: fx.Node) -> tuple[str, Mapping[str, Any]] | None:
    """The op's type and arguments, for a node of such an op; None for others."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return None
    schema = node.target._schema
    op_type = _TYPES.get(schema.name.partition("::")[2])
    if op_type is None:
        return None
    named = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    return op_type, {**named, **node.kwargs}
