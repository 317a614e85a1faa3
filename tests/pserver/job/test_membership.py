"""Who is waited for."""

from __future__ import annotations

from pserver.job.membership import Member, Membership, MemberState


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
