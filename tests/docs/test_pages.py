"""Promises about the pages: their width, their links, what each list of them must have."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generators.api import MODULES
from docs.generators.command_line import below
from pserver.cli.settings import EVERY
from pserver.table.table import INDEX_BYTES
from tests.support.pages import PAGES, ROOT, fences, name
from trainer.environment.environment import INTERNAL, OTHER_LAUNCHERS, WITH_SERVERS, WITHOUT_SERVERS
from trainer.row_optimizers import BY_TYPE
from transpiler.strategy.strategy import CONFIGS, SWITCHES

WIDTH, README_LINES = 100, 140
VARIABLES = (*WITH_SERVERS, *WITHOUT_SERVERS, *OTHER_LAUNCHERS, *INTERNAL)
DOCS = ROOT / "docs"
PACKAGES = ("pserver", "trainer", "transpiler")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")  # within a line
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")  # steps[step](image) is no link
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page with its fences made empty lines, so that line numbers stay."""
    text = page.read_text(encoding="utf-8")
    return FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_short(page: Path) -> None:
    """At most 100 columns outside of tables, fences and pictures."""
    long = [
        number
        for number, line in enumerate(prose(page).splitlines(), start=1)
        if len(line) > WIDTH and not line.startswith(("|", "!["))
    ]

    assert long == [], f"{name(page)}: lines {long}"


# pages about what is inside of the packages, whose examples show it
INSIDE = ("architecture.md", "concepts/", "extend.md", "security.md")
# from which a page may import, too: the reader of checkpoint files, which needs no job; and the
# types of a strategy's dictionaries, for annotations
ROOMS = ("pserver.checkpoint", "transpiler.strategy.fields")
IMPORTS = re.compile(r"^\s*(?:from|import) ((?:pserver|trainer|transpiler)[\w.]*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_examples_import_what_users_may(page: Path) -> None:
    """From a package's root, a module that lies there, or one that has a page of the reference; not
    from inside of a package.
    """
    if not page.is_relative_to(DOCS) or name(page).removeprefix("docs/").startswith(INSIDE):
        return
    inside = [
        module
        for fence in fences(page)
        if fence.language == "python"
        for module in IMPORTS.findall(fence.text)
        if module not in (*PACKAGES, *MODULES, *ROOMS)
        and not (ROOT / f"{module.replace('.', '/', 1)}.py").is_file()
    ]

    assert inside == []


def test_an_extra_is_installed_from_a_checkout() -> None:
    """The package is on no index: nothing says that pip finds it by its name."""
    named = re.compile(r"pip install '?\"?pserver")
    written = [*PAGES, *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in written
        if path.name != "CHANGELOG.md" and named.search(path.read_text(encoding="utf-8"))
    ]

    assert wrong == []


def test_no_page_and_no_classifier_promises_a_system_that_never_ran() -> None:
    """Linux is what the tests run on."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'"Operating System :: ([^"]+)"', text)

    assert all("Linux" in each for each in found), found
    assert "macOS has never been run" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file that is there, and a heading of it."""
    dead = []
    for link in LINK.findall(CODE.sub("", prose(page))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)

    assert dead == []


def test_the_readme_is_short() -> None:
    """At most 140 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_index_has_every_page_in_the_order_of_the_site() -> None:
    """docs/README.md links to every page of docs/, as ``nav`` of mkdocs.yml does."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    linked = [link for link in LINK.findall(prose(DOCS / "README.md")) if link.endswith(".md")]
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}

    assert list(leaves(nav)) == ["README.md", *linked]
    assert set(leaves(nav)) == pages


def leaves(nav: Any) -> Iterator[str]:
    """The pages of a part of ``nav``, in order."""
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from leaves(each)


def test_a_reference_to_a_note_finds_it() -> None:
    """Every ``[Note: title]`` in the sources is an essay, or names one."""
    known = re.findall(r"^\| ([^|]+) \| \[", (DOCS / "notes.md").read_text(), re.MULTILINE)
    named = {
        re.sub(r"[\s#]+", " ", title)
        for package in ("transpiler", "pserver", "trainer")
        for path in (ROOT / package).rglob("*.py")
        for title in re.findall(r"\[Note: ([^\]]+)\]", path.read_text(encoding="utf-8"))
    }

    assert named - {title.strip() for title in known} == {"..."}  # how they are written


@pytest.mark.processes
def test_the_picture_of_the_architecture_is_current() -> None:
    """docs/architecture.svg is what docs/pictures/architecture.py draws."""
    made = subprocess.run(
        [sys.executable, str(DOCS / "pictures" / "architecture.py"), "--print"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout

    assert made == (DOCS / "architecture.svg").read_text(encoding="utf-8"), (
        "run python docs/pictures/architecture.py"
    )


@pytest.mark.processes
@pytest.mark.parametrize("script", ["benchmarks.py", "modes.py", "staleness.py"])
def test_pictures_of_tables_are_current(script: str) -> None:
    """docs/concepts/modes/*.svg and docs/benchmarks/*.svg are what their scripts draw."""
    made = subprocess.run(
        [sys.executable, str(DOCS / "pictures" / script), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert made.returncode == 0, made.stderr


def test_the_page_of_rooms_has_every_room_and_no_other() -> None:
    """docs/architecture.md names each folder of the three packages once, and only those."""
    rooms = {
        path.parent.relative_to(ROOT).as_posix() + "/"
        for package in ("transpiler", "pserver", "trainer")
        for path in (ROOT / package).glob("*/__init__.py")
    }
    listed = re.findall(r"^\| `([\w/]+/)` \|", prose(DOCS / "architecture.md"), re.MULTILINE)
    listed = [room for room in listed if room.startswith(("transpiler/", "pserver/", "trainer/"))]

    assert sorted(listed) == sorted(rooms)


def test_the_page_of_the_strategy_has_every_switch() -> None:
    """docs/strategy.md names every switch, every dictionary and the keys of a_sync_configs;
    strategy_keys.md, which is generated, says what they do.
    """
    text = (DOCS / "strategy.md").read_text(encoding="utf-8")
    names = (*SWITCHES, *CONFIGS, *CONFIGS["a_sync_configs"])
    assert [name for name in names if name not in text] == []


def test_the_rows_that_fit_follow_from_the_bytes_of_a_row() -> None:
    """docs/rows_in_ram.md divides memory by what `pserver plan` says of a row there, and by what
    the index takes.
    """
    text = (DOCS / "rows_in_ram.md").read_text(encoding="utf-8")
    held = re.findall(r"^(\w+) +0 to 999999999 .*?  (\d+) B ", text, re.MULTILINE)
    fit = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)

    assert len(held) == 5
    for (rule, record), (label, row, *millions) in zip(held, fit, strict=True):
        assert (label, int(row)) == (rule, int(record) + INDEX_BYTES)
        assert [int(each) for each in millions] == [
            memory * 1000 // int(row) for memory in (32, 128, 512)
        ]


def test_the_page_of_embeddings_has_every_rule() -> None:
    """docs/embeddings.md names the class of every update rule for rows."""
    text = (DOCS / "embeddings.md").read_text(encoding="utf-8")

    assert [cls.__name__ for cls in BY_TYPE.values() if f"`{cls.__name__}`" not in text] == []


def test_the_table_of_variables_has_every_one_and_no_other() -> None:
    """trainer/environment/environment.py describes every variable that the sources name."""
    word = re.compile(
        r'"((?:PSERVER|TRAIN|CURRENT|MASTER|RANK|WORLD|LOCAL|TORCHELASTIC|GLOO)[A-Z_]*)"'
    )
    table = ROOT / "trainer" / "environment" / "variables.py"
    found = {
        name
        for package in ("pserver", "trainer")
        for path in (ROOT / package).rglob("*.py")
        for name in word.findall(path.read_text(encoding="utf-8"))
        if path != table and ("_" in name or name in ("RANK", "TRAINERS"))
    }
    others = {name for each in OTHER_LAUNCHERS for name in each.names}  # of one module's tables
    described = {name for each in VARIABLES for name in each.names}

    assert found - others == described - others


def test_the_page_of_the_command_line_has_every_flag() -> None:
    """docs/command_line.md names every command and every flag of it."""
    from pserver.__main__ import parser

    text = (DOCS / "command_line.md").read_text(encoding="utf-8")
    for command, sub in below(parser()).items():
        section = text.partition(f"## pserver {command}\n")[2].partition("\n## ")[0]
        flags = [flag for action in sub._actions for flag in action.option_strings]
        missing = [
            flag for flag in flags if flag not in ("-h", "--help") and f"`{flag}" not in section
        ]

        assert section and not missing, f"{command}: {missing}"


def test_the_table_of_exit_statuses_has_every_command() -> None:
    """docs/errors.md says of each command what its statuses mean, and so does its help."""
    from pserver.__main__ import parser

    for command, sub in below(parser()).items():
        assert [each for each in EVERY if each.of == f"pserver {command}"], command
        assert "exit status: 0: " in sub.format_help(), command
