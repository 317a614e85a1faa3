"""The rows of a benchmark: what was measured, beside what, and how near it came to its target.

docs/benchmarks.json has those that the documentation shows, in the form of build/bench.json, which
``make bench`` writes.  The page of benchmarks and its pictures are made from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

DOCUMENTED = Path(__file__).parent.parent / "benchmarks.json"
GROUPS = {  # a picture: its title, and how the names of its rows begin
    "wire": ("On the wire", ("wire/", "writes/")),
    "tables": ("Tables", ("table/", "sampled softmax/")),
    "trainers": ("Among trainers", ("collective/", "mixed/")),
    "survival": ("What surviving costs", ("survival/",)),
    "overlap": ("Hidden behind the device", ("overlap/",)),
    "data": ("Reading data", ("data/",)),
    "paddle": ("Beside PaddlePaddle", ("paddle/",)),
    "gpu": ("On a GPU", ("gpu/",)),
    "examples": ("An example", ("movielens/",)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        name: "wire/...".
        value, baseline: ours, and what it is compared with, in ``unit``.
        ratio: of the two, so that ``bound``, "least" or "most", says what ``target`` is of it.
        runs: of each contender; ``date``: the day of the measurement.
        setting: what ran where, with how many threads.
        commit: at which it was measured; "" where nobody knows.
    """

    name: str
    value: float | None
    unit: str
    baseline: float | None
    against: str
    ratio: float | None
    target: float | None
    bound: str
    runs: int
    date: str
    setting: str
    commit: str = ""

    @property
    def nearness(self) -> float | None:
        """Doublings by which a ratio is better than its target, below 0 where it is worse; None
        where there is no target, or nothing was measured.
        """
        if self.ratio is None or not self.target or self.ratio <= 0:
            return None
        doublings = math.log2(self.ratio / self.target)
        return -doublings if self.bound == "most" else doublings

    @property
    def asked(self) -> str:
        """The target in words."""
        return "" if self.target is None else f"at {self.bound} {self.target:g}"

    @property
    def said(self) -> str:
        """The ratio with two decimals, or, if it is small, one digit that is not 0."""
        if self.ratio is None:
            return ""
        return f"{self.ratio:.2f}" if self.ratio >= 0.095 else f"{self.ratio:.1g}"


def rows(file: Path = DOCUMENTED) -> list[Row]:
    """Those of a file, in its order."""
    names = [each.name for each in fields(Row)]
    found = json.loads(file.read_text(encoding="utf-8"))
    return [Row(**{name: facts[name] for name in names if name in facts}) for facts in found]


def counted(among: Iterable[Row]) -> str:
    """How many targets were met, in words."""
    near = [row.nearness for row in among if row.nearness is not None]
    return f"{sum(each >= 0 for each in near)} of {len(near)} targets met"


def missed(among: Iterable[Row]) -> list[Row]:
    """Those that missed their targets, the furthest first."""
    found = [(row.nearness, row) for row in among if row.nearness is not None]
    return [row for near, row in sorted(found, key=lambda each: each[0]) if near < 0]


def grouped(among: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each group that has a picture: some with a target."""
    every = list(among)
    of = {
        group: [row for row in every if row.name.startswith(beginnings)]
        for group, (_, beginnings) in GROUPS.items()
    }
    return {
        group: found
        for group, found in of.items()
        if any(row.nearness is not None for row in found)
    }
