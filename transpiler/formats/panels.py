"""The panels of a picture: where a block and its ops are drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from transpiler.ir.graph import Block

# Pixels.
MARGIN, TITLE, ROW, BOX = 24, 30, 27, 21
LANE = 16  # a line of words on a lane, below the title
PANEL, PADDING, GUTTER, GAP = 560, 12, 44, 36
CHARACTER = 6.65  # width of one in a box
COLUMN = 900  # a column of panels gets no higher than this, unless block 0 is
# characters that XML cannot hold
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def quoted(text: str) -> str:
    """Text escaped for an XML element or attribute."""
    return escape(_UNPRINTABLE.sub("\ufffd", text), {'"': "&quot;"})


def shortened(text: str, pixels: float) -> str:
    """The text, cut to fit a box of this width."""
    limit = int(pixels / CHARACTER)
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


@dataclass(frozen=True, slots=True)
class Panel:
    """A block's panel in the picture.

    Attributes:
        block: what it shows.
        x, y: pixels, of its upper left corner.
    """

    block: Block
    x: float
    y: float

    @property
    def height(self) -> float:
        """Pixels from the upper to the lower edge."""
        return TITLE + max(len(self.block.ops), 1) * ROW + PADDING

    @property
    def left(self) -> float:
        """Pixels, where the boxes begin."""
        return (
            self.x + PADDING + (GUTTER if self.block.index == 0 and len(self.block.ops) > 1 else 0)
        )

    @property
    def right(self) -> float:
        """Pixels, where the boxes end."""
        return self.x + PANEL - PADDING

    def middle(self, number: int) -> float:
        """The y coordinate of the middle of an op's box."""
        return self.y + TITLE + number * ROW + BOX / 2


def panels_of(blocks: Sequence[Block], top: float) -> list[Panel]:
    """Block 0 on the left, the others in columns beside it."""
    first = Panel(blocks[0], MARGIN, top)
    found, limit = [first], top + max(first.height, COLUMN)
    x, y = MARGIN + PANEL + GAP * 2, top
    for block in blocks[1:]:
        panel = Panel(block, x, y)
        if y > top and y + panel.height > limit:
            x, y = x + PANEL + GAP, top
            panel = Panel(block, x, y)
        found.append(panel)
        y += panel.height + GAP / 2
    return found
