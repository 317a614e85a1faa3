"""A job as the page shows it: its curves, its events, its present state.  No clock, no thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from pserver.web import views
from pserver.web.samples import Change, EventFeed, Sample, recent
from pserver.web.views import (
    TREND_POINTS,
    Curves,
    Facts,
    LaneTimes,
    Point,
    TrainerView,
    answers,
    lane_times,
)

KEPT_SAMPLES = 12


VALUES = "values"  # the curves of what scripts report: "values/loss/0"


class JobView:
    """A job as one watcher knows it.

    Args:
        endpoints: of its servers.
        curves: where values over time are kept.

    Attributes:
        curves: "values/NAME/TRAINER", "samples/TRAINER", "samples/all", "steps/LANE",
            "split/LANE/PART", "staleness/LANE", "memory/PROCESS", "bytes/in", "bytes/out",
            "progress/step".
        events: on the time axis.
    """

    def __init__(self, endpoints: Sequence[str], curves: Curves | None = None) -> None:
        self.endpoints = list(endpoints)
        self.curves = Curves() if curves is None else curves
        self.events = EventFeed()
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._now: dict[str, Any] = {}
        self._moved: float | None = None  # when a server's version last did
        self._run = ""

    def add(self, sample: Sample) -> None:
        """Adds the servers' states at one moment, later than those before."""
        before = self._samples[-1] if self._samples else Sample(sample.time)
        self._samples.append(sample)
        change = recent(self._samples)
        times = lane_times(change)
        seen = views.trainers_of(sample.replies)
        run = next((reply.run for reply in sample.replies.values() if reply.run), "")
        if run and run != self._run:  # another job: its steps are counted anew
            self._run, self._moved = run, None
        if any(_moved(before, sample, endpoint) for endpoint in sample.replies):
            self._moved = sample.time
        self.curves.add(sample.time, _values(sample, change, times, seen))
        self.events.compare(self.curves.tick, before, sample)
        self._now = self._page(sample, change, times, seen)

    def page(self, since: int) -> dict[str, Any]:
        """The changes after a tick, for a page that knows all before, JSON-able."""
        return {
            "tick": self.curves.tick,
            "now": self._now,
            "curves": {
                key: [(point.time, views.spoken(point.value)) for point in points]
                for key, points in self.curves.since(since).items()
            },
            "events": self.events.since(since),
        }

    def _page(
        self,
        sample: Sample,
        change: Change,
        times: Sequence[LaneTimes],
        seen: Sequence[TrainerView],
    ) -> dict[str, Any]:
        replies = sample.replies
        job: dict[str, Any] = {"run": self._run, "mode": "", "fingerprint": "", "expected": 0}
        for reply in replies.values():
            if reply.fingerprint:
                job |= {
                    "mode": reply.mode,
                    "fingerprint": reply.fingerprint[:12],
                    "expected": reply.trainers_expected,
                }
        facts = self._facts(sample, times, seen)
        return {
            "time": sample.time,
            "job": job,
            "answers": [
                {"question": each.question, "verdict": each.verdict, "text": each.text}
                for each in answers(facts)
            ],
            "servers": views.servers(self.endpoints, sample, change),
            "trainers": views.trainers(seen, change),
            "links": views.links(self.endpoints, replies, change),
            "lanes": views.lanes(times),
            "tables": views.tables(replies.values(), change),
        }

    def _facts(
        self, sample: Sample, times: Sequence[LaneTimes], seen: Sequence[TrainerView]
    ) -> Facts:
        values: dict[str, dict[int, list[Point]]] = {}
        for each in seen:
            for name in each.report.values:
                points = self.curves.curve(f"{VALUES}/{name}/{each.number}").last(TREND_POINTS)
                values.setdefault(name, {})[each.number] = points
        saves = [each.report.since_save_seconds for each in seen if each.report.saves]
        written = self.events.saved_at
        saves += [] if written is None else [sample.time - written]
        saved = min(saves, default=None)
        step = max((each.step for each in seen), default=0)
        then: float | None = 0.0
        if saved is not None:
            then = self.curves.curve("progress/step").at(sample.time - saved)
        return Facts(
            self.endpoints,
            sample,
            seen,
            times,
            None if self._moved is None else sample.time - self._moved,
            values,
            saved,
            None if then is None else max(0, step - int(then)),
        )


def _moved(before: Sample, after: Sample, endpoint: str) -> bool:
    known = before.replies.get(endpoint)
    version = after.replies[endpoint].version
    return known is not None and version != known.version and version > 0


def _values(
    sample: Sample, change: Change, times: Sequence[LaneTimes], seen: Sequence[TrainerView]
) -> dict[str, float]:
    """The values to draw as curves."""
    found: dict[str, float] = {}
    for each in seen:
        if each.state != "joined":
            continue
        for name, value in each.report.values.items():
            found[f"{VALUES}/{name}/{each.number}"] = value
        if each.report.memory_bytes:
            found[f"memory/trainer {each.number}"] = float(each.report.memory_bytes)
    for reply in sample.replies.values():
        if reply.memory_bytes:
            found[f"memory/server {reply.server_index}"] = float(reply.memory_bytes)
    for index, lane in enumerate(times):
        found[f"steps/{index}"] = lane.steps_per_second
        if lane.mean.total:
            found |= {f"split/{index}/{name}": each for name, each in lane.mean.parts().items()}
        if lane.staleness is not None:
            found[f"staleness/{index}"] = lane.staleness
    joined = {each.number for each in seen if each.report.samples and each.state == "joined"}
    rates = {who: rate for who, rate in change.samples().items() if who in joined}
    found |= {f"samples/{who}": rate for who, rate in rates.items()}
    if len(rates) > 1:
        found["samples/all"] = math.fsum(rates.values())
    if change.seconds:
        found["bytes/in"] = math.fsum(change.rates("bytes_in").values())
        found["bytes/out"] = math.fsum(change.rates("bytes_out").values())
    if seen:
        found["progress/step"] = float(max(each.step for each in seen))
    return found
