"""Trainers that step together, one of which asks for samples when the others have stepped."""

from __future__ import annotations

import json

import pytest

from pserver.errors import Refused
from pserver.job_log.records import Process
from pserver.lane.leases import JobLeases
from pserver.lane.step import Step
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership
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


def job_of_two() -> tuple[JobLeases, Lifecycle, list[Member]]:
    """A job's lease table, its lock, and its trainers."""
    members, job = Membership(2, 0.0), Lifecycle()
    there = [Member(number, str(number), "tcp", 0.0) for number in range(2)]
    for each in there:
        members.add(each)
    return JobLeases(members, job, wait_seconds=0.0), job, there


def test_a_request_of_absurd_numbers_is_refused_and_changes_nothing() -> None:
    """What a trainer brings of a checkpoint counts afterwards, and so does what it asks."""
    (before, job, there), asked = job_of_two(), LeaseRequest(number=1, epoch=STRIPES, most=100)
    for member in there:
        start = before.lease(member, asked).ranges[0].start
        with job.condition:
            before.decided(member.trainer, member.incarnation, [(0, start, start + 3)])
    leases, _, (first, second) = job_of_two()
    for wrong in ({"stripes": 2**32 - 1}, {"samples": 2**63}):
        absurd = LeaseEpoch()
        absurd.CopyFrom(STRIPES)
        absurd.MergeFrom(LeaseEpoch(number=7, **wrong))
        with pytest.raises(Refused, match=f"leases: epoch 7, {next(iter(wrong))}: expected .*got"):
            leases.lease(second, LeaseRequest(number=1, epoch=absurd, most=100))
    leases.lease(first, LeaseRequest(restored=json.dumps(before.plain())))

    assert leases.lease(first, asked).batches == 2
    assert list(leases.accounts) == [0]


def leased_by_one(members: Membership, job: Lifecycle) -> tuple[JobLeases, Member]:
    """The lease table of a job whose trainer 0 has used up its stripe."""
    leases, first = JobLeases(members, job, wait_seconds=0.0), Member(0, "0", "tcp", 0.0)
    members.add(first)
    leases.lease(first, LeaseRequest(number=1, epoch=STRIPES, most=100))
    with job.condition:
        leases.decided(0, "0", [(0, 0, 5)])
    return leases, first


WAITS = LeaseRequest(number=2, epoch=STRIPES, most=100, unstepped=0)


def test_an_epoch_does_not_wait_for_who_may_join_or_not() -> None:
    """A job that has begun with fewer trainers: those that are there divide all samples."""
    job = Lifecycle()
    leases, first = leased_by_one(Membership(2, 0.0, least=1), job)

    assert leases.lease(first, WAITS).batches == 5


def test_the_stripe_of_a_kept_place_is_not_divided() -> None:
    """Before it is known that nobody takes the place; steps wait for whoever does."""
    members, job = Membership(2, 0.0), Lifecycle()
    leases, first = leased_by_one(members, job)
    members.add(Member(1, "1", "tcp", 0.0))
    members.fence(Process(1, "1"), "trainer 1 has ended")
    members.reserved[1] = 10.0

    assert not leases.lease(first, WAITS).batches
    members.expire(11.0)
    assert leases.lease(first, WAITS).batches == 5


def test_who_comes_when_its_samples_are_divided_waits_until_those_are_used_up() -> None:
    """It would have fewer steps left than the others have."""
    members, job = Membership(2, 0.0, least=1), Lifecycle()
    leases, first = leased_by_one(members, job)
    leases.lease(first, WAITS)
    with job.condition:
        assert not leases.let_in(1, {})
        leases.decided(0, "0", [(0, 5, 9)])
        assert not leases.let_in(1, {})
        assert leases.let_in(1, {0: Step(Process(0, "a"), 1, {}, {}, leases=((0, 9, 10),))})
