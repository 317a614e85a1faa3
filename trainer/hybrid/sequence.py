"""Sequence parallelism: each rank has a part of every sequence; attention sees whole sequences, a
part of the heads at a time.

::

              all heads         all tokens                            all heads
    rank 0   tokens 0..3  -->  heads 0..1  --attention, all-to-all-->  tokens 0..3
    rank 1   tokens 4..7  -->  heads 2..3                              tokens 4..7
                    all-to-all

Layers that work on each token by itself need no change.
``torch.nn.functional.scaled_dot_product_attention``, called in the model's forward, is replaced,
also where ``nn.MultiheadAttention`` calls it: with ``need_weights=False``.  (Jacobs et al.:
DeepSpeed Ulysses, 2023.)  Positions are inputs: a rank's tokens do not begin at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.hybrid.mesh import divides

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_attention = F.scaled_dot_product_attention  # torch's own, kept while it is replaced


def split_sequence(tensor: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's part of a batch of sequences.

    Example::

        mesh = hybrid_mesh(fleet.DistributedStrategy())
        tokens = split_sequence(torch.zeros(8, 128), mesh)    # [8, 128 / sep_degree]

    Args:
        tensor: a batch with time in dimension ``dim``.
        mesh: of :func:`trainer.hybrid_mesh`.

    Returns:
        A contiguous copy of the part.

    Raises:
        ValueError: the sequence's length is not a multiple of the sep degree.
    """
    divides(
        "length",
        tensor.shape[dim],
        mesh["sep"].size(),
        "sep",
        f"dimension {dim} of a tensor of shape {tuple(tensor.shape)}",
    )
    return tensor.chunk(mesh["sep"].size(), dim)[mesh["sep"].get_local_rank()].contiguous()


class _Exchange(torch.autograd.Function):
    """An all-to-all over dimension 0; its gradient is exchanged in the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(tensor: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[batch, heads, time / n, size] -> [batch, heads / n, time, size]"""
    batch, heads, time, size = tensor.shape
    divides("heads", heads, ranks, "sep", "scaled_dot_product_attention")
    parts = tensor.reshape(batch, ranks, heads // ranks, time, size).transpose(0, 1).contiguous()
    received: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]  # torch's own
    return received.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, ranks * time, size)


def _to_time(tensor: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[batch, heads / n, time, size] -> [batch, heads, time / n, size]"""
    batch, heads, time, size = tensor.shape
    parts = (
        tensor.reshape(batch, heads, ranks, time // ranks, size).permute(2, 0, 1, 3, 4).contiguous()
    )
    received: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]  # torch's own
    return received.transpose(0, 1).reshape(batch, ranks * heads, time // ranks, size)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """``scaled_dot_product_attention`` of sequences whose parts are on the ranks of a group, in the
    order of the ranks.

    Args:
        query, key, value: [batch, heads, time / n, size]; all ranks have all heads, which n
            divides.
        attn_mask: for whole sequences: its last dimension is the whole time.
        options: as torch's: dropout_p, is_causal, scale, enable_gqa.

    Returns:
        [batch, heads, time / n, size]

    Raises:
        ValueError: the number of heads is not a multiple of n, or the mask is for this rank's part
            only.
    """
    ranks = dist.get_world_size(group)
    if query.dim() != 4:
        raise ValueError(
            f"sep_degree {ranks}: expected attention over [batch, heads, time, size], got the "
            f"shape {tuple(query.shape)}"
        )
    if attn_mask is not None and attn_mask.shape[-1] != ranks * key.shape[2]:
        raise ValueError(
            f"attn_mask: expected one for the whole sequence of {ranks * key.shape[2]}, got the "
            f"shape {tuple(attn_mask.shape)}"
        )
    parts = [_to_heads(tensor, group, ranks) for tensor in (query, key, value)]
    result = _attention(parts[0], parts[1], parts[2], attn_mask=attn_mask, **options)
    return _to_time(result, group, ranks)


class _Replaced(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by :func:`attention` while it is entered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs or {})
        if func is not _attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **options: Any) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return attention(**dict(zip(names, args, strict=False)), **options, group=self._group)

    def _multi_head(self, args: Any, options: Mapping[str, Any]) -> Any:
        """Replaces attention by name for this call: torch runs the function's body outside the
        mode.
        """
        if options.get("need_weights", True):
            raise ValueError(
                "sep_degree: nn.MultiheadAttention computes weights from this rank's part of a "
                "sequence only: call it with need_weights=False"
            )
        F.scaled_dot_product_attention = self._attend
        try:
            return F.multi_head_attention_forward(*args, **options)
        finally:
            F.scaled_dot_product_attention = _attention


def replace_attention(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes attention see whole sequences in every forward of ``model``."""
    stack: list[ExitStack] = []

    def begin(*_: Any) -> None:
        stack.append(ExitStack())
        stack[-1].enter_context(_Replaced(group))

    def end(*_: Any) -> None:
        stack.pop().close()

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)
