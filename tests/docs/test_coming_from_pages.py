"""Promises about docs/coming_from: the pages for users of other systems have one form."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from pserver.__main__ import main
from tests.support.pages import FILE, ROOT, fences, name

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
    assert ours == ["python", "sh", "output"] * (len(ours) // 3) != []


def test_the_lines_of_pserver_check_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page shows what the command says of the script above it; ``...`` stands for any text."""
    monkeypatch.chdir(tmp_path)
    shown = 0
    for fence in fences(ROOT / "docs" / "coming_from" / "fluid.md"):
        first, _, rest = fence.text.partition("\n")
        if fence.language == "text" and (file := FILE.match(first)):
            Path(file[1]).write_text(fence.text, encoding="utf-8")
        elif first.startswith("$ pserver check "):
            assert main(first.removeprefix("$ pserver ").split()) == 1
            printed = capsys.readouterr().out
            same = doctest.OutputChecker().check_output(rest, printed, doctest.ELLIPSIS)
            assert same, printed
            shown += 1
    assert shown == 1
