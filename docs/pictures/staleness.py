"""The cost of staleness by optimizer, and the part of it that delay compensation takes back.

::

    python docs/pictures/staleness.py            measures, for some minutes: docs/staleness.json,
                                                 and all that is made from it
    python docs/pictures/staleness.py --tasks digits    the same for one model
    python docs/pictures/staleness.py --draw     writes the pictures, and the tables of the page
    python docs/pictures/staleness.py --check    says which of them are not current

What a run is: stale_gradients.py.  A rate, and a factor lambda, is the one with the lowest held-out
loss with a seed of its own, which no figure has.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from xml.sax.saxutils import escape

import torch
from architecture import GREY, INK, WHITE, text
from stale_gradients import OPTIMIZERS, TASKS, Task, measure

DOCS = Path(__file__).parent.parent
RESULTS, PAGE = DOCS / "staleness.json", DOCS / "staleness.md"
COST, STEPS = DOCS / "staleness.svg", DOCS / "staleness_steps.svg"
STALENESS = (0, 1, 2, 4, 8, 16)
RATES = {  # among which the best is taken at staleness 0
    "SGD": (0.5, 1.0, 2.0, 4.0, 8.0),
    "SGD, momentum 0.9": (0.125, 0.25, 0.5, 1.0),
    "Adam": (0.01, 0.02, 0.04, 0.08),
}
FACTORS = (1.0, 10.0, 100.0, 1000.0)  # of delay compensation
CHOICE, SEEDS = 100, (0, 1, 2)  # the seed that chooses, and those of the figures
POINTS = 8  # of a curve over steps


# ---- measuring ----


@dataclass(frozen=True)
class Arm:
    """The runs of one setting.

    Attributes:
        task, optimizer: keys of TASKS and OPTIMIZERS.
        tuned: the rate is the best at this staleness, and not at staleness 0.
        factor: lambda; 0: delays are not compensated.
        tried: what this setting was chosen among: rate, factor, final loss.
        curves: of each seed, the held-out loss; see ``measure``.
        scores: of each seed, at the end.
        guess: the loss that a curve has where a run has failed.
    """

    task: str
    optimizer: str
    staleness: int
    tuned: bool
    rate: float
    factor: float
    tried: list[tuple[float, float, float]]
    curves: list[list[float]]
    scores: list[float]
    guess: float

    @property
    def losses(self) -> list[float]:
        """Of each seed, at the end."""
        return [curve[-1] for curve in self.curves]

    @property
    def failed(self) -> int:
        """The number of runs that end no better than a guess."""
        return sum(loss >= self.guess for loss in self.losses)


class Measurement:
    """The arms of one model and optimizer."""

    def __init__(self, name: str, optimizer: str, task: Task) -> None:
        self._name, self._optimizer, self._task = name, optimizer, task
        self._run = cache(self._measured)

    def _measured(
        self, rate: float, staleness: int, factor: float, seed: int
    ) -> tuple[list[float], float]:
        made = OPTIMIZERS[self._optimizer](rate)
        curve, score = measure(self._task, made, staleness, factor, seed, POINTS)
        return [round(loss, 4) for loss in curve], round(score, 4)

    def _arm(
        self, staleness: int, tuned: bool, rates: Iterable[float], factors: Iterable[float]
    ) -> Arm:
        """The best of these rates and factors."""
        tried = [
            (rate, factor, self._run(rate, staleness, factor, CHOICE)[0][-1])
            for rate in rates
            for factor in factors
        ]
        rate, factor, _ = min(tried, key=lambda each: each[2])
        runs = [self._run(rate, staleness, factor, seed) for seed in SEEDS]
        return Arm(
            *(self._name, self._optimizer, staleness, tuned, rate, factor, tried),
            curves=[curve for curve, _ in runs],
            scores=[score for _, score in runs],
            guess=round(self._task.guess, 4),
        )

    def arms(self) -> list[Arm]:
        """Of every staleness: at the rate that is best at staleness 0, and at that of its own; each
        without compensation and with it.
        """
        found = [self._arm(0, False, RATES[self._optimizer], [0.0])]
        rate = own = found[0].rate
        for staleness in STALENESS[1:]:
            lower = self._arm(staleness, True, (own, own / 2, own / 4), [0.0])
            own = lower.rate
            found += [
                self._arm(staleness, False, [rate], [0.0]),
                self._arm(staleness, False, [rate], FACTORS),
                lower,
                self._arm(staleness, True, [own], FACTORS),
            ]
        return found


def measured(names: Iterable[str]) -> Iterator[list[Arm]]:
    """The arms of one model and optimizer after the other; a line says how far it is."""
    for name in names:
        task = TASKS[name]()
        for optimizer in OPTIMIZERS:
            found = Measurement(name, optimizer, task).arms()
            ends = [round(mean(arm.losses), 3) for arm in found]
            print(f"{task.model}, {optimizer}: held-out losses {ends}", flush=True)
            yield found


def write(arms: Iterable[Arm]) -> None:
    """Writes docs/staleness.json."""
    lines = [json.dumps(asdict(arm)) for arm in arms]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read() -> list[Arm]:
    """The arms of docs/staleness.json."""
    return [Arm(**each) for each in json.loads(RESULTS.read_text(encoding="utf-8"))]


# ---- tables ----


def measured_pairs(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """The models and optimizers that there are arms of, in order."""
    return list(dict.fromkeys((arm.task, arm.optimizer) for arm in arms))


def row(arms: Sequence[Arm], task: str, optimizer: str, tuned: bool, on: bool) -> list[Arm]:
    """The arms of one row, by staleness; at 0 all are the same."""
    found = {
        arm.staleness: arm
        for arm in arms
        if (arm.task, arm.optimizer) == (task, optimizer)
        and (not arm.staleness or (arm.tuned, bool(arm.factor)) == (tuned, on))
    }
    return [found[staleness] for staleness in STALENESS]


def cell(arm: Arm) -> str:
    """The mean of the scores and their deviation; of runs that have not failed."""
    kept = [s for s, loss in zip(arm.scores, arm.losses, strict=True) if loss < arm.guess]
    if len(kept) < 2:
        return "fails" if not kept else f"{kept[0]:.3f}, {arm.failed} fail"
    said = f"{mean(kept):.3f} ± {stdev(kept):.3f}"
    return said + (f", {arm.failed} fails" if arm.failed else "")


def table(kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a column for each staleness."""
    head = [*kinds, *(f"s = {each}" for each in STALENESS)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scores(arms: Sequence[Arm], tuned: bool) -> str:
    """A table of scores."""
    rows = []
    for task, optimizer in measured_pairs(arms):
        made = TASKS[task]()
        for on in (False, True):
            first = [f"{made.model}: {made.score[0]}", optimizer, "on" if on else "off"]
            rows.append([*first, *map(cell, row(arms, task, optimizer, tuned, on))])
    return table(["model", "optimizer", "`dc_asgd`"], rows)


def settings(arms: Sequence[Arm]) -> str:
    """A table of rates, and of lambdas at the rate of staleness 0 and at that."""
    rows = []
    for task, optimizer in measured_pairs(arms):
        rates = [f"{arm.rate:g}" for arm in row(arms, task, optimizer, True, False)]
        said = {"rate": rates}
        for tuned, what in (False, "lambda, rate of s = 0"), (True, "lambda, own rate"):
            factors = [f"{arm.factor:g}" for arm in row(arms, task, optimizer, tuned, True)]
            said[what] = ["", *factors[1:]]
        name = TASKS[task]().model
        rows += [[name, optimizer, what, *cells] for what, cells in said.items()]
    return table(["model", "optimizer", ""], rows)


def page(arms: Sequence[Arm], old: str) -> str:
    """The page with the tables of these arms."""
    made = {"same rate": scores(arms, False), "own rate": scores(arms, True)}
    made["settings"] = settings(arms)
    for name, lines in made.items():
        begin, end = f"<!-- {name}: make pictures -->", "<!-- end -->"
        old, count = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            f"{begin}\n\n{lines}\n\n{end}",
            old,
            flags=re.DOTALL,
        )
        assert count == 1, f"{PAGE}: expected one place for {name!r}, found {count}"
    return old


# ---- pictures ----


WIDE, HIGH, LEFT, TOP = 300, 190, 48, 34  # of a panel; where its lines begin in it
RIGHT, BOTTOM, HEAD = 10, 34, 66
OFF, ON = "#b35900", "#6741d9"
COLORS = {0: INK, 4: "#1971c2", 16: "#c92a2a"}


@dataclass(frozen=True)
class Line:
    """A line of a panel: of each place the values of all runs."""

    values: Sequence[Sequence[float]]
    color: str
    dashed: bool = False

    @property
    def means(self) -> list[float]:
        """Of each place."""
        return [mean(each) for each in self.values]

    def style(self) -> str:
        """Its attributes in SVG."""
        dashes = ' stroke-dasharray="5 3"' if self.dashed else ""
        return f'fill="none" stroke="{self.color}" stroke-width="1.8"{dashes}'


def panel(
    left: float, top: float, title: str, marks: Sequence[str], guess: float, lines: Sequence[Line]
) -> str:
    """Lines over places that are equally far apart; above a guess is nothing."""
    lowest = min(min(each) for line in lines for each in line.values)
    floor = lowest - 0.06 * (guess - lowest)
    wide, high = WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM

    def across(place: int) -> float:
        return left + LEFT + place / (len(marks) - 1) * wide

    def up(loss: float) -> float:
        return top + TOP + (guess - loss) / (guess - floor) * high

    drawn = text(left + LEFT, top + 20, title, 11.5, INK, 700, "start")
    for share in (0, 1 / 3, 2 / 3, 1):
        loss = guess - share * (guess - lowest)
        ends = f"M {left + LEFT:g} {up(loss):.1f} h {wide}"
        drawn += f'<path d="{ends}" stroke="#dde2e8" stroke-width="1"/>'
        drawn += text(left + LEFT - 6, up(loss) + 4, f"{loss:.2f}", 11, GREY, anchor="end")
    for place, mark in enumerate(marks):
        drawn += text(across(place), top + HIGH - BOTTOM + 16, mark, 11, GREY)
    for line in lines:
        points = " ".join(
            f"{across(place):.1f},{up(loss):.1f}" for place, loss in enumerate(line.means)
        )
        drawn += f'<polyline points="{points}" {line.style()}/>'
        for place, values in enumerate(line.values):
            ends = f"M {across(place):.1f} {up(max(values)):.1f} V {up(min(values)):.1f}"
            drawn += f'<path d="{ends}" stroke="{line.color}" stroke-width="1" opacity="0.5"/>'
    return drawn


def picture(
    title: str, below: str, legend: Sequence[tuple[str, Line]], panels: Sequence[str]
) -> str:
    """An SVG of panels, three in a row."""
    width, height = 3 * WIDE, HEAD + HIGH * -(-len(panels) // 3) + 24
    drawn, x = text(14, 24, title, 15, INK, 700, "start"), 14.0
    for words, line in legend:
        drawn += f'<path d="M {x:g} 46 h 30" {line.style()}/>'
        drawn += text(x + 36, 50, words, 12, INK, anchor="start")
        x += 54 + 6.3 * len(words)
    drawn += "".join(panels) + text(width / 2, height - 10, below, 12, GREY)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" rx="12" fill="{WHITE}"/>\n'
        + drawn.replace("><", ">\n<")
        + "\n</svg>\n"
    )


def places(arms: Sequence[Arm]) -> list[tuple[str, str, str, float, float]]:
    """Of each panel the task, the optimizer, its title and its corner."""
    return [
        (
            *(task, optimizer, f"{TASKS[task]().model}; {optimizer}"),
            *(place % 3 * WIDE, HEAD + place // 3 * HIGH),
        )
        for place, (task, optimizer) in enumerate(measured_pairs(arms))
    ]


def cost(arms: Sequence[Arm]) -> str:
    """The final loss against staleness."""
    kinds = {
        "same rate": (False, False),
        "same rate, dc_asgd": (False, True),
        "own rate": (True, False),
        "own rate, dc_asgd": (True, True),
    }
    panels = []
    for task, optimizer, title, left, top in places(arms):
        lines = []
        for tuned, on in kinds.values():
            found = row(arms, task, optimizer, tuned, on)
            lines.append(Line([arm.losses for arm in found], ON if on else OFF, tuned))
        marks = [str(each) for each in STALENESS]
        panels.append(panel(left, top, title, marks, found[0].guess, lines))
    legend = [(name, Line([], ON if on else OFF, tuned)) for name, (tuned, on) in kinds.items()]
    title = "Final held-out loss against staleness; the upper edge is a guess"
    below = "steps between the parameters of a gradient and those it is applied to; bars: 3 seeds"
    return picture(title, below, legend, panels)


def steps(arms: Sequence[Arm]) -> str:
    """The loss against the steps, each at a rate of its own."""
    panels = []
    for task, optimizer, title, left, top in places(arms):
        lines = []
        for on in (False, True):
            for arm in row(arms, task, optimizer, True, on):
                if arm.staleness in COLORS and (arm.staleness or not on):
                    by_place = list(zip(*arm.curves, strict=True))
                    lines.append(Line(by_place, COLORS[arm.staleness], on))
        marks = [f"{each}/{POINTS}" if each else "0" for each in range(POINTS + 1)]
        marks = [mark if place % 2 == 0 else "" for place, mark in enumerate(marks)]
        panels.append(panel(left, top, title, marks, arm.guess, lines))
    legend = [
        *((f"staleness {each}", Line([], color)) for each, color in COLORS.items()),
        *((f"{each}, dc_asgd", Line([], color, True)) for each, color in COLORS.items() if each),
    ]
    title = "Held-out loss against steps, each at a rate of its own; the upper edge is a guess"
    return picture(title, "share of the steps; bars: 3 seeds", legend, panels)


def main() -> None:
    """Measures, writes or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    words = parser.parse_args()
    if not (words.draw or words.check):
        torch.set_num_threads(1)
        found = [arm for arm in read() if arm.task not in words.tasks] if RESULTS.exists() else []
        for some in measured(words.tasks):
            write(found := found + some)
    arms = read()
    text_now = PAGE.read_text(encoding="utf-8")
    made = {COST: cost(arms), STEPS: steps(arms), PAGE: page(arms, text_now)}
    if words.check:
        stale = [
            file.name
            for file, drawn in made.items()
            if not file.exists() or file.read_text(encoding="utf-8") != drawn
        ]
        again = "run python docs/pictures/staleness.py --draw"
        sys.exit(f"{again}: {', '.join(stale)}" if stale else 0)
    for file, drawn in made.items():
        file.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
