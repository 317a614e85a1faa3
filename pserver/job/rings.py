"""Breaks rings of trainers that wait for one another, on server 0: see [Note: rings] in
membership/waits.py.
"""

from __future__ import annotations

from pserver.errors import JobFailed
from pserver.job.meetings import Meetings
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Membership
from pserver.membership.waits import in_words, saves_of
from pserver.timeouts import Timeouts


class Rings:
    """The watch for rings in one job.  The caller holds the job's lock.

    Args:
        members: the job's trainers, with their waits.
        job: for its end.
        meetings: where saves are put off.
    """

    def __init__(self, members: Membership, job: Lifecycle, meetings: Meetings) -> None:
        self._members, self._job, self._meetings = members, job, meetings

    def tick(self, limits: Timeouts) -> None:
        """Looks for a ring, and breaks one that has stood for long enough.  The server's clock
        calls it a few times a second.

        Args:
            limits: of the job: a ring of what scripts have asked for is broken within the
                heartbeat timeout.
        """
        self.look()
        ring = self._members.waits.ring(limits.ring)
        if not ring:
            return
        said = in_words(ring)
        saves = saves_of(ring)
        for what in dict.fromkeys(wait.what for wait in saves):
            why = f"the trainers wait for one another ({said})"
            if self._meetings.put_off(what, why):
                self._job.log_event("put off", f"{what} is put off, and a later save is due: {why}")
        if not saves:
            self._job.fail(
                JobFailed(
                    f"the trainers wait for one another ({said}): they have taken different "
                    "numbers of steps or samples, or only some of them save, load, meet at a "
                    "barrier or ask for values of all trainers"
                )
            )

    def look(self) -> None:
        """Looks which trainers wait in steps now."""
        steps = {}
        for member in self._members.joined():
            for wait in member.waits.values():
                if wait.place.startswith("lane") and not wait.done():
                    of = "" if wait.place == "lane 0" else f" of {wait.place}"
                    steps[member.trainer, f"{wait.what}{of}"] = wait.missing
        self._members.waits.steps(steps)
