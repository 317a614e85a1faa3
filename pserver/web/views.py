"""A job as the page shows it: answers, curves, tables, and the parts of a step's time.  Pure.

[Note: where a step's time goes]  A trainer measures a step from one close to the next, how long its
script was blocked in it, and how long each server's answer took.  The rest of the time it has
computed.  A server measures how long its step lasted from the first trainer's commit, how late this
trainer's commit arrived after that, and how long the update took.  So of a server's answer::

    others = step - this trainer's lateness - update
    wire   = answer - others - update

The slowest server's parts divide what the script was blocked for.  Where a step's answer comes
while the script computes already, it is blocked for less than the answer takes, and each part
counts for as much less; what it is blocked for beyond the slowest answer is packing and unpacking,
and counts as wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from pserver.telemetry.counts import counted
from pserver.web.samples import Change, Sample
from pserver.wire_pb2 import StatusReply, TrainerReport, TrainerStatus

# ---- curves ----
#
# Values over time, as many as a page can draw: old ones are thinned.


MOST_POINTS = 10_000  # of a curve
MOST_CURVES = 2_000


class Point(NamedTuple):
    """One value.

    Attributes:
        tick: the number of the moment at which the value was taken, from 1.
        time: in seconds since 1970.
    """

    tick: int
    time: float
    value: float


class Curve:
    """One curve.  When it has as many points as it may have, every second one of the older half is
    dropped: the past gets coarser, the present stays.

    Args:
        most: points; 4 or more.

    Example:
        >>> curve = Curve(4)
        >>> for tick in range(1, 6):
        ...     curve.add(Point(tick, float(tick), 0.0))
        >>> [point.tick for point in curve.since(0)]
        [1, 3, 4, 5]
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: Point) -> None:
        """Adds a value, later than those before."""
        if len(self._points) >= self._most:
            half = self._most // 2
            self._points[:half] = self._points[:half:2]
        self._points.append(point)

    def since(self, tick: int) -> list[Point]:
        """The points after a moment, in order."""
        low, high = 0, len(self._points)
        while low < high:
            middle = (low + high) // 2
            if self._points[middle].tick > tick:
                high = middle
            else:
                low = middle + 1
        return self._points[low:]

    def last(self, count: int) -> list[Point]:
        """The last points, in order."""
        return self._points[-count:]

    def at(self, time: float) -> float | None:
        """The last value at or before a time; None: it is older than the curve."""
        found = None
        for point in reversed(self._points):
            if point.time <= time:
                found = point.value
                break
        return found


class Curves:
    """All curves of a job, by key: "loss/trainer 0".

    Args:
        most_points: of each.
        most_curves: of further names nothing is kept.

    Attributes:
        tick: the last moment at which values were taken; 0 before the first.
    """

    def __init__(self, most_points: int = MOST_POINTS, most_curves: int = MOST_CURVES) -> None:
        self.tick = 0
        self._most_points, self._most_curves = most_points, most_curves
        self._by_key: dict[str, Curve] = {}

    def add(self, time: float, values: dict[str, float]) -> None:
        """Adds the curves' values at one moment; a curve without a value has a gap there."""
        self.tick += 1
        for key, value in values.items():
            if key not in self._by_key and len(self._by_key) < self._most_curves:
                self._by_key[key] = Curve(self._most_points)
            if key in self._by_key:
                self._by_key[key].add(Point(self.tick, time, value))

    def curve(self, key: str) -> Curve:
        """A curve; an empty one where there is none of this key."""
        return self._by_key.get(key) or Curve()

    def since(self, tick: int) -> dict[str, list[Point]]:
        """The new points after a moment, by key; curves without new points are left out."""
        found = {key: curve.since(tick) for key, curve in self._by_key.items()}
        return {key: points for key, points in found.items() if points}


# ---- step split ----
#
# Where a step's time goes: computing, waiting for other trainers, the wire, the update.


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of a trainer's step of one lane, on average.

    Attributes:
        compute: the script's own.
        others: waiting for other trainers.
        update: the servers' arithmetic.
        wire: travelling, packing and unpacking.
    """

    compute: float = 0.0
    others: float = 0.0
    update: float = 0.0
    wire: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.others + self.update + self.wire

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {
            "compute": self.compute,
            "others": self.others,
            "wire": self.wire,
            "update": self.update,
        }


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The times of one lane.

    Attributes:
        mode: of the lane.
        by_trainer: the steps of each trainer that has taken some.
        lateness: by trainer, seconds of a step for which the first trainer waited for it.
        answers: by endpoint, seconds from a commit to its answer, on average over trainers.
        steps_per_second: of the lane's updates.
        staleness: mean, in steps; None: there are rounds, or nothing was pushed.
        most_stale: steps, since the job's start.
    """

    mode: str
    by_trainer: Mapping[int, Split]
    lateness: Mapping[int, float]
    answers: Mapping[str, float]
    steps_per_second: float
    staleness: float | None
    most_stale: int

    @property
    def mean(self) -> Split:
        """Over trainers."""
        found = list(self.by_trainer.values())
        count = max(1, len(found))
        return Split(
            sum(each.compute for each in found) / count,
            sum(each.others for each in found) / count,
            sum(each.update for each in found) / count,
            sum(each.wire for each in found) / count,
        )


def lane_times(change: Change) -> list[LaneTimes]:
    """The times of every lane, by index."""
    lanes = {endpoint: change.lanes(endpoint) for endpoint in change.seconds}
    count = max((len(found) for found in lanes.values()), default=0)
    return [_times(change, index) for index in range(count)]


def _times(change: Change, index: int) -> LaneTimes:
    splits: dict[int, tuple[float, Split]] = {}  # by trainer: the slowest answer, and its step
    lateness: dict[int, float] = {}
    answers: dict[str, float] = {}
    mode, speed, pushes, stale, most = "", 0.0, 0, 0, 0
    for endpoint, seconds in change.seconds.items():
        found = change.lanes(endpoint)
        if index >= len(found):
            continue
        lane = found[index]
        mode, speed = lane.mode, max(speed, lane.version / seconds)
        pushes, stale = pushes + lane.stale_pushes, stale + lane.stale_steps
        most = max(most, lane.most_stale_steps)
        step = lane.step_seconds / lane.steps if lane.steps else 0.0
        update = lane.update_seconds / lane.updates if lane.updates else 0.0
        waits = []
        for trainer, report in change.reports(endpoint, index).items():
            late = lane.wait_seconds.get(trainer, 0.0) / lane.steps if lane.steps else 0.0
            lateness[trainer] = max(lateness.get(trainer, 0.0), late)
            if not (report.steps and report.waits):
                continue
            answer = report.wait_seconds / report.waits
            waits.append(answer)
            blocked = min(report.blocked_seconds, report.step_seconds) / report.steps
            whole = report.step_seconds / report.steps
            if answer >= splits.get(trainer, (-1.0, Split()))[0]:
                others = max(0.0, step - late - update)
                splits[trainer] = answer, _split(whole, blocked, answer, others, update)
        if waits:
            answers[endpoint] = sum(waits) / len(waits)
    by_trainer = {trainer: split for trainer, (_, split) in sorted(splits.items())}
    mean = stale / pushes if pushes else None
    return LaneTimes(mode, by_trainer, dict(sorted(lateness.items())), answers, speed, mean, most)


def _split(whole: float, blocked: float, answer: float, others: float, update: float) -> Split:
    """Divides a step of ``whole`` seconds."""
    share = min(1.0, blocked / answer) if answer else 0.0
    update = min(update, answer) * share
    others = min(others * share, max(0.0, blocked - update))
    return Split(whole - blocked, others, update, max(0.0, blocked - others - update))


# ---- job view ----
#
# A job as the page shows it, from what its servers say: servers, trainers, links, lanes.


# of a trainer's states, the one that counts first
WORST = ("lost", "joined", "finished", "preempted", "left")


@dataclass(slots=True)
class TrainerView:
    """One trainer, as all servers see it.

    Attributes:
        number: of the trainer.
        state: "joined", "finished", ...: the first of ``WORST`` that a server reports.
        step: the furthest.
        silence: seconds since any server has heard it.
        activity: its present one.
        report: the newest.
        behind: how many times as long as the others it computes, where it is slow; else 0.
    """

    number: int
    state: str = "left"
    step: int = 0
    silence: float = float("inf")
    activity: str = ""
    report: TrainerReport = field(default_factory=TrainerReport)
    behind: float = 0.0

    def add(self, status: TrainerStatus) -> None:
        """Adds one server's status of the trainer."""
        if status.state in WORST[: WORST.index(self.state)]:
            self.state = status.state
        if status.silence_seconds < self.silence:
            self.silence, self.activity = status.silence_seconds, status.activity
        self.step = max(self.step, status.step)
        self.behind = max(self.behind, status.behind)
        if status.report.ByteSize() and status.report.samples >= self.report.samples:
            self.report = status.report


def trainers_of(replies: Mapping[str, StatusReply]) -> list[TrainerView]:
    """The trainers that some server knows, by number."""
    found: dict[int, TrainerView] = {}
    for reply in replies.values():
        for status in reply.trainers:
            found.setdefault(status.trainer_id, TrainerView(status.trainer_id)).add(status)
    return [found[number] for number in sorted(found)]


def servers(endpoints: Sequence[str], sample: Sample, change: Change) -> list[dict[str, Any]]:
    """Each server, in the order in which the user has named them."""
    into, out = change.rates("bytes_in"), change.rates("bytes_out")
    found = []
    for place, endpoint in enumerate(endpoints):
        reply = sample.replies.get(endpoint)
        entry: dict[str, Any] = {
            "endpoint": endpoint,
            "name": f"server {place if reply is None else reply.server_index}",
            "up": reply is not None,
            "state": "unreachable" if reply is None else reply.state,
            "error": sample.errors.get(endpoint, ""),
        }
        if reply is not None:
            entry |= {
                "error": reply.failure,
                "mode": reply.mode,
                "version": reply.version,
                "slices": reply.slices,
                "held": reply.bytes_held,
                "memory": reply.memory_bytes,
                "uptime": reply.uptime_seconds,
                "in": into.get(endpoint, 0.0),
                "out": out.get(endpoint, 0.0),
            }
        found.append(entry)
    return found


def trainers(seen: Sequence[TrainerView], change: Change) -> list[dict[str, Any]]:
    """Each trainer."""
    samples, steps = change.samples(), change.steps()
    return [
        {
            "number": each.number,
            "state": each.state,
            "step": each.step,
            "activity": each.activity,
            "silence": each.silence,
            "behind": each.behind,
            "memory": each.report.memory_bytes,
            "samples": each.report.samples,
            "samples_per_second": samples.get(each.number, 0.0),
            "steps_per_second": steps.get(each.number, 0.0),
            "values": {name: spoken(value) for name, value in sorted(each.report.values.items())},
        }
        for each in seen
    ]


def links(
    endpoints: Sequence[str], replies: Mapping[str, StatusReply], change: Change
) -> list[dict[str, Any]]:
    """Each pair of a trainer and a server, with the bytes a second that travel."""
    found = []
    for place, endpoint in enumerate(endpoints):
        if (reply := replies.get(endpoint)) is None:
            continue
        rates = change.links(endpoint) if endpoint in change.seconds else {}
        for trainer in reply.trainers:
            down, up = rates.get(trainer.trainer_id, (0.0, 0.0))
            found.append(
                {
                    "trainer": trainer.trainer_id,
                    "server": place,
                    "up": up,
                    "down": down,
                    "transport": trainer.transport,
                    "reconnects": trainer.report.reconnects,
                    "state": trainer.state,
                }
            )
    return found


def lanes(times: Sequence[LaneTimes]) -> list[dict[str, Any]]:
    """Each lane: the parts of its steps' time, late trainers, staleness."""
    return [
        {
            "lane": index,
            "mode": lane.mode,
            "steps_per_second": lane.steps_per_second,
            "split": lane.mean.parts(),
            "by_trainer": {str(number): each.parts() for number, each in lane.by_trainer.items()},
            "lateness": {str(number): seconds for number, seconds in lane.lateness.items()},
            "answers": lane.answers,
            "staleness": lane.staleness,
            "most_stale": lane.most_stale,
        }
        for index, lane in enumerate(times)
    ]


def spoken(value: float) -> float | str:
    """A number as JSON has it: one that is not finite is "nan", "inf" or "-inf"."""
    return value if abs(value) < float("inf") else str(value)


# ---- answers ----
#
# The five questions of an operator, each answered in one sentence from what servers say.


SILENT_SECONDS = 5.0  # of a trainer that should beat each second
LATE_SHARE = 0.1  # of a step: from this share on a trainer delays the others
SLOWER = 1.25  # times the fastest
STILL_SECONDS = 5.0  # without a step
FRESH_SECONDS = 120.0  # of a checkpoint
TREND_POINTS = 60
NAMES = {
    "compute": "the trainers' own computing",
    "others": "waiting for other trainers",
    "wire": "the wire, packing and unpacking",
    "update": "the servers' updates",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        question: as the page asks it.
        verdict: "good", "warn", "bad", or "unknown".
        text: one sentence.
    """

    question: str
    verdict: str
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that the answers are made from.

    Attributes:
        endpoints: of all servers that should run.
        sample: the last one.
        trainers: as all servers see them.
        lanes: by index.
        still: seconds since the servers' versions last moved; None: they never have.
        values: the last points of each value that scripts report, by name, then by trainer.
        saved: seconds since the last checkpoint, where it is known that there was one.
        unsaved: steps since then, or since the job's start.
    """

    endpoints: Sequence[str]
    sample: Sample
    trainers: Sequence[TrainerView] = ()
    lanes: Sequence[LaneTimes] = ()
    still: float | None = None
    values: Mapping[str, Mapping[int, Sequence[Point]]] | None = None
    saved: float | None = None
    unsaved: int | None = None

    @property
    def states(self) -> set[str]:
        """The states of the servers that have answered."""
        return {reply.state for reply in self.sample.replies.values()}

    @property
    def failure(self) -> str:
        """The error that ended the job, if there is one."""
        replies = self.sample.replies.values()
        return next((reply.failure for reply in replies if reply.failure), "")

    @property
    def runs(self) -> bool:
        """Whether a job runs."""
        return "serving" in self.states and not self.failure


def answers(facts: Facts) -> list[Answer]:
    """The five answers, in the order of the questions."""
    return [
        Answer("Is it healthy?", *_healthy(facts)),
        Answer("What limits it?", *_limit(facts)),
        Answer("Who is slow?", *_slow(facts)),
        Answer("Is the model fine?", *_model(facts)),
        Answer("Can I stop it now?", *_stop(facts)),
    ]


def _healthy(facts: Facts) -> tuple[str, str]:
    gone = [each for each in facts.endpoints if each not in facts.sample.replies]
    if facts.failure:
        return "bad", f"No: the job has failed: {facts.failure}"
    if gone:
        few = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if gone[3:] else "")
        verb = "does" if len(gone) == 1 else "do"
        return (
            "bad",
            f"No: {len(gone)} of {_count(len(facts.endpoints), 'server')} {verb} not answer: {few}",
        )
    lost = [each.number for each in facts.trainers if each.state == "lost"]
    if lost:
        return "bad", f"No: {_trainers(lost)} lost"
    if "draining" in facts.states:
        return "warn", "It ends: a server is shutting down"
    if facts.states == {"empty"}:
        return "unknown", "No job runs: the servers are up and empty"
    expected = max(reply.trainers_expected for reply in facts.sample.replies.values())
    if "installing" in facts.states or len(facts.trainers) < expected:
        return "warn", f"It begins: {len(facts.trainers)} of {_count(expected, 'trainer')} joined"
    silent = [
        t.number for t in facts.trainers if t.state == "joined" and t.silence > SILENT_SECONDS
    ]
    if silent:
        return "warn", f"Perhaps not: no message from {_trainers(silent, verb=False)}"
    if slow := [t.number for t in facts.trainers if t.behind]:
        return "warn", f"Yes, but {_trainers(slow)} slower than the others"
    if refused := _counted(facts, "refused_nonfinite"):
        return "warn", f"Yes, but {_count(refused, 'step')} refused because of a NaN or an infinity"
    working = _count(sum(each.state == "joined" for each in facts.trainers), "trainer")
    return "good", f"Yes: {_count(len(facts.endpoints), 'server')} and {working} are at work"


def _counted(facts: Facts, name: str) -> int:
    """A count over all trainers: of the server that has counted most, as all refuse alike."""
    return max((counted(each.trainers, name) for each in facts.sample.replies.values()), default=0)


def _limit(facts: Facts) -> tuple[str, str]:
    if not facts.runs:
        return "unknown", "Nothing runs"
    if facts.still is None or facts.still > STILL_SECONDS:
        since = "yet" if facts.still is None else f"for {_seconds(facts.still)}"
        doing = {each.activity for each in facts.trainers if each.state == "joined"} - {""}
        said = f"; trainers say: {', '.join(sorted(doing)[:3])}" if doing else ""
        return "warn", f"Nothing moves: no step was applied {since}{said}"
    lane = max(facts.lanes, key=lambda each: each.mean.total, default=None)
    if lane is None or not lane.mean.total:
        return "unknown", "Steps are applied; how long they take is not measured yet"
    name, seconds = max(lane.mean.parts().items(), key=lambda part: part[1])
    share = seconds / lane.mean.total
    text = f"{NAMES[name]}: {share:.0%} of a step of {_seconds(lane.mean.total)}"
    return ("good" if name == "compute" else "warn"), text[0].upper() + text[1:]


def _slow(facts: Facts) -> tuple[str, str]:
    if not facts.runs:
        return "unknown", "Nothing runs"
    for lane in facts.lanes:
        if lane.lateness and lane.mean.total:
            number, late = max(lane.lateness.items(), key=lambda item: item[1])
            if len(lane.lateness) > 1 and late >= LATE_SHARE * lane.mean.total:
                return "warn", (
                    f"Trainer {number}: the first one waits {_seconds(late)} of each step of "
                    f"{_seconds(lane.mean.total)} for it"
                )
        if not lane.lateness and len(lane.by_trainer) > 1:
            number, split = max(lane.by_trainer.items(), key=lambda item: item[1].total)
            fastest = min(each.total for each in lane.by_trainer.values())
            if fastest and split.total > SLOWER * fastest:
                return "warn", (
                    f"Trainer {number}: a step takes it {_seconds(split.total)}, the fastest "
                    f"{_seconds(fastest)}"
                )
        if len(lane.answers) > 1:
            endpoint, slowest = max(lane.answers.items(), key=lambda item: item[1])
            other = min(lane.answers.values())
            if slowest > SLOWER * other and slowest - other >= LATE_SHARE * lane.mean.total:
                return "warn", (
                    f"Server {endpoint}: it answers after {_seconds(slowest)}, the fastest after "
                    f"{_seconds(other)}"
                )
    if not any(lane.by_trainer for lane in facts.lanes):
        return "unknown", "No steps have been measured in the last seconds"
    return "good", "Nobody: no trainer and no server holds up the others"


def _model(facts: Facts) -> tuple[str, str]:
    values = facts.values or {}
    for name, by_trainer in sorted(values.items()):
        for number, points in sorted(by_trainer.items()):
            if points and not math.isfinite(points[-1].value):
                return "bad", f"No: {name} of trainer {number} is {points[-1].value}"
    if refused := _counted(facts, "refused_nonfinite"):
        return "warn", f"Doubtful: {_count(refused, 'step')} had a NaN or an infinity"
    name = next((each for each in sorted(values) if "loss" in each.lower()), "")
    if not name:
        return "unknown", "Its loss is not known: the script says it by fleet.report(loss=...)"
    number, points = max(values[name].items(), key=lambda item: len(item[1]))
    finite = [point.value for point in points if math.isfinite(point.value)]
    third = len(finite) // 3
    if third < 2:
        return "good", f"So far: {name} is {finite[-1]:.4g}"
    first, last = median(finite[:third]), median(finite[-third:])
    span = _seconds(points[-1].time - points[0].time)
    if last > first + 0.05 * abs(first):
        return "warn", f"Doubtful: {name} rises, from {first:.4g} to {last:.4g} in {span}"
    word = "falls" if last < first - 0.01 * abs(first) else "stays"
    return "good", f"Yes: {name} {word}, from {first:.4g} to {last:.4g} in {span}"


def _stop(facts: Facts) -> tuple[str, str]:
    if not facts.sample.replies:
        return "unknown", "No server answers"
    if facts.failure:
        kept = max(reply.kept_seconds for reply in facts.sample.replies.values())
        what = f"its values are kept for another {_seconds(kept)}" if kept else "nothing is kept"
        return "warn" if kept else "unknown", f"It has stopped: {what}"
    if not facts.runs:
        return "good", "Yes: no job runs"
    steps = "" if facts.unsaved is None else f" and {_count(facts.unsaved, 'step')} ago"
    if facts.saved is None:
        lost = "all steps" if facts.unsaved is None else f"all {_count(facts.unsaved, 'step')}"
        return "warn", f"Not without loss: no checkpoint is known, {lost} would be gone; save first"
    if facts.saved <= FRESH_SECONDS:
        return "good", f"Yes: a checkpoint was written {_seconds(facts.saved)}{steps or ' ago'}"
    return "warn", f"Save first: the last checkpoint was {_seconds(facts.saved)}{steps or ' ago'}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _trainers(numbers: Sequence[int], verb: bool = True) -> str:
    names = ", ".join(map(str, numbers[:8])) + (" ..." if numbers[8:] else "")
    one = len(numbers) == 1
    return f"trainer{'' if one else 's'} {names}" + (f" {'is' if one else 'are'}" if verb else "")


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- table view ----
#
# Tables as the page shows them: rows by tier, hit rates, admissions, evictions, bytes.


REMOVED = ("evicted", "expired", "shrunk")


def tables(replies: Iterable[StatusReply], change: Change) -> list[dict[str, Any]]:
    """Each table, summed over servers, by name.

    "hit_rate" is the part of the ids that were looked up lately whose row was in memory; None where
    nothing was looked up.
    """
    totals: dict[str, dict[str, int]] = {}
    held: dict[str, int] = {}
    for reply in replies:
        for table in reply.tables:
            counted = totals.setdefault(table.name, {})
            held[table.name] = held.get(table.name, 0) + table.bytes_held
            for name, count in {**table.counters, "rows": table.rows}.items():
                counted[name] = counted.get(name, 0) + count
    lately = change.tables()
    return [
        {
            "name": name,
            "memory_rows": counted.get("rows", 0) - counted.get("cold", 0),
            "disk_rows": counted.get("cold", 0),
            "waiting": counted.get("waiting", 0),
            "admitted": counted.get("admitted", 0),
            "refused": counted.get("refused", 0),
            "removed": sum(counted.get(each, 0) for each in REMOVED),
            "bytes": held[name],
            **_lookups(*lately.get(name, ({}, 0.0))),
        }
        for name, counted in sorted(totals.items())
    ]


def _lookups(counted: Mapping[str, float], seconds: float) -> dict[str, Any]:
    asked = counted.get("lookups", 0.0)
    missed = counted.get("lookups_disk", 0.0) + counted.get("lookups_new", 0.0)
    return {
        "lookups_per_second": asked / seconds if seconds else 0.0,
        "hit_rate": (asked - missed) / asked if asked > 0 else None,
    }
