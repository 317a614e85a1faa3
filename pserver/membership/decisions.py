"""One server's end of the job's log: its staged steps, and the log's decisions.

[Note: who decides]  Server 0 has the coordinator, and appends records when all servers have staged
a step; the others notify it, over the link between servers, and get every record.  A server that is
alone decides at once, in the thread that stages, without a message.  Records take effect in the
order of the log, under the job's lock; what follows from one, an update of tensors, happens outside
it.

[Note: an awaited server]  Where a lost server may come back, server 0 keeps the job: nothing is
decided while it is unreachable, as it stages nothing.  When it follows again it receives the state
of the log, and then each record; trainers send it their steps again.  Where server 0 itself is
lost, the others keep what they have staged, and follow it again: they send the number of their last
record, receive those after it, and report again the staged steps and the silent trainers.

[Note: a call's turn]  What such a call reads or changes depends on steps, so it has a place among
them that is the same on all servers: steps whose records stand before it are applied, and steps
behind it wait.  The thread that brings a call waits for its turn and carries it out.  [Note: calls
in the log] in pserver/job_log/coordinator.py says when it gets its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pserver.errors import Busy, Draining, JobFailed, PServerError, Refused, ServerLost, TrainerLost
from pserver.job_log.coordinator import Coordinator
from pserver.job_log.records import (
    Call,
    Decided,
    Joined,
    Left,
    LogSnapshot,
    Lost,
    Notice,
    Process,
    Record,
    Silence,
    Staged,
    notices_bytes,
    notices_of,
    records_bytes,
    records_of,
    resumes,
)
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership
from pserver.transport.stream import SequencedStream
from pserver.undone import or_undone
from pserver.wire_pb2 import FollowRequest, Hello
from transpiler.plan.plan import Deployment

# ---- quiesce ----
#
# Quiescing a server: no step changes a value while a save, a load or a shrink runs.
#
# A step counts as running from the first change of a tensor to the change of its watermark.  A
# pause waits until no step runs, and no step begins before the pause ends.  Values and watermarks
# are then of one moment, between two steps.
#
# A save pauses for its cut only (server_cut.py), which it reads while steps continue.
#
# A call that has a place in the job's log holds the steps whose records stand behind it, until it
# has been carried out (:class:`LoggedCalls`).


# for which a load, a shrink, or a save in the foreground waits for a save that is being written
CUT_SECONDS = 600.0


class Quiesce:
    """Counts running steps, and holds new ones during a pause.

    Any thread may use it.  Both are guarded by the job's lock, which is not held while a
    step or a pause lasts.

    Args:
        job: for its lock.
        paused: called with the seconds of each pause.

    Attributes:
        condition: the job's.
        rested: the event that a step has ended, or that held steps are released: for threads that
            wait until none runs, or until certain ones are applied.
    """

    def __init__(
        self, job: Lifecycle, paused: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._job, self.condition = job, job.condition
        self._told = paused
        self.rested = job.waits.event()
        self._goes_on = job.waits.event()  # steps may begin
        self._since = 0.0  # when the pause began
        self._running = 0
        self._paused = False
        self._cut = self._reading = False  # one is to be taken; it is taken, and read
        self._held = deque[int]()  # records behind which steps wait

    @contextmanager
    def updating(self, record: int = 0) -> Iterator[None]:
        """Marks, while the block runs, that a step changes tensors, and then its watermark.

        Args:
            record: of the step.

        Raises:
            PServerError: the job ended during a pause.
        """
        with self._job.lock:
            self.begin_step(record)
        try:
            yield
        finally:
            with self._job.lock:
                self.end_step()

    # ---- the caller holds the job's lock ----

    def begin_step(self, record: int) -> None:
        """Begins what :meth:`updating` does; :meth:`end_step` ends it."""
        if self._is_held(record):
            self._job.wait(self._goes_on, lambda: not self._is_held(record))
        self._running += 1

    def _is_held(self, record: int) -> bool:
        return self._paused or (bool(self._held) and record > self._held[0])

    def end_step(self) -> None:
        """Ends :meth:`begin_step`: the step has made all its changes."""
        self._running -= 1
        self.rested.notify()

    def hold_behind(self, record: int) -> None:
        """Makes steps whose records stand behind this one wait until :meth:`let_go`."""
        self._held.append(record)

    @property
    def held_behind(self) -> int:
        """The first record behind which steps wait; 0: none does."""
        return self._held[0] if self._held else 0

    def let_go(self, record: int) -> None:
        """Releases the steps that wait behind this record."""
        if record in self._held:
            self._held.remove(record)
            self._let_on()

    def _let_on(self) -> None:
        """Notifies held steps, and the next thread that holds them, of their release."""
        self._goes_on.notify()
        self.rested.notify()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps, while the block runs, every step from changing anything, and other pauses from
        beginning: a repeated save over another connection waits for the one under way.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def begin_cut(self, seconds: float = 0.0) -> None:
        """Reserves a cut until :meth:`end_cut`; no other one begins meanwhile.

        Args:
            seconds: the longest wait for a cut under way.

        Raises:
            Busy: it has not ended by then.
        """
        with self._job.lock:
            self._await(lambda: self._cut, seconds)
            self._cut = True

    def read_cut(self) -> None:
        """Notes that the cut is taken, and is read from now on."""
        with self._job.lock:
            self._reading = True

    def end_cut(self) -> None:
        """Ends the cut, which is not read any more."""
        with self._job.lock:
            self._cut = self._reading = False
            self.rested.notify()

    def await_cut(self, seconds: float = CUT_SECONDS) -> None:
        """Returns when no cut is read: for callers that change more than a step does, of which a
        cut would have to copy all.  A reserved cut may stand behind the call in the job's log, so
        it is not awaited.

        Raises:
            Busy: one is still read, after so many seconds.
        """
        with self._job.lock:
            self._await(lambda: self._reading, seconds)

    def _await(self, busy: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        if not self._job.waits.wait(self.rested, lambda: not busy(), deadline=end):
            raise Busy("a save is being written here: ask again when it is done")

    def pause(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Begins what :meth:`paused` does; :meth:`resume` ends it.

        Args:
            given_up: whether the pause is no longer wanted; called while another pause lasts, under
                the job's lock.  A thread that gives up notifies ``rested``.

        Returns:
            Whether it has begun.
        """
        with self._job.lock:
            self._job.waits.wait(self.rested, lambda: not self._paused or given_up())
            if self._paused:
                return False
            self._paused, self._since = True, time.monotonic()
            with or_undone(self.resume):
                self._job.waits.wait(self.rested, lambda: not self._running)
            return True

    def resume(self) -> None:
        """Ends a pause."""
        with self._job.lock:
            self._paused, seconds = False, time.monotonic() - self._since
            self._job.wake_all()  # watermarks may have been loaded
        self._told(seconds)


# ---- logged calls ----
#
# The control calls that have a place in the job's log: the moment of a save, a shrink.
#
# ::
#
#   a trainer's call ---> ready --all servers are--> in the log --its turn--> carried out
#                           |
#                           `--withdrawn, or its trainer is lost--> given up


MOST_AHEAD = 2**20  # numbers that a trainer may pass over: of calls that have failed before

T = TypeVar("T")


class CallLane(Protocol):
    """The part of a lane that calls use."""

    def has_applied(self, record: int) -> bool:
        """Whether each decided step is applied whose record stands before this one."""


@dataclass(slots=True, eq=False)
class LoggedCall:
    """One call on this server.

    Attributes:
        record: its number in the log; 0: it is not there.
        given_up: why it never will be.
        done: it has been carried out, or has failed.
        result, failure: its outcome.
    """

    call: Call
    record: int = 0
    given_up: PServerError | None = None
    done: bool = False
    result: Any = None
    failure: BaseException | None = None


class LoggedCalls:
    """Carries out calls, each once and at its place.  See [Note: a call's turn].

    Any thread may call it; methods without a wait are called under the job's lock.

    Args:
        job: for its lock and its end.
        quiesce: keeps the steps behind a call from beginning.
        lanes: whose steps come before.
        ready: notifies the coordinator that this server is ready for a call.
    """

    def __init__(
        self,
        job: Lifecycle,
        quiesce: Quiesce,
        lanes: Sequence[CallLane],
        ready: Callable[[Call], None],
    ) -> None:
        self._job, self._quiesce, self._lanes, self._ready = job, quiesce, lanes, ready
        self._calls: dict[tuple[Process, str], LoggedCall] = {}  # the last of each kind
        self._logged: dict[tuple[Process, str], int] = {}  # its number in the log

    def carry_out(
        self, member: Member, kind: str, number: int, run: Callable[[int], T]
    ) -> T | None:
        """Carries out a call when its turn comes; a call that comes twice, once.

        Args:
            member: the trainer that calls.
            number: of its calls of this kind, from 1.
            run: does it; is given the number of the call's record.

        Returns:
            What ``run`` returned; None where the call was in the log before this server came back.

        Raises:
            Refused: a later call of this kind has arrived, or this one was withdrawn; or the number
                is that of no call of this trainer's.
            TrainerLost: the trainer was lost before the call was in the log.
            PServerError: what ended the job meanwhile; and what ``run`` raises.
        """
        process = Process(member.trainer, member.incarnation)
        with self._job.lock:
            self._job.check_running()
            present, logged = self._present(process, kind, number)
            if present is None and number == logged:
                return None
            own = present or LoggedCall(Call(process, kind, number))
            with nullcontext() if present else or_undone(partial(self._never_runs, own)):
                if present is None:
                    self._calls[process, kind] = own
                    self._ready(own.call)  # it may be in the log when this returns
                self._wait(own, lambda: own.done if present else self._is_due(own))
        if present is None:
            self._run(own, run)
        if own.failure is not None:
            raise own.failure
        result: T = own.result
        return result

    def withdraw(self, member: Member, kind: str, number: int) -> None:
        """Gives up a call that another server cannot carry out, unless it is in the log.  The call
        may arrive after that.

        Raises:
            Refused: the number is that of no call of this trainer's.
        """
        key = process, _ = Process(member.trainer, member.incarnation), kind
        own, last = self._calls.get(key), self._last(process, kind)
        if number > last:
            self._expect(kind, number, last)
            self._calls[key] = own = LoggedCall(Call(process, kind, number))
        if own is not None and own.call.number == number:
            self._give_up(own, Refused(f"the {kind} with number {number} was withdrawn"))

    def drop(self, member: Member) -> None:
        """Gives up a lost trainer's calls that are not in the log."""
        for own in list(self._calls.values()):
            if own.call.process == Process(member.trainer, member.incarnation):
                self._give_up(own, TrainerLost(member.fenced))

    def logged(self, call: Call, record: int) -> None:
        """Takes the record of a call."""
        self._logged[call.process, call.kind] = call.number
        own = self._calls.get((call.process, call.kind))
        if own is not None and own.call == call and own.given_up is None:
            own.record = record
            self._quiesce.hold_behind(record)
            self._quiesce.rested.notify()

    def stands(self, process: Process, calls: Mapping[str, int]) -> None:
        """Takes, on a server that has come back, the calls of a process that are in the log."""
        self._logged.update({(process, kind): number for kind, number in calls.items()})

    @property
    def waiting(self) -> list[Call]:
        """The calls that this server is ready for, and that are not in the log."""
        waits = (each for each in self._calls.values() if not each.record and not each.given_up)
        return [each.call for each in waits]

    def _present(self, process: Process, kind: str, number: int) -> tuple[LoggedCall | None, int]:
        """The same call, if it has arrived before; and the number of the last one in the log."""
        own, last = self._calls.get((process, kind)), self._last(process, kind)
        self._expect(kind, number, last)
        present = own if own is not None and own.call.number == number else None
        return present, self._logged.get((process, kind), 0)

    def _last(self, process: Process, kind: str) -> int:
        """The number of the last call of a kind, in the log or not."""
        own = self._calls.get((process, kind))
        return max(self._logged.get((process, kind), 0), 0 if own is None else own.call.number)

    def _expect(self, kind: str, number: int, last: int) -> None:
        """Checks a call's number: one far ahead would make all later calls old ones."""
        if not max(last, 1) <= number <= last + MOST_AHEAD:
            raise Refused(f"expected the number of a new {kind} or of the last one, got {number}")

    def _is_due(self, own: LoggedCall) -> bool:
        first = bool(own.record) and self._quiesce.held_behind == own.record
        return first and all(lane.has_applied(own.record) for lane in self._lanes)

    def _wait(self, own: LoggedCall, done: Callable[[], bool]) -> None:
        def check() -> None:
            if own.given_up is not None:
                raise own.given_up
            self._job.check_running()

        self._job.waits.wait(self._quiesce.rested, done, check=check)

    def _never_runs(self, own: LoggedCall) -> None:
        """Gives up a call whose thread has failed before its turn: no thread waits for it."""
        if own.record:
            self._quiesce.let_go(own.record)
        text = f"the {own.call.kind} with number {own.call.number} failed before its turn"
        own.given_up = own.given_up or JobFailed(text)
        self._quiesce.rested.notify()

    def _run(self, own: LoggedCall, run: Callable[[int], Any]) -> None:
        try:
            own.result = run(own.record)
        except BaseException as error:
            own.failure = error
        with self._job.lock:
            own.done = True
            self._quiesce.let_go(own.record)
            self._quiesce.rested.notify()

    def _give_up(self, own: LoggedCall, error: PServerError) -> None:
        if not own.record and own.given_up is None:
            own.given_up = error
            self._quiesce.rested.notify()


# ---- decisions ----


class Link(Protocol):
    """The carrier of messages between the servers of a job; see :mod:`pserver.job_log`."""

    def send(self, data: bytes) -> None:
        """Sends a message to the coordinator; to all other servers, where this is the coordinator.
        Returns at once, and keeps the order.
        """

    def close(self) -> None:
        """Ends the link: no message is sent or received any more."""


class Links(Protocol):
    """The connections between the servers of a job; see :mod:`pserver.service.server`."""

    def connect(self, deployment: Deployment, decisions: Decisions, coordinator: str) -> Link:
        """The link of this server to the others, by the coordinator's endpoint."""

    def follow(self, request: FollowRequest) -> str:
        """The session of a server that wants to follow; "" while there is no job to follow."""

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        """Serves a following server's stream until it ends."""

    def tick(self) -> None:
        """Loses silent servers; the server's clock calls it a few times a second."""


class Followed(Protocol):
    """The part of a lane that the log uses."""

    @property
    def index(self) -> int:
        """The index of the lane in the plan."""

    @property
    def undecided(self) -> int:
        """The number of steps that are staged, and have no record."""

    @property
    def staged(self) -> Sequence[Staged]:
        """The steps that have no record."""

    def decided(self, what: Decided, time: float, record: int) -> None:
        """Takes the record of these steps, with its number."""

    def drop(self, member: Member) -> None:
        """Drops a lost trainer's staged steps."""


class Calls(Protocol):
    """The calls that have a place in the log."""

    def logged(self, call: Call, record: int) -> None:
        """Takes the record of a call, with its number."""

    @property
    def waiting(self) -> Sequence[Call]:
        """The calls that this server is ready for, and that have no record."""


def process_of(member: Member) -> Process:
    """A member, as the log names it."""
    return Process(member.trainer, member.incarnation)


class Decisions:
    """This server's notices to the coordinator, and the log's decisions.  The caller holds the
    job's lock, but for :meth:`received`.

    Args:
        servers: of the plan.
        server: this one.
        rounds: by lane, whether all trainers' steps are one update.
        members: the job's trainers.
        lost: called with each lost trainer, and a sentence.
        job: for its lock and its end.
        clock: wall time, in seconds since 1970.
        awaits: a lost server may come back.  (An attribute, too.)
        returned: of a server that has come back: called with the state of the log, before its first
            record.

    Attributes:
        lanes: the lane executors, once they are made.
        calls: those that have a place in the log, once there is one for them.
        joined: by process, the steps by lane after which it begins.
        last: the number of the last record that took effect.
        recorded: called with each record that takes effect.
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
        returned: Callable[[LogSnapshot], None] | None = None,
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
        """Keeps the function that connects to the other servers, for :meth:`link`.  The link begins
        when a trainer joins: a server that was started with its program may wait for long.
        """
        self._dial = dial

    def link(self) -> None:
        """Begins the link, unless it has begun."""
        if self._dial is not None and self._link is None:
            self._link, unsent = self._dial(), self._unsent
            self._unsent = []
            for data in unsent:
                self._send(data)

    def close(self) -> None:
        """Ends the link: the job is over."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    @property
    def decides(self) -> bool:
        """Whether this server is the coordinator."""
        return self.coordinator is not None

    # ---- notices ----

    def staged(self, notice: Staged) -> None:
        """Notes that all of a trainer's step has arrived."""
        if self._cut is not None:
            self._job.fail(self._cut)
        if self.coordinator is None:
            self._send(notices_bytes([notice]))
        else:
            self._append(self.coordinator.staged(0, notice, self._clock()))

    def ready(self, call: Call) -> None:
        """Notes that this server is ready for a call."""
        if self._cut is not None:
            self._job.fail(self._cut)
        if self.coordinator is None:
            self._send(notices_bytes([call]))
        else:
            self._append(self.coordinator.call(0, call, self._clock()))

    def silent(self, process: Process, text: str) -> None:
        """Reports a trainer that has sent nothing for the heartbeat timeout."""
        if self.coordinator is None:
            self._silences[process] = Silence(process, text)
            self._send(notices_bytes([self._silences[process]]))
        else:
            self._append(self.coordinator.lose(process, text, self._clock()))
            self.changed()

    def join(self, process: Process, steps: Sequence[int]) -> None:
        """Notes that a trainer joins this server.

        Args:
            steps: by lane, the last ones before it begins.
        """
        self.link()
        if self.coordinator is not None:
            self._append(self.coordinator.join(process, steps, self._clock()))

    def begins_at(self, members: Membership) -> tuple[int, ...]:
        """By lane, the last counting step of the slowest live trainer: a later one begins after it.
        On the coordinator; the step may not be applied yet.
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
        """Notes that a trainer has left: another process may take its number.

        Args:
            preempted_after: its host was taken away, after this step; None: it was not.
        """
        if self.coordinator is not None:
            self._append(self.coordinator.leave(process, self._clock(), preempted_after))

    def loaded(self) -> None:
        """Notes that other values have taken the place of those that servers held."""
        if self.coordinator is not None:
            self._append(self.coordinator.load(self._clock()))

    def changed(self) -> None:
        """Looks for rounds that are complete now, as fewer trainers are awaited."""
        if self.coordinator is not None and self._job.failure is None:
            for lane, is_round in enumerate(self._rounds):
                if is_round:
                    self._append(self.coordinator.complete(lane, self._clock()))

    # ---- messages of the link ----

    def received(self, server: int, data: bytes) -> None:
        """Takes a message of another server; takes the job's lock.

        Args:
            server: which one.

        Raises:
            ValueError: it is none of this version.
        """
        if self.coordinator is None:
            standing = LogSnapshot.of(data) if self._returned else None
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
        """Handles the end of the link.  The job fails where a step needs it: on a server that has
        had its last step the job may be over already.  Where server 0 may come back, it is followed
        again.
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
        """Handles the loss of another server on server 0: awaits it, or acts as :meth:`cut`."""
        with self._job.lock:
            if self.coordinator is None or not self.awaits or self._closed:
                self.cut(error)
            elif self._job.failure is None:
                self.away[server] = None
                self.coordinator.server_lost(server)
                self._job.log_event("away", f"{error}; nothing is applied until it has come back")

    def server_returned(
        self, server: int, say: Callable[[bytes], None], last: int | None = None
    ) -> None:
        """Handles a server that follows server 0; one that was lost receives the state of the log.

        Args:
            say: sends it a message.
            last: of a server that was not lost, and follows again: the last record that it has.
        """
        with self._job.lock:
            coordinator, away = self.coordinator, server in self.away
            if coordinator is None or self._closed or not (away or last is not None):
                return
            self.away.pop(server, None)
            if last is None:
                say(coordinator.snapshot(server).to_bytes())
                self._job.log_event("back", f"server {server} has come back; the job goes on")
            elif (missing := coordinator.since(last)) is not None:
                say(records_bytes(missing, resumes=True))
                self._job.log_event("back", f"server {server} follows again; the job goes on")
            else:
                self._job.fail(ServerLost(f"server {server} has missed more than is kept"))
            self._job.wake_all()

    @property
    def awaited(self) -> list[int]:
        """The lost servers, as far as this one knows, that are to come back."""
        return [0] if self.resumes else sorted(self.away)

    def came_back(self) -> None:
        """Notes, on server 0, that this process replaces another one: nothing is decided until the
        other servers follow it.
        """
        assert self.coordinator is not None, "server 0 comes back"
        self.last = self.coordinator.last
        self.away = dict.fromkeys(range(1, self._servers))

    def _follows_again(self, error: PServerError) -> bool:
        """Follows server 0 again, on another server that has lost it and may wait for its return.

        Returns:
            Whether it does; False: the loss stands.
        """
        over = self._closed or self._job.failure is not None or self._job.draining
        waits = self.awaits and self.coordinator is None and self._returned is None
        refused = self.resumes and not isinstance(error, ServerLost)  # and not lost once more
        if over or not waits or isinstance(error, Draining) or self._dial is None or refused:
            return False
        self.resumes = True  # the link reports them
        self._link = self._dial()
        said: list[Notice] = [*self._silences.values(), *self._waiting_calls]
        for lane in self.lanes:
            said.extend(lane.staged)
        for notice in said:
            self._link.send(notices_bytes([notice]))
        self._job.log_event("away", f"{error}; nothing is applied until it has come back")
        return True

    @property
    def _waiting_calls(self) -> Sequence[Call]:
        return () if self.calls is None else self.calls.waiting

    def _resumed(self, data: bytes, records: Sequence[Record]) -> Sequence[Record]:
        """The records that this server lacks, once it follows again."""
        if not self.resumes:
            return records
        if not resumes(data):
            return ()  # it receives them once more
        self.resumes = False
        self._job.log_event("back", "server 0 has come back; the job goes on")
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

    # ---- records ----

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
        """Applies records, in their order."""
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
                case Decided() as what:
                    self.lanes[what.lane].decided(what, record.time, record.number)
                case Lost(process, text):
                    self._silences.pop(process, None)
                    self._lost(process, text)
                case Left(process, preempted_after):
                    self._silences.pop(process, None)
                    self._members.leave(process, preempted_after)
                    self._job.wake_all()
                case Joined(process, steps):
                    self.joined[process] = tuple(steps)
                case Call():
                    if self.calls is not None:
                        self.calls.logged(record.what, record.number)
