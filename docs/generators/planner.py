"""The part of docs/planner.md on many hosts: the figures of probes in docs/scale/, and what the
cost model predicts from them.  tests/benchmarks/planner_scale.py is their script, and::

    pserver plan --servers 8 --trainers 64 --link 25Gbit --figures docs/scale/dense_sync.json \\
        tests/benchmarks/planner_scale.py dense sync

probes once, where there is no such file, and predicts from it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from docs.generators.tables import DOCS, filled, table
from pserver.launcher.planning.cost import (
    Figures,
    Prediction,
    Where,
    bandwidth,
    predict,
    served_seconds,
    updated_seconds,
)
from pserver.launcher.planning.plan import spelled

PAGE, FOLDER = "planner.md", DOCS / "scale"
MODELS, MODES = ("dense", "clicks"), ("sync", "async", "geo10")
LINKS = ("10Gbit", "25Gbit", "100Gbit")
SERVERS, TRAINERS = 8, 64


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a mode, with its figures."""

    model: str
    mode: str
    figures: Figures

    def at(self, link: str) -> Prediction:
        """The prediction for a link."""
        (probed,) = self.figures.probes.values()
        rate = bandwidth("--link", link)
        return predict(self.figures.load, probed, Where(self.figures.cores, True, rate))


def cases() -> Iterator[Case]:
    """Those of the page, in its order."""
    for model in MODELS:
        for mode in MODES:
            yield Case(model, mode, Figures.read(str(FOLDER / f"{model}_{mode}.json")))


def pages() -> dict[str, str]:
    """The page with what is made."""
    made = {"steps at scale": steps, "costs at scale": costs}
    return {PAGE: filled(PAGE, lambda mark: made[mark]())}


def steps() -> str:
    """A table: what a step takes, and what bounds it."""
    head = (
        *("model", "mode", "link", "a step", "bound by", "compute", "update", "links"),
        *("processor of a server", "lookups"),
    )
    rows = []
    for case in cases():
        for link in LINKS:
            found = case.at(link)
            parts = {part.name: part.seconds for part in found.parts}
            links = sum(seconds for name, seconds in parts.items() if name.startswith("link"))
            update = spelled(parts["update"]) if "update" in parts else ""
            rows.append(
                (
                    *(case.model, case.mode, link, spelled(found.seconds), found.bottleneck),
                    *(spelled(parts["compute"]), update, spelled(links)),
                    spelled(parts["processor of a server"]),
                    spelled(parts["lookups"]) if "lookups" in parts else "",
                )
            )
    return table(head, rows)


def costs() -> str:
    """A table: what the steps are computed from."""
    head = (
        *("model", "mode", "a message", "its answer", "processor of the servers"),
        *("of one more trainer", "per GB of its", "update", "of one more trainer"),
    )
    rows = []
    for case in cases():
        (probed,) = case.figures.probes.values()
        one = probed.alone
        each = 1 / one.messages
        sent, received = sum(one.sent) * each, (sum(one.received) - sum(one.looked_up)) * each
        load = case.figures.load
        fewer, more = (replace(load, trainers=count) for count in (1, 2))
        served, served_more = served_seconds(fewer, probed), served_seconds(more, probed)
        updated, updated_more = updated_seconds(fewer, probed), updated_seconds(more, probed)
        per_gb = (served_more - served) / (sum(one.sent) + sum(one.received)) * 1e9
        rows.append(
            (
                *(case.model, case.mode, _size(sent), _size(received)),
                *(spelled(served * each), spelled((served_more - served) * each)),
                *(f"{per_gb:.2g} s", spelled(updated * each)),
                spelled((updated_more - updated) * each),
            )
        )
    return table(head, rows)


def _size(count: float) -> str:
    return f"{count / 1e6:.3g} MB"
