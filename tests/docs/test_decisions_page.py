"""Promises about docs/decisions.md: a decision says what was rejected for it."""

from __future__ import annotations

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "decisions.md"


def test_every_decision_says_what_was_rejected() -> None:
    """Each has a title of its own, and names what was not chosen."""
    sections = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
    titles = [section.partition("\n")[0] for section in sections]

    assert len(titles) > 50
    assert sorted(set(titles)) == sorted(titles)
    assert [
        title
        for title, section in zip(titles, sections, strict=True)
        if "\nRejected: " not in section
    ] == []
