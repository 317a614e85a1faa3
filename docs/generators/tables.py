"""Tables of Markdown, and the places in hand-written pages where generated ones stand::

<!-- flags of pserver plan: make reference -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent
PLACE = re.compile(r"(<!-- ([^\n]*): make reference -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; no cell has a line end or a pipe in it."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def filled(page: str, made: Callable[[str], str]) -> str:
    """A page of docs/ with what belongs between its marks.

    Args:
        page: its path below docs/.
        made: the text for a mark, by what the mark says.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    return PLACE.sub(lambda found: f"{found[1]}\n{made(found[2])}\n{found[3]}", text)
