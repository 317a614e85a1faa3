"""A Markdown extension for the pages of docs/ as a site, which has no sources to link to.

On a code host ``[the ports](../pserver/security/access.py)`` is a link to that file.  In the site
it is the words, and the path as code.  Python-Markdown does not tell an extension which page it
converts, so a path counts as one of docs/ wherever docs/ has it, whatever ``../`` precede it.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

DOCS = Path(__file__).parent.parent
RELATIVE = re.compile(r"(?:\.\./)*([^:#]+)")


def source(link: str) -> str | None:
    """The path in the repository that a link leads to, where the site does not have it."""
    found = RELATIVE.match(link)
    if found is None:
        return None
    path = found[1]
    if (DOCS / path).exists():
        return f"docs/{path}" if path.endswith(".py") else None
    return path if (DOCS.parent / path).exists() else None


class SourceLinks(Treeprocessor):
    """Puts the words, and the path as code, in place of each link to a source."""

    def run(self, root: Element) -> None:
        """Changes the elements of a page in place."""
        for link in root.iter("a"):
            path = source(link.get("href", ""))
            if path is None:
                continue
            if "".join(link.itertext()) == path:
                link.text, link[:] = None, []
            link.tag, link.attrib = "span", {"class": "source"}
            _append(link, path)


def _append(words: Element, path: str) -> None:
    """The path as code, behind the words where there are any."""
    if len(words):
        words[-1].tail = f"{words[-1].tail or ''} "
    elif words.text:
        words.text += " "
    SubElement(words, "code").text = path


class SourceLinksExtension(Extension):
    """What mkdocs.yml names."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Python-Markdown's name
        """Behind the inline patterns (20), which make links, and before MkDocs's look at them."""
        md.treeprocessors.register(SourceLinks(md), "source_links", 10)


def makeExtension(**settings: object) -> SourceLinksExtension:  # noqa: N802
    """What Python-Markdown calls."""
    return SourceLinksExtension(**settings)
