"""Trainers that wait for one another, under their job's lock: with the job's failure as an end, and
a word on who is waited for.

[Note: who waits for whom]  A trainer may wait in a step (for the others' steps) or at a barrier
(for the others to come to it). If some are in the one and all the rest in the other, nobody would
ever move: they have taken different numbers of steps, and are told so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pserver.errors import JobFailed, PServerError
from pserver.job.membership import Membership, Wait

PATIENCE_SECONDS = 3.0  # a wait that lasts longer says for whom, once

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
    began, said = time.monotonic(), False
    this.member.waits[this.place] = this
    try:
        while not this.done():
            job.check_standing()
            _check_deadlock(job, members)
            job.changed.wait(0.2)
            if not said and time.monotonic() - began > PATIENCE_SECONDS:
                said = True
                for_whom = ", ".join(map(str, missing()))
                log.warning(
                    "trainer %d has waited long at %s for trainer %s",
                    this.member.trainer,
                    this.what,
                    for_whom,
                )
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
