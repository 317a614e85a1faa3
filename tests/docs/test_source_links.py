"""Links of pages that lead out of docs/, in the site."""

from __future__ import annotations

from markdown import markdown


def page(text: str) -> str:
    return markdown(text, extensions=["docs.site.source_links"])


def test_a_link_to_a_source_becomes_words_and_a_path() -> None:
    """Of words that are the path already only the path stays; an anchor is dropped."""
    said = '<span class="source">{}</span>'
    path = "<code>pserver/security/access.py</code>"

    assert said.format(f"its <em>table</em> {path}") in page(
        "[its *table*](../pserver/security/access.py#L1)"
    )
    assert said.format(path) in page(
        "[pserver/security/access.py](../../pserver/security/access.py)"
    )
    assert said.format("the picture <code>docs/pictures/ctr.py</code>") in page(
        "[the picture](pictures/ctr.py)"
    )


def test_links_within_the_site_stay() -> None:
    """As those to other hosts, and those that lead nowhere, do."""
    for link in ("ports.md#ports", "../checks/pairs.md", "https://prometheus.io", "nowhere.md"):
        assert page(f"[words]({link})") == f'<p><a href="{link}">words</a></p>'
