"""Promises about docs/concepts/lanes.md: every update mode has a section and a picture there."""

from __future__ import annotations

import re

from tests.support.pages import ROOT
from transpiler.plan.modes import EVERY_MODE

PAGE = ROOT / "docs" / "concepts" / "lanes.md"
PICTURES = PAGE.parent / "modes"


def test_every_mode_has_a_picture() -> None:
    """Each is shown on the page, under a heading of its own, and no picture is left over."""
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^### .+\n\n!\[.+\]\(modes/(\w+)\.svg\)$", text, re.MULTILINE)

    assert sorted(shown) == sorted(picture.stem for picture in PICTURES.glob("*.svg"))
    assert [mode.name for mode in EVERY_MODE if mode.name not in shown] == []


def test_a_picture_is_readable_without_the_page() -> None:
    """It has a background of its own, for pages that are dark, and a title for who does not see
    it.
    """
    for picture in PICTURES.glob("*.svg"):
        drawn = picture.read_text(encoding="utf-8")

        assert re.search(r"<title>[^<]{20,}</title>", drawn), picture.name
        assert re.search(r'<rect width="\d+" height="\d+" rx="12" fill="#ffffff"/>', drawn)


def test_the_picture_of_some_modes_names_each() -> None:
    """Those of its title, each above its timeline, by a name that ``transpiler.plan`` knows."""
    drawn = (ROOT / "docs" / "modes.svg").read_text(encoding="utf-8")
    title = re.search(r"<title>(.+): who waits for whom</title>", drawn)
    shown = re.findall(r'font-size="15" font-weight="700"[^>]*>([^<]+)</text>', drawn)

    assert title is not None and shown == title[1].split(", ")
    assert {*shown} <= {mode.name for mode in EVERY_MODE}
