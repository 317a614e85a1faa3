"""Who reads what a job holds without taking part in it: ``pserver save``.

[Note: one moment]  An observer asks for a pause, in which no step changes a value, and reads slices
and rows while it lasts.  A pause ends when the observer says so, or when it has been silent for the
heartbeat timeout: an operator's process that dies does not stop the job for longer.

No clock: time is an argument.  The caller holds the job's lock but where a method says otherwise.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from pserver.errors import Busy, Refused
from pserver.job.installed_program import InstalledProgram


@dataclass(slots=True)
class Observation:
    """One observer's look at what a job holds, which outlives the job.

    Attributes:
        installed: what it reads.
        last_heard: in seconds of the job's clock.
        session: the secret that its calls and its stream repeat.
        paused: its pause lasts.
        wanted: it has asked for one, and not for its end.
        ended: it reads no more, and pauses nothing from here on.
        end_stream: breaks its stream; a later one replaces it.
    """

    installed: InstalledProgram
    last_heard: float
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    paused: bool = False
    wanted: bool = False
    ended: bool = False
    end_stream: Callable[[], None] = lambda: None

    def set_pause(self, paused: bool) -> None:
        """Begins or ends its pause; waits for the steps that run, and gives up the job's lock
        meanwhile.  A pause that was ended before it has begun does not begin.
        """
        quiesce = self.installed.quiesce
        with quiesce.condition:
            self.wanted = paused and not self.ended
            quiesce.rested.tell()  # for a pause that is not wanted any more
            if not paused and self.paused:
                self.paused = False
                quiesce.resume()
            elif self.wanted and quiesce.pause(lambda: self.paused or not self.wanted):
                self.paused = self.wanted
                if not self.wanted:
                    quiesce.resume()


class Observations:
    """The observers of one server."""

    def __init__(self) -> None:
        self._by_session: dict[str, Observation] = {}

    def begin(self, installed: InstalledProgram, now: float) -> Observation:
        """A new observer."""
        observation = Observation(installed, now)
        self._by_session[observation.session] = observation
        return observation

    def check_room(self, most: int) -> None:
        """Returns if there may be another observer.

        Raises:
            Busy: there are as many as there may be.
        """
        if len(self._by_session) >= most:
            raise Busy(f"{most} observers read what this server holds: ask again when one has left")

    def find(self, session: str) -> Observation | None:
        """The observer that holds a session."""
        return self._by_session.get(session)

    def of_session(self, session: str, now: float) -> Observation:
        """The observer that holds a session, and is heard.

        Raises:
            Refused: there is none.
        """
        observation = self.find(session)
        if observation is None:
            raise Refused("this session of an observer is not known here: it was silent too long")
        observation.last_heard = now
        return observation

    def end(self, observation: Observation) -> None:
        """It reads no more."""
        observation.ended = True
        if self._by_session.pop(observation.session, None) is not None:
            observation.set_pause(False)

    def lose_silent(self, now: float, timeout: float) -> None:
        """Ends those that have been silent for longer than the heartbeat timeout."""
        for observation in list(self._by_session.values()):
            if now - observation.last_heard > timeout:
                self.end(observation)
