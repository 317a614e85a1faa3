"""The cost model against sums that are done by hand, and what must hold of any prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.launcher.planning.cost import (
    PAYLOAD,
    JobLoad,
    LaneLoad,
    Measured,
    Probed,
    Where,
    predict,
)
from pserver.launcher.planning.plan import prediction_text

MB = 10**6
SYNC = LaneLoad("sync", True, 1, True, (4 * MB,), (4 * MB,))
ASYNC = replace(SYNC, mode="async", waits=False, together=False)
GEO = replace(ASYNC, mode="geo", steps=100)
# 10 ms of compute and 2 ms of exchange, of which the server works for 1 ms and updates for 0.5
ALONE = Measured(
    steps=100,
    seconds=0.012,
    exchange_seconds=0.002,
    cpu_seconds=0.011,
    exchange_cpu_seconds=0.001,
    messages=1.0,
    lookups=0.0,
    sent=(4e6,),
    received=(4e6,),
    looked_up=(0.0,),
    update_seconds=(0.0005,),
    server_cpu_seconds=(0.001,),
)
# two trainers
PAIR = replace(
    ALONE,
    seconds=0.014,
    exchange_seconds=0.003,
    update_seconds=(0.0007,),
    server_cpu_seconds=(0.0018,),
)
MEASURED = Probed(ALONE, PAIR)
HERE = Where(cores=2)


def job(*lanes: LaneLoad, trainers: int = 1) -> JobLoad:
    return JobLoad(trainers, lanes, (16 * MB,) * len(lanes[0].sent), False)


def alone(measured: Measured) -> Probed:
    return Probed(measured, measured)


def divided(lane: LaneLoad, servers: int) -> LaneLoad:
    """The same bytes on so many servers."""
    part = (4 * MB // servers,) * servers
    return replace(lane, sent=part, received=part)


@pytest.mark.parametrize("lane", [SYNC, ASYNC])
def test_what_was_probed_is_predicted_as_it_was(lane: LaneLoad) -> None:
    """One trainer on this machine, or two: nothing is added."""
    one = predict(job(lane), alone(ALONE), HERE)
    two = predict(job(lane, trainers=2), MEASURED, HERE)

    assert (one.seconds, one.bottleneck) == (pytest.approx(0.012), "compute")
    assert (two.seconds, two.bottleneck) == (pytest.approx(0.014), "compute")


def test_trainers_beyond_the_cores_wait_for_them() -> None:
    """Four of 10 ms each on 2 cores compute for 20 ms; two more than were probed exchange for
    (1 ms + the server's 0.8 ms) / 2 cores each.
    """
    found = predict(job(SYNC, trainers=4), MEASURED, HERE)

    assert found.seconds == pytest.approx(0.020 + 0.003 + 2 * 0.0018 / 2)


def test_trainers_with_machines_of_their_own_share_only_the_server() -> None:
    """The update takes 0.2 ms more for each further one; the rest of the server's work, 0.6 ms
    each, on its 2 cores, takes longer than one trainer's copies where there are many.
    """
    four = predict(job(SYNC, trainers=4), MEASURED, Where(2, apart=True))
    many = predict(job(SYNC, trainers=11), MEASURED, Where(2, apart=True))

    assert four.seconds == pytest.approx(0.010 + 0.0011 + 0.0015)
    assert [part.name for part in four.parts if part.hidden] == ["processor of a server"]
    assert many.seconds == pytest.approx(0.010 + 0.0025 + (0.0005 + 10 * 0.0006) / 2)
    assert [part.name for part in many.parts if part.hidden] == ["exchange"]


def test_servers_divide_their_work() -> None:
    """Also where more are asked for than were probed."""
    found = predict(job(divided(SYNC, 4), trainers=21), MEASURED, Where(2, apart=True))
    parts = {part.name: part.seconds for part in found.parts}

    assert parts["update"] == pytest.approx((0.0005 + 20 * 0.0002) / 4)
    assert parts["processor of a server"] == pytest.approx((0.0005 + 20 * 0.0006) / 2 / 4)


def test_a_link_carries_what_trainers_send_and_then_what_they_receive() -> None:
    """4 MB each way at 100 MB/s, beside the copies; of two trainers one server's link carries
    twice as much.
    """
    one = predict(job(SYNC), alone(ALONE), Where(2, True, link=100e6 / PAYLOAD))
    two = predict(job(SYNC, trainers=2), MEASURED, Where(2, True, link=100e6 / PAYLOAD))
    parts = {part.name: part.seconds for part in two.parts}

    assert one.seconds == pytest.approx(0.010 + 0.0005 + 0.080)
    assert parts["link to server 0"] == parts["link from server 0"] == pytest.approx(0.080)
    assert two.bottleneck == "link to server 0"


def test_a_fast_link_hides_behind_the_copies() -> None:
    """8 MB at 10 GB/s take 0.8 ms, and the copies 1.5."""
    found = predict(job(SYNC), alone(ALONE), Where(2, True, link=10e9 / PAYLOAD))

    assert found.seconds == pytest.approx(0.012)
    assert [part.name for part in found.parts if part.hidden][:1] == ["link from a trainer"]


def test_two_servers_halve_what_a_server_link_carries() -> None:
    """Then the trainers' own links decide, which carry everything."""
    found = predict(
        job(divided(SYNC, 2), trainers=2), MEASURED, Where(2, True, link=100e6 / PAYLOAD)
    )
    parts = {part.name: part.seconds for part in found.parts}

    assert parts["link from a trainer"] == pytest.approx(0.040)


def test_what_queues_is_hidden_until_it_is_longer() -> None:
    """8 MB both ways: 8 ms at 1 GB/s, hidden behind 12 ms; 80 ms at 100 MB/s, which decide."""
    fast = predict(job(ASYNC), alone(ALONE), Where(2, True, link=1e9))
    slow = predict(job(ASYNC), alone(ALONE), Where(2, True, link=100e6 / PAYLOAD))

    assert (fast.seconds, fast.bottleneck) == (pytest.approx(0.012), "compute")
    assert (slow.seconds, slow.bottleneck) == (pytest.approx(0.080), "link of a trainer")


def test_k_steps_divide_what_a_message_takes() -> None:
    """80 ms every 100 steps are hidden."""
    found = predict(
        job(GEO), alone(replace(ALONE, messages=0.01)), Where(2, True, link=100e6 / PAYLOAD)
    )

    assert found.seconds == pytest.approx(0.012)


def test_async_trainers_share_the_processors() -> None:
    """Four trainers of 11 ms and their server's 1 ms on 2 cores."""
    found = predict(job(ASYNC, trainers=4), MEASURED, HERE)

    assert (found.seconds, found.bottleneck) == (pytest.approx(4 * 0.012 / 2), "processors")


def test_async_updates_follow_one_another() -> None:
    """64 of 0.5 ms each take 32 ms, as long as the server's work for all on its 2 cores; on 4, too,
    which have less to do.
    """
    two, four = (
        predict(job(ASYNC, trainers=64), MEASURED, Where(cores, apart=True)) for cores in (2, 4)
    )

    assert (two.seconds, two.bottleneck) == (pytest.approx(0.032), "processor of a server")
    assert four.seconds == pytest.approx(0.032)


def test_latency_counts_for_each_message_and_each_lookup() -> None:
    """Two times one way, of a message and of the lookup before the forward."""
    measured = alone(replace(ALONE, lookups=1.0, received=(5e6,), looked_up=(1e6,)))
    tables = replace(job(SYNC), tables=True)
    near = predict(tables, measured, Where(2, True, link=100e6 / PAYLOAD))
    far = predict(tables, measured, Where(2, True, link=100e6 / PAYLOAD, latency=0.001))

    assert far.seconds - near.seconds == pytest.approx(0.004)
    assert near.seconds == pytest.approx(0.010 + 0.0005 + 0.080 + 0.010)


def test_what_queues_goes_to_one_server_after_the_other() -> None:
    """Four round trips of 20 ms each, for a message of async mode; one for a sync step."""
    far = Where(2, True, latency=0.010)
    queued, together = (
        predict(job(divided(lane, 4)), alone(ALONE), far).seconds for lane in (ASYNC, SYNC)
    )

    assert queued == pytest.approx(4 * 0.020)
    # the four servers divide the update
    assert together == pytest.approx(0.010 + 0.0005 / 4 + 0.0015 + 0.020)


@pytest.mark.parametrize("lane", [SYNC, ASYNC, GEO])
@pytest.mark.parametrize("apart", [False, True])
def test_nothing_gets_faster_by_more_trainers_or_a_slower_link(lane: LaneLoad, apart: bool) -> None:
    """And no step is shorter than its compute."""
    links = [1e10, 1e9, 1e8, 1e7]
    grid = [
        [
            round(predict(job(lane, trainers=count), MEASURED, Where(2, apart, link)).seconds, 12)
            for link in links
        ]
        for count in (1, 2, 4, 8)
    ]

    assert all(row == sorted(row) for row in grid)
    assert all(list(column) == sorted(column) for column in zip(*grid, strict=True))
    assert min(map(min, grid)) >= 0.010


def test_a_job_without_servers_is_refused() -> None:
    """There is nothing that the model knows of it."""
    with pytest.raises(ValueError, match="a job with servers"):
        predict(JobLoad(2, (), (), False), MEASURED, HERE)


def test_the_table_names_the_bottleneck_and_every_part() -> None:
    """First what follows one another, then what goes on beside it; and the probes."""
    found = predict(job(SYNC, trainers=2), MEASURED, Where(2, True, link=100e6 / PAYLOAD))

    lines = prediction_text(found, MEASURED).splitlines()

    assert lines[0] == (
        "predicted step 171 ms, 5.858 steps/s of each trainer; bottleneck: link to server 0"
    )
    assert [line.split("  ")[0] for line in lines[2:-1]] == [
        *("compute", "update", "link to server 0", "link from server 0"),
        *("exchange", "processor of a server"),
    ]
    assert [line.endswith("while the rest goes on") for line in lines[2:-1]] == [False] * 4 + [
        True
    ] * 2
    assert lines[-1] == (
        "from a probe of 100 steps of 12 ms, 2 ms of them in the exchange, and of 100 of 14 ms of "
        "two trainers"
    )


def test_a_disturbed_probe_says_so() -> None:
    """Where other processes kept a part of the machine busy."""
    disturbed = Probed(ALONE, replace(PAIR, others=1.26))
    found = predict(job(SYNC, trainers=2), disturbed, HERE)

    lines = prediction_text(found, disturbed).splitlines()

    assert lines[-1].startswith("other processes kept 1.3 cores of this machine busy meanwhile")
