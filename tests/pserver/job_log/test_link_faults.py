"""Promises of links over a network that loses, doubles, delays and reorders frames, and breaks
connections.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pserver import timeouts
from pserver.config import split_endpoint
from pserver.errors import ServerLost
from pserver.job_log import follower as follower_link
from pserver.wire_pb2 import Kind
from tests.faults.faults import ACTIONS, Injector, Point, injected
from tests.faults.network_path import Flips, NetworkPath
from tests.support.links import SECONDS, Coordinator, Follower
from tests.support.tiers import RARE

SEEDS = range(500)
MESSAGES = 24  # each way
MANY = 2000
PLACES = [
    ("out", Kind.HELLO),
    ("out", Kind.STAGED),
    ("out", Kind.PROBE),
    ("in", Kind.RECORD),
    ("in", Kind.PROBE),
]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows only in silence shows soon."""
    monkeypatch.setattr(timeouts, "LINK_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(follower_link, "RETRY_SECONDS", 0.002)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    """One for all; each trial is a job of its own."""
    with Coordinator() as coordinator:
        yield coordinator


def messages(name: str, seed: object) -> list[bytes]:
    """Texts of some sizes."""
    draw = random.Random(f"{name} {seed}")
    return [b"%d " % number + bytes(draw.choice((0, 9, 40_000))) for number in range(MESSAGES)]


def trial(coordinator: Coordinator, injector: Injector, transport: str, seed: object) -> int:
    """Messages both ways, in an order of the seed; checks that each arrives once and in its place.

    Returns:
        How often a stream was opened again.
    """
    plan = f"plan {seed}"
    coordinator.links.expect(plan, 2)
    staged, records = messages("staged", seed), messages("record", seed)
    turns = [True] * MESSAGES + [False] * MESSAGES
    random.Random(f"turns {seed}").shuffle(turns)
    with injected(injector, transport):
        with Follower(coordinator, plan=plan, transports=[transport]) as follower:
            left = iter(staged), iter(records)
            for up in turns:
                if up:
                    follower.link.send(next(left[0]))
                else:
                    coordinator.links.send(1, next(left[1]))
            heard = [message for _, message in coordinator.hear(MESSAGES)]

            assert heard == staged
            assert follower.hear(MESSAGES) == records
            assert follower.received.empty() and follower.lost.empty()
    assert coordinator.received.empty() and coordinator.lost.empty()
    return follower.link.reconnects


@pytest.mark.parametrize("transport", [RARE("inprocess"), "tcp"])
def test_every_message_arrives_once_and_in_order(coordinator: Coordinator, transport: str) -> None:
    """Whatever the network does, in 500 seeds: half of them over each transport."""
    seeds = SEEDS[transport == "tcp" :: 2]
    reconnects, done = 0, set[str]()
    for seed in seeds:
        injector = Injector(seed=seed, rate=0.1)
        reconnects += trial(coordinator, injector, transport, seed)
        done |= {action for action, _, _ in injector.done}

    assert reconnects > len(seeds) // 2 and done == set(ACTIONS)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("direction", "kind"), PLACES)
def test_a_fault_at_any_frame_costs_no_message(
    coordinator: Coordinator, direction: str, kind: Kind, action: str
) -> None:
    """At the first frame of its kind, and at a later one."""
    for occurrence in (1, 2, 5):
        point = Point(action, direction, kind, occurrence=occurrence)
        place = f"{action} {direction} {kind} {occurrence}"
        trial(coordinator, Injector([point]), "inprocess", place)


def test_a_connection_that_dies_without_a_word_is_replaced() -> None:
    """Both ends go on over a new one; nobody is lost, nor any message."""
    with Coordinator(heartbeat_timeout_seconds=2.0) as coordinator:
        _, port = split_endpoint(coordinator.server.endpoint)
        ports = [port, coordinator.server.job.transports["tcp"]]
        with NetworkPath("127.0.0.2", ports) as path:
            endpoint = f"127.0.0.2:{port}"
            with Follower(coordinator, endpoint=endpoint, transports=["tcp"]) as follower:
                follower.link.send(b"before")
                assert coordinator.hear(1) == [(1, b"before")]
                path.drop()
                follower.link.send(b"meanwhile")
                coordinator.links.send(1, b"record")

                assert coordinator.hear(1) == [(1, b"meanwhile")]
                assert follower.hear(1) == [b"record"]
                assert follower.link.reconnects == 1
                assert follower.lost.empty() and coordinator.lost.empty()


def test_changed_bits_cost_no_message() -> None:
    """Checksums show them at either end; the stream breaks, and another says it again."""
    with Coordinator(checksum="on") as coordinator:
        _, port = split_endpoint(coordinator.server.endpoint)
        data_port = coordinator.server.job.transports["tcp"]
        with NetworkPath("127.0.0.2", [port, data_port]) as path:
            path.flips = Flips(data_port, every=60_000)
            endpoint, sent = f"127.0.0.2:{port}", [b"%d " % i + bytes(200) for i in range(MANY)]
            with Follower(coordinator, endpoint=endpoint, transports=["tcp"]) as follower:
                for message in sent:
                    follower.link.send(message)
                    coordinator.links.send(1, message)

                assert [message for _, message in coordinator.hear(len(sent))] == sent
                assert follower.hear(len(sent)) == sent
                assert path.flips.count > 3 and follower.link.reconnects > 2
                path.flips = None
                assert follower.lost.empty() and coordinator.lost.empty()


def test_silence_for_the_heartbeat_timeout_is_a_loss_at_both_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each end is told once, and so is the log, which says it before; a process that comes back
    later is not taken for the lost one.
    """
    with Coordinator(heartbeat_timeout_seconds=0.6) as coordinator:
        _, port = split_endpoint(coordinator.server.endpoint)
        path = NetworkPath("127.0.0.2", [port, coordinator.server.job.transports["tcp"]])
        endpoint = f"127.0.0.2:{port}"
        with path, Follower(coordinator, endpoint=endpoint, transports=["tcp"]) as follower:
            follower.link.send(b"before")
            assert coordinator.hear(1)
            path.close()  # nothing gets through any more

            index, error = coordinator.lost.get(timeout=SECONDS)
            assert index == 1 and "not been heard for 0.6 s" in str(error)
            assert isinstance(follower.lost.get(timeout=SECONDS), ServerLost)
            said = [each.getMessage() for each in caplog.records]
            assert len([each for each in said if "nothing has arrived for" in each]) == 1
        with Follower(coordinator, transports=["tcp"]) as later:
            later.link.send(b"after")
            assert coordinator.hear(1) == [(1, b"after")]
        assert follower.lost.empty() and coordinator.lost.empty()
