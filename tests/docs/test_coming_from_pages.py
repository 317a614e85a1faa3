"""Promises about docs/coming_from: the pages for users of other systems have one form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, fences, name

PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
SECTIONS = ["Words", "Before", "After", "What differs", "What they have, and we do not"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_has_words_scripts_and_what_differs(page: Path) -> None:
    """In this order; what they have and we do not is not left out."""
    text = page.read_text(encoding="utf-8")

    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    for section in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert len(section.split()) > 20


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_their_script_is_shown_and_ours_runs(page: Path) -> None:
    """Before is an illustration, after a script, its command and what it prints."""
    before = page.read_text(encoding="utf-8").partition("\n## After\n")[0].count("\n") + 1
    theirs = {fence.language for fence in fences(page) if fence.line < before}
    ours = [fence.language for fence in fences(page) if fence.line > before]

    assert theirs == {"text"}
    assert ours == ["python", "sh", "output"]
