"""The pages of docs/ that are made from the sources are the ones that their generators make."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from markdown import markdown
from markdown_it import MarkdownIt

from docs.generators import DOCS, GENERATORS, api
from docs.generators.description import FENCED
from docs.pictures.measured_code import unmarked
from tests.support.pages import PAGES, name
from transpiler.names.names import names

pytestmark = pytest.mark.processes  # griffe, which reads the packages, asks git


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: each.__name__.split(".")[-1])
def test_a_page_is_the_generated_one(generator: ModuleType) -> None:
    """``make reference`` has been run since the last change; which rows of the benchmarks are old
    changes with the code, and is said when it is run next.
    """
    made = generator.pages()
    stale = [path for path, text in made.items() if unmarked(text) != unmarked(written(path))]

    assert made and stale == []


def written(path: str) -> str:
    """A page as it is."""
    return (DOCS / path).read_text(encoding="utf-8") if (DOCS / path).is_file() else ""


def test_a_package_index_gets_no_relative_link() -> None:
    """It has none of the files: README's sections and fences are the same, and paths are code."""
    readme, text = (
        (DOCS.parent / place).read_text() for place in ("README.md", "pserver/description.md")
    )
    tokens = [
        each
        for token in MarkdownIt("commonmark").parse(text)
        for each in (token, *(token.children or ()))
    ]
    links = [each.attrGet("href") or "" for each in tokens if each.type == "link_open"]

    assert not [each for each in tokens if each.type == "image"]
    assert not [link for link in links if not str(link).startswith("https://")]
    assert re.findall(r"^## .+", text, re.M) == re.findall(r"^## .+", readme, re.M)
    assert FENCED.findall(text) == FENCED.findall(readme) != []
    assert "\n\nThe quick start (`docs/quickstart.md`) continues: " in text


def test_the_index_of_names_has_every_name() -> None:
    """Each is the first cell of a row."""
    text = (DOCS / "index_of_names.md").read_text(encoding="utf-8")

    assert [name for name in names() if f"\n| `{name}` |" not in text] == []


def test_the_python_pages_say_what_each_name_is() -> None:
    """A row has the first sentence of the docstring, and the file; mkdocstrings gets the name."""
    page = api.pages()["reference/trainer.fleet.md"]

    assert "| `barrier_worker` | Waits for every trainer that has not left | [trainer/" in page
    assert "\n<!-- ::: trainer.fleet.barrier_worker -->\n" in page


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_code_host_shows_no_line_of_the_sites(page: Path) -> None:
    """What only mkdocstrings understands stands in comments."""
    assert not re.search(r"^:::", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_site_reads_the_comments() -> None:
    """They become the lines that mkdocstrings knows; another comment stays one."""
    text = "<!-- ::: trainer.spawn -->\n\n<!-- ::: of two words -->\n"
    found = markdown(text, extensions=["docs.site.docstring_places"])

    assert found == "<p>::: trainer.spawn</p>\n<!-- ::: of two words -->"
