"""The cost model against sums that are done by hand, and what must hold of any prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.launcher.planning.cost import PAYLOAD, JobLoad, LaneLoad, Measured, Where, predict
from pserver.launcher.planning.plan import prediction_text

MB = 10**6
SYNC = LaneLoad("sync", True, 1, True, (4 * MB,), (4 * MB,))
ASYNC = replace(SYNC, mode="async", waits=False, together=False)
GEO = replace(ASYNC, mode="geo", steps=100)
# 10 ms of compute and 2 ms of exchange, of which the server works for 1 ms
MEASURED = Measured(
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
    server_cpu_seconds=(0.001,),
)
HERE = Where(cores=2)


def job(*lanes: LaneLoad, trainers: int = 1) -> JobLoad:
    return JobLoad(trainers, lanes, (16 * MB,) * len(lanes[0].sent), False, 8 * MB, False)


def divided(lane: LaneLoad, servers: int) -> LaneLoad:
    """The same bytes on so many servers."""
    part = (4 * MB // servers,) * servers
    return replace(lane, sent=part, received=part)


@pytest.mark.parametrize("lane", [SYNC, ASYNC])
def test_what_was_probed_is_predicted_as_it_was(lane: LaneLoad) -> None:
    """One trainer on this machine: nothing is added."""
    found = predict(job(lane), MEASURED, HERE)

    assert found.seconds == pytest.approx(0.012)
    assert found.bottleneck == "compute"


def test_trainers_beyond_the_cores_wait_for_them() -> None:
    """Four of 10 ms each on 2 cores compute for 20 ms; three more exchange for
    (1 ms + half of the server's 1 ms) / 2 cores each.
    """
    found = predict(job(SYNC, trainers=4), MEASURED, HERE)

    assert found.seconds == pytest.approx(0.020 + 0.002 + 3 * 0.0015 / 2)


def test_trainers_with_machines_of_their_own_share_only_the_server() -> None:
    """Three more: half of the server's 1 ms each, on its 2 cores."""
    found = predict(job(SYNC, trainers=4), MEASURED, Where(2, apart=True))

    assert found.seconds == pytest.approx(0.012 + 3 * 0.0005 / 2)


def test_a_link_carries_what_trainers_send_and_then_what_they_receive() -> None:
    """4 MB each way at 100 MB/s; of two trainers one server's link carries twice as much."""
    alone = predict(job(SYNC), MEASURED, Where(2, True, link=100e6 / PAYLOAD))
    two = predict(job(SYNC, trainers=2), MEASURED, Where(2, True, link=100e6 / PAYLOAD))
    parts = {part.name: part.seconds for part in two.parts}

    assert alone.seconds == pytest.approx(0.012 + 0.080)
    assert parts["link to server 0"] == parts["link from server 0"] == pytest.approx(0.080)
    assert two.bottleneck == "link to server 0"


def test_two_servers_halve_what_a_server_link_carries() -> None:
    """Then the trainers' own links decide, which carry everything."""
    found = predict(
        job(divided(SYNC, 2), trainers=2), MEASURED, Where(2, True, link=100e6 / PAYLOAD)
    )
    parts = {part.name: part.seconds for part in found.parts}

    assert parts["link from a trainer"] == pytest.approx(0.040)


def test_what_queues_is_hidden_until_it_is_longer() -> None:
    """8 MB both ways: 8 ms at 1 GB/s, hidden behind 12 ms; 80 ms at 100 MB/s, which decide."""
    fast = predict(job(ASYNC), MEASURED, Where(2, True, link=1e9))
    slow = predict(job(ASYNC), MEASURED, Where(2, True, link=100e6 / PAYLOAD))

    assert (fast.seconds, fast.bottleneck) == (pytest.approx(0.012), "compute")
    assert (slow.seconds, slow.bottleneck) == (pytest.approx(0.080), "link of a trainer")


def test_k_steps_divide_what_a_message_takes() -> None:
    """80 ms every 100 steps are hidden."""
    found = predict(
        job(GEO), replace(MEASURED, messages=0.01), Where(2, True, link=100e6 / PAYLOAD)
    )

    assert found.seconds == pytest.approx(0.012)


def test_async_trainers_share_the_processors() -> None:
    """Four trainers of 11 ms and their server's 1 ms on 2 cores."""
    found = predict(job(ASYNC, trainers=4), MEASURED, HERE)

    assert (found.seconds, found.bottleneck) == (pytest.approx(4 * 0.012 / 2), "processors")


def test_latency_counts_for_each_message_and_each_lookup() -> None:
    """Two times one way, of a message and of the lookup before the forward."""
    measured = replace(MEASURED, lookups=1.0, received=(5e6,), looked_up=(1e6,))
    tables = replace(job(SYNC), tables=True)
    near = predict(tables, measured, Where(2, True, link=100e6 / PAYLOAD))
    far = predict(tables, measured, Where(2, True, link=100e6 / PAYLOAD, latency=0.001))

    assert far.seconds - near.seconds == pytest.approx(0.004)
    assert near.seconds == pytest.approx(0.012 + 0.080 + 0.010)


def test_what_queues_goes_to_one_server_after_the_other() -> None:
    """Four round trips of 20 ms each, for a message of async mode; one for a sync step."""
    far = Where(2, True, latency=0.010)
    queued, together = (
        predict(job(divided(lane, 4)), MEASURED, far).seconds for lane in (ASYNC, SYNC)
    )

    assert (queued, together) == (pytest.approx(4 * 0.020), pytest.approx(0.012 + 0.020))


@pytest.mark.parametrize("lane", [SYNC, ASYNC, GEO])
@pytest.mark.parametrize("apart", [False, True])
def test_nothing_gets_faster_by_more_trainers_or_a_slower_link(lane: LaneLoad, apart: bool) -> None:
    """And no step is shorter than its compute."""
    links = [1e10, 1e9, 1e8, 1e7]
    grid = [
        [
            predict(job(lane, trainers=trainers), MEASURED, Where(2, apart, link)).seconds
            for link in links
        ]
        for trainers in (1, 2, 4, 8)
    ]

    assert all(row == sorted(row) for row in grid)
    assert all(list(column) == sorted(column) for column in zip(*grid, strict=True))
    assert min(map(min, grid)) >= 0.010


def test_a_job_without_servers_is_refused() -> None:
    """There is nothing that the model knows of it."""
    with pytest.raises(ValueError, match="a job with servers"):
        predict(JobLoad(2, (), (), False, 0, False), MEASURED, HERE)


def test_the_table_names_the_bottleneck_and_every_part() -> None:
    """With the probe that it stands on."""
    found = predict(job(SYNC, trainers=2), MEASURED, Where(2, True, link=100e6 / PAYLOAD))

    lines = prediction_text(found, MEASURED).splitlines()

    assert lines[0] == (
        "predicted step 172 ms, 5.806 steps/s of each trainer; bottleneck: link to server 0"
    )
    assert [line.split("  ")[0] for line in lines[2:-1]] == [
        *("compute", "exchange", "link to server 0", "link from server 0")
    ]
    assert lines[-1] == "from a probe of 100 steps of 12 ms, 2 ms of them in the exchange"


def test_a_disturbed_probe_says_so() -> None:
    """Where other processes kept a part of the machine busy."""
    found = predict(job(SYNC), MEASURED, HERE)

    lines = prediction_text(found, replace(MEASURED, others=1.26)).splitlines()

    assert lines[-1].startswith("other processes kept 1.3 cores of this machine busy meanwhile")
