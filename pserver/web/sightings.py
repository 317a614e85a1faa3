"""What servers have said at one moment, and what has changed between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pserver.wire_pb2 import LaneReport, LaneStatus, StatusReply, TableStatus

RECENT_SECONDS = 5.0
START_SECONDS = 0.5  # by which two answers of one start may differ


@dataclass(frozen=True, slots=True)
class Sighting:
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
    """Whether totals of the two may be subtracted: one start of a server, one run of a job."""
    return abs(started(after) - started(before)) < START_SECONDS and after.run == before.run


def started(reply: StatusReply) -> float:
    """When a server was, by its own clock: another start of it has another."""
    return reply.time - reply.uptime_seconds


@dataclass(frozen=True, slots=True)
class Change:
    """What has changed between two moments, at the servers that have answered at both.

    Attributes:
        before, after: by endpoint.
        seconds: by endpoint, between its two answers.
    """

    before: Mapping[str, StatusReply]
    after: Mapping[str, StatusReply]
    seconds: Mapping[str, float]

    @classmethod
    def between(cls, first: Sighting, last: Sighting) -> Change:
        """Of two moments, the earlier one first."""
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
        """By endpoint, how much a counter of StatusReply grows a second."""
        return {
            endpoint: (getattr(self.after[endpoint], name) - getattr(self.before[endpoint], name))
            / seconds
            for endpoint, seconds in self.seconds.items()
        }

    def lanes(self, endpoint: str) -> list[LaneStatus]:
        """What one server has measured meanwhile, by lane."""
        pairs = zip(self.before[endpoint].lanes, self.after[endpoint].lanes, strict=False)
        return [_lane_between(*pair) for pair in pairs]

    def reports(self, endpoint: str, lane: int) -> dict[int, LaneReport]:
        """What trainers have measured meanwhile of one lane and this server, by trainer."""
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
        """By table, how much each counter has grown on all servers, and in how many seconds."""
        found: dict[str, tuple[dict[str, float], float]] = {}
        for endpoint, seconds in self.seconds.items():
            earlier: dict[str, TableStatus] = {
                table.name: table for table in self.before[endpoint].tables
            }
            for table in self.after[endpoint].tables:
                if (known := earlier.get(table.name)) is None:
                    continue
                totals, _ = found.get(table.name, ({}, 0.0))
                for name, count in table.counters.items():
                    new = count - known.counters.get(name, 0)
                    totals[name] = totals.get(name, 0.0) + new
                found[table.name] = totals, seconds
        return found


def recent(sightings: Sequence[Sighting], seconds: float = RECENT_SECONDS) -> Change:
    """What has changed in the last seconds: between the last moment and the first that is no older.

    Args:
        sightings: in order; one or more.
    """
    last = sightings[-1]
    first = next(each for each in sightings if each.time >= last.time - seconds)
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
