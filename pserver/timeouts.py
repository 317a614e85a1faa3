"""The timeouts of liveness: after which silence of another process something is done.

[Note: from the heartbeat timeout]  One number scales a job: the heartbeat timeout T, after which a
silent process is lost.  All that must happen before follows from it::

    T/10            a trainer says that it waits for a server that may come back
    T/8, or 0.5 s   a server probes its link to server 0
    T/5, or 1 s     a trainer, or an observer of a job, sends a heartbeat or announces itself
    T/4             a connection is made and greeted; a silent stream is opened again
    T/2             a ring of trainers that wait for one another is broken
    T               the process is lost
    2 T             ``launch`` gives up a server that it asks about the end of a trainer

A budget is another thing: the seconds that a write, a cut or a save may take belong to whoever
spends them, and stand there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pserver.config import HEARTBEAT_TIMEOUT_SECONDS

# ---- beats and probes: at most so long, however long the heartbeat timeout is ----

BEAT_SECONDS = 1.0  # of a trainer, from one heartbeat to the next
LINK_BEAT_SECONDS = 0.5  # of a link between servers
LAST_BEAT_SECONDS = 0.1  # for the answer to a heartbeat at the end of the timeout
# a request's first PROBE comes so long after its last frame, and each further one twice as late
PROBE_SECONDS = 1.0
MOST_PROBE_SECONDS = 16.0
WORKING_SECONDS = 1.0  # from one PROBE of a server that works on a request to the next

# ---- control calls: for an answer, where nothing is derived from a job ----

CALL_SECONDS = 5.0  # to a call that is made once
WATCH_SECONDS = 2.0  # to one that is made each second: the panel's, the page's, an announcement
LONG_POLL_SECONDS = 1.0  # for which a server holds a call that waits: then the trainer calls again

# ---- the end of a process: each waits longer than what it waits for ----

HANDLER_SECONDS = 3.0  # for a main thread to reach its handler of SIGTERM
DRAIN_SECONDS = 5.0  # for the trainers of a server that shuts down to hear of it
KILL_SECONDS = DRAIN_SECONDS + HANDLER_SECONDS  # between SIGTERM and SIGKILL, for a process of ours
STOP_SECONDS = 30  # likewise, for a container's whole job


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts of one job, in seconds: see [Note: from the heartbeat timeout].

    Attributes:
        lost: the heartbeat timeout.

    Example:
        >>> Timeouts(4.0).beat
        0.8
    """

    lost: float = HEARTBEAT_TIMEOUT_SECONDS

    @property
    def notice(self) -> float:
        """After which a trainer says that it waits for a server that may come back."""
        return self.lost / 10

    @property
    def link_beat(self) -> float:
        """From one PROBE of a link between servers to the next."""
        return min(LINK_BEAT_SECONDS, self.lost / 8)

    @property
    def beat(self) -> float:
        """From one heartbeat of a trainer or an observer, or one announcement, to the next."""
        return min(BEAT_SECONDS, self.lost / 5)

    @property
    def answer(self) -> float:
        """To the answer of the first heartbeat; each further one has twice as long."""
        return self.lost / 5

    @property
    def connection(self) -> float:
        """For a stream to connect, and for the answer to its greeting; of a link, the silence after
        which its stream is opened again.
        """
        return self.lost / 4

    @property
    def stream(self) -> float:
        """The silence of a stream with an open request after which another is opened."""
        return max(self.connection, 2 * PROBE_SECONDS)

    @property
    def ring(self) -> float:
        """For which a ring of waits stands at most, so that it is broken within the timeout."""
        return self.lost / 2

    @property
    def question(self) -> float:
        """For which a server that does not answer is asked about the end of a trainer."""
        return 2 * self.lost
