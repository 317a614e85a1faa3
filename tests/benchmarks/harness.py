"""How a row is measured: what we do and what it is compared with take turns in one run, and the
medians are divided.

[Note: ratios]  A machine's speed drifts by a factor of two with what else it does.  So nothing is
compared with a number from another day: the contenders of a row run one after the other, round
after round, and drift meets them all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Contender = Callable[[], float]  # one run; returns what was measured


@dataclass(frozen=True, slots=True)
class Promise:
    """What a row is to show.

    Attributes:
        name: "wire/...".
        against: what it is compared with.
        target: of the ratio; ``most`` says that it is the most, otherwise it is the least.  None:
            shown beside another row.
        unit: of the two values; ``setting``: what runs where, with how many threads.
    """

    name: str
    against: str
    target: float | None
    unit: str = "ms"
    most: bool = False
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A promise, and what came of it.  ``skipped`` says why it could not be measured here."""

    promise: Promise
    value: float | None = None
    baseline: float | None = None
    runs: int = 0
    skipped: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the baseline; where less is asked for, how much of it."""
        if self.value is None or self.baseline is None:
            return None
        above, below = self.baseline, self.value
        if self.promise.most or self.promise.unit.endswith("/s"):  # more of it is faster
            above, below = below, above
        return above / below if below else None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None where there is none, or nothing was measured."""
        if self.ratio is None or self.promise.target is None:
            return None
        return (
            self.ratio <= self.promise.target
            if self.promise.most
            else self.ratio >= self.promise.target
        )

    def plain(self) -> dict[str, Any]:
        """As it stands in build/bench.json."""
        facts = asdict(self.promise)
        most = facts.pop("most")
        return {
            **{
                "name": facts.pop("name"),
                "value": self.value,
                "unit": facts.pop("unit"),
                "baseline": self.baseline,
            },
            **{
                "ratio": self.ratio,
                "target": facts.pop("target"),
                "bound": "most" if most else "least",
                "runs": self.runs,
            },
            **{"met": self.met, "skipped": self.skipped, **facts},
        }


def alternate(contenders: Mapping[str, Contender], runs: int) -> dict[str, float]:
    """The median of each contender's runs; they take turns.

    A first round, which warms everything up, does not count.
    """
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs + 1):
        for name, run in contenders.items():
            measured[name].append(run())
    return {name: statistics.median(values[1:]) for name, values in measured.items()}


def timed(call: Callable[[], object], seconds: float = 0.25, unit: float = 1e3) -> Contender:
    """A contender whose run repeats ``call`` for about this long; it returns milliseconds a
    call.
    """
    count = 0

    def run() -> float:
        nonlocal count
        if not count:
            call()
            count = 1 + int(seconds / max(_seconds(call, 1), 1e-7))
        return _seconds(call, count) / count * unit

    return run


def _seconds(call: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - began


def rows_of(
    promises: Mapping[Promise, str], medians: Mapping[str, float], own: str, runs: int
) -> Iterator[Row]:
    """Rows that compare the contender ``own`` with others: each promise with the name of its
    baseline.
    """
    for promise, baseline in promises.items():
        yield Row(promise, medians[own], medians[baseline], runs)
