"""What is known of a job that is watched: its curves, its events, and how it is now.  No clock, no
thread, no socket: time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from pserver.web import job_view, table_view
from pserver.web.answers import TREND_POINTS, Facts, answers
from pserver.web.curves import Curves, Point
from pserver.web.happenings import Happenings
from pserver.web.job_view import Seen
from pserver.web.sightings import Change, Sighting, recent
from pserver.web.step_split import LaneTimes, lane_times

KEPT_SIGHTINGS = 12
VALUES = "values"  # the curves of what scripts report: "values/loss/0"


class Watched:
    """A job as one watcher knows it.

    Args:
        endpoints: of its servers.
        curves: where values over time are kept.

    Attributes:
        curves: "values/NAME/TRAINER", "samples/TRAINER", "samples/all", "steps/LANE",
            "split/LANE/PART", "staleness/LANE", "memory/PROCESS", "bytes/in", "bytes/out",
            "progress/step".
        happenings: on the time axis.
    """

    def __init__(self, endpoints: Sequence[str], curves: Curves | None = None) -> None:
        self.endpoints = list(endpoints)
        self.curves = Curves() if curves is None else curves
        self.happenings = Happenings()
        self._sightings: deque[Sighting] = deque(maxlen=KEPT_SIGHTINGS)
        self._now: dict[str, Any] = {}
        self._moved: float | None = None  # when a server's version last did
        self._run = ""

    def take(self, sighting: Sighting) -> None:
        """What the servers have said at one moment, later than those before."""
        before = self._sightings[-1] if self._sightings else Sighting(sighting.time)
        self._sightings.append(sighting)
        change = recent(self._sightings)
        times = lane_times(change)
        seen = job_view.trainers_of(sighting.replies)
        run = next((reply.run for reply in sighting.replies.values() if reply.run), "")
        if run and run != self._run:  # another job: its steps are counted anew
            self._run, self._moved = run, None
        if any(_moved(before, sighting, endpoint) for endpoint in sighting.replies):
            self._moved = sighting.time
        self.curves.add(sighting.time, _values(sighting, change, times, seen))
        self.happenings.take(self.curves.tick, before, sighting)
        self._now = self._page(sighting, change, times, seen)

    def page(self, since: int) -> dict[str, Any]:
        """What a page that knows all until a tick has not seen, JSON-able."""
        return {
            "tick": self.curves.tick,
            "now": self._now,
            "curves": {
                key: [(point.time, job_view.spoken(point.value)) for point in points]
                for key, points in self.curves.since(since).items()
            },
            "events": self.happenings.since(since),
        }

    def _page(
        self,
        sighting: Sighting,
        change: Change,
        times: Sequence[LaneTimes],
        seen: Sequence[Seen],
    ) -> dict[str, Any]:
        replies = sighting.replies
        job: dict[str, Any] = {"run": self._run, "mode": "", "fingerprint": "", "expected": 0}
        for reply in replies.values():
            if reply.fingerprint:
                job |= {
                    "mode": reply.mode,
                    "fingerprint": reply.fingerprint[:12],
                    "expected": reply.trainers_expected,
                }
        facts = self._facts(sighting, times, seen)
        return {
            "time": sighting.time,
            "job": job,
            "answers": [
                {"question": each.question, "verdict": each.verdict, "text": each.text}
                for each in answers(facts)
            ],
            "servers": job_view.servers(self.endpoints, sighting, change),
            "trainers": job_view.trainers(seen, change),
            "links": job_view.links(self.endpoints, replies, change),
            "lanes": job_view.lanes(times),
            "tables": table_view.tables(replies.values(), change),
        }

    def _facts(self, sighting: Sighting, times: Sequence[LaneTimes], seen: Sequence[Seen]) -> Facts:
        values: dict[str, dict[int, list[Point]]] = {}
        for each in seen:
            for name in each.report.values:
                points = self.curves.curve(f"{VALUES}/{name}/{each.number}").last(TREND_POINTS)
                values.setdefault(name, {})[each.number] = points
        saves = [each.report.since_save_seconds for each in seen if each.report.saves]
        written = self.happenings.saved_at
        saves += [] if written is None else [sighting.time - written]
        saved = min(saves, default=None)
        step = max((each.step for each in seen), default=0)
        then: float | None = 0.0
        if saved is not None:
            then = self.curves.curve("progress/step").at(sighting.time - saved)
        return Facts(
            self.endpoints,
            sighting,
            seen,
            times,
            None if self._moved is None else sighting.time - self._moved,
            values,
            saved,
            None if then is None else max(0, step - int(then)),
        )


def _moved(before: Sighting, after: Sighting, endpoint: str) -> bool:
    known = before.replies.get(endpoint)
    version = after.replies[endpoint].version
    return known is not None and version != known.version and version > 0


def _values(
    sighting: Sighting, change: Change, times: Sequence[LaneTimes], seen: Sequence[Seen]
) -> dict[str, float]:
    """What is drawn as curves."""
    found: dict[str, float] = {}
    for each in seen:
        if each.state != "joined":
            continue
        for name, value in each.report.values.items():
            found[f"{VALUES}/{name}/{each.number}"] = value
        if each.report.memory_bytes:
            found[f"memory/trainer {each.number}"] = float(each.report.memory_bytes)
    for reply in sighting.replies.values():
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
