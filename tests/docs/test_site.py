"""Promises about docs/ as a site: it builds, it stands alone, no link in it is dead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.support.browser import browser, look, needed, violations
from tests.support.pages import PAGES, ROOT, name
from tests.support.site import SECONDS, Page, built, dead, is_foreign, served

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
IMPORTED = re.compile(r"(?:@import\s+(?:url\()?|url\()\s*['\"]?([^'\")\s]+)")


STRUCTURE = ("li", "table", "tr", "pre", "em", "strong", "h1", "h2", "h3", "h4", "img")
MARKED = re.compile(r"^<!-- ::: ", re.MULTILINE)  # mkdocstrings puts more there
VIEWS = ((360, 740, "light"), (1280, 900, "light"))
DARK = (1280, 900, "dark")
SCHEMES = {"light": "default", "dark": "slate"}
DOCUMENTATION = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's."""
    return built(tmp_path_factory.mktemp("site")).resolve()


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[Path, Page]:
    """Every page of the site, by its path."""
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def of(page: Path) -> Path:
    """Where the site has a page of docs/, below its folder."""
    below = page.relative_to(ROOT / "docs")
    return (below.with_name("index") if below.name == "README.md" else below).with_suffix(".html")


def test_it_has_every_page(folder: Path, site: dict[Path, Page]) -> None:
    """Each file of docs/ is a page; the index is the first one."""
    expected = {of(page) for page in DOCUMENTATION}

    assert {path.relative_to(folder) for path in site} == expected | {Path("404.html")}


def test_no_link_is_dead(site: dict[Path, Page]) -> None:
    """Links within the site find a page, and a part of it where they name one."""
    assert dead({path: page for path, page in site.items() if path.name != "404.html"}) == []


def test_a_link_names_a_file(site: dict[Path, Page]) -> None:
    """Also that of the logo: a page that is opened as a file has nobody who finds the index."""
    found = [
        f"{page.path.name}: {link}"
        for page in site.values()
        for link in page.links
        if page.path.name != "404.html" and not is_foreign(link)
        if not Path(link.partition("#")[0] or page.path).suffix
    ]

    assert found == []


def test_it_loads_nothing_from_elsewhere(folder: Path, site: dict[Path, Page]) -> None:
    """Scripts, styles, fonts and pictures are the site's own."""
    loaded = [f"{page.path.name}: {link}" for page in site.values() for link in page.loaded]
    styles = [
        f"{path.name}: {link}"
        for path in folder.rglob("*.css")
        for link in IMPORTED.findall(path.read_text(encoding="utf-8"))
    ]

    assert len(loaded) > len(site) and styles
    assert [each for each in loaded + styles if is_foreign(each.partition(": ")[2])] == []


def test_a_code_host_shows_the_same(folder: Path) -> None:
    """CommonMark, which a code host reads, finds as many lists, tables and blocks in a page as the
    site has.
    """
    reader = MarkdownIt("commonmark").enable("table")
    for page in DOCUMENTATION:
        text = page.read_text(encoding="utf-8")
        if not MARKED.search(text):
            found = re.search(r"<article.*?</article>", (folder / of(page)).read_text(), re.DOTALL)
            assert found is not None
            assert structure(found[0]) == structure(reader.render(text)), page


def structure(html: str) -> dict[str, int]:
    """How many of some elements it has."""
    return {name: len(re.findall(rf"<{name}[ >]", html)) for name in STRUCTURE}


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[tuple[Any, str]]:
    """A browser, and the address of the site."""
    with served(folder) as url, browser() as driver:
        driver.set_script_timeout(SECONDS)
        driver.command_executor.client_config.timeout = 2 * SECONDS
        yield driver, url


def wrong(driver: Any, view: tuple[int, int, str], url: str) -> list[str]:
    """What axe-core and the console say of a page in a view, whether it is too wide or in other
    colours, and which other hosts it has asked.
    """
    look(driver, *view)
    remembered = {"origin": url, "storageTypes": "local_storage"}  # the colours of another view
    driver.execute_cdp_cmd("Storage.clearDataForOrigin", remembered)
    driver.get(url)
    until(driver, "return document.querySelector('.md-search')?.ariaLabel === 'Search'")
    scheme = driver.execute_script("return document.body.dataset.mdColorScheme")
    wider = driver.execute_script("return document.documentElement.scrollWidth - innerWidth")
    found = violations(driver) + [entry["message"] for entry in driver.get_log("browser")]
    found += ["wider than the screen"] if wider > 0 else []
    asked = "return performance.getEntriesByType('resource').map(each => new URL(each.name).host)"
    found += sorted(set(driver.execute_script(asked)) - {urlsplit(url).netloc})
    found += [] if scheme == SCHEMES[view[2]] else [f"shown in {scheme}"]
    return [f"{view}: {each}" for each in found]


def until(driver: Any, script: str) -> None:
    """Returns as soon as the script gives something true."""
    from selenium.webdriver.support.ui import WebDriverWait  # where there is a browser

    WebDriverWait(driver, SECONDS).until(lambda found: found.execute_script(script))


@needed
def test_everybody_can_use_it(opened: tuple[Any, str]) -> None:
    """A page on a phone and on a desktop, light and dark; and the search finds another."""
    driver, url = opened
    for view in (*VIEWS, DARK):
        assert wrong(driver, view, f"{url}environment.html") == []
    search(driver, f"{url}index.html")


def search(driver: Any, page: str) -> None:
    """Asks a page for a word, and waits for the first link that it finds."""
    look(driver, *VIEWS[1])  # on a phone the field is behind a button
    driver.get(page)
    until(driver, "return document.querySelector('.md-search')?.ariaLabel === 'Search'")
    driver.find_element("css selector", ".md-search__input").send_keys("straggler")
    until(driver, "return document.querySelector('.md-search-result__link')?.href")


@needed
def test_the_search_works_in_a_file(folder: Path) -> None:
    """Without a server, and without another host: the page finds where a word is."""
    with browser() as driver:
        search(driver, (folder / "index.html").as_uri())
        found = "return [...document.querySelectorAll('.md-search-result__link')].map(e => e.href)"
        links = driver.execute_script(found)
        asked = "return performance.getEntriesByType('resource').map(each => each.name)"
        loaded = driver.execute_script(asked)
        driver.get(links[0])
        page = driver.execute_script("return document.body.innerText").lower()

    assert {urlsplit(link).scheme for link in links + loaded} == {"file"}
    assert "straggler" in page


@needed
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", DOCUMENTATION, ids=name)
def test_everybody_can_use_each_page(page: Path, opened: tuple[Any, str]) -> None:
    """No violation of axe-core, on a phone and on a desktop, and nothing wider than the screen."""
    driver, url = opened

    assert [each for view in VIEWS for each in wrong(driver, view, url + of(page).as_posix())] == []
