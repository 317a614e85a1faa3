"""Draws docs/benchmarks/*.svg from docs/benchmarks.json: how near each ratio is to its target.

::

    python docs/pictures/benchmarks.py            writes a picture for each group of rows
    python docs/pictures/benchmarks.py --check    says which of them are not current
    python docs/pictures/benchmarks.py --rows build/bench.json --out build/bench.svg
                                                  all groups of a measurement in one picture

A bar begins at the target and is as long as the doublings from there to the ratio.  What was missed
lies to the left, is hatched, and says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from architecture import GREY, INK, WHITE, text
from benchmark_rows import DOCUMENTED, GROUPS, Row, counted, grouped, rows

FOLDER = Path(__file__).parent.parent / "benchmarks"
# Drawn for a phone: there it has about this many pixels.  Elsewhere it is a quarter larger.
WIDTH, SCALE = 380, 1.25
LEFT, BARS, EDGE = 14, 230, 366  # where bars begin, how wide they are, where words end
HEAD, HEIGHT, THICK = 62, 40, 12  # of a group's head, of a row, of a bar
FURTHEST = 2.0  # doublings that a bar shows to each side; what is further ends in a point
MET, MISSED, LINES = "#2b8a3e", "#b35900", "#c3cad2"
TICK, CROSS, LESS, MORE = "\u2713", "\u2715", "\u2190", "\u2192"
HATCHED = (
    '<pattern id="missed" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{WHITE}"/><rect width="3" height="6" fill="{MISSED}"/>'
    "</pattern>"
)


def across(doublings: float) -> float:
    """Where so many doublings from the target are."""
    cut = max(-FURTHEST, min(FURTHEST, doublings))
    return LEFT + BARS / 2 + cut / FURTHEST * BARS / 2


MARKS = {-2: "1/4", -1: "1/2", 0: "target", 1: "2 x", 2: "4 x"}  # by doublings


def scale(y: float) -> str:
    """What the lines behind the bars stand for."""
    return "".join(text(across(each), y, words, 11, GREY) for each, words in MARKS.items())


def lines(y: float) -> str:
    """The lines behind the bar of a row; none crosses a name."""
    drawn = ""
    for each in MARKS:
        color, wide = (LINES, 1) if each else (INK, 1.5)
        ends = f"M {across(each):g} {y + 18:g} v {THICK + 4}"
        drawn += f'<path d="{ends}" stroke="{color}" stroke-width="{wide}"/>'
    return drawn


def bar(row: Row, near: float, y: float, name: str) -> str:
    """A row: its name, whether it was met, its bar, and its figures."""
    met, begin, end = near >= 0, across(0), across(near)
    word, color = (f"{TICK} met", MET) if met else (f"{CROSS} missed", MISSED)
    drawn = text(LEFT, y + 14, name, 12.5, INK, 400 if met else 700, "start")
    drawn += text(EDGE, y + 14, word, 12, color, 700, "end")
    point = 6.0 if abs(near) > FURTHEST else 0.0
    back = end + (point if end < begin else -point)
    top, middle, bottom = y + 20, y + 20 + THICK / 2, y + 20 + THICK
    shape = f"M {begin:g} {top:g} H {back:g} L {end:g} {middle:g} L {back:g} {bottom:g} H {begin:g}"
    if abs(end - begin) < 1:  # exactly the target still is something to see
        shape = f"M {begin:g} {top:g} h 2 v {THICK} h -2"
    fill = MET if met else "url(#missed)"
    drawn += f'<path d="{shape} z" fill="{fill}" stroke="{color}" stroke-width="1.5"/>'
    return drawn + text(
        LEFT + BARS + 8, bottom - 1.5, f"{row.said}, {row.asked}", 12, INK, 400, "start"
    )


def section(group: str, found: Sequence[Row], y: float) -> tuple[str, float]:
    """A group's rows with targets, and where they end."""
    title, beginnings = GROUPS[group]
    shown = [(row, row.nearness) for row in found if row.nearness is not None]
    below = y + HEAD + HEIGHT * len(shown)
    drawn = text(LEFT, y + 24, title, 15, INK, 700, "start")
    drawn += text(EDGE, y + 24, f"worse {LESS}  {MORE} better", 11.5, GREY, 400, "end")
    drawn += scale(y + 46)
    for place, (row, near) in enumerate(shown):
        name = row.name.removeprefix(beginnings[0])
        top = y + HEAD + HEIGHT * place
        drawn += lines(top) + bar(row, near, top, name)
    return drawn, below + 14


def picture(groups: Mapping[str, Sequence[Row]]) -> str:
    """An SVG of groups, one below the other."""
    drawn, y, titles, said = "", 0.0, [], []
    for group, found in groups.items():
        more, y = section(group, found, y)
        drawn += more
        titles.append(f"{GROUPS[group][0]}: {counted(found)}")
        said += [
            f"{row.name} {row.said}, {row.asked}, {'met' if row.nearness >= 0 else 'missed'}"
            for row in found
            if row.nearness is not None
        ]
    height = round(y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * SCALE:g}" '
        f'height="{height * SCALE:g}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
        f"<title>How near each ratio is to its target. {escape('; '.join(titles))}</title>\n"
        f"<desc>{escape('; '.join(said))}</desc>\n<defs>{HATCHED}</defs>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="{WHITE}"/>\n'
        + drawn.replace("><", ">\n<")
        + "\n</svg>\n"
    )


def main() -> None:
    """Writes the pictures, or compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rows", type=Path, default=DOCUMENTED)
    parser.add_argument("--out", type=Path, help="one picture of all groups")
    words = parser.parse_args()
    groups = grouped(rows(words.rows))
    made = {FOLDER / f"{group}.svg": picture({group: found}) for group, found in groups.items()}
    if words.out is not None:
        made = {words.out: picture(groups)}
    if words.check:
        stale = {file for file in FOLDER.glob("*.svg") if file not in made} | {
            file
            for file, drawn in made.items()
            if not file.exists() or file.read_text(encoding="utf-8") != drawn
        }
        names = ", ".join(sorted(file.name for file in stale))
        sys.exit(f"run python docs/pictures/benchmarks.py: {names}" if stale else 0)
    for file, drawn in made.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
