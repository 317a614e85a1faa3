"""A picture of a benchmark's rows: how near each is to its target, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from harness import Row

HEIGHT = 18  # of a row
LEFT, WIDTH = 260, 420  # of the names, and of the bars
FURTHEST = 2.0  # doublings of the target, to each side


def nearness(row: Row) -> float | None:
    """Doublings by which a ratio is better than its target, below 0 where it is worse; None where
    there is no target, or nothing was measured.
    """
    if row.ratio is None or not row.promise.target or row.ratio <= 0:
        return None
    doublings = math.log2(row.ratio / row.promise.target)
    return -doublings if row.promise.most else doublings


def picture(rows: Sequence[Row]) -> str:
    """An SVG: a bar for each row with a target, to the right where it is met."""
    drawn = [(row, near) for row in rows if (near := nearness(row)) is not None]
    height = HEIGHT * (len(drawn) + 2)
    middle = LEFT + WIDTH / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 140}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        *(_mark(middle, doublings, height) for doublings in (-2, -1, 0, 1, 2)),
        *(_bar(row, near, middle, HEIGHT * (place + 1)) for place, (row, near) in enumerate(drawn)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _at(middle: float, doublings: float) -> float:
    cut = max(-FURTHEST, min(FURTHEST, doublings))
    return middle + cut / FURTHEST * WIDTH / 2


def _mark(middle: float, doublings: float, height: int) -> str:
    x, text = _at(middle, doublings), f"{2.0**doublings:g}"
    label = "target" if not doublings else f"{text} x"
    return (
        f'<line x1="{x:g}" y1="{HEIGHT}" x2="{x:g}" y2="{height}" stroke="#bbb"/>'
        f'<text x="{x:g}" y="{HEIGHT - 5}" text-anchor="middle">{label}</text>'
    )


def _bar(row: Row, near: float, middle: float, y: int) -> str:
    end, colour = _at(middle, near), "#1a7f37" if near >= 0 else "#b35900"
    left, width = min(middle, end), abs(end - middle)
    said = (
        f"{row.ratio:.2f}, {'at most' if row.promise.most else 'at least'} {row.promise.target:g}"
    )
    return (
        f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(row.promise.name)}</text>'
        f'<rect x="{left:g}" y="{y + 3}" width="{max(width, 1):g}" height="{HEIGHT - 6}" '
        f'fill="{colour}"/>'
        f'<text x="{LEFT + WIDTH + 6}" y="{y + 13}">{said}</text>'
    )
