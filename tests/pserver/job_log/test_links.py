"""Promises of links that hold over every transport, and with every kind of key."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from pserver.errors import FingerprintMismatch, Refused, ServerLost
from pserver.job_log.link import MOST_BYTES
from pserver.wire_pb2 import FollowRequest
from tests.support.links import EVERY_TRANSPORT, PLAN, SECONDS, Coordinator, Follower, access_of
from tests.support.waiting import eventually

MANY = 2000


@pytest.fixture(params=["open", "secret", "keys"])
def kind(request: pytest.FixtureRequest) -> str:
    """What a server asks for."""
    return str(request.param)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """An open one."""
    with Coordinator() as coordinator:
        yield coordinator


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_messages_arrive_both_ways_once_and_in_order(
    tmp_path: Path, transport: str, kind: str
) -> None:
    """However many threads send at a time, and whoever is first."""
    settings, access = access_of(kind, tmp_path)
    with Coordinator(**settings) as coordinator:
        coordinator.links.broadcast(b"first")
        with Follower(coordinator, access=access, transports=[transport]) as follower:
            messages = numbered(MANY)
            sending = threading.Thread(
                target=lambda: deque(map(follower.link.send, messages), maxlen=0)
            )
            sending.start()
            for message in messages:
                coordinator.links.send(1, message)

            assert coordinator.hear(MANY) == [(1, message) for message in messages]
            assert follower.hear(MANY + 1) == [b"first", *messages]
            assert follower.link.transport == transport
            sending.join()
    assert follower.lost.empty() and coordinator.lost.empty()


def test_threads_that_send_at_a_time_keep_their_own_order(coordinator: Coordinator) -> None:
    """Of several threads each one's messages arrive in its order."""
    with Follower(coordinator, transports=["tcp"]) as follower:

        def send(name: bytes) -> None:
            for number in range(MANY):
                follower.link.send(b"%s %d" % (name, number))

        threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b", b"c")]
        for thread in threads:
            thread.start()
        heard = [message.split() for _, message in coordinator.hear(3 * MANY)]
        for thread in threads:
            thread.join()

    for name in (b"a", b"b", b"c"):
        assert [number for who, number in heard if who == name] == numbered(MANY)


def test_a_large_message_arrives_and_a_larger_one_is_refused(coordinator: Coordinator) -> None:
    """Up to 2 MB, also where it is larger than what may be on its way at a time."""
    with Follower(coordinator, transports=["tcp"]) as follower:
        for message in (bytes(MOST_BYTES), b"behind it"):
            follower.link.send(message)
        with pytest.raises(ValueError, match="at most 2097152 bytes, got 2097153"):
            follower.link.send(bytes(MOST_BYTES + 1))

        assert coordinator.hear(2) == [(1, bytes(MOST_BYTES)), (1, b"behind it")]


def test_a_close_does_not_wait_for_a_message_that_is_received(coordinator: Coordinator) -> None:
    """It may come from under a lock that the receiver of the message waits for."""
    lock, taking, heard = threading.Lock(), threading.Event(), list[bytes]()

    def received(message: bytes) -> None:
        taking.set()
        with lock:
            heard.append(message)

    with Follower(coordinator, transports=["tcp"]) as follower:
        follower.link._received = received
        with lock:
            for message in (b"one", b"two"):
                coordinator.links.send(1, message)
            assert taking.wait(SECONDS)
            began = time.monotonic()
            follower.link.close()
            assert time.monotonic() - began < 0.5

    assert heard == [b"one"]


def test_a_coordinator_tells_its_followers_apart(coordinator: Coordinator) -> None:
    """Each message has one receiver, and a broadcast has all."""
    with Follower(coordinator, 1) as one, Follower(coordinator, 2) as two:
        coordinator.links.send(1, b"to 1")
        coordinator.links.send(2, b"to 2")
        coordinator.links.broadcast(b"to all")
        two.link.send(b"from 2")

        assert one.hear(2) == [b"to 1", b"to all"]
        assert two.hear(2) == [b"to 2", b"to all"]
        assert coordinator.hear(1) == [(2, b"from 2")]
        assert {coordinator.joined.get(timeout=SECONDS) for _ in range(2)} == {1, 2}
    with pytest.raises(ValueError, match="from 1 to 2, got 3"):
        coordinator.links.send(3, b"to nobody")


def test_what_was_sent_before_a_close_arrives(coordinator: Coordinator) -> None:
    """Both ends are told nothing, as nothing was lost."""
    with Follower(coordinator, transports=["tcp"]) as follower:
        follower.link.send(b"first")
        assert coordinator.hear(1)
        for message in numbered(MANY):
            follower.link.send(message)

        follower.link.close()
        follower.link.close()
        follower.link.send(b"after the end")

    assert [message for _, message in coordinator.hear(MANY)] == numbered(MANY)
    assert coordinator.received.empty() and coordinator.lost.empty() and follower.lost.empty()


@pytest.mark.parametrize(
    ("index", "plan", "error", "text"),
    [
        (1, "another plan", FingerprintMismatch, "server 1 runs another program"),
        (0, "a plan", Refused, "expected a server from 1 to 2 to follow, got 0"),
        (3, "a plan", Refused, "expected a server from 1 to 2 to follow, got 3"),
    ],
)
def test_a_server_of_another_job_is_refused(
    coordinator: Coordinator, index: int, plan: str, error: type[Exception], text: str
) -> None:
    """By its fingerprint, or its place in the plan; it is told why, once."""
    with Follower(coordinator, index, plan=plan) as follower:
        lost = follower.lost.get(timeout=SECONDS)

    assert type(lost) is error and text in str(lost)
    assert follower.lost.empty() and coordinator.joined.empty()


def test_the_later_of_two_followers_counts(coordinator: Coordinator) -> None:
    """What the first had not heard is not the second's; the first is told that it is out."""
    with Follower(coordinator) as first:
        first.link.send(b"first")
        assert coordinator.hear(1) == [(1, b"first")]
        with Follower(coordinator) as second:
            second.link.send(b"second")
            assert coordinator.hear(1) == [(1, b"second")]
            coordinator.links.send(1, b"for the second")

            assert second.hear(1) == [b"for the second"]
            index, error = coordinator.lost.get(timeout=SECONDS)
            assert index == 1 and "another process has taken its place" in str(error)
            assert "session of server 1 is not known" in str(first.lost.get(timeout=SECONDS))
            assert first.received.empty() and second.lost.empty()


def test_a_process_that_never_came_is_not_lost(coordinator: Coordinator) -> None:
    """It had asked, and opened no stream: what was said before is its successor's."""
    coordinator.links.broadcast(b"from the beginning")
    request = FollowRequest(server_index=1, fingerprint=PLAN, incarnation="ended at once")
    session = coordinator.links.follow(request)
    assert coordinator.links.follow(request) == session  # a call that came twice
    with Follower(coordinator) as follower:
        assert follower.hear(1) == [b"from the beginning"]
    assert coordinator.lost.empty()


def test_a_follower_waits_for_its_job(coordinator: Coordinator) -> None:
    """A coordinator without a job is asked again; when the job's links end, its followers hear."""
    coordinator.links.close()
    with Follower(coordinator) as follower:
        follower.link.send(b"early")
        coordinator.links.expect("a plan", 2)

        assert coordinator.hear(1) == [(1, b"early")]
        coordinator.links.close()
        assert isinstance(follower.lost.get(timeout=SECONDS), Refused | ServerLost)
        coordinator.links.send(1, b"to nobody")
        coordinator.links.broadcast(b"to nobody")
    assert coordinator.lost.empty()


def test_a_follower_that_is_lost_is_sent_nothing_until_it_comes_back(
    coordinator: Coordinator,
) -> None:
    """Messages for nobody are not kept; a process that joins hears what is said from then on."""
    with Follower(coordinator, transports=["tcp"]) as first:
        first.link.send(b"here")
        assert coordinator.hear(1) and coordinator.joined.get(timeout=SECONDS) == 1
    eventually(lambda: not coordinator.links._followers[1].listens)
    coordinator.links.broadcast(b"for nobody")
    with Follower(coordinator, transports=["tcp"]) as second:
        assert coordinator.joined.get(timeout=SECONDS) == 1
        coordinator.links.broadcast(b"for the second")

        assert second.hear(1) == [b"for the second"]


def test_a_follower_notices_that_another_process_is_the_coordinator(
    coordinator: Coordinator,
) -> None:
    """It follows that one again: it says which record it had last, and is sent nothing that was
    said before it followed.
    """
    with Follower(coordinator, returns=True) as follower:
        coordinator.links.send(1, b"of the first")
        assert follower.hear(1) == [b"of the first"]
        first, coordinator.links = coordinator.links, coordinator.new_links()
        coordinator.links.expect(PLAN, 3, again=True)
        follower.link._end.cancel()
        error = follower.lost.get(timeout=SECONDS)
        assert isinstance(error, ServerLost) and "not known" in str(error)
        coordinator.links.broadcast(b"missed")
        with Follower(coordinator, last=7) as again:
            assert [coordinator.joined.get(timeout=SECONDS) for _ in range(2)] == [1, 1]
            coordinator.links.broadcast(b"heard")
            assert again.hear(1) == [b"heard"]
    assert coordinator.lasts == [None, 7]
    first.close()
