"""A Markdown extension for the pages of docs/reference as a site: where docstrings stand.

A code host would show the line ``::: name``, where mkdocstrings puts a signature and a docstring.
So a page has it in a comment, ``<!-- ::: name -->``, which only the site reads.
"""

from __future__ import annotations

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

PLACE = re.compile(r"<!-- (::: \S+) -->")


class DocstringPlaces(Preprocessor):
    """Takes the lines that mkdocstrings knows out of their comments."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines of a page, as many as there were."""
        return [found[1] if (found := PLACE.fullmatch(line)) else line for line in lines]


class DocstringPlacesExtension(Extension):
    """What mkdocs.yml names."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Python-Markdown's name
        """Before comments are put aside (20)."""
        md.preprocessors.register(DocstringPlaces(md), "docstring_places", 25)


def makeExtension(**settings: object) -> DocstringPlacesExtension:  # noqa: N802
    """What Python-Markdown calls."""
    return DocstringPlacesExtension(**settings)
