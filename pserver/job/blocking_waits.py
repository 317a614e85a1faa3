"""Trainers that wait for one another, under their job's lock: with the job's failure as an end, and
a word on who is waited for.

[Note: who waits for whom]  A trainer may wait in a step (for the others' steps) or at a barrier
(for the others to come to it). If some are in the one and all the rest in the other, nobody would
ever move: they have taken different numbers of steps, and are told so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from pserver.errors import JobFailed, PServerError
from pserver.job.membership import Membership, Wait
from pserver.polling import poll

log = logging.getLogger(__name__)


class Standing(Protocol):
    """What a wait needs of its job: its lock, and whether it still stands.

    See [Note: the job's lock] in job.py.
    """

    changed: threading.Condition

    def check_standing(self) -> None:
        """Raises what ended the job, if something did."""

    def fail(self, error: PServerError) -> None:
        """Ends the job for everybody."""


def wait(job: Standing, members: Membership, this: Wait, missing: Callable[[], list[int]]) -> None:
    """Waits, with the job's lock held, until ``this`` is done.

    Args:
        missing: the trainers that are waited for, for the log.

    Raises:
        PServerError: what ended the job meanwhile.
    """

    def waiting() -> str:
        for_whom = ", ".join(map(str, missing()))
        return (
            f"trainer {this.member.trainer} has waited long at {this.what} for trainer {for_whom}"
        )

    this.member.waits[this.place] = this
    try:
        for _ in poll(log, waiting):
            if this.done():
                return
            job.check_standing()
            _check_deadlock(job, members)
            job.changed.wait(0.2)
    finally:
        # the same step may have come again, over another stream
        if this.member.waits.get(this.place) is this:
            del this.member.waits[this.place]


def _check_deadlock(job: Standing, members: Membership) -> None:
    """See [Note: who waits for whom]."""
    joined = {member.trainer: member for member in members.joined()}
    awaited = members.awaited()
    blocked = [
        joined[trainer] for trainer in awaited if trainer in joined and joined[trainer].waits
    ]
    if len(blocked) < len(awaited) or any(
        each.done() for member in blocked for each in member.waits.values()
    ):
        return
    at_barrier = ["barrier" in member.waits for member in blocked]
    if any(at_barrier) and not all(at_barrier):
        facts = ", ".join(
            f"trainer {member.trainer} waits at {member.waiting}" for member in blocked
        )
        job.fail(
            JobFailed(
                f"the trainers wait for one another ({facts}): they have taken different numbers "
                "of steps"
            )
        )
        job.check_standing()
