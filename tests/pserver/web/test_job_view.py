"""What ``pserver web`` makes of what servers say: times, rates, curves, events; no sockets."""

from __future__ import annotations

import json
import math

import pytest

from pserver.web.job_view import JobView
from pserver.web.samples import Change
from pserver.web.views import Curve, Curves, Point, TrainerView, lane_times
from pserver.wire_pb2 import LaneStatus, TrainerStatus
from tests.support.samples import (
    COMPUTE,
    HERE,
    THERE,
    UPDATE,
    WIRE,
    event,
    reply,
    sample,
    table,
)


def test_a_curve_keeps_its_ends() -> None:
    """However many values come it has at most so many points, of which the last half is whole."""
    curve = Curve(100)
    for tick in range(1, 100_001):
        curve.add(Point(tick, float(tick), 0.0))
    ticks = [point.tick for point in curve.since(0)]

    assert len(ticks) <= 100 and ticks == sorted(set(ticks))
    assert ticks[0] == 1 and ticks[-50:] == list(range(99_951, 100_001))
    assert [point.tick for point in curve.since(99_998)] == [99_999, 100_000]
    assert curve.since(100_000) == [] and len(curve) == len(ticks)


def test_of_further_names_nothing_is_kept() -> None:
    """A script that reports ever new names does not fill the memory."""
    curves = Curves(most_points=10, most_curves=3)
    curves.add(1.0, {str(number): 1.0 for number in range(5)})
    curves.add(2.0, {str(number): 1.0 for number in range(5)})

    assert list(curves.since(0)) == ["0", "1", "2"]
    assert len(curves.curve("0").since(0)) == 2 and not curves.curve("4").since(0)


def test_a_steps_time_is_divided() -> None:
    """Compute, waiting, wire and update are those of the steps between the two moments."""
    late = {0: 0.0, 1: 0.020}
    times = lane_times(Change.between(sample(1, reply(1, late)), sample(3, reply(3, late))))
    (lane,) = times

    assert lane.mode == "sync" and lane.steps_per_second == pytest.approx(10)
    assert lane.lateness == pytest.approx(late) and lane.staleness is None
    first, second = lane.by_trainer[0], lane.by_trainer[1]
    for split, others, compute in ((first, 0.020, COMPUTE), (second, 0.0, COMPUTE + 0.020)):
        assert split.others == pytest.approx(others, abs=1e-9)
        assert split.compute == pytest.approx(compute)
        assert (split.update, split.wire) == pytest.approx((UPDATE, WIRE))
        assert split.total == pytest.approx(COMPUTE + 0.020 + UPDATE + WIRE)


def test_the_slowest_server_counts() -> None:
    """A step waits for all of them."""
    slow = reply(3)
    for trainer in slow.trainers:
        trainer.report.lanes[0].wait_seconds += 20 * 0.030
        trainer.report.lanes[0].blocked_seconds += 20 * 0.030
        trainer.report.lanes[0].step_seconds += 20 * 0.030
    change = Change.between(sample(1, reply(1), reply(1)), sample(3, reply(3), slow))
    (lane,) = lane_times(change)

    assert lane.answers[THERE] - lane.answers[HERE] == pytest.approx(0.030)
    assert lane.mean.wire == pytest.approx(WIRE + 0.030)


def test_a_state_that_this_version_does_not_know_changes_nothing() -> None:
    """A newer server may report one."""
    seen = TrainerView(0)
    for state in ("resting", "joined", "resting"):
        seen.add(TrainerStatus(state=state))
    assert seen.state == "joined"


def test_staleness_is_a_mean() -> None:
    """Of the pushes between the two moments; the most is since the start."""
    before = LaneStatus(mode="async", stale_pushes=10, stale_steps=10, most_stale_steps=9)
    after = LaneStatus(mode="async", stale_pushes=14, stale_steps=22, most_stale_steps=9)
    change = Change.between(sample(0, reply(0, lanes=[before])), sample(1, reply(1, lanes=[after])))
    (lane,) = lane_times(change)

    assert (lane.staleness, lane.most_stale) == (3.0, 9)


def test_totals_of_two_starts_are_not_subtracted() -> None:
    """Of a server that was started again, or another run of the job, nothing is known yet."""
    again = reply(1, uptime_seconds=2.0)
    other = reply(9, run="second")
    for after in (again, other):
        assert not Change.between(sample(8, reply(8)), sample(9, after)).seconds


def test_a_page_gets_what_is_new() -> None:
    """All at first, and then what is behind the tick that it knows; all of it is JSON."""
    view = JobView([HERE])
    for second in range(3):
        view.add(sample(second, reply(second, values={"loss": 1.0 - 0.1 * second})))
    whole = view.page(0)
    assert whole["tick"] == 3 and len(whole["curves"]["values/loss/1"]) == 3
    assert json.loads(json.dumps(whole, allow_nan=False))["tick"] == 3

    view.add(sample(3, reply(3, values={"loss": math.nan})))
    new = view.page(3)
    assert new["curves"]["values/loss/0"] == [(5003.0, "nan")]
    assert new["curves"]["samples/all"][0][1] == pytest.approx(2 * 640)
    assert new["curves"]["progress/step"] == [(5003.0, 30.0)]
    assert view.page(4)["curves"] == {}
    (server,), trainers = new["now"]["servers"], new["now"]["trainers"]
    assert server["in"] == pytest.approx(10_000) and server["memory"] == 2000
    assert [each["samples_per_second"] for each in trainers] == pytest.approx([640, 640])
    assert [each["values"] for each in trainers] == [{"loss": "nan"}] * 2
    assert new["now"]["links"][1]["up"] == pytest.approx(5000)


def test_tables_are_summed_over_servers() -> None:
    """Rows by tier, and the part of lookups that found their row in memory."""
    view = JobView([HERE, THERE])
    for second in range(3):
        counted = {"lookups": 100 * second, "lookups_disk": 20 * second, "cold": 5, "evicted": 2}
        part = table(50, **counted)
        view.add(
            sample(second, *(reply(second, tables=[part]) for _ in range(2))),
        )
    (users,) = view.page(0)["now"]["tables"]

    assert (users["memory_rows"], users["disk_rows"], users["removed"]) == (90, 10, 4)
    assert users["bytes"] == 10_000 and users["hit_rate"] == pytest.approx(0.8)


def test_events_count_once() -> None:
    """Two servers tell the same; times are by the watcher's clock; a server that goes and comes
    again, or is another one, is told too.
    """
    view = JobView([HERE, THERE])
    joined = [event(1, 1000.0, "joined", "trainer 0 joined")]
    # the second server's clock is an hour ahead
    view.add(
        sample(
            1,
            reply(1, events=joined),
            reply(1, time=4601.0, events=[event(7, 4600.0, "joined", "trainer 0 joined")]),
        )
    )
    view.add(sample(2, reply(2, events=joined), None))
    view.add(sample(3, reply(3, events=joined), None))
    view.add(sample(4, reply(4, events=joined), reply(4, uptime_seconds=1.0)))
    view.add(sample(5, None, reply(5, uptime_seconds=2.0)))
    view.add(sample(6, reply(6, events=joined), reply(6, uptime_seconds=3.0)))
    events = view.page(0)["events"]

    assert [(each["kind"], each["time"]) for each in events] == [
        ("joined", 5000.0),
        ("unreachable", 5002.0),
        ("restarted", 5004.0),
        ("unreachable", 5005.0),
        ("back", 5006.0),
    ]
    assert [each["kind"] for each in view.page(5)["events"]] == ["back"]
