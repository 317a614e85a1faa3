"""A job seen from outside: states, times, rates, progress, curves, events, notices; no sockets."""

from __future__ import annotations

import json
import math

import pytest

from pserver.telemetry.job_view import (
    Change,
    Curve,
    Curves,
    DataProgress,
    JobView,
    Notice,
    Point,
    TrainerView,
    lane_times,
    notices,
)
from pserver.wire_pb2 import (
    EpochStatus,
    LaneStatus,
    SaveStatus,
    StatusReply,
    TrainerReport,
    TrainerStatus,
    WaitStatus,
)
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
    said = [TrainerStatus(state=state) for state in ("resting", "joined", "resting")]
    assert TrainerView.of(said).state == "joined"


def test_a_trainer_is_what_all_servers_say() -> None:
    """The worst state, the furthest step, the last activity, the newest report."""
    said = [
        TrainerStatus(
            trainer_id=3,
            state="joined",
            step=7,
            transport="shm",
            silence_seconds=0.5,
            activity="saving\x1b[2J",
            report=TrainerReport(samples=640, values={"loss": 0.5}, saves=1, since_save_seconds=9),
        ),
        TrainerStatus(
            trainer_id=3,
            state="lost",
            step=9,
            transport="tcp",
            silence_seconds=4.0,
            activity="step 6",
            report=TrainerReport(samples=320, values={"loss": 0.9}),
            kept_seconds=20.0,
        ),
    ]
    seen = TrainerView.of(said, samples_per_second=64.0)

    assert (seen.number, seen.state, seen.word, seen.step) == (3, "lost", "lost", 9)
    assert (seen.activity, seen.silence, seen.kept_seconds) == ("saving?[2J", 0.5, 20.0)
    assert (seen.transports, seen.values, seen.saved) == (["shm", "tcp"], {"loss": 0.5}, 9.0)
    assert (seen.samples, seen.samples_per_second, seen.steps_per_second) == (640, 64.0, None)
    assert TrainerView.of(said[:1]).word == "saving?[2J"


def progressing(second: float, batch: int, batches: int = 100) -> StatusReply:
    """A server's answer, with a trainer that has had so many batches and one that is two ahead."""
    made = reply(second, values={"loss": 1.0})
    for trainer, ahead in zip(made.trainers, (2, 0), strict=True):
        trainer.report.passes, trainer.report.batches = 2, batches
        trainer.report.batch = batch + ahead
        trainer.report.values[f"own {trainer.trainer_id}"] = trainer.trainer_id
    return made


def test_the_progress_of_the_slowest_trainer() -> None:
    """The pass of the trainer that is least far and its time left, samples of all, means of
    values; what scripts have said last stays when the servers have ended.
    """
    view = JobView([HERE, THERE])
    first = view.add(sample(0, progressing(0, 10), None))
    second = view.add(sample(4, progressing(4, 30), None))
    last = view.add(sample(5, None, None))

    assert first.progress == DataProgress(2, 10, 100, None) and first.samples_per_second is None
    assert second.progress == DataProgress(2, 30, 100, 14.0)
    assert second.progress is not None and second.progress.text == "30/100  30%  0:00:14 left"
    assert second.samples_per_second == pytest.approx(2 * 640)
    assert second.headline == ["1,280 samples/s", "loss 1", "own 0 0", "own 1 1"]
    assert [each.word for each in second.trainers] == ["training", "training"]
    assert (last.progress, last.headline) == (second.progress, second.headline)
    assert last.trainers == []


def test_a_new_pass_is_timed_anew() -> None:
    """The time left is that of the pass that runs; batches of unknown number have none."""
    view = JobView([HERE])
    for now, batch, batches in ((1.0, 90, 100), (2.0, 100, 100), (9.0, 4, 100), (10.0, 14, 100)):
        state = view.add(sample(now, progressing(now, batch, batches)))
    assert state.progress == DataProgress(2, 14, 100, 8.6)

    view.add(sample(11, progressing(11, 20, 0)))
    state = view.add(sample(12, progressing(12, 21, 0)))
    assert state.progress == DataProgress(2, 21, 0, None)
    assert state.progress is not None and state.progress.text == "batch 21"


def test_a_server_that_does_not_answer_keeps_its_numbers() -> None:
    """With the age of its last answer; of one that never has there are none."""
    view = JobView([HERE, THERE])
    view.add(sample(1, reply(1), None))
    here, there = view.add(sample(4, None, None)).servers

    assert (here.up, here.state, here.error, here.version) == (False, "unreachable", "gone", 10)
    assert (here.age, there.age, there.version) == (3.0, None, None)
    assert (here.bytes_in, here.bytes_in_per_second) == (10_000, 0.0)


def test_notices_name_what_an_operator_should_know() -> None:
    """Waits, awaited servers, epochs, counts, saves and logs; a server's own with its endpoint."""
    wait = WaitStatus(trainer_id=0, what="samples", number=57, seconds=12.0, for_whom=[1])
    brief = WaitStatus(trainer_id=1, what="step 9", number=9, seconds=0.5, for_whom=[0])
    epoch = EpochStatus(number=3, unit="samples", samples=100, decided=60, leased=24, skipped=2)
    first = reply(1, waits=[wait, brief], away=[1], epochs=[epoch])
    second = reply(1, away=[0], save=SaveStatus(file="a", failure="no room"))
    for each, count in ((first, 1), (second, 2)):  # the second has counted a step before the first
        each.trainers[0].counts["refused_nonfinite"] = count
    second.recording.failure = "No space left"

    assert notices({HERE: first, THERE: second}) == [
        Notice("warn", "trainer 0 waits at samples for trainer 1, for 12.0 s (wait 57)"),
        Notice("brief", "trainer 1 waits at step 9 for trainer 0, for 0.5 s (wait 9)"),
        Notice("warn", "waits for server 0, 1 to come back"),
        Notice(
            "info",
            "epoch 3: 100 samples, 60 decided, 24 leased, 2 skipped, 0 handed back",
        ),
        Notice("warn", "2 steps refused because of a NaN or an infinity"),
        Notice("warn", f"{THERE}: a save has failed: no room"),
        Notice("warn", f"{THERE}: the job's log is not recorded any more: No space left"),
    ]


def test_settings_are_said_once() -> None:
    """The scripts' first; where processes differ, with their names."""
    made = reply(1, settings={"mode": "sync", "versions": "torch 2"})
    for trainer in made.trainers:
        trainer.report.settings.update({"arguments": f"--seed {trainer.trainer_id}", "script": "a"})
        trainer.report.settings["versions"] = "torch 2"
    found = JobView([HERE]).add(sample(1, made)).settings

    assert list(found.items()) == [
        ("arguments", "--seed 0 (trainer 0); --seed 1 (trainer 1)"),
        ("script", "a"),
        ("versions", "torch 2"),
        ("mode", "sync"),
    ]


def test_an_epoch_of_unknown_length() -> None:
    """One whose end no trainer has met yet, and one that is over."""
    epoch = EpochStatus(number=3, unit="batches", decided=60, leased=24, handed_back=8, left_out=1)
    epoch.over = True
    counted = "60 decided, 24 leased, 0 skipped, 8 handed back, 1 left out"
    (notice,) = notices({HERE: reply(1, epochs=[epoch])})
    assert notice.text == f"epoch 3, over: batches, length unknown, {counted}"


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


def test_rates_of_rare_answers_are_those_since_the_last() -> None:
    """Rates of samples that are further apart than the time that rates look back."""
    view = JobView([HERE])
    states = [view.add(sample(second, reply(second))) for second in (0, 20, 40)]
    assert [each.samples_per_second for each in states] == [None, 1280.0, 1280.0]


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
    assert server["bytes_in_per_second"] == pytest.approx(10_000)
    assert server["memory_bytes"] == 2000
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
    assert users["bytes_held"] == 10_000 and users["hit_rate"] == pytest.approx(0.8)


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
