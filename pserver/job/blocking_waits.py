"""Waits of one trainer for the others, under the job's lock.

A wait ends when the job ends.  One that lasts long is logged, with the trainers that are missing.

[Note: trainers that wait for each other]  A trainer waits in a step (for the others' steps) or at a
barrier (for the others to reach it).  If some trainers wait in a step and all the rest at a
barrier, none of them can ever go on: they have taken different numbers of steps.  The same holds
where all wait at barriers, but not at the same one.  The job then fails and tells them so.  Not
where one waits in a save of the job's own, which gives way, nor where they wait for samples: see
[Note: rings] in wait_table.py.  To a gathering they come from everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from pserver.errors import JobFailed
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Membership, Wait
from pserver.job.waits import Event

BARRIER = "barrier"  # the place of such a wait
GATHERING = "gathering"  # likewise: see gatherings.py


def wait_until_done(
    job: Lifecycle,
    members: Membership,
    wait: Wait,
    missing: Callable[[], list[int]],
    event: Event | None = None,
) -> None:
    """Blocks until ``wait`` is done.  The caller holds the job's lock, which is free meanwhile.

    Args:
        missing: the trainers that are waited for, for the log.
        event: tells when it may be done; None: that of control calls does.

    Raises:
        PServerError: what ended the job meanwhile.
    """
    if wait.done():
        return

    def waiting() -> str:
        for_whom = ", ".join(map(str, missing()))
        return f"trainer {wait.member.trainer} waits at {wait.what} for trainer {for_whom}"

    def check() -> None:
        job.check_running()
        _check_deadlock(job, members)

    wait.member.waits[wait.place] = wait
    try:
        job.waits.wait(event or job.changed, wait.done, waiting, wait.deadline, check)
    finally:
        # the same step may have come again over another stream, with a wait of its own
        if wait.member.waits.get(wait.place) is wait:
            del wait.member.waits[wait.place]


def _check_deadlock(job: Lifecycle, members: Membership) -> None:
    """See [Note: trainers that wait for each other]."""
    if not any(BARRIER in member.waits for member in members.by_trainer.values()):
        return
    joined = {member.trainer: member for member in members.joined()}
    awaited = members.awaited()
    blocked = [
        joined[trainer] for trainer in awaited if trainer in joined and joined[trainer].waits
    ]
    waits = [wait for member in blocked for wait in member.waits.values()]
    if any(wait.place == GATHERING or wait.apart for wait in waits):
        return
    if len(blocked) < len(awaited) or any(wait.done() for wait in waits):
        return
    barriers = {wait.what for wait in waits if wait.place == BARRIER}
    at_barrier = [BARRIER in member.waits for member in blocked]
    if any(at_barrier) and (not all(at_barrier) or len(barriers) > 1):
        said = ", ".join(f"trainer {each.trainer} waits at {each.waiting}" for each in blocked)
        job.fail(
            JobFailed(
                f"the trainers wait for one another ({said}): they have taken different numbers "
                "of steps, or only some of them save, load, meet at a barrier or ask for values of "
                "all trainers"
            )
        )
        job.check_running()
