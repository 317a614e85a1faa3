"""Promises about docs/ as a site: it builds, it stands alone, no link in it is dead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tests.support.site import Page, built, dead, is_foreign

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
IMPORTED = re.compile(r"(?:@import\s+(?:url\()?|url\()\s*['\"]?([^'\")\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site, by its path."""
    folder = built(tmp_path_factory.mktemp("site")).resolve()
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def test_it_has_every_page(site: dict[Path, Page]) -> None:
    """Each file of docs/ is a page; the index is the first one."""
    folder = next(path.parent for path in site if path.name == "404.html")
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    expected = {
        path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html")
        for path in pages
    }

    assert {path.relative_to(folder) for path in site} == expected | {Path("404.html")}


def test_no_link_is_dead(site: dict[Path, Page]) -> None:
    """Links within the site find a page, and a part of it where they name one."""
    assert dead({path: page for path, page in site.items() if path.name != "404.html"}) == []


def test_it_loads_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    """Scripts, styles, fonts and pictures are the site's own."""
    folder = next(path.parent for path in site if path.name == "404.html")
    loaded = [f"{page.path.name}: {link}" for page in site.values() for link in page.loaded]
    styles = [
        f"{path.name}: {link}"
        for path in folder.rglob("*.css")
        for link in IMPORTED.findall(path.read_text(encoding="utf-8"))
    ]

    assert len(loaded) > len(site) and styles
    assert [each for each in loaded + styles if is_foreign(each.partition(": ")[2])] == []
