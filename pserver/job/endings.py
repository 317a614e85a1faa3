"""How a server's job ends, for one trainer or for all: silence, loss, failure, success, and a
server that shuts down.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from pserver.config import ServerConfig
from pserver.errors import Draining, JobFailed, PServerError, Refused, TrainerLost
from pserver.job.announcements import Announcements
from pserver.job.decisions import Links, process_of
from pserver.job.events import EventLog
from pserver.job.installed_program import InstalledProgram
from pserver.job.job_identity import JobIdentity
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership
from pserver.job.observations import Observations
from pserver.job.reload import Reload
from pserver.job.stragglers import news
from pserver.job_log.records import Process
from pserver.onlookers import onlooker

log = logging.getLogger(__name__)


class Endings(ABC):
    """A job, as far as its end concerns it.  Any thread may call it.

    Args:
        config: the server's.
        transports: the transports that the server listens on, by name, with the port of each.
        clock: seconds that never go back.

    Attributes:
        lifecycle: the job's state, its failure and its lock.
        program: what the present job has installed; None before that.
        observations: who reads without taking part.
        links: to the other servers of a job; None: each decides by itself.
        reload: of a server that was started again while its job goes on; None: of any other.
        log: what peers bring about.
    """

    def __init__(
        self, config: ServerConfig, transports: Mapping[str, int], clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.transports = dict(transports)
        self.lifecycle = Lifecycle(clock)
        self.condition = self.lifecycle.condition
        self.program: InstalledProgram | None = None
        self._clock = clock
        self._identity = JobIdentity()
        self._members = Membership(1, clock(), clock=clock)
        self._announcements = Announcements()
        self.links: Links | None = None
        self._coordinator = ""  # server 0's endpoint, as trainers name it
        self.reload = None if config.reload is None else Reload(config.reload)
        self.log = EventLog(log, self.lifecycle.events)
        self.observations = Observations()

    @abstractmethod
    def _reset(self) -> None:
        """The server is as it was at its start."""

    @abstractmethod
    def _end_membership(self, member: Member, reason: str) -> None:
        """A trainer takes no more part; with a reason the job fails.  The caller holds the job's
        lock.
        """

    # ---- the end ----

    @property
    def ended(self) -> threading.Event:
        """Set when a job has ended here, because its trainers left or because it failed."""
        return self.lifecycle.ended

    @property
    def failure(self) -> PServerError | None:
        """What ended the present job; None while all is well."""
        return self.lifecycle.failure

    @property
    def awaited(self) -> bool:
        """Whether trainers have announced themselves that have not joined."""
        with self.condition:
            return self._announcements.any

    @property
    def busy(self) -> bool:
        """Whether trainers take part in a job now."""
        return bool(self._members.joined())

    def _close_if_over(self) -> None:
        """Ends the job when its last trainer has gone.  The caller holds the job's lock."""
        if self.failure is not None and not self._members.joined():
            self.ended.set()
        elif self.failure is None and self._members.undone:
            self.lifecycle.fail(JobFailed("every trainer of the job was preempted"))
            self.ended.set()
        elif self.failure is None and self._members.over:
            if not self._members.returning:
                version = self.program.version if self.program else 0
                self.log.say("done", f"the job is done after {version} updates", logging.INFO)
                self.lifecycle.succeed()
                self.ended.set()
            self._reset()

    def tick(self) -> None:
        """Applies the heartbeat timeout and the start timeout.

        The server's clock thread calls it a few times a second.
        """
        with self.condition:
            now, timeout = self._clock(), self.config.heartbeat_timeout_seconds
            for member, text in self._members.silent(now, timeout):
                if member.finished or not self._members.unfinished():  # it has done its part
                    self.log.say(f"silent {member.trainer}", f"{text}, and had finished")
                    self._end_membership(member, "")
                else:
                    self._silent(process_of(member), text)
            for process in self._members.not_back(now, timeout):
                self._not_back(process, timeout)
            self._announcements.lose_silent(now, timeout)
            self.observations.lose_silent(now, timeout)
            self._expire(now)
            self._name_stragglers()
            if self._members.by_trainer and self.failure is None:
                self._check_missing(now)
            if self.program is not None and self.failure is None:
                self.program.decisions.tick(now, self.config.start_timeout_seconds)
                if self.program.decisions.decides:
                    self.program.rings.tick(timeout)
            if self._members.by_trainer:
                self._close_if_over()
        if self.links is not None:  # not under the job's lock
            self.links.tick()

    @onlooker("the watch for stragglers")
    def _name_stragglers(self) -> None:
        for trainer, text in news(self._members.joined(), self.config.straggler_factor):
            self.log.say(f"straggler {trainer}", text)

    def paused(self) -> None:
        """This process has not run for a while."""
        with self.condition:
            self._members.waits.paused()

    def check_loads(self, member: Member, what: str) -> None:
        """Returns if a trainer may replace what all have: trainer 0, or the least one of those that
        were not preempted.

        Raises:
            Refused: it may not.
        """
        if member.trainer != (first := self._members.first):
            raise Refused(
                f"only trainer {first} loads {what}, and this is trainer {member.trainer}"
            )

    # ---- trainers that are lost: see [Note: the job's log] ----

    def _silent(self, process: Process, text: str) -> None:
        if self.program is None or self.failure is not None:
            self._lose(process, text)
        else:
            self.program.decisions.silent(process, text)

    def _not_back(self, process: Process, timeout: float) -> None:
        """A trainer has not come to this server since it was started again: server 0 loses it."""
        if self.program is not None and self.program.decisions.decides and self.failure is None:
            text = f"{process} has not come back to server 0 within {timeout:g} s"
            self.program.decisions.silent(process, text)

    def _lose(self, process: Process, text: str) -> None:
        """A trainer is lost, as the log says.  The caller holds the job's lock."""
        member = self._members.fence(process, text)
        if member is None:
            return
        streams = [each.end_stream for each in member.watermarks.values()]
        installed = self.program
        for lane in () if installed is None else installed.lanes:
            lane.drop(member)
        if installed is not None:
            installed.calls.drop(member)
        if installed is not None and (partial := installed.count_partial(member)):
            text += f"; {partial} steps of it are decided in lanes of one mode, and not of another"
        goes_on = bool(self._members.joined() or self._members.away)
        if installed is None or not installed.outlives_trainers or not goes_on:
            self.lifecycle.lose(TrainerLost(text))
        else:
            self._go_on_without(member, text, installed.plan.keeps_places)
        for end in streams:
            if end is not None:
                end()
        self.lifecycle.wake_all()

    def _go_on_without(self, member: Member, text: str, keeps_place: bool) -> None:
        """The job goes on; where steps need all trainers, it may keep the lost one's place for
        another process.  See [Note: kept places] in membership.py.
        """
        there = {*self._members.away, *(each.trainer for each in self._members.joined())}
        left = ", ".join(map(str, sorted(there)))
        said = f"{text}; its decided steps count, and the job goes on with trainer {left}"
        if keeps_place and not (member.finished or member.leaving):
            seconds = self.config.start_timeout_seconds
            self._members.kept[member.trainer] = self._clock() + seconds
            said += f", after up to {seconds:g} s in which another process may take its place"
        self.log.say(f"lost {member.trainer}", said)

    def _expire(self, now: float) -> None:
        """Ends the time of places that were kept for processes that have not come."""
        for trainer in self._members.expire(now):
            self._say_empty(trainer, f"within {self.config.start_timeout_seconds:g} s")

    def _say_empty(self, trainer: int, when: str) -> None:
        """A place is kept no more.  The caller holds the job's lock."""
        text = f"nobody takes trainer {trainer}'s place {when}: the job goes on without it"
        self.log.say(f"empty {trainer}", text)
        if self.program is not None:
            self.program.decisions.changed()
        self.lifecycle.wake_all()

    def _check_missing(self, now: float) -> None:
        """Fails the job where a trainer will not join any more."""
        for trainer in self._members.not_joined():
            if trainer in self._members.away:
                continue  # it has joined before this server came back: see _not_back
            if (lost := self._lost(trainer, self._members.began)) is not None:
                self.lifecycle.lose(lost)
        start = self.config.start_timeout_seconds
        names = ", ".join(map(str, self._members.missing(now, start)))
        if names:
            self.lifecycle.lose(TrainerLost(f"trainer {names} has not joined within {start:g} s"))

    def shut_down(self) -> None:
        """Takes no new trainers and no new steps; every trainer is told, those that wait at once
        and the others by their heartbeats.
        """
        with self.condition:
            if self.busy and self._members.unfinished():
                self.lifecycle.fail(Draining("the server is shutting down"))
            self.lifecycle.drain()

    def _lost(self, trainer: int, since: float) -> TrainerLost | None:
        """See :meth:`Announcements.lost`."""
        timeout = self.config.heartbeat_timeout_seconds
        return self._announcements.lost(trainer, since, self._clock(), timeout)
