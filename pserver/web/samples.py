"""The states of a job's servers: at one moment, the changes since the last one, and their logs."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pserver.wire_pb2 import LaneReport, LaneStatus, StatusReply, TableStatus

# ---- samples ----
#
# What servers have said at one moment, and what has changed between two of them.


RECENT_SECONDS = 5.0
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


@dataclass(frozen=True, slots=True)
class Change:
    """The changes between two moments, of the servers that have answered at both.

    Attributes:
        before, after: by endpoint.
        seconds: by endpoint, between its two answers.
    """

    before: Mapping[str, StatusReply]
    after: Mapping[str, StatusReply]
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
            {endpoint: first.replies[endpoint] for endpoint in kept},
            {endpoint: last.replies[endpoint] for endpoint in kept},
            {endpoint: last.heard[endpoint] - first.heard[endpoint] for endpoint in kept},
        )

    def rates(self, name: str) -> dict[str, float]:
        """By endpoint, the growth of a counter of StatusReply a second."""
        return {
            endpoint: (getattr(self.after[endpoint], name) - getattr(self.before[endpoint], name))
            / seconds
            for endpoint, seconds in self.seconds.items()
        }

    def lanes(self, endpoint: str) -> list[LaneStatus]:
        """One server's measurements meanwhile, by lane."""
        pairs = zip(self.before[endpoint].lanes, self.after[endpoint].lanes, strict=False)
        return [_lane_between(*pair) for pair in pairs]

    def reports(self, endpoint: str, lane: int) -> dict[int, LaneReport]:
        """Trainers' measurements meanwhile of one lane and this server, by trainer."""
        earlier = {each.trainer_id: each for each in self.before[endpoint].trainers}
        found = {}
        for each in self.after[endpoint].trainers:
            known = earlier.get(each.trainer_id)
            if known is None or lane >= min(len(known.report.lanes), len(each.report.lanes)):
                continue
            found[each.trainer_id] = _report_between(
                known.report.lanes[lane], each.report.lanes[lane]
            )
        return found

    def links(self, endpoint: str) -> dict[int, tuple[float, float]]:
        """Bytes a second from and to one server, as each trainer sees them, by trainer."""
        earlier = {each.trainer_id: each.report for each in self.before[endpoint].trainers}
        seconds = self.seconds[endpoint]
        return {
            each.trainer_id: (
                max(0, each.report.bytes_in - known.bytes_in) / seconds,
                max(0, each.report.bytes_out - known.bytes_out) / seconds,
            )
            for each in self.after[endpoint].trainers
            if (known := earlier.get(each.trainer_id)) is not None
        }

    def samples(self) -> dict[int, float]:
        """Samples a second, by trainer, as its script has reported them."""
        found: dict[int, float] = {}
        for endpoint, seconds in self.seconds.items():
            earlier = {each.trainer_id: each.report for each in self.before[endpoint].trainers}
            for each in self.after[endpoint].trainers:
                if (known := earlier.get(each.trainer_id)) is not None:
                    new = max(0, each.report.samples - known.samples)
                    found[each.trainer_id] = max(found.get(each.trainer_id, 0.0), new / seconds)
        return found

    def steps(self) -> dict[int, float]:
        """Steps a second, by trainer, of the lane that is furthest."""
        found: dict[int, float] = {}
        for endpoint, seconds in self.seconds.items():
            earlier = {each.trainer_id: each.step for each in self.before[endpoint].trainers}
            for each in self.after[endpoint].trainers:
                if each.trainer_id in earlier:
                    new = max(0, each.step - earlier[each.trainer_id]) / seconds
                    found[each.trainer_id] = max(found.get(each.trainer_id, 0.0), new)
        return found

    def tables(self) -> dict[str, tuple[dict[str, float], float]]:
        """By table, the growth of each counter over all servers, and the longest of their times."""
        found: dict[str, tuple[dict[str, float], float]] = {}
        for endpoint, seconds in self.seconds.items():
            earlier: dict[str, TableStatus] = {
                table.name: table for table in self.before[endpoint].tables
            }
            for table in self.after[endpoint].tables:
                if (known := earlier.get(table.name)) is None:
                    continue
                totals, longest = found.get(table.name, ({}, 0.0))
                for name, count in table.counters.items():
                    new = count - known.counters.get(name, 0)
                    totals[name] = totals.get(name, 0.0) + new
                found[table.name] = totals, max(longest, seconds)
        return found


def recent(samples: Sequence[Sample], seconds: float = RECENT_SECONDS) -> Change:
    """The changes of the last seconds: between the last moment and the first that is no older.

    Args:
        samples: in order; one or more.
    """
    last = samples[-1]
    first = next(each for each in samples if each.time >= last.time - seconds)
    return Change.between(first, last)


def _lane_between(before: LaneStatus, after: LaneStatus) -> LaneStatus:
    return LaneStatus(
        mode=after.mode,
        version=max(0, after.version - before.version),
        queued=after.queued,
        steps=max(0, after.steps - before.steps),
        step_seconds=max(0.0, after.step_seconds - before.step_seconds),
        updates=max(0, after.updates - before.updates),
        update_seconds=max(0.0, after.update_seconds - before.update_seconds),
        wait_seconds={
            trainer: max(0.0, seconds - before.wait_seconds.get(trainer, 0.0))
            for trainer, seconds in after.wait_seconds.items()
        },
        stale_pushes=max(0, after.stale_pushes - before.stale_pushes),
        stale_steps=max(0, after.stale_steps - before.stale_steps),
        most_stale_steps=after.most_stale_steps,
    )


def _report_between(before: LaneReport, after: LaneReport) -> LaneReport:
    return LaneReport(
        steps=max(0, after.steps - before.steps),
        step_seconds=max(0.0, after.step_seconds - before.step_seconds),
        blocked_seconds=max(0.0, after.blocked_seconds - before.blocked_seconds),
        wait_seconds=max(0.0, after.wait_seconds - before.wait_seconds),
        waits=max(0, after.waits - before.waits),
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


# ---- log files ----
#
# The last lines of a log, of those that lie in one folder.


SUFFIX = ".log"
LAST_BYTES = 2**16
MOST_LINES = 500


class LogFiles:
    """The regular files "*.log" that lie directly in a folder: no links, no other folders.

    Args:
        folder: the folder; None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """The names of all of them, sorted."""
        if self._folder is None:
            return []
        try:
            with os.scandir(self._folder) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
                )
        except OSError:  # it is not there yet
            return []

    def tail(self, name: str, lines: int) -> list[str]:
        """The last lines of a log.

        Args:
            name: one of :meth:`names`; not a path.
            lines: the largest number of them.

        Raises:
            KeyError: there is no such log.
        """
        if self._folder is None or name not in self.names():
            raise KeyError(name)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it may have been replaced
        try:
            descriptor = os.open(self._folder / name, flags)
        except OSError:
            raise KeyError(name) from None
        with open(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise KeyError(name)
            file.seek(max(0, size - LAST_BYTES))
            text = file.read(LAST_BYTES).decode(errors="replace")
        found = text.splitlines()
        whole = found[1:] if size > LAST_BYTES else found  # the first may be half a line
        return whole[-max(0, min(lines, MOST_LINES)) :] if lines > 0 else []
