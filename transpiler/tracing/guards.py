"""The decisions about sizes that tracing took, and the sizes at which they differ.

See [Note: what stays free] in ``trace.py``.  The equivalence check runs at these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]  # has no stubs

from transpiler.tracing.trace import SizeGuard, TracedStep

_PROBES = sorted(
    {
        *range(1, 66),
        *(2**power + near for power in range(6, 31) for near in (-1, 0, 1)),
        100,
        1000,
        10_000,
        100_000,
    }
)
# rows: torch's own decisions at larger sizes (are 32-bit indices enough?) are not checked
_LARGEST_CHECKED = 1024

Values = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Variant:
    """Sizes at which the equivalence check runs.

    Attributes:
        values: of the free sizes.
        guard: the decision that differs at these values; None: only another size.
    """

    values: Values
    guard: SizeGuard | None = None


def _at(expression: sympy.Basic, values: Values) -> sympy.Basic:
    return expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})


def sizes_at(trace: TracedStep, values: Values) -> list[list[int | None]] | None:
    """The extents of every input (None: a fixed one); None if these values give no whole sizes of 1
    or more.
    """
    found: list[list[int | None]] = []
    for sizes in trace.sizes:
        extents = [None if size is None else _at(size, values) for size in sizes]
        if any(each is not None and (not each.is_integer or int(each) < 1) for each in extents):
            return None
        found.append([None if each is None else int(each) for each in extents])
    return found


def _points(trace: TracedStep, guard: SizeGuard) -> Iterator[Values]:
    """Values to try a guard at: all its sizes alike, then one at a time."""
    symbols = sorted(guard.expression.free_symbols, key=str)
    for probe in _PROBES:
        yield {**trace.hints, **{symbol: probe for symbol in symbols if symbol in trace.hints}}
    if len(symbols) > 1:
        for symbol in symbols:
            for probe in _PROBES[:80]:
                yield {**trace.hints, symbol: probe}


def _fails(trace: TracedStep, guard: SizeGuard) -> list[Values]:
    if not guard.expression.free_symbols:
        return []
    decided = [
        values for values in _points(trace, guard) if _at(guard.expression, values) == sympy.false
    ]
    return [values for values in decided if sizes_at(trace, values) is not None]


def variants(trace: TracedStep) -> list[Variant]:
    """The sizes to check: the example's, one row more, and one on the other side of every decision.

    Raises:
        ValueError: a decision of the model's own code does not hold for every size of 2 or more;
            the message names the line.
    """
    found = [Variant(trace.hints), _one_more(trace)]
    for guard in trace.guards:
        failing = _fails(trace, guard)
        single = next((values for values in failing if 1 in values.values()), None)
        larger = next((values for values in failing if 1 not in values.values()), None)
        if larger is not None and not guard.internal:
            raise branch_error(guard)
        for values in (single, larger):
            if values is not None and max(values.values()) <= _LARGEST_CHECKED:
                if not any(variant.guard and variant.values == values for variant in found):
                    found.append(Variant(values, guard))
    return found


def _one_more(trace: TracedStep) -> Variant:
    for more in range(1, 65):
        values = {symbol: hint + more for symbol, hint in trace.hints.items()}
        if sizes_at(trace, values) is not None:
            return Variant(values)
    return Variant(trace.hints)


def branch_error(guard: SizeGuard) -> ValueError:
    """The error for a decision of the model's code that depends on a free size."""
    return ValueError(
        f"{guard.line or 'in the backward pass'}: cannot capture this step: it takes another path "
        "for other sizes (a branch on the size of dimension 0, or of another that stays free); a "
        "program has one path for all"
    )
