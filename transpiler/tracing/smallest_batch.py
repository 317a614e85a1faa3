"""The smallest sizes at which a captured step equals the eager step.

The equivalence check runs at every size that matters: the example's, one more, and a size on the
other side of every decision that tracing took (guards.py).  A size of one (a batch of one row) may
be ruled out; a failure at any other size is the user's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, nn

from transpiler.ir.sparse_rows import SparseRows
from transpiler.lower import lower
from transpiler.tracing.emit import emit
from transpiler.tracing.equivalence_check import (
    StepResult,
    buffers,
    check_equivalence,
    eager,
    resized,
)
from transpiler.tracing.guards import Variant, branch_error, sizes_at, variants
from transpiler.tracing.input_spec import Inputs
from transpiler.tracing.ragged_bags import offsets_of, with_regular_bags
from transpiler.tracing.tables import CapturedTable, comparable
from transpiler.tracing.trace import TracedStep

LOG = logging.getLogger(__name__)
Step = Callable[..., Any]


def smallest_batch(
    model: nn.Module,
    step: Step,
    restore: Callable[[], None],
    found: TracedStep,
    inputs: Inputs,
    trained: Sequence[str],
    tables: Sequence[CapturedTable],
) -> frozenset[sympy.Symbol]:
    """Runs the equivalence check at every size that matters.

    Args:
        restore: restores the module and the random generators, as given by ``unchanged``.
        found: the trace of the step.
        inputs: the example.
        trained: the parameters whose gradients are compared.
        tables: of the model.

    Returns:
        The free sizes that must not be 1.

    Raises:
        ValueError: the captured step differs from the eager one; the message names the line of the
            step, or the variable.
    """
    offsets = offsets_of(found.graph, found.placeholders)
    captured = _captured_step(model, found, inputs.names, tables)

    def sized(variant: Variant) -> list[Tensor] | None:
        sizes = sizes_at(found, variant.values)
        if sizes is None:
            return None
        batch = resized(inputs.batch, sizes)
        return with_regular_bags(batch, inputs.names, offsets, variant.values, found.hints)

    def run(*of: Variant) -> tuple[str, float]:
        batches = [batch for batch in map(sized, of) if batch is not None]
        return check_equivalence(
            model, restore, batches, lambda given: eager(model, step, trained, given), captured
        )

    tried = variants(found)
    worst = run(*[variant for variant in tried if variant.guard is None])
    ruled_out = {
        symbol
        for name, sizes in zip(inputs.names, found.sizes, strict=True)
        if name in offsets and offsets[name].ends and sizes[0] is not None
        for symbol in sizes[0].free_symbols
    }
    for variant in tried:
        if variant.guard is None:
            continue
        try:
            worst = max(worst, run(variant), key=lambda result: result[1])
        except Exception as error:
            restore()
            ruled_out |= _ruled_out(variant, error)
    if worst[0]:
        LOG.warning(
            "capture: %s differs from eager training by %.1e (relative): some kernel rounds "
            "differently",
            *worst,
        )
    return frozenset(ruled_out)


def _captured_step(
    model: nn.Module,
    found: TracedStep,
    names: Sequence[str],
    tables: Sequence[CapturedTable],
) -> Callable[[Sequence[Tensor]], StepResult]:
    """The captured step as a function of a batch, on the module's own tensors."""
    emitted = emit(found, model, names, set(), frozenset(), tables)
    of_rows = {table.proxy: table for table in tables}
    keys = {
        f"{name}@GRAD": of_rows[name].gradient if name in of_rows else f"{name}@GRAD"
        for name in found.gradients
    }
    keys = {**{name: name for name in found.outputs}, **keys}
    held = {table.name: table.rows() for table in tables}
    kernels = {"sparse_table": lambda op, **settings: held[op.outputs[0]]}
    lowered = lower(emitted.ops, list(keys.values()), _device(model), kernels)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def captured(given: Sequence[Tensor]) -> StepResult:
        with torch.no_grad():
            values = lowered({**tensors, **dict(zip(names, given, strict=True))})
        kept: dict[str, Tensor] = {}
        for key, value in zip(keys, values, strict=True):
            if isinstance(value, SparseRows):
                kept |= comparable(key.removesuffix("@GRAD"), value)
            else:
                kept[key] = value.detach().clone()
        return StepResult({**kept, **buffers(model)})

    return captured


def _ruled_out(variant: Variant, error: Exception) -> set[sympy.Symbol]:
    """The sizes that must not be 1, after a failure at sizes where a decision differs.

    Raises:
        ValueError: the size is another one, or the model's own code decides; the message names the
            line of the decision.
    """
    assert variant.guard is not None, "called for decisions only"
    eager_refused = "cannot capture" not in str(error)
    if 1 not in variant.values.values() or not (variant.guard.internal or eager_refused):
        raise branch_error(variant.guard) from error
    LOG.info("capture: a size of one is ruled out: %s", str(error).partition("\n")[0])
    return {symbol for symbol, value in variant.values.items() if value == 1}


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
