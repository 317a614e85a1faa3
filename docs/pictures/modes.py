"""Draws docs/concepts/modes/*.svg, one timeline for each update mode, of who waits for whom, and
docs/modes.svg, three of them in one picture.

::

    python docs/pictures/modes.py            writes the pictures
    python docs/pictures/modes.py --check    says which of them are not current

A mode is a row of ``MODES``: how long the trainers compute, what one message brings, and who waits.
The times in a picture follow from these by the rules of the mode (timeline.py), and are no
measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from architecture import GREY, INK, PSERVER, TRAINER, TRANSPILER, WHITE, box, head, text
from timeline import (
    END,
    FIRST,
    NAMES,
    SECOND,
    SERVERS,
    Message,
    Timeline,
    averaged,
    one_by_one,
    together,
)

FOLDER = Path(__file__).parent.parent / "concepts" / "modes"
LEFT, UNIT, TOP, HEIGHT, APART = 98, 54, 58, 32, 74  # pixels
WIDTH = round(LEFT + END * UNIT + 24)
MARK = "#e8590c"  # of what a picture is about


@dataclass(frozen=True)
class Mode:
    """One picture.

    Attributes:
        title: what a reader of the picture hears.
        says: one line below it.
        draw: fills a timeline.
    """

    title: str
    says: str
    draw: Callable[[Timeline], None]
    rows: tuple[int, ...] = (FIRST, SERVERS, SECOND)


MODES = {
    "sync": Mode(
        "Sync mode: every trainer waits for the slowest, and all go on from one update",
        "One update for all trainers' steps: each waits until the slowest has sent its own.",
        partial(together, lengths=(2.1, 3.1), steps=1, words="mean"),
    ),
    "async": Mode(
        "Async mode: each step is an update of its own, and nobody waits for another trainer",
        "Each step is an update of its own.  Values land between two steps; nobody waits while a "
        "slot is free.",
        partial(one_by_one, lengths=(2.0, 3.1), words="of"),
    ),
    "half_async": Mode(
        "Half-async mode: a trainer averages its own steps and waits for their result alone",
        "A trainer averages 2 of its own steps, sends the mean, and waits for the result; for no "
        "other trainer.",
        partial(one_by_one, lengths=(1.5, 2.3), words="of", steps=2, waits=True),
    ),
    "bounded_staleness": Mode(
        "Bounded staleness: a trainer that is too far ahead waits for the slowest",
        "A staleness of 1: the answer to step n waits until the slowest trainer's step n - 1 is "
        "applied.",
        partial(one_by_one, lengths=(1.3, 3.6), words="of", waits=True, staleness=1),
    ),
    "delay_compensation": Mode(
        "Delay compensation: async, and the servers correct a gradient for what has changed since",
        "Orange: another trainer has stepped since this one read, so its gradient is corrected by "
        "that change.",
        partial(one_by_one, lengths=(2.3, 3.5), words="of", waits=True, corrects=True),
    ),
    "geo": Mode(
        "Geo mode: trainers step by themselves, and every k steps what changed is added",
        "k = 2: trainers step by themselves.  Every 2 steps the servers add what changed; nobody "
        "waits.",
        partial(one_by_one, lengths=(1.5, 2.1), words="add", steps=2),
    ),
    "diloco": Mode(
        "DiLoCo: trainers step by themselves, and every k steps all exchange and wait",
        "k = 2: the mean change is the gradient of an outer optimizer; all wait at every 2nd step.",
        partial(together, lengths=(1.4, 1.9), steps=2, words="outer"),
    ),
    "mixed": Mode(
        "Mixed: dense gradients are averaged among trainers while rows travel to the servers",
        "Tables async on servers: a forward asks for rows, a step sends their gradients.  Dense "
        "layers: all-reduce.",
        partial(averaged, lengths=(2.0, 2.9), rows=True),
    ),
    "collective": Mode(
        "Collective mode: no servers, trainers average their gradients among themselves",
        "No servers: an all-reduce, for which every trainer waits; then each steps by itself.",
        partial(averaged, lengths=(2.2, 3.2), rows=False),
        (FIRST, SECOND),
    ),
}


# ---- drawing ----

STYLES = {  # fill, border, dashes, colour of words
    "compute": (TRAINER[0], TRAINER[1], "", TRAINER[2]),
    "wait": (WHITE, "#adb5bd", "4 3", GREY),
    "hold": (WHITE, PSERVER[1], "4 3", PSERVER[2]),
    "update": (PSERVER[0], PSERVER[1], "", PSERVER[2]),
    "corrected": ("#fff4e6", MARK, "", MARK),
    "reduce": (TRANSPILER[0], TRANSPILER[1], "", TRANSPILER[2]),
}


def across(time: float) -> float:
    """Where a time is, in pixels."""
    return LEFT + min(time, END) * UNIT


def block(kind: str, words: str, x: float, y: float, width: float, height: float = HEIGHT) -> str:
    """A rectangle of a kind, with as many of its words as fit."""
    fill, border, dashes, color = STYLES[kind]
    drawn = box(x + 0.75, y, width - 1.5, height, fill, border, 4)
    if dashes:
        drawn = drawn.replace("/>", f' stroke-dasharray="{dashes}"/>')
    fits = next((each for each in shorter(words) if 6.3 * len(each) < width - 4), "")
    return drawn + (text(x + width / 2, y + 21, fits, 11.5, color) if fits else "")


def shorter(words: str) -> Iterator[str]:
    """Words, and what may stand in their place where there is less room."""
    yield words
    if words.startswith("waits for "):
        yield words.replace("trainer ", "")
        yield "waits"
    if words.startswith("step "):
        yield words.removeprefix("step ")


def ys(rows: tuple[int, ...]) -> dict[int, float]:
    """The upper edge of each row."""
    return {row: TOP + place * APART for place, row in enumerate(rows)}


def flight(message: Message, tops: dict[int, float]) -> str:
    """The arrow of a message, and where its values land."""
    down = tops[message.to] > tops[message.row]
    begin = tops[message.row] + (HEIGHT + 1 if down else -1)
    end = tops[message.to] + (-2 if down else HEIGHT + 2)
    color = TRAINER[2] if message.to == SERVERS else PSERVER[2]
    points = f"M {across(message.sent):g} {begin:g} L {across(message.arrives):g} {end:g}"
    drawn = (
        f'<path d="{points}" fill="none" stroke="{color}" stroke-width="1.5" '
        f'marker-end="url(#head-{color[1:]})"/>'
    )
    if message.lands is not None and message.lands < END:
        edge, to = tops[message.to] + (0 if down else HEIGHT), across(message.lands)
        drawn += (
            f'<path d="M {across(message.arrives):g} {edge:g} H {to:g}" fill="none" '
            f'stroke="{color}" stroke-width="2.5"/>'
            f'<circle cx="{to:g}" cy="{edge:g}" r="4" fill="{color}"/>'
        )
    return drawn


def legend(kinds: set[str], lands: bool, y: float) -> str:
    """What the colours mean."""
    words = {
        "compute": "forward and backward",
        "wait": "waits",
        "hold": "has come, not applied",
        "update": "update",
        "corrected": "update, corrected",
        "reduce": "all-reduce",
    }
    drawn, x = "", float(LEFT)
    for kind in (each for each in words if each in kinds):
        drawn += block(kind, "", x, y, 24, 14)
        drawn += text(x + 30, y + 11.5, words[kind], 11.5, GREY, anchor="start")
        x += 30 + 6.1 * len(words[kind]) + 22
    if lands:
        drawn += f'<circle cx="{x + 6:g}" cy="{y + 7:g}" r="4" fill="{PSERVER[2]}"/>'
        drawn += text(x + 16, y + 11.5, "values land", 11.5, GREY, anchor="start")
    return drawn


def drawing(mode: Mode) -> tuple[str, float, set[str], bool]:
    """A mode's timeline, its lower edge, and what a legend explains: kinds, and landing values."""
    line, tops = Timeline(), ys(mode.rows)
    mode.draw(line)
    below = max(tops.values()) + HEIGHT
    drawn = text(LEFT, 30, mode.says, 13, INK, anchor="start")
    for row, y in tops.items():
        color = PSERVER[2] if row == SERVERS else TRAINER[2]
        drawn += text(16, y + 21, NAMES[row], 13, color, 600, "start")
    spans = [span for span in line.spans if span.begin < END - 0.35]
    messages = [each for each in line.messages if each.arrives < END]
    for span in (each for each in spans if each.kind == "reduce" and each.row == FIRST):
        middle = across((span.begin + min(span.end, END)) / 2)
        drawn += vertical(middle, tops[FIRST] + HEIGHT, tops[SECOND])
    for span in spans:
        x, end = across(span.begin), across(span.end)
        drawn += block(span.kind, span.words, x, tops[span.row], end - x)
    drawn += "".join(flight(message, tops) for message in messages)
    lands = any(each.lands is not None for each in messages)
    return drawn, below, {span.kind for span in spans}, lands


def whole(title: str, drawn: str, height: int) -> str:
    """A picture as SVG."""
    heads = "".join(head(accent) for accent in (TRAINER[2], PSERVER[2], TRANSPILER[2]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n<title>{title}</title>\n'
        f"<defs>{heads}</defs>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="{WHITE}"/>\n'
        + drawn.replace("><", ">\n<")
        + "\n</svg>\n"
    )


def time_at(y: float) -> str:
    """The direction of time."""
    return text(WIDTH - 20, y, "time \u2192", 12, GREY, anchor="end")


def picture(mode: Mode) -> str:
    """A mode's picture as SVG."""
    drawn, below, kinds, lands = drawing(mode)
    drawn += legend(kinds, lands, below + 26) + time_at(below + 37.5)
    return whole(mode.title, drawn, round(below + 62))


def at_a_glance(names: Iterable[str]) -> str:
    """Some modes, one below the other, each with its name, and one legend, as SVG."""
    drawn, height, kinds, lands = "", 0.0, set[str](), False
    for name in names:
        own, below, found, landing = drawing(MODES[name])
        own = text(16, 30, name, 15, INK, 700, "start") + own
        drawn += f'<g transform="translate(0 {height:g})">{own}</g>'
        height, kinds, lands = height + below + 6, kinds | found, lands or landing
    title = f"{', '.join(names)}: who waits for whom"
    drawn += legend(kinds, lands, height + 20) + time_at(height + 52)
    return whole(title, drawn, round(height + 68))


def vertical(x: float, begin: float, end: float) -> str:
    """An arrow both ways, between the trainers."""
    color = TRANSPILER[2]
    ends = f'marker-end="url(#head-{color[1:]})"'
    middle = (begin + end) / 2
    return "".join(
        f'<path d="M {x:g} {middle:g} V {to:g}" fill="none" stroke="{color}" '
        f'stroke-width="1.5" {ends}/>'
        for to in (begin + 2, end - 2)
    )


if __name__ == "__main__":
    files = {FOLDER / f"{name}.svg": picture(mode) for name, mode in MODES.items()}
    files[FOLDER.parent.parent / "modes.svg"] = at_a_glance(["sync", "async", "geo"])
    if sys.argv[1:] == ["--check"]:
        stale = [
            file.name
            for file, drawn in files.items()
            if not file.exists() or file.read_text(encoding="utf-8") != drawn
        ]
        sys.exit(f"run python docs/pictures/modes.py: {', '.join(stale)}" if stale else 0)
    for file, drawn in files.items():
        file.write_text(drawn, encoding="utf-8")
