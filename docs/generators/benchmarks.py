"""What docs/benchmarks.md has of the rows in docs/benchmarks.json: the tables, the pictures, what
was missed, and what ran where.

A part of the page that explains a row says so below its heading::

    <!-- explains: wire/tcp 64 MB, raw; wire/tcp 16 MB, raw -->

A figure in the text, here and on pages that name a speed, is the row's ("ours", "baseline" or
"ratio")::

    <!-- ratio of wire/tcp 64 MB, raw -->0.81<!-- /figure -->
"""

from __future__ import annotations

import re
from textwrap import fill

from docs.generators.tables import DOCS, filled, table
from docs.pictures.benchmark_rows import GROUPS, Row, counted, grouped, missed, rows
from docs.pictures.measured_code import MARK, changed, folders, marked

PAGE = "benchmarks.md"
FIGURED = ("embeddings.md", "rows_in_ram.md")  # further pages with figures of rows
PADDLE = "paddle/"  # rows with a table of their own
EXPLAINS = re.compile(r"^<!-- explains: (.*?) -->$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(
    r"(<!-- (ours|baseline|ratio) of ([^>]+?) -->)[^<]*(<!-- /figure -->)", re.DOTALL
)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def pages() -> dict[str, str]:
    """The page with what is made."""
    found = rows()
    own = [row for row in found if not row.name.startswith(PADDLE)]
    made = {
        "pictures of ratios": lambda: pictures(own),
        "what was missed": lambda: missing(found),
        "rows": lambda: figures(own),
        "the picture of PaddlePaddle": lambda: pictures([r for r in found if r not in own]),
        "rows of PaddlePaddle": lambda: figures([row for row in found if row not in own]),
        "settings": lambda: settings(own),
    }
    page = filled(PAGE, lambda mark: made[mark]())
    others = {name: (DOCS / name).read_text(encoding="utf-8") for name in FIGURED}
    return {name: figured(text, found) for name, text in {PAGE: page, **others}.items()}


def figured(text: str, found: list[Row]) -> str:
    """A page whose figures are those of the rows that they name.

    Raises:
        ValueError: there is no such row.
    """
    by_name = {row.name: row for row in found}

    def figure(mark: re.Match[str]) -> str:
        name = " ".join(mark[3].split())
        if name not in by_name:
            raise ValueError(f"a figure of {name!r}: expected a row of benchmarks.json")
        row = by_name[name]
        value = row.value if mark[2] == "ours" else row.baseline
        return mark[1] + (row.said if mark[2] == "ratio" else _figure(value, row.unit)) + mark[4]

    return FIGURE.sub(figure, text)


def pictures(found: list[Row]) -> str:
    """A line for the picture of each group; what it shows is said for those who do not see it."""
    lines = [
        f"![{GROUPS[group][0]}: {counted(of)}](benchmarks/{group}.svg)\n"
        for group, of in grouped(found).items()
    ]
    return "\n".join(lines)


def missing(found: list[Row]) -> str:
    """An item for each row that missed its target, with a link to what explains it."""
    asked = [row for row in found if row.nearness is not None]
    lost, known = missed(found), explained()
    lines = [f"{len(lost)} of {len(asked)} targets were missed.\nThe furthest come first.\n"]
    for row in lost:
        name = f"[{row.name}](#{known[row.name]})" if row.name in known else row.name
        lines.append(f"- {name}: {row.said}, {row.asked}")
    return "\n".join(lines) + "\n"


def explained() -> dict[str, str]:
    """The anchor of the part that explains a row, by the row's name."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    found = {}
    for mark in EXPLAINS.finditer(text):
        heading = HEADING.findall(text[: mark.start()])[-1]
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found |= {" ".join(name.split()): anchor for name in mark[1].split(";")}
    return found


def figures(found: list[Row]) -> str:
    """The table of some rows."""
    head = ("row", "ours", "baseline", "compared with", "ratio", "target", "", "measured")
    old = marked((DOCS / PAGE).read_text(encoding="utf-8"))
    return table(head, (_cells(row, row.name in old) for row in found))


def _cells(row: Row, marked: bool) -> tuple[str, ...]:
    """Of a row that the page has ``marked`` as old until now."""
    near = row.nearness
    verdict = "" if near is None else "met" if near >= 0 else "missed"
    old = changed(row.commit, folders(row.name))
    measured = f"{row.date}, {row.runs} runs{MARK if old or (old is None and marked) else ''}"
    values = (_figure(row.value, row.unit), _figure(row.baseline, row.unit))
    return (row.name, *values, row.against, row.said, row.asked, verdict, measured)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}" if value >= 1e4 else f"{value:.4g} {unit}"


def settings(found: list[Row]) -> str:
    """What ran where, with the rows of which that is true."""
    named: dict[str, list[str]] = {}
    for row in found:
        named.setdefault(row.setting, []).append(f"`{row.name}`")
    items = (f"- {', '.join(names)}: {setting}" for setting, names in named.items())
    return "".join(f"{wrapped(each)}\n" for each in items)


def wrapped(item: str) -> str:
    """An item of a list on lines of 100 columns."""
    return fill(item, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
