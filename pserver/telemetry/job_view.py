"""A job seen from outside: what its servers say, one moment after another, becomes what the panel,
``pserver status`` and the page show.  Pure: no clock, no thread, no socket.

::

    status calls --Sample--> JobView.add --> JobView.state     panel, status, page
                                         --> JobView.page      the page: its curves and events

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
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from pserver.polling import NOTICE_SECONDS
from pserver.telemetry.counts import count_lines, most_counted
from pserver.wire_pb2 import (
    EpochStatus,
    LaneReport,
    LaneStatus,
    ReloadStatus,
    SaveStatus,
    StatusReply,
    TableStatus,
    TrainerReport,
    TrainerStatus,
    WaitStatus,
)

# ---- samples ----
#
# What servers have said at one moment, and what has changed between two of them.


RECENT_SECONDS = 5.0  # over which rates look back
START_SECONDS = 0.5  # by which two answers of one start may differ


@dataclass(frozen=True, slots=True)
class Sample:
    """All servers at one moment.

    Attributes:
        time: in seconds since 1970, by this process's clock.
        replies: by endpoint, of the servers that have answered.
        heard: when each of these did, by this process's clock.
        errors: by endpoint, why a server has not answered.
    """

    time: float
    replies: Mapping[str, StatusReply] = field(default_factory=dict)
    heard: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def same_start(before: StatusReply, after: StatusReply) -> bool:
    """Whether totals of the two may be subtracted: they are of one start of a server and one run of
    a job.
    """
    return abs(started(after) - started(before)) < START_SECONDS and after.run == before.run


def started(reply: StatusReply) -> float:
    """The time of a server's start, by its own clock: another start has another time."""
    return reply.time - reply.uptime_seconds


# the running totals of a job, by message
TOTALS: Mapping[type[Message], Sequence[str]] = {
    StatusReply: ("bytes_in", "bytes_out"),
    LaneStatus: (
        *("version", "steps", "step_seconds", "updates", "update_seconds"),
        *("wait_seconds", "stale_pushes", "stale_steps"),
    ),
    TrainerStatus: ("step",),
    TrainerReport: ("samples", "bytes_in", "bytes_out"),
    LaneReport: ("steps", "step_seconds", "blocked_seconds", "wait_seconds", "waits"),
    TableStatus: ("counters",),
}
M = TypeVar("M", bound=Message)


def grown(before: M, after: M) -> M:
    """The later message, with the growth of each running total in its place."""
    made = type(after)()
    made.CopyFrom(after)
    for name in TOTALS[type(after)]:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(new, int | float):
            setattr(made, name, max(0, new - old))
        else:  # a map
            getattr(made, name).update({key: max(0, new[key] - old.get(key, 0)) for key in new})
    return made


def grown_status(before: StatusReply, after: StatusReply) -> StatusReply:
    """The same of a server's whole answer; trainers, lanes and tables that are in both remain."""
    made = grown(before, after)
    for kept in (made.lanes, made.trainers, made.tables):
        del kept[:]
    made.lanes.extend(map(grown, before.lanes, after.lanes))
    tables = {each.name: each for each in before.tables}
    made.tables.extend(grown(tables[t.name], t) for t in after.tables if t.name in tables)
    trainers = {each.trainer_id: each for each in before.trainers}
    for each in after.trainers:
        if (known := trainers.get(each.trainer_id)) is None:
            continue
        trainer, report = grown(known, each), grown(known.report, each.report)
        del report.lanes[:]
        report.lanes.extend(map(grown, known.report.lanes, each.report.lanes))
        trainer.report.CopyFrom(report)
        made.trainers.append(trainer)
    return made


@dataclass(frozen=True, slots=True)
class Change:
    """The changes between two moments, of the servers that have answered at both.

    Attributes:
        grown: by endpoint, the later answer with the growth of each running total.
        seconds: by endpoint, between its two answers.
    """

    grown: Mapping[str, StatusReply]
    seconds: Mapping[str, float]

    @classmethod
    def between(cls, first: Sample, last: Sample) -> Change:
        """The change between two moments, the earlier one first."""
        kept = [
            endpoint
            for endpoint, reply in last.replies.items()
            if endpoint in first.replies
            and same_start(first.replies[endpoint], reply)
            and last.heard[endpoint] > first.heard[endpoint]
        ]
        return cls(
            {each: grown_status(first.replies[each], last.replies[each]) for each in kept},
            {each: last.heard[each] - first.heard[each] for each in kept},
        )

    def rates(self, name: str) -> dict[str, float]:
        """By endpoint, the growth of a counter of StatusReply a second."""
        return {each: getattr(self.grown[each], name) / s for each, s in self.seconds.items()}

    def of_trainers(self, count: Callable[[TrainerStatus], float]) -> dict[int, float]:
        """By trainer, the growth of a count a second: the most that a server has seen."""
        found: dict[int, float] = {}
        for endpoint, seconds in self.seconds.items():
            for each in self.grown[endpoint].trainers:
                rate = count(each) / seconds
                found[each.trainer_id] = max(found.get(each.trainer_id, 0.0), rate)
        return found


def recent(samples: Sequence[Sample], seconds: float = RECENT_SECONDS) -> Change:
    """The changes of the last seconds: between the last moment and the first that is no older, or
    the one before, where the last one is alone.

    Args:
        samples: in order; one or more.
    """
    last = samples[-1]
    first = next(each for each in samples if each.time >= last.time - seconds)
    if first is last:
        first = samples[-2] if len(samples) > 1 else last
    return Change.between(first, last)


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
        return self._points[bisect_right(self._points, tick, key=lambda each: each.tick) :]

    def last(self, count: int) -> list[Point]:
        """The last points, in order."""
        return self._points[-count:]

    def at(self, time: float) -> float | None:
        """The last value at or before a time; None: it is older than the curve."""
        return next((each.value for each in reversed(self._points) if each.time <= time), None)


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
        wire: travelling, packing and unpacking.
        update: the servers' arithmetic.
    """

    compute: float = 0.0
    others: float = 0.0
    wire: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.others + self.wire + self.update

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The times of one lane.

    Attributes:
        mode: of the lane.
        by_trainer: the steps of each trainer that has taken some.
        mean: over these trainers.
        lateness: by trainer, seconds of a step for which the first trainer waited for it.
        answers: by endpoint, seconds from a commit to its answer, on average over trainers.
        steps_per_second: of the lane's updates.
        staleness: mean, in steps; None: there are rounds, or nothing was pushed.
        most_stale: steps, since the job's start.
    """

    mode: str
    by_trainer: Mapping[int, Split]
    mean: Split
    lateness: Mapping[int, float]
    answers: Mapping[str, float]
    steps_per_second: float
    staleness: float | None
    most_stale: int


def lane_times(change: Change) -> list[LaneTimes]:
    """The times of every lane, by index."""
    count = max((len(each.lanes) for each in change.grown.values()), default=0)
    return [_times(change, index) for index in range(count)]


def _times(change: Change, index: int) -> LaneTimes:
    splits: dict[int, tuple[float, Split]] = {}  # by trainer: the slowest answer, and its step
    lateness: dict[int, float] = {}
    answers: dict[str, float] = {}
    mode, speed, pushes, stale, most = "", 0.0, 0, 0, 0
    for endpoint, seconds in change.seconds.items():
        server = change.grown[endpoint]
        if index >= len(server.lanes):
            continue
        lane = server.lanes[index]
        mode, speed = lane.mode, max(speed, lane.version / seconds)
        pushes, stale = pushes + lane.stale_pushes, stale + lane.stale_steps
        most = max(most, lane.most_stale_steps)
        step = lane.step_seconds / lane.steps if lane.steps else 0.0
        update = lane.update_seconds / lane.updates if lane.updates else 0.0
        waits = []
        for each in server.trainers:
            if index >= len(each.report.lanes):
                continue
            trainer, report = each.trainer_id, each.report.lanes[index]
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
    return LaneTimes(
        mode,
        by_trainer,
        _mean(by_trainer.values()),
        dict(sorted(lateness.items())),
        answers,
        speed,
        stale / pushes if pushes else None,
        most,
    )


def _mean(splits: Collection[Split]) -> Split:
    count = max(1, len(splits))
    return Split(*(sum(getattr(s, each.name) for s in splits) / count for each in fields(Split)))


def _split(whole: float, blocked: float, answer: float, others: float, update: float) -> Split:
    """Divides a step of ``whole`` seconds."""
    share = min(1.0, blocked / answer) if answer else 0.0
    update = min(update, answer) * share
    others = min(others * share, max(0.0, blocked - update))
    return Split(whole - blocked, others, max(0.0, blocked - others - update), update)


# ---- servers, trainers, links, tables ----
#
# A job at one moment, from its servers' last answers and what has changed lately.


UNREACHABLE = "unreachable"
# of a trainer's states, the one that counts first
WORST = ("lost", "joined", "finished", "preempted", "left")
REMOVED = ("evicted", "expired", "shrunk")


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server.

    Attributes:
        index: of the plan; where that is not known, its place among the endpoints.
        up: whether it has answered the last time.
        state: its own word, or "unreachable"; the numbers are then those of its last answer.
        error: why it has not answered, or what has ended its job.
        age: seconds since its last answer; None: there was none.
        version: updates applied, in steps.
        bytes_in, bytes_out: since its start.
    """

    endpoint: str
    index: int
    up: bool
    state: str
    error: str = ""
    age: float | None = None
    mode: str = ""
    version: int | None = None
    slices: int = 0
    bytes_held: int = 0
    memory_bytes: int = 0
    uptime_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_in_per_second: float = 0.0
    bytes_out_per_second: float = 0.0
    transports: Sequence[str] = ()


COPIED = (  # from a server's answer
    *("mode", "version", "slices", "bytes_held", "memory_bytes", "uptime_seconds"),
    *("bytes_in", "bytes_out"),
)


def servers(
    endpoints: Sequence[str],
    sample: Sample,
    known: Mapping[str, StatusReply],
    heard: Mapping[str, float],
    change: Change,
) -> list[ServerView]:
    """Each server, in the order of the endpoints.

    Args:
        known, heard: the last answer of each server that has ever answered, and when it came.
    """
    into, out = change.rates("bytes_in"), change.rates("bytes_out")
    found = []
    for place, endpoint in enumerate(endpoints):
        reply, up = known.get(endpoint), endpoint in sample.replies
        error = sample.errors.get(endpoint, "")
        if reply is None:
            found.append(ServerView(endpoint, place, False, UNREACHABLE, error))
            continue
        found.append(
            ServerView(
                endpoint,
                reply.server_index,
                up,
                reply.state if up else UNREACHABLE,
                reply.failure if up else error,
                max(0.0, sample.time - heard[endpoint]),
                bytes_in_per_second=into.get(endpoint, 0.0),
                bytes_out_per_second=out.get(endpoint, 0.0),
                transports=tuple(reply.transports),
                **{name: getattr(reply, name) for name in COPIED},
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The progress of a trainer in the data.

    Attributes:
        number: of the pass, from 1.
        batch: the one that it has been given.
        batches: of the pass; 0: not known.
        seconds_left: of the pass; None: not known.
        text: the batches, and the time that is left.
    """

    number: int
    batch: int
    batches: int
    seconds_left: float | None = None
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class TrainerView:
    """One trainer, as all servers see it.

    Attributes:
        number: of the trainer.
        state: "joined", "finished", ...: the first of ``WORST`` that a server reports.
        word: the state in a few words: of one that trains, its activity beside its steps.
        step: the furthest that a server has applied.
        transports: to the servers.
        silence: seconds since any server has heard it.
        activity: its present one, by its last heartbeat.
        behind: how many times as long as the others it computes, where it is slow; else 0.
        compute_seconds: of a step of its own, where it is slow.
        kept_seconds: for which the place of a lost one is kept.
        memory_bytes: resident; 0: not known.
        samples: that its script has reported.
        samples_per_second, steps_per_second: lately; None: not known yet.
        values: of ``fleet.report``, by name.
        progress: its own in the data; None: it reports none.
        saved: seconds since its last save of the whole job; None: there was none.
        settings: of its script, in words.
    """

    number: int
    state: str
    word: str
    step: int
    transports: Sequence[str]
    silence: float
    activity: str
    behind: float
    compute_seconds: float
    kept_seconds: float
    memory_bytes: int
    samples: int
    samples_per_second: float | None
    steps_per_second: float | None
    values: Mapping[str, float]
    progress: DataProgress | None
    saved: float | None
    settings: Mapping[str, str]

    @classmethod
    def of(
        cls,
        statuses: Sequence[TrainerStatus],
        samples_per_second: float | None = None,
        steps_per_second: float | None = None,
    ) -> TrainerView:
        """One trainer from its statuses on the servers that know it; one or more."""
        known = [each.state for each in statuses if each.state in WORST]
        state = min(known, key=WORST.index, default=WORST[-1])
        heard = min(statuses, key=lambda each: each.silence_seconds)
        slow = max(statuses, key=lambda each: each.behind)
        report = max(
            (each.report for each in statuses), key=lambda each: (each.samples, each.ByteSize() > 0)
        )
        activity = printable(heard.activity)
        steps = not activity or activity.startswith("step ")
        return cls(
            heard.trainer_id,
            state,
            state if state != "joined" else "training" if steps else activity,
            max(each.step for each in statuses),
            sorted({each.transport for each in statuses} - {""}),
            heard.silence_seconds,
            activity,
            slow.behind,
            slow.compute_seconds if slow.behind else 0.0,
            max(each.kept_seconds for each in statuses),
            report.memory_bytes,
            report.samples,
            samples_per_second,
            steps_per_second,
            dict(sorted(report.values.items())),
            DataProgress(report.passes, report.batch, report.batches) if report.passes else None,
            report.since_save_seconds if report.saves else None,
            {name: printable(each) for name, each in sorted(report.settings.items())},
        )


def trainers(replies: Iterable[StatusReply], change: Change) -> list[TrainerView]:
    """The trainers that some server knows, by number."""
    found: dict[int, list[TrainerStatus]] = {}
    for reply in replies:
        for status in reply.trainers:
            found.setdefault(status.trainer_id, []).append(status)
    samples = change.of_trainers(lambda each: each.report.samples)
    steps = change.of_trainers(lambda each: each.step)
    return [
        TrainerView.of(statuses, samples.get(number), steps.get(number))
        for number, statuses in sorted(found.items())
    ]


@dataclass(frozen=True, slots=True)
class LinkView:
    """The link of a trainer and a server; bytes a second to the server and to the trainer."""

    trainer: int
    server: int
    state: str
    transport: str
    up: float
    down: float
    reconnects: int


def links(
    endpoints: Sequence[str], replies: Mapping[str, StatusReply], change: Change
) -> list[LinkView]:
    """Each pair of a trainer and a server that has answered."""
    found = []
    for place, endpoint in enumerate(endpoints):
        if (reply := replies.get(endpoint)) is None:
            continue
        seconds = change.seconds.get(endpoint, 1.0)
        grown = change.grown.get(endpoint, StatusReply())
        lately = {each.trainer_id: each.report for each in grown.trainers}
        for each in reply.trainers:
            report = lately.get(each.trainer_id, TrainerReport())
            up, down = report.bytes_out / seconds, report.bytes_in / seconds
            again = each.report.reconnects
            found.append(
                LinkView(each.trainer_id, place, each.state, each.transport, up, down, again)
            )
    return found


@dataclass(frozen=True, slots=True)
class TableView:
    """One table, summed over servers.

    Attributes:
        memory_rows, disk_rows: by tier.
        removed: rows that were evicted, have expired, or were shrunk away.
        counters: from the job's start, by name.
        lookups_per_second: lately.
        hit_rate: the part of the ids that were looked up lately whose row was in memory; None:
            nothing was looked up.
    """

    name: str
    memory_rows: int
    disk_rows: int
    removed: int
    bytes_held: int
    counters: Mapping[str, int]
    lookups_per_second: float
    hit_rate: float | None


def tables(replies: Iterable[StatusReply], change: Change) -> list[TableView]:
    """Each table, by name."""
    by_name: dict[str, list[TableStatus]] = {}
    for reply in replies:
        for table in reply.tables:
            by_name.setdefault(table.name, []).append(table)
    lately: dict[str, Counter[str]] = {}
    for reply in change.grown.values():
        for table in reply.tables:
            lately.setdefault(table.name, Counter()).update(table.counters)
    return [
        _table(parts, lately.get(name, Counter()), max(change.seconds.values(), default=1.0))
        for name, parts in sorted(by_name.items())
    ]


def _table(parts: Sequence[TableStatus], lately: Counter[str], seconds: float) -> TableView:
    counters = Counter[str]()
    for part in parts:
        counters.update(part.counters)
    del counters["rows"]
    asked, cold = lately["lookups"], counters["cold"]
    missed = lately["lookups_disk"] + lately["lookups_new"]
    return TableView(
        parts[0].name,
        sum(part.rows for part in parts) - cold,
        cold,
        sum(counters[each] for each in REMOVED),
        sum(part.bytes_held for part in parts),
        counters,
        asked / seconds,
        (asked - missed) / asked if asked > 0 else None,
    )


# ---- progress and values ----
#
# The pass over the data, and the numbers that scripts report.


class PassClock:
    """Times the pass that runs, from the moment at which it was first seen."""

    def __init__(self) -> None:
        self._pass = (0, 0)  # which one is timed, and how many batches it has
        self._began = (0.0, 0)  # when it was first seen, and at which batch

    def progress(self, seen: Sequence[TrainerView], now: float) -> DataProgress | None:
        """The progress of the trainer that is least far; None: no trainer reports any."""
        places = [(p.number, p.batch, p.batches) for each in seen if (p := each.progress)]
        if not places:
            return None
        number, batch, batches = min(places)
        if self._pass != (number, batches) or batch < self._began[1]:
            self._pass, self._began = (number, batches), (now, batch)
        seconds, done = now - self._began[0], batch - self._began[1]
        left = (batches - batch) * seconds / done if batches and done else None
        text = f"batch {batch}"
        if batches:
            text = f"{batch}/{batches}  {math.floor(100 * min(1.0, batch / batches))}%"
            text += "" if left is None else f"  {clock(left)} left"
        return DataProgress(number, batch, batches, left, text)


def sample_rates(seen: Iterable[TrainerView]) -> dict[int, float]:
    """Samples a second, by trainer, of the joined ones that report them."""
    return {
        each.number: each.samples_per_second
        for each in seen
        if each.samples and each.state == "joined" and each.samples_per_second is not None
    }


def means(seen: Iterable[TrainerView]) -> dict[str, float]:
    """The mean of each value over the trainers that report it."""
    found: dict[str, list[float]] = {}
    for each in seen:
        for name, value in each.values.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


def headline(samples_per_second: float | None, values: Mapping[str, float]) -> list[str]:
    """The samples per second and the values of a job, in words.

    Example:
        >>> headline(15234.4, {"loss": 0.43121})
        ['15,234 samples/s', 'loss 0.4312']
    """
    rate = [] if samples_per_second is None else [f"{samples_per_second:,.0f} samples/s"]
    return rate + [f"{printable(name)} {value:.4g}" for name, value in values.items()]


def settings(seen: Iterable[TrainerView], replies: Iterable[StatusReply]) -> dict[str, str]:
    """The settings of a job, in words, by name: the scripts' first, then the plan's.  Where
    processes differ, each value has the names of its processes.
    """
    said = [(f"trainer {each.number}", each.settings) for each in seen]
    said += [(f"server {r.server_index}", dict(sorted(r.settings.items()))) for r in replies]
    by_name: dict[str, dict[str, list[str]]] = {}
    for process, facts in said:
        for name, value in facts.items():
            by_name.setdefault(name, {}).setdefault(value, []).append(process)
    return {
        name: "; ".join(f"{each} ({', '.join(values[each])})" for each in values)
        if len(values) > 1
        else next(iter(values))
        for name, values in by_name.items()
    }


# ---- words ----


def printable(text: str) -> str:
    """Text of other processes, without control codes of a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> clock(3725.4)
        '1:02:05'
    """
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def jsonable(value: Any) -> Any:
    """Dataclasses, messages, mappings and sequences as JSON has them; numbers that it does not have
    are the texts "nan", "inf" and "-inf".

    Example:
        >>> jsonable(TrainerStatus(trainer_id=1, silence_seconds=float("inf")))["silence_seconds"]
        'inf'
    """
    if isinstance(value, Message):
        return {each.name: jsonable(getattr(value, each.name)) for each in value.DESCRIPTOR.fields}
    if is_dataclass(value):
        return {each.name: jsonable(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else [*map(jsonable, value)]


# ---- notices ----
#
# What an operator should read, a line each: waits, saves, servers that are awaited, counts.


@dataclass(frozen=True, slots=True)
class Notice:
    """One line.

    Attributes:
        kind: "info"; "warn": something is wrong, or stands still; "brief": it is over in a moment.
        text: in plain words.
    """

    kind: str
    text: str


def notices(replies: Mapping[str, StatusReply]) -> list[Notice]:
    """The notices of a job, by endpoint where a server's own."""
    found, away = list[Notice](), set[int]()
    for reply in replies.values():
        for wait in reply.waits:
            kind = "warn" if wait.seconds >= NOTICE_SECONDS else "brief"
            found.append(Notice(kind, wait_line(wait)))
        away |= set(reply.away)
    if away:
        awaited = ", ".join(map(str, sorted(away)))
        found.append(Notice("warn", f"waits for server {awaited} to come back"))
    for reply in replies.values():
        found += [Notice("info", epoch_line(each)) for each in reply.epochs]
    counts = count_lines([each.trainers for each in replies.values()])
    found += [Notice("warn", line) for line in counts]
    for endpoint, reply in replies.items():
        if reply.HasField("save"):
            kind = "warn" if reply.save.failure else "info"
            found.append(Notice(kind, f"{endpoint}: {save_line(reply.save)}"))
        if reply.HasField("reload"):
            found.append(Notice("info", f"{endpoint}: {reload_line(reply.reload)}"))
        if failure := reply.recording.failure:
            text = f"{endpoint}: the job's log is not recorded any more: {failure}"
            found.append(Notice("warn", text))
    return found


def wait_line(wait: WaitStatus) -> str:
    """A wait, with the awaited trainers and its seconds, in one line."""
    whom = ", ".join(map(str, wait.for_whom)) or "(none)"
    what = f"trainer {wait.trainer_id} waits at {printable(wait.what)} for trainer {whom}"
    return f"{what}, for {wait.seconds:.1f} s (wait {wait.number})"


def epoch_line(epoch: EpochStatus) -> str:
    """The progress of an epoch's samples, in one line."""
    total = f"{epoch.samples} {epoch.unit}" if epoch.samples else f"{epoch.unit}, length unknown"
    text = f"epoch {epoch.number}{', over' if epoch.over else ''}: {total}, {epoch.decided} decided"
    text += f", {epoch.leased} leased, {epoch.skipped} skipped, {epoch.handed_back} handed back"
    return text + (f", {epoch.left_out} left out" if epoch.left_out else "")


def save_line(save: SaveStatus) -> str:
    """The last save in the background, in one line."""
    how = f"{size(save.bytes)} in {save.seconds:.1f} s, steps waited {save.pause_seconds:.3f} s"
    if save.failure:
        return f"a save has failed: {save.failure}"
    return f"saved to {save.file}: {how}" if save.done else f"saves to {save.file}: {how}"


def reload_line(reload: ReloadStatus) -> str:
    """The losses of a server that has come back, in one line."""
    each = ", ".join(f"trainer {t}: {n}" for t, n in sorted(reload.steps_by_trainer.items()))
    return (
        f"came back from {reload.file}: {reload.steps} decided steps are lost here ({each}), with "
        f"up to {reload.rows} changes of rows"
    )


# ---- events ----
#
# What has happened to a job: what servers tell, and what their watcher sees of them.


MOST = 500
SAME_SECONDS = 5.0  # two servers tell the same thing within so long
SAVED = "saved"


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """An event on the time axis.

    Attributes:
        tick: when the watcher has learned of it, as curves count.
        time: in seconds since 1970, by the watcher's clock.
        kind: a word: "joined", "lost", "saved", ...
        text: a sentence.
    """

    tick: int
    time: float
    kind: str
    text: str


class EventFeed:
    """The last events, in the order in which the watcher has learned of them.

    Attributes:
        saved_at: when the last checkpoint was written; None: none is known.
    """

    def __init__(self) -> None:
        self.saved_at: float | None = None
        self._all: deque[FeedEvent] = deque(maxlen=MOST)
        self._heard: dict[str, int] = {}  # by endpoint: the number of the last event
        self._down: set[str] = set()
        self._started: dict[str, float] = {}

    def add(self, tick: int, time: float, kind: str, text: str) -> None:
        """Adds an event."""
        self._all.append(FeedEvent(tick, time, kind, text))
        if kind == SAVED:
            self.saved_at = max(time, self.saved_at or 0.0)

    def compare(self, tick: int, before: Sample, after: Sample) -> None:
        """Adds the events between two moments."""
        for endpoint, reply in after.replies.items():
            known = self._started.setdefault(endpoint, started(reply))
            if abs(started(reply) - known) >= START_SECONDS:
                self._heard.pop(endpoint, None)
                self.add(tick, after.time, "restarted", f"{endpoint} was started again")
            elif endpoint in self._down:
                self.add(tick, after.time, "back", f"{endpoint} answers again")
            self._down.discard(endpoint)
            self._started[endpoint] = started(reply)
            late = after.heard[endpoint] - reply.time  # this clock, less the server's
            for event in reply.events:
                if event.number > self._heard.get(endpoint, 0):
                    self._heard[endpoint] = event.number
                    self._told(tick, event.time + late, event.kind, event.text)
        for endpoint, error in after.errors.items():
            if endpoint not in self._down and endpoint not in after.replies:
                self._down.add(endpoint)
                self.add(tick, after.time, "unreachable", f"{endpoint} does not answer: {error}")
        for endpoint in set(before.replies) & set(after.replies):
            earlier = {each.trainer_id: each.report for each in before.replies[endpoint].trainers}
            for trainer in after.replies[endpoint].trainers:
                said = earlier.get(trainer.trainer_id)
                if said is not None and trainer.report.saves > said.saves:
                    when = after.time - trainer.report.since_save_seconds
                    self._told(tick, when, SAVED, "fleet.save has written the whole job")

    def _told(self, tick: int, time: float, kind: str, text: str) -> None:
        """Adds an event that a server reports, once where several do."""
        for each in reversed(self._all):
            if each.kind == kind and each.text == text and abs(each.time - time) < SAME_SECONDS:
                return
        self.add(tick, time, kind, text)

    def since(self, tick: int) -> list[dict[str, Any]]:
        """The events that the watcher has learned of after a tick, JSON-able."""
        return [
            {"time": each.time, "kind": each.kind, "text": each.text}
            for each in self._all
            if each.tick > tick
        ]


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
    def refused(self) -> int:
        """The steps that servers have refused because of a NaN or an infinity."""
        replies = self.sample.replies.values()
        return most_counted([each.trainers for each in replies], "refused_nonfinite")

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
    if refused := facts.refused:
        return "warn", f"Yes, but {_count(refused, 'step')} refused because of a NaN or an infinity"
    working = _count(sum(each.state == "joined" for each in facts.trainers), "trainer")
    return "good", f"Yes: {_count(len(facts.endpoints), 'server')} and {working} are at work"


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
    if refused := facts.refused:
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


# ---- job view ----
#
# The whole, over time.


KEPT_SAMPLES = 12
VALUES = "values"  # the curves of what scripts report: "values/loss/0"


@dataclass(frozen=True, slots=True)
class JobState:
    """A job at one moment, as every surface shows it.

    Attributes:
        time: of the moment.
        run, mode, fingerprint, trainers_expected: of the job; empty without one.
        servers: in the order of the endpoints.
        trainers: by number.
        links: of trainers and servers.
        lanes: by index; empty until two moments are known.
        tables: by name.
        progress: in the data, of the trainer that is least far.
        samples_per_second: of all joined trainers together; None: not known.
        values: of ``fleet.report``: of each the mean over the trainers that report it.
        headline: the last two in words.
        settings: of the job, in words, by name.
        notices: for an operator.
        answers: to the five questions.
    """

    time: float
    run: str
    mode: str
    fingerprint: str
    trainers_expected: int
    servers: Sequence[ServerView]
    trainers: Sequence[TrainerView]
    links: Sequence[LinkView]
    lanes: Sequence[LaneTimes]
    tables: Sequence[TableView]
    progress: DataProgress | None
    samples_per_second: float | None
    values: Mapping[str, float]
    headline: Sequence[str]
    settings: Mapping[str, str]
    notices: Sequence[Notice]
    answers: Sequence[Answer]


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
        state: at the last moment; None before the first one.
    """

    def __init__(self, endpoints: Sequence[str], curves: Curves | None = None) -> None:
        self.endpoints = list(endpoints)
        self.curves = Curves() if curves is None else curves
        self.events = EventFeed()
        self.state: JobState | None = None
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._known: dict[str, StatusReply] = {}  # the last answers
        self._heard: dict[str, float] = {}
        self._pass = PassClock()
        self._moved: float | None = None  # when a server's version last did
        self._run = ""

    def add(self, sample: Sample) -> JobState:
        """Adds the servers' states at one moment, later than those before; returns the job's."""
        before = self._samples[-1] if self._samples else Sample(sample.time)
        self._samples.append(sample)
        self._known.update(sample.replies)
        self._heard.update(sample.heard)
        change = recent(self._samples)
        lanes, seen = lane_times(change), trainers(sample.replies.values(), change)
        run = next((reply.run for reply in sample.replies.values() if reply.run), "")
        if run and run != self._run:  # another job: its steps are counted anew
            self._run, self._moved = run, None
        if any(_moved(before, sample, endpoint) for endpoint in sample.replies):
            self._moved = sample.time
        self.curves.add(sample.time, _values(sample, change, lanes, seen))
        self.events.compare(self.curves.tick, before, sample)
        self.state = self._state(sample, change, lanes, seen)
        return self.state

    def page(self, since: int) -> dict[str, Any]:
        """The changes after a tick, for a page that knows all before, JSON-able."""
        return {
            "tick": self.curves.tick,
            "now": {} if self.state is None else jsonable(self.state),
            "curves": {
                key: [(point.time, jsonable(point.value)) for point in points]
                for key, points in self.curves.since(since).items()
            },
            "events": self.events.since(since),
        }

    def _state(
        self,
        sample: Sample,
        change: Change,
        lanes: Sequence[LaneTimes],
        seen: Sequence[TrainerView],
    ) -> JobState:
        replies, last = sample.replies, self.state
        if replies or last is None:
            progress = self._pass.progress(seen, sample.time)
            rates = sample_rates(seen)
            rate, values = math.fsum(rates.values()) if rates else None, means(seen)
        else:  # they have ended, or are unreachable: what scripts have said stays
            progress, rate = last.progress, last.samples_per_second
            values = dict(last.values)
        planned = [reply for reply in replies.values() if reply.fingerprint]
        return JobState(
            sample.time,
            self._run,
            planned[-1].mode if planned else "",
            planned[-1].fingerprint[:12] if planned else "",
            planned[-1].trainers_expected if planned else 0,
            servers(self.endpoints, sample, self._known, self._heard, change),
            seen,
            links(self.endpoints, replies, change),
            lanes,
            tables(replies.values(), change),
            progress,
            rate,
            values,
            headline(rate, values),
            settings(seen, replies.values()),
            notices(replies),
            answers(self._facts(sample, lanes, seen)),
        )

    def _facts(
        self, sample: Sample, lanes: Sequence[LaneTimes], seen: Sequence[TrainerView]
    ) -> Facts:
        values: dict[str, dict[int, list[Point]]] = {}
        for each in seen:
            for name in each.values:
                points = self.curves.curve(f"{VALUES}/{name}/{each.number}").last(TREND_POINTS)
                values.setdefault(name, {})[each.number] = points
        saves = [each.saved for each in seen if each.saved is not None]
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
            lanes,
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
        for name, value in each.values.items():
            found[f"{VALUES}/{name}/{each.number}"] = value
        if each.memory_bytes:
            found[f"memory/trainer {each.number}"] = float(each.memory_bytes)
    for reply in sample.replies.values():
        if reply.memory_bytes:
            found[f"memory/server {reply.server_index}"] = float(reply.memory_bytes)
    for index, lane in enumerate(times):
        found[f"steps/{index}"] = lane.steps_per_second
        if lane.mean.total:
            found |= {f"split/{index}/{name}": each for name, each in lane.mean.parts().items()}
        if lane.staleness is not None:
            found[f"staleness/{index}"] = lane.staleness
    rates = sample_rates(seen)
    found |= {f"samples/{who}": rate for who, rate in rates.items()}
    if len(rates) > 1:
        found["samples/all"] = math.fsum(rates.values())
    if change.seconds:
        found["bytes/in"] = math.fsum(change.rates("bytes_in").values())
        found["bytes/out"] = math.fsum(change.rates("bytes_out").values())
    if seen:
        found["progress/step"] = float(max(each.step for each in seen))
    return found
