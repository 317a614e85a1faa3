"""Trainers that step together, one of which asks for samples when the others have stepped."""

from __future__ import annotations

from pserver.job.job_leases import JobLeases
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership
from pserver.wire_pb2 import LeaseEpoch, LeaseRequest

STRIPES = LeaseEpoch(number=0, seed="0", samples=10, batch_size=1, stripes=2, unit="samples")


def test_who_asks_later_than_the_others_has_a_whole_stripe() -> None:
    """Where it has taken no step: nobody has stepped in its place."""
    members, job = Membership(2, 0.0), Lifecycle()
    leases = JobLeases(members, job)
    first, second = (Member(number, str(number), "tcp", 0.0) for number in range(2))
    for each in (first, second):
        members.add(each)
    asked = LeaseRequest(number=1, epoch=STRIPES, most=100)
    reply = leases.lease(first, asked)
    with job.condition:
        leases.decided(0, "0", [(0, reply.ranges[0].start, reply.ranges[0].start + 3)])

    assert leases.lease(second, asked).batches == 5
