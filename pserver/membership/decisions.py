"""One server's end of the job's log: what it stages, and what the log decides.

[Note: who decides]  Server 0 has the coordinator, and appends records when all servers have staged
a step; the others tell it, over the link between servers, and get every record.  A server that is
alone decides at once, in the thread that stages, without a message.  Records take effect in the
order of the log, under the job's lock; what follows from one, an update of tensors, happens
outside it.

[Note: an awaited server]  Where a lost server may come back, server 0 keeps the job: nothing is
decided while it is away, as it stages nothing.  When it follows again it is told where the log
stands, and then of each record; trainers send it their steps again.
Where server 0 itself is lost, the others keep what they have staged, and follow it again: they say
which record was their last, are sent those behind it, and tell it again what is staged, and who is
silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from pserver.errors import Draining, JobFailed, PServerError, ServerLost
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership
from pserver.job_log.coordinator import Coordinator
from pserver.job_log.records import (
    Call,
    Consumed,
    Decided,
    Joined,
    Lost,
    Notice,
    Process,
    ProcessStep,
    Record,
    Silence,
    Staged,
    notices_bytes,
    notices_of,
    records_bytes,
    records_of,
    resumes,
)
from pserver.job_log.standing import Standing
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import FollowRequest, Hello
from transpiler.plan.plan import Deployment


class Link(Protocol):
    """What carries messages between the servers of a job; see :mod:`pserver.link`."""

    def send(self, data: bytes) -> None:
        """To the coordinator; to all other servers, where this is the coordinator.  Returns at
        once, and keeps the order.
        """

    def close(self) -> None:
        """Nothing comes or goes any more."""


class Links(Protocol):
    """What connects the servers of a job; see :mod:`pserver.service.server`."""

    def connect(self, deployment: Deployment, decisions: Decisions, coordinator: str) -> Link:
        """The link of this server to the others, by the coordinator's endpoint."""

    def follow(self, request: FollowRequest) -> str:
        """The session of a server that wants to follow; "" while there is no job to follow."""

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        """Serves a following server's stream until it ends."""

    def tick(self) -> None:
        """The server's clock calls it a few times a second."""


class Followed(Protocol):
    """A lane, as far as the log concerns it."""

    @property
    def index(self) -> int:
        """Which lane of the plan."""

    @property
    def undecided(self) -> int:
        """How many steps are staged, and have no record."""

    @property
    def staged(self) -> Sequence[tuple[Member, int, int]]:
        """The steps that have no record: trainer, number, and rows of tables that they change."""

    def decided(self, steps: Sequence[ProcessStep], time: float, record: int) -> None:
        """The record of these steps, of that number, stands."""

    def drop(self, member: Member) -> None:
        """What a lost trainer has staged never counts."""


class Calls(Protocol):
    """The calls that have a place in the log."""

    def logged(self, call: Call, record: int) -> None:
        """The record of a call, of that number, stands."""

    @property
    def waiting(self) -> Sequence[Call]:
        """Those that this server is ready for, and that have no record."""


def process_of(member: Member) -> Process:
    """A member, as the log names it."""
    return Process(member.trainer, member.incarnation)


class Decisions:
    """What this server has told the coordinator, and what the log says.  The caller holds the job's
    lock, but for :meth:`received`.

    Args:
        servers: of the plan.
        server: this one.
        rounds: by lane, whether all trainers' steps are one update.
        members: the job's trainers.
        lost: told of each trainer that is lost, with a sentence.
        job: for its lock and its end.
        clock: wall time, in seconds since 1970.
        awaits: a server that is lost may come back.  (An attribute, too.)
        returned: of a server that has come back: told where the log stands, before its first
            record.

    Attributes:
        lanes: the lane executors, once they are made.
        calls: those that have a place in the log, once there is one for them.
        joined: by process, the steps by lane at which it begins.
        last: the number of the last record that took effect.
        recorded: told of each record that takes effect.
        coordinator: on server 0; None on the others.
        resumes: on another server: it has lost server 0, and follows it again.
        away: servers that are lost, and are awaited; with the time from which on they are, by the
            job's clock, once :meth:`tick` has seen them.
    """

    def __init__(
        self,
        servers: int,
        server: int,
        rounds: Sequence[bool],
        members: Membership,
        lost: Callable[[Process, str], None],
        job: Lifecycle,
        clock: Callable[[], float] = time.time,
        awaits: bool = False,
        returned: Callable[[Standing], None] | None = None,
    ) -> None:
        self.lanes: Sequence[Followed] = ()
        self.calls: Calls | None = None
        self.joined: dict[Process, tuple[int, ...]] = {}
        self.away: dict[int, float | None] = {}
        self._members, self._job, self._lost, self._clock = members, job, lost, clock
        self.awaits, self._returned = awaits, returned
        self._cut: PServerError | None = None
        self._dial: Callable[[], Link] | None = None
        self._link: Link | None = None
        self._unsent: list[bytes] = []  # until there is a link
        self._servers, self._closed = servers, False
        self._rounds = rounds
        self.coordinator = (
            None if server else Coordinator(servers, rounds, members.awaited_together)
        )
        self.last = 0
        self.resumes = False
        self._silences: dict[Process, Silence] = {}  # that server 0 was told, and has no record of
        self.recorded: Callable[[Record], None] = lambda record: None

    def connect(self, dial: Callable[[], Link]) -> None:
        """Messages go over a link to the other servers, which begins when a trainer joins: a server
        that was started with its program may wait for long.
        """
        self._dial = dial

    def link(self) -> None:
        """The link begins, unless it has."""
        if self._dial is not None and self._link is None:
            self._link, unsent = self._dial(), self._unsent
            self._unsent = []
            for data in unsent:
                self._send(data)

    def close(self) -> None:
        """The job is over."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    @property
    def decides(self) -> bool:
        """Whether this server is the coordinator."""
        return self.coordinator is not None

    # ---- what happens here ----

    def staged(
        self, lane: int, member: Member, step: int, rows: int = 0, consumed: Consumed = ()
    ) -> None:
        """All of a trainer's step is here.

        Args:
            rows: of tables that it changes here.
            consumed: which leased samples.
        """
        if self._cut is not None:
            self._job.fail(self._cut)
        notice = Staged(lane, ProcessStep(process_of(member), step), rows, consumed)
        if self.coordinator is None:
            self._send(notices_bytes([notice]))
        else:
            self._append(self.coordinator.staged(0, notice, self._clock()))

    def ready(self, call: Call) -> None:
        """This server is ready for a call."""
        if self._cut is not None:
            self._job.fail(self._cut)
        if self.coordinator is None:
            self._send(notices_bytes([call]))
        else:
            self._append(self.coordinator.call(0, call, self._clock()))

    def silent(self, process: Process, text: str) -> None:
        """A trainer has sent nothing for the heartbeat timeout."""
        if self.coordinator is None:
            self._silences[process] = Silence(process, text)
            self._send(notices_bytes([self._silences[process]]))
        else:
            self._append(self.coordinator.lose(process, text, self._clock()))
            self.changed()

    def join(self, process: Process, steps: Sequence[int]) -> None:
        """A trainer joins this server.

        Args:
            steps: by lane, at which it begins.
        """
        self.link()
        if self.coordinator is not None:
            self._append(self.coordinator.join(process, steps, self._clock()))

    def begins_at(self, members: Membership) -> tuple[int, ...]:
        """By lane, the last step that counts of the slowest one that takes part: where a later one
        begins.  On the coordinator; the step may not be applied yet.
        """
        assert self.coordinator is not None, "the coordinator lets trainers in"
        coordinator, away = self.coordinator, members.away.values()
        steps = [
            [max(m.step(lane), coordinator.decided(process_of(m), lane)) for m in members.joined()]
            + [coordinator.decided(each, lane) for each in away]
            for lane in range(len(self._rounds))
        ]
        return tuple(min(each, default=0) for each in steps)

    def left(self, process: Process, preempted_after: int | None = None) -> None:
        """A trainer has left: another process may take its number.

        Args:
            preempted_after: its host was taken away, after this step; None: it was not.
        """
        if self.coordinator is not None:
            self.coordinator.leave(process, preempted_after)

    def changed(self) -> None:
        """Fewer trainers are awaited: rounds may be complete."""
        if self.coordinator is not None and self._job.failure is None:
            for lane, is_round in enumerate(self._rounds):
                if is_round:
                    self._append(self.coordinator.complete(lane, self._clock()))

    # ---- what comes over the link ----

    def received(self, server: int, data: bytes) -> None:
        """A message of another server; takes the job's lock.

        Args:
            server: which one.

        Raises:
            ValueError: it is none of this version.
        """
        if self.coordinator is None:
            standing = Standing.of(data) if self._returned else None
            records = records_of(data)
            with self._job.lock:
                if standing is not None and self._returned is not None and not self._closed:
                    self.last, returned, self._returned = standing.last, self._returned, None
                    returned(standing)
                elif self._returned is None and not self._closed:
                    self._take(self._resumed(data, records))
            return
        notices = notices_of(data)
        with self._job.lock:
            for notice in notices if not self._closed else ():
                # it does not come again: without it steps would wait for ever
                self._job.or_fail(partial(self._noticed, server, notice))

    def _noticed(self, server: int, notice: Notice) -> None:
        assert self.coordinator is not None, "only the coordinator is told"
        if isinstance(notice, Silence):
            self.silent(notice.process, notice.text)
        elif self._job.failure is not None:
            return
        elif isinstance(notice, Call):
            self._append(self.coordinator.call(server, notice, self._clock()))
        else:
            self._append(self.coordinator.staged(server, notice, self._clock()))

    def cut(self, error: PServerError) -> None:
        """The link has ended.  The job fails where a step needs it: on a server that has had its
        last one the job may be over already.  Where server 0 may come back, it is followed again.
        """
        with self._job.lock:
            if self._follows_again(error):
                return
            self._cut = error
            waits = any(lane.undecided for lane in self.lanes) or self._waiting_calls
            if not self._closed and waits:
                self._job.fail(error)

    # ---- see [Note: an awaited server] ----

    def server_lost(self, server: int, error: PServerError) -> None:
        """Server 0 has lost another one: waits for it, or does what :meth:`cut` says."""
        with self._job.lock:
            if self.coordinator is None or not self.awaits or self._closed:
                self.cut(error)
            elif self._job.failure is None:
                self.away[server] = None
                self.coordinator.server_lost(server)
                self._job.say("away", f"{error}; nothing is applied until it has come back")

    def server_returned(
        self, server: int, say: Callable[[bytes], None], last: int | None = None
    ) -> None:
        """A server follows server 0; one that was lost is told where the log stands.

        Args:
            say: tells it something.
            last: of a server that was not lost, and follows again: the last record that it has.
        """
        with self._job.lock:
            coordinator, away = self.coordinator, server in self.away
            if coordinator is None or self._closed or not (away or last is not None):
                return
            self.away.pop(server, None)
            if last is None:
                say(coordinator.standing(server).to_bytes())
                self._job.say("back", f"server {server} has come back; the job goes on")
            elif (missing := coordinator.since(last)) is not None:
                say(records_bytes(missing, resumes=True))
                self._job.say("back", f"server {server} follows again; the job goes on")
            else:
                self._job.fail(ServerLost(f"server {server} has missed more than is kept"))
            self._job.wake_all()

    @property
    def awaited(self) -> list[int]:
        """The servers that are lost, as far as this one knows, and that are to come back."""
        return [0] if self.resumes else sorted(self.away)

    def came_back(self) -> None:
        """On server 0, in the process that takes the place of another one: the other servers are to
        follow it again.
        """
        assert self.coordinator is not None, "server 0 comes back"
        self.last = self.coordinator.last
        self.away = dict.fromkeys(range(1, self._servers))

    def _follows_again(self, error: PServerError) -> bool:
        """Whether another server waits for server 0, which it has lost."""
        over = self._closed or self._job.failure is not None or self._job.draining
        waits = self.awaits and self.coordinator is None and self._returned is None
        refused = self.resumes and not isinstance(error, ServerLost)  # and not lost once more
        if over or not waits or isinstance(error, Draining) or self._dial is None or refused:
            return False
        self.resumes = True  # the link says so
        self._link = self._dial()
        said: list[Notice] = [*self._silences.values(), *self._waiting_calls]
        for lane in self.lanes:
            for member, step, rows in lane.staged:
                said.append(Staged(lane.index, ProcessStep(process_of(member), step), rows))
        for notice in said:
            self._link.send(notices_bytes([notice]))
        self._job.say("away", f"{error}; nothing is applied until it has come back")
        return True

    @property
    def _waiting_calls(self) -> Sequence[Call]:
        return () if self.calls is None else self.calls.waiting

    def _resumed(self, data: bytes, records: Sequence[Record]) -> Sequence[Record]:
        """Those records that this server has not, once it follows again."""
        if not self.resumes:
            return records
        if not resumes(data):
            return ()  # it is told of them once more
        self.resumes = False
        self._job.say("back", "server 0 has come back; the job goes on")
        return [each for each in records if each.number > self.last]

    def tick(self, now: float, timeout: float) -> None:
        """Gives up a server that has not come back; the caller holds the job's lock.

        Args:
            now, timeout: in seconds of the job's clock.
        """
        for server, since in list(self.away.items()):
            if since is None:
                self.away[server] = now
            elif now - since > timeout:
                del self.away[server]
                self.cut(ServerLost(f"server {server} has not come back within {timeout:g} s"))

    # ---- what the log says ----

    def _append(self, records: Sequence[Record]) -> None:
        if records and self._servers > 1:
            self._send(records_bytes(records))
        self._take(records)

    def _send(self, data: bytes) -> None:
        if self._link is None:
            self._unsent.append(data)
        else:
            self._link.send(data)

    def _take(self, records: Iterable[Record]) -> None:
        """Records take effect, in their order."""
        for record in records:
            if record.number != self.last + 1:
                self._job.fail(
                    JobFailed(
                        f"the job's log: expected record {self.last + 1}, got {record.number}"
                    )
                )
                return
            self.last = record.number
            self.recorded(record)
            match record.what:
                case Decided(lane, steps):
                    self.lanes[lane].decided(steps, record.time, record.number)
                case Lost(process, text):
                    self._silences.pop(process, None)
                    self._lost(process, text)
                case Joined(process, steps):
                    self.joined[process] = tuple(steps)
                case Call():
                    if self.calls is not None:
                        self.calls.logged(record.what, record.number)
