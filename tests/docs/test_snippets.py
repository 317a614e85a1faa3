"""Every example of the documentation runs as it stands: page by page, from top to bottom, in an
empty folder.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, Reader, fences, name
from tests.support.tiers import RARE

RUN = ("python", "sh")
# whose examples start processes again and again; README.md, and the shorter pages, stand for them,
# for the page of notebooks test_notebook.py
LONG = {
    *("checkpoints.md", "collective.md", "command_line.md", "datasets.md", "deployment.md"),
    *("dgc.md", "elasticity.md", "embeddings.md", "evaluation.md", "inference.md", "lightning.md"),
    *("loggers.md", "manifests.md", "modes.md", "names.md", "notebook.md", "planner.md"),
    *("programs.md", "quickstart.md", "ray.md", "recommenders.md", "restarts.md", "rows_in_ram.md"),
    *("rules.md", "security.md", "sharding.md", "trace.md", "transformers.md", "web.md"),
    *("weights.md", "clicks.md", "by_hand.md", "fluid.md", "tensorflow.md", "torch_rpc.md"),
    *("torchrec.md", "persia.md", "operate.md", "replay.md", "exactly_once.md"),
}
FENCE = re.compile(rf"^ *```({'|'.join(RUN)})\b", re.MULTILINE)  # soon, at each collection
LANGUAGES = (*RUN, "output", "text")
ELSEWHERE = "index_of_names.md"  # tests/transpiler/names runs what it shows

pytestmark = pytest.mark.processes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [
        RARE(page) if page.name in LONG else page
        for page in PAGES
        if FENCE.search(page.read_text(encoding="utf-8"))
    ],
    ids=name,
)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """Python and shell fences succeed, one after the other, and print what the page shows."""
    with Reader(tmp_path) as reader:
        for fence in fences(page):
            reader.read(fence)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_fence_says_what_it_is(page: Path) -> None:
    """A block is fenced, and is ``python``, ``sh``, ``output``, or ``text``: an illustration that
    nothing runs.
    """
    assert [str(fence) for fence in fences(page) if fence.language not in LANGUAGES] == []


def test_pages_with_examples_are_found() -> None:
    """As the parser of the pages finds them."""
    parsed = [page for page in PAGES if any(fence.language in RUN for fence in fences(page))]

    assert parsed == [page for page in PAGES if FENCE.search(page.read_text(encoding="utf-8"))]


def test_most_examples_run() -> None:
    """Illustrations are the exception: at most a third of the fences, those of output left out."""
    pages = [page for page in PAGES if page.name != ELSEWHERE]
    found = [fence for page in pages for fence in fences(page) if fence.language != "output"]
    shown = [str(fence) for fence in found if fence.language not in RUN]

    assert 3 * len(shown) <= len(found), shown
