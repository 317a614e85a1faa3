"""A prediction, and a search, as text."""

from __future__ import annotations

from collections.abc import Sequence

from pserver.launcher.planning.candidates import Candidate
from pserver.launcher.planning.cost import Prediction
from pserver.launcher.planning.figures import Measured

DISTURBING = 0.25  # cores


def prediction_text(found: Prediction, measured: Measured) -> str:
    """A line for the step, and a table of its parts.

    Args:
        measured: by the probe, on which the prediction stands.
    """
    head = (
        f"predicted step {spelled(found.seconds)}, {1 / found.seconds:.4g} steps/s of each "
        f"trainer; bottleneck: {found.bottleneck}"
    )
    rows = [("part", "of a step", "")]
    for part in found.parts:
        why = f"{part.why}; while the rest goes on" if part.hidden else part.why
        rows.append((part.name, spelled(part.seconds), why))
    probe = (
        f"from a probe of {measured.steps} steps of {spelled(measured.seconds)}, "
        f"{spelled(measured.exchange_seconds)} of them in the exchange"
    )
    return "\n".join([head, *table(rows), probe, *disturbance(measured)])


def disturbance(measured: Measured) -> list[str]:
    """A warning where other processes have disturbed the probe."""
    if measured.others < DISTURBING:
        return []
    return [
        f"other processes kept {measured.others:.1f} cores of this machine busy meanwhile: the job "
        "will take less without them; probe again when they rest"
    ]


def candidates_text(found: Sequence[Candidate], trainers: int) -> str:
    """A table, the first of which is the best."""
    rows = [("servers", "strategy", "of a step", "steps/s", "memory of a server", "bottleneck")]
    for each in found:
        seconds = each.prediction.seconds
        rows.append(
            (
                str(each.servers),
                each.setting,
                spelled(seconds),
                f"{trainers / seconds:.4g}",
                f"{each.memory / 1e6:.4g} MB",
                each.prediction.bottleneck,
            )
        )
    return "\n".join(table(rows))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def spelled(seconds: float) -> str:
    """A time as people write it.

    Example:
        >>> spelled(0.0123)
        '12.3 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
