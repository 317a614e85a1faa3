"""Decompositions for tracing that compute what eager computes, where torch's own do not.

- ``dropout``: torch traces another op in its place, which draws the mask in another order where a
  tensor is not row-major.  Without that replacement torch's own composition runs.
- Recurrent layers with ``dropout`` between them: torch 2.13's decomposition loses the dropout.  Run
  layer by layer they keep it.
- Recurrent layers over a free time: torch's decomposition loops over the steps, whose number a
  program does not know; one op takes its place.
- ``one_hot`` without a number of classes, and packed sequences: a size depends on data, and the
  refusal says what to write instead.
- ``ctc_loss``: what it keeps for its backward has a size that depends on data (ctc.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from transpiler.ir.recurrent import KINDS
from transpiler.tracing.ctc import ctc_loss
from transpiler.tracing.recurrent import traced

Kernel = Callable[..., Any]


@contextmanager
def as_eager() -> Iterator[None]:
    """Traces composite ops inside as the ops that eager runs."""
    aten = torch.ops.aten
    with ExitStack() as stack:
        stack.enter_context(_replaced(aten.dropout.default, lambda kernel: None))
        for kind in KINDS:
            overload = getattr(aten, kind).input
            stack.enter_context(_replaced(overload, partial(_by_layer, kind)))
        stack.enter_context(_given(aten.ctc_loss.Tensor, ctc_loss))
        stack.enter_context(_given(aten.one_hot.default, _one_hot))
        stack.enter_context(_given(aten._pack_padded_sequence.default, _pack_padded_sequence))
        yield


@contextmanager
def _replaced(overload: OpOverload, change: Callable[[Kernel], Kernel | None]) -> Iterator[None]:
    """Changes, or with None takes away, the Python kernels that torch would trace through."""
    kernels = dict(overload.py_kernels)
    changed = {key: change(kernel) for key, kernel in kernels.items() if key in _TRACED}
    _set(
        overload,
        {key: kernel for key, kernel in {**kernels, **changed}.items() if kernel is not None},
    )
    try:
        yield
    finally:
        _set(overload, kernels)


@contextmanager
def _given(overload: OpOverload, kernel: Kernel) -> Iterator[None]:
    """Gives a Python kernel to a composite op that has none."""
    kernels = dict(overload.py_kernels)
    _set(overload, {**kernels, DispatchKey.CompositeImplicitAutograd: kernel})
    try:
        yield
    finally:
        _set(overload, kernels)


def _one_hot(ids: Tensor, num_classes: int = -1) -> Tensor:
    """torch's own where the number of classes is said.

    Raises:
        ValueError: it is not, so that it would be the largest id of the batch.
    """
    if num_classes < 0:
        raise ValueError(
            "one_hot without num_classes makes as many columns as the largest id of the batch "
            "says, which a program cannot know: write one_hot(ids, num_classes=...)"
        )
    found: Tensor = torch.ops.aten.one_hot.default._op_dk(
        DispatchKey.CompositeImplicitAutograd, ids, num_classes
    )
    return found


def _pack_padded_sequence(*arguments: Any) -> NoReturn:
    """Refuses packed sequences.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a packed sequence has as many rows as the lengths of the batch say, which a program "
        "cannot know: give the layer the padded batch, whose steps after a sequence's end change "
        "none before it; mask its outputs by the lengths, and take the last state of each "
        "sequence with outputs[torch.arange(lengths.shape[0]), lengths - 1].  The backward "
        "direction of a bidirectional layer needs each sequence reversed within its length"
    )


_TRACED = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _set(overload: OpOverload, kernels: dict[Any, Any]) -> None:
    overload.py_kernels.clear()
    overload.py_kernels.update(kernels)
    overload._dispatch_cache.clear()


def _over_free_time(kind: str, kernel: Kernel) -> Kernel:
    """A recurrent op without dropout, as one op of the trace where time is free."""

    def run(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        time = input.shape[1 if batch_first else 0]
        if not isinstance(time, torch.SymInt) or not time.node.expr.free_symbols:
            return tuple(
                kernel(
                    input,
                    hx,
                    params,
                    has_biases,
                    num_layers,
                    dropout,
                    train,
                    bidirectional,
                    batch_first,
                )
            )
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        return traced(
            kind, input, states, params, has_biases, num_layers, train, bidirectional, batch_first
        )

    return run


def _by_layer(kind: str, unrolled: Kernel) -> Kernel:
    """A recurrent op (``torch.lstm``'s arguments) that runs once per layer where there is dropout
    in between.
    """
    kernel = _over_free_time(kind, unrolled)

    def run(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        if not (dropout and train and num_layers > 1):
            return tuple(
                kernel(
                    input,
                    hx,
                    params,
                    has_biases,
                    num_layers,
                    dropout,
                    train,
                    bidirectional,
                    batch_first,
                )
            )
        directions, each = (2 if bidirectional else 1), len(params) // num_layers
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        finals: list[tuple[Tensor, ...]] = []
        value = input.transpose(0, 1) if batch_first else input
        for layer in range(num_layers):
            of_layer = [state[layer * directions : (layer + 1) * directions] for state in states]
            mine = params[layer * each : (layer + 1) * each]
            given = of_layer[0] if isinstance(hx, Tensor) else of_layer
            value, *final = kernel(
                value, given, mine, has_biases, 1, 0.0, train, bidirectional, False
            )
            finals.append(tuple(final))
            if layer < num_layers - 1:
                value = torch.dropout(value, dropout, train=True)
        ends = [torch.cat([final[index] for final in finals]) for index in range(len(states))]
        return (value.transpose(0, 1) if batch_first else value, *ends)

    return run
