"""Promises of docs/extend.md: each place that it names is there, and has what it says."""

from __future__ import annotations

import re

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "extend.md"
CODE = re.compile(r"`([^`\n]+)`")
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}


def test_every_path_of_the_page_exists() -> None:
    """Whatever begins with a folder of the repository is a file or a folder of it."""
    text = PAGE.read_text(encoding="utf-8")
    paths = {code for code in CODE.findall(text) if code.partition("/")[0] in FOLDERS}

    assert len(paths) > 50 and {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_place_has_what_it_is_named_for() -> None:
    """In the tables of places the second column stands in the file of the first."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    gone = [row for row in rows if row[1] not in (ROOT / row[0]).read_text(encoding="utf-8")]

    assert len(rows) > 30 and gone == []
