"""Figures in the text about speed are those of the rows that were measured."""

from __future__ import annotations

import re

import pytest

from docs.generators.benchmarks import EXPLAINS, FIGURE, FIGURED, PAGE, figured
from docs.generators.tables import DOCS
from docs.pictures.benchmark_rows import rows

PAGES = (PAGE, *FIGURED)


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_figure_is_that_of_its_row(name: str) -> None:
    """As the generator writes it."""
    text = text_of(name)
    assert FIGURE.search(text), "a page without a figure is not to be listed"
    assert figured(text, rows()) == text


def test_a_figure_of_no_row_is_an_error() -> None:
    """A row may have got another name."""
    text = "<!-- ratio of wire/never measured -->0.9<!-- /figure -->"
    with pytest.raises(ValueError, match="'wire/never measured': expected a row"):
        figured(text, rows())
    (first, *_) = rows()
    mark = f"<!-- ratio of {first.name} -->?<!-- /figure -->"
    assert figured(mark, rows()) == mark.replace("?", first.said)


def test_a_row_has_one_figure() -> None:
    """Below what explains a row its ratio stands in a mark alone, and nothing was measured "on a
    busy machine": such a figure is none.
    """
    text, by_name = text_of(PAGE), {row.name: row for row in rows()}
    for part in re.split(r"^###? ", text, flags=re.MULTILINE):
        bare = re.sub(r"`[^`]*`", "", FIGURE.sub("", part))
        for named in EXPLAINS.findall(part):
            for name in (" ".join(each.split()) for each in named.split(";")):
                said = by_name[name].said
                assert not re.search(rf"(?<![\d.]){re.escape(said)}(?![\d%])", bare), name
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert not re.search(r"on (a|the) busy machine|busy ones", "\n".join(prose))
