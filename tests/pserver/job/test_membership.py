"""Who is waited for."""

from __future__ import annotations

from pserver.membership.members import Member, Membership, MemberState


def test_a_lane_waits_for_a_last_step_that_has_come_in_another() -> None:
    """A trainer that ends sends the last step of each lane, one after the other."""
    members = Membership(3, since=0.0)
    for trainer in range(3):
        members.add(Member(trainer, f"start of {trainer}", "tcp", last_heard=0.0))

    members.by_trainer[1].leaving.add(0)

    assert members.awaited(lane=0) == [0, 2]
    assert members.awaited(lane=1) == [0, 1, 2]
    assert members.awaited() == [0, 2]  # at a barrier it will not be

    members.by_trainer[2].state = MemberState.LEFT
    assert members.awaited(lane=1) == [0, 1]


def test_a_job_that_begins_with_fewer_waits_for_those_that_have_joined() -> None:
    """Until so many have joined it waits as for all; it is over without the others."""
    members = Membership(8, since=0.0, least=2)
    members.add(Member(5, "start of 5", "tcp", last_heard=0.0))

    assert members.awaited() == list(range(8)) and not members.over
    assert members.absent == []
    assert members.missing(now=9.0, timeout=1.0) == [0, 1, 2, 3, 4, 6, 7]

    members.add(Member(0, "start of 0", "tcp", last_heard=0.0))

    assert members.awaited() == members.unfinished() == [0, 5]
    assert members.absent == [1, 2, 3, 4, 6, 7]  # nor do the others share with them
    assert members.missing(now=9.0, timeout=1.0) == []

    members.add(Member(7, "start of 7", "tcp", last_heard=0.0))
    members.by_trainer[0].finished = True

    assert members.unfinished() == [5, 7]
    for member in members.by_trainer.values():
        member.state = MemberState.LEFT
    assert members.over


def test_a_number_above_the_plans_trainers_means_all() -> None:
    """A server's setting need not fit each job."""
    members = Membership(2, since=0.0, least=3)
    members.add(Member(0, "start of 0", "tcp", last_heard=0.0))

    assert members.awaited() == [0, 1]
