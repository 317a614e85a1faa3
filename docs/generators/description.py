"""Writes pserver/description.md: README.md for a package index, which has none of our files.

There a relative link leads nowhere, and a picture by a relative path is not shown.  So a link
becomes its words and the path as code, as in the site, and pictures go, with what is said of them.
"""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r":?\n\n!\[[^\]]*\]\((?!https?:)[^)]*\)(\n\nLeft: (?:.+\n?)+?(?=\n\n))?")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]*)[^)]*\)")
LAST = "\nThe source distribution has `docs/`, and README.md with its pictures.\n"


def portable(text: str) -> str:
    """A text without pictures and links by relative paths; fences stay as they are."""
    found, at = "", 0
    for fence in FENCED.finditer(text):
        found += _portable(text[at : fence.start()]) + fence[0]
        at = fence.end()
    return found + _portable(text[at:])


def _portable(prose: str) -> str:
    """The same of a text without fences."""
    prose = PICTURE.sub(lambda found: "." if found[0][0] == ":" else "", prose)
    return LINK.sub(r"\1 (`\2`)", prose)


def pages() -> dict[str, str]:
    """The text of the file."""
    return {"../pserver/description.md": portable(README.read_text(encoding="utf-8")) + LAST}
