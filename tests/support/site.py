"""The built site of docs/ as its tests see it: pages, what they link to, what they load."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

from tests.support.load import run
from tests.support.pages import ROOT

SECONDS = 240.0
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}


def built(folder: Path) -> Path:
    """The site, as ``make docs`` builds it, in a folder of this test's."""
    site = folder / "site"
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir")
    done = run(
        [*command, str(site)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the site's first page, while a server on loopback answers there."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, and not a word of each request."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Page(HTMLParser):
    """One page of HTML.

    Attributes:
        anchors: what a link to a part of the page may name.
        links: what ``a`` elements lead to.
        loaded: what the page fetches: scripts, styles, images.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes what one element has to say."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def is_foreign(link: str) -> bool:
    """Whether it leads to another host, or to another program."""
    return link.startswith(("http:", "https:", "//", "mailto:"))


def dead(site: dict[Path, Page]) -> list[str]:
    """The links and files of all pages that are not there, as "page: link"."""
    found = []
    for page in site.values():
        for link in page.links + page.loaded:
            if is_foreign(link) or link.startswith("data:"):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.path.parent / path).resolve() if path else page.path
            target = target / "index.html" if target.is_dir() else target
            if target not in site:
                there = target.is_file() and not anchor
            else:
                there = not anchor or anchor in site[target].anchors
            if not there:
                found.append(f"{page.path.name}: {link}")
    return found
