"""Writes docs/notes.md: the index of the essays that stand in the sources as ``[Note: title]``.

An essay is a paragraph of a docstring, or of a block of comments, that begins with its title in
brackets.  Everywhere else the title follows a "see".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("transpiler", "pserver", "trainer")
ESSAY = re.compile(r"^[ \t#]*\[Note: ([^\]]+)\]\s+(.+?)(?=\n[ \t#]*\n|\"\"\"|\Z)", re.M | re.S)
SENTENCE = re.compile(r"(.+?(?<!et al)\.)(?:\s|$)")
FIRST = """# Notes in the sources

A hard thing gets an essay in the docstring of the module that owns it, headed `[Note: title]`.
Code that relies on it says `See [Note: title]`.
This page is the index of these essays, each with its first sentence.
`make reference` writes it.
"""


def essays(path: Path) -> Iterator[tuple[str, str]]:
    """The title and the first sentence of each essay in a file."""
    text = path.read_text(encoding="utf-8")
    for found in ESSAY.finditer(text):
        refers = text[: found.start()].rstrip().lower().endswith(" see")  # at the end of a line
        if refers or found[2].partition("\n")[0].endswith(".py"):  # or it is a list of essays
            continue
        words = " ".join(re.sub(r"^\s*#", "", line).strip() for line in found[2].splitlines())
        words = re.sub(r"\s+", " ", words).replace("``", "`").replace("|", "\\|")
        sentence = SENTENCE.match(words)
        yield found[1], sentence[1] if sentence else "(a drawing)"


def pages() -> dict[str, str]:
    """The text of the page."""
    lines = [FIRST]
    for package in PACKAGES:
        lines += [f"## {package}", "", "| note | file | it begins |", "|---|---|---|"]
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for title, sentence in essays(path):
                lines.append(f"| {title} | [{name}](../{name}) | {sentence} |")
        lines.append("")
    return {"notes.md": "\n".join(lines).rstrip() + "\n"}
