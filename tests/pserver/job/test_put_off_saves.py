"""Saves of the job's own whose barriers are put off: for all trainers, or for none."""

from __future__ import annotations

import pytest

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.job.meetings import Meetings
from pserver.job.rings import Rings
from pserver.job_log.own_state import MOST_PUT_OFF, fold
from pserver.lane.leases import JobLeases
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership
from pserver.timeouts import Timeouts
from pserver.wire_pb2 import LeaseEpoch, LeaseRequest

NAME, WHY = "automatic save 1.4", "the trainers wait for one another (...)"


def room(trainers: int = 2) -> tuple[Meetings, Membership, Lifecycle, list[Member]]:
    members, job = Membership(trainers, 0.0), Lifecycle()
    there = [Member(number, str(number), "tcp", 0.0) for number in range(trainers)]
    for each in there:
        members.add(each)
    job.begin()
    return Meetings(members, job), members, job, there


def put_off(meetings: Meetings, job: Lifecycle, name: str = NAME) -> bool:
    with job.condition:
        return meetings.put_off(name, WHY)


def come(
    meetings: Meetings, member: Member, name: str = NAME, text: str = "place"
) -> wire.MeetReply:
    request = wire.MeetRequest(mode=wire.MEET_SAVE, key=name, text=text)
    return meetings.meet(member, request)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is answered at once."""
    monkeypatch.setattr(timeouts, "LONG_POLL_SECONDS", 0.0)


def test_who_waits_and_who_comes_later_are_told_the_same() -> None:
    """And so are those of a process that takes this one's place."""
    meetings, _, job, (one, other) = room()
    assert not come(meetings, one).over
    assert put_off(meetings, job) and not put_off(meetings, job)
    assert [come(meetings, each).problem for each in (one, other)] == [WHY] * 2
    assert not come(meetings, other).over

    again, _, _, (_, late) = room()
    fold(again.state, meetings.state.entries())
    assert come(again, late).problem == WHY
    assert again.state.entries() == meetings.state.entries()


def test_what_somebody_has_passed_is_never_put_off() -> None:
    """Nor what nobody has come to; and one who comes when it is passed, passes."""
    meetings, members, job, (one, other) = room()
    come(meetings, one, text="a")
    assert dict(come(meetings, other, text="b").texts) == {0: "a", 1: "b"}
    assert not put_off(meetings, job) and not put_off(meetings, job, "automatic save 1.5")

    late = Member(1, "another", "tcp", 0.0)
    members.add(late)
    assert come(meetings, one).over
    assert dict(come(meetings, late).texts) == {0: "a", 1: "b"}


def test_only_so_many_are_known() -> None:
    """To one that is forgotten a trainer comes in vain once more."""
    meetings, _, job, (one, _) = room()
    for number in range(MOST_PUT_OFF + 10):
        come(meetings, one, f"automatic save {number}")
        assert put_off(meetings, job, f"automatic save {number}")
    kinds = [each.WhichOneof("what") for each in meetings.state.entries()]
    assert kinds.count("put_off") == MOST_PUT_OFF


def test_who_waits_for_samples_hears_of_a_save_once() -> None:
    """It is told that there is nothing, at once, and comes; asked again it waits as before."""
    meetings, members, job, (one, other) = room()
    leases = JobLeases(members, job, wait_seconds=30.0)
    epoch = LeaseEpoch(number=0, seed="0", samples=10, batch_size=1, stripes=2, unit="samples")
    leases.lease(one, LeaseRequest(number=1, epoch=epoch, most=100))
    with job.condition:
        leases.decided(0, "0", [(0, 0, 5)])
    come(meetings, other)

    reply = leases.lease(one, LeaseRequest(number=2, epoch=epoch, most=100, unstepped=0))
    assert not (reply.ranges or reply.over)
    known = {wait.what: sorted(wait.for_whom) for wait in members.waits.waits()}
    assert known == {NAME: [0], "samples of pass 0": [1]}
    leases._wait_seconds = 0.0
    assert not leases.lease(one, LeaseRequest(number=3, epoch=epoch, most=100, unstepped=0)).over


def test_a_ring_without_a_save_fails_the_job_and_names_all() -> None:
    """With a clock that stands for the heartbeat timeout; the server's clock looks."""
    meetings, members, job, (one, other) = room()
    now = [0.0]
    members.waits._clock = lambda: now[0]
    rings = Rings(members, job, meetings)
    epoch = LeaseEpoch(number=0, seed="0", samples=10, batch_size=1, stripes=2, unit="samples")
    leases = JobLeases(members, job, wait_seconds=0.0)
    leases.lease(one, LeaseRequest(number=1, epoch=epoch, most=100))
    with job.condition:
        leases.decided(0, "0", [(0, 0, 5)])
    number = 1
    while now[0] < 30.0 and job.failure is None:
        number += 1
        leases.lease(one, LeaseRequest(number=number, epoch=epoch, most=100, unstepped=0))
        meetings.meet(other, wire.MeetRequest(key="1: epoch"))
        with job.condition:
            rings.tick(Timeouts(20.0))
        now[0] += 0.5

    assert 10.0 <= now[0] <= 12.0
    assert "trainer 0 waits at samples of pass 0 for trainer 1" in str(job.failure)
    assert "trainer 1 waits at barrier '1: epoch' for trainer 0" in str(job.failure)
