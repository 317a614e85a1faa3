"""What follows when a process of a job has failed."""

from __future__ import annotations

import pytest

from pserver.launcher.supervisor import EARLY_SECONDS, FailedProcess, Next, RestartPolicy

LATE = EARLY_SECONDS + 1


@pytest.mark.parametrize(
    ("ended", "left", "whole", "expected"),
    [
        (FailedProcess(1, LATE, goes_on=True), 1, True, Next.ALONE),
        (FailedProcess(1, LATE, goes_on=True), 1, False, Next.ALONE),
        (FailedProcess(1, LATE, goes_on=True), 0, True, Next.WITHOUT),
        (FailedProcess(1, LATE, goes_on=True, preempted=True), 1, True, Next.WITHOUT),
        (FailedProcess(1, LATE), 1, True, Next.WHOLE),
        (FailedProcess(1, LATE, preempted=True), 1, True, Next.WHOLE),
        (FailedProcess(1, LATE), 1, False, Next.FAIL),
        (FailedProcess(1, LATE), 0, True, Next.FAIL),
        (FailedProcess(None, LATE, goes_on=True), 1, True, Next.ALONE),
        (FailedProcess(None, LATE, goes_on=True), 1, False, Next.ALONE),
        (FailedProcess(None, LATE, goes_on=True), 0, True, Next.FAIL),
        (FailedProcess(None, LATE), 1, True, Next.WHOLE),
        (FailedProcess(None, LATE), 0, True, Next.FAIL),
    ],
)
def test_what_follows_depends_on_who_goes_on_and_what_is_left(
    ended: FailedProcess, left: int, whole: bool, expected: Next
) -> None:
    """A restart is counted where a process is started again, and only there."""
    policy = RestartPolicy(left, whole)

    assert policy.after(ended) is expected
    assert policy.used == (expected in (Next.ALONE, Next.WHOLE))


def test_single_trainers_and_jobs_share_the_restarts() -> None:
    """N in all."""
    policy = RestartPolicy(3, whole=True)
    ends = [
        FailedProcess(1, LATE, goes_on=True),
        FailedProcess(None, LATE),
        FailedProcess(0, 1.0, goes_on=True),
    ]

    assert [policy.after(each) for each in ends] == [Next.ALONE, Next.WHOLE, Next.ALONE]
    assert policy.counted == "restart 3 of 3"
    assert policy.after(ends[0]) is Next.WITHOUT and policy.after(ends[1]) is Next.FAIL


@pytest.mark.parametrize(
    ("ends", "least", "expected"),
    [
        # the same place, at its start, twice in a row
        ([(2, 1.0), (2, 1.0)], 0, [Next.WHOLE, Next.FEWER]),
        ([(2, 1.0), (2, LATE)], 0, [Next.WHOLE, Next.WHOLE]),
        ([(2, LATE), (2, 1.0)], 0, [Next.WHOLE, Next.WHOLE]),
        ([(2, 1.0), (1, 1.0)], 0, [Next.WHOLE, Next.WHOLE]),
        # places have other numbers after one of them stays empty
        ([(1, 1.0), (1, 1.0), (1, 1.0)], 0, [Next.WHOLE, Next.FEWER, Next.WHOLE]),
        # with MIN:MAX at once, down to MIN
        ([(2, LATE), (0, LATE), (1, 1.0)], 2, [Next.FEWER, Next.WHOLE, Next.WHOLE]),
        ([(2, LATE), (1, LATE), (0, LATE)], 1, [Next.FEWER, Next.FEWER, Next.WHOLE]),
        # nobody knows whose place it is
        ([(None, 1.0), (None, 1.0)], 1, [Next.WHOLE, Next.WHOLE]),
    ],
)
def test_a_collective_job_goes_on_with_fewer_where_a_place_does_not_come_back(
    ends: list[tuple[int | None, float]], least: int, expected: list[Next]
) -> None:
    """Each start is a restart that counts."""
    policy, trainers, found = RestartPolicy(len(ends), True, least), 3, []
    for trainer, seconds in ends:
        found.append(policy.after_collective(FailedProcess(trainer, seconds), trainers))
        trainers -= found[-1] is Next.FEWER

    assert found == expected and policy.used == len(ends)
    assert policy.after_collective(FailedProcess(0, 1.0), trainers) is Next.FAIL


def test_the_last_trainer_is_not_left_out() -> None:
    """A job needs one."""
    policy = RestartPolicy(3, whole=True)

    assert [policy.after_collective(FailedProcess(0, 1.0), 1) for _ in range(3)] == [Next.WHOLE] * 3
