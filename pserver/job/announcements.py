"""Trainers that have started and have not joined yet: they say so as often as they send heartbeats,
so that the end of one is known although it was never a member.

No locks and no clock: time is an argument, and the caller holds the job's lock.

[Note: whose end it is]  A server learns of a job from trainer 0's Join.  Before that it cannot tell
which announcements belong together, and trainers of the next job may wait while one runs.  So the
end of an announced trainer counts at once for those trainers that were there when it became known.
For one that came within a heartbeat timeout after that it counts when another heartbeat timeout has
passed, in which no other process of that number came: trainers of one job start at about the same
time, and so do those of a job that is started again.  For later ones it does not count.  And it
counts for nobody while another process of the same number is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pserver.errors import TrainerLost


@dataclass(slots=True)
class Announced:
    """One process that has announced itself.

    Attributes:
        trainer: its number.
        first, last: when it was heard first, and last, in seconds of the job's clock.
    """

    trainer: int
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an announced trainer.

    Attributes:
        known: since when, in seconds of the job's clock.
        reason: what the others are told.
    """

    known: float
    reason: str


class Announcements:
    """The announced processes of one server, and those of them that ended without joining."""

    def __init__(self) -> None:
        self._announced: dict[str, Announced] = {}  # by incarnation
        self._ended: dict[int, Ended] = {}  # by trainer

    @property
    def any(self) -> bool:
        """Whether a process has announced itself and neither joined nor ended."""
        return bool(self._announced)

    def heard(self, trainer: int, incarnation: str, now: float, most: int) -> bool:
        """A trainer says that it is there.

        Args:
            most: processes; of more, the one that was silent for longest is forgotten.

        Returns:
            Whether it is new.
        """
        new = incarnation not in self._announced
        if new and len(self._announced) >= most:
            del self._announced[min(self._announced, key=lambda one: self._announced[one].last)]
        known = self._announced.setdefault(incarnation, Announced(trainer, now, now))
        known.last = now
        self._ended.pop(trainer, None)
        return new

    def first_heard(self, incarnation: str, now: float) -> float:
        """Since when a process has been there; ``now`` for one that was never announced."""
        known = self._announced.get(incarnation)
        return now if known is None else known.first

    def joined(self, trainer: int, incarnation: str) -> None:
        """A trainer has joined, or stays away in good order."""
        self._announced.pop(incarnation, None)
        self._ended.pop(trainer, None)

    def failed(self, trainer: int, incarnation: str, reason: str, now: float) -> None:
        """A trainer says that it will never come; or, without an incarnation, whoever has started
        it does.
        """
        if not incarnation:
            for other, known in list(self._announced.items()):
                if known.trainer == trainer:
                    del self._announced[other]
            self._end(trainer, reason, now)
        elif self._announced.pop(incarnation, None) is not None:
            self._end(trainer, reason, now)

    def lose_silent(self, now: float, timeout: float) -> None:
        """Takes those for lost that have been silent for longer than the heartbeat timeout.

        Args:
            now: in seconds of the job's clock.
            timeout: in seconds.
        """
        for incarnation, known in list(self._announced.items()):
            silence = now - known.last
            if silence > timeout:
                del self._announced[incarnation]
                reason = (
                    f"it has shown no heartbeat for {silence:.1f} s (heartbeat timeout {timeout:g} "
                    "s)"
                )
                self._end(known.trainer, reason, now)

    def lost(self, trainer: int, since: float, now: float, timeout: float) -> TrainerLost | None:
        """What a trainer is to be told that needs another one; None while that one may come.  See
        [Note: whose end it is].

        Args:
            trainer: the one that is needed.
            since: when the one that asks was heard first, in seconds of the job's clock.
            now: likewise.
            timeout: the heartbeat timeout, in seconds.
        """
        ended = self._ended.get(trainer)
        if ended is None or since - ended.known > timeout:
            return None
        if ended.known < since and now - since <= timeout:
            return None  # it may belong to a job before
        return TrainerLost(f"trainer {trainer} ended before it joined: {ended.reason}")

    def _end(self, trainer: int, reason: str, now: float) -> None:
        if all(known.trainer != trainer for known in self._announced.values()):
            self._ended[trainer] = Ended(now, reason)
