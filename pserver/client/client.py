"""A trainer's connection to one server: its control calls, a channel of tensors for each lane, its
heartbeat.

This room is the only owner of the protocol on a trainer's side: its interface consists of tensors,
names, hyper-parameters, steps and :class:`~pserver.client.replies.Reply`, and no message leaves it.
The calls, in their order::

    join() -> Admission          opens a channel for each lane, and one for tables
    install(program)             trainer 0, where Admission.install says so; then:
        tables.load(rows)        the rows that tables begin with
        channels[0].load(values) last: every slice and state; from here on the server serves
    channels[0].pull([], destination)    the job's values

    a step of a lane, on its channel:
        begin(destination) -> Reply  a future of it; new values arrive before it
        push(step, gradients)    any number, in any order
        push_rows(step, gradients)
        assign(step, assignments)    where the script has written into parameters
        commit(step, hparams, absent)
        scale(step, coefficients)    where norms clip on servers, after ``norms``

    between steps, on channels[0]:   pull(names, destination), load(values), checksums(names)
    at any time, on tables:          lookup(ids, destination), scan(table, cursor, ...),
                                     mark_saved(table), load(rows)
    at any time:                     barrier, rendezvous, agree, shrink, table_status, saves

    finish(), all_finished()     no further step; the trainers agree that the job is done
    leave()                      says BYE on every channel, then Leave
    tell(failure)                at any time: this trainer ends

A channel has one request at a time; what sends it again after a broken connection is
:mod:`pserver.client.stream`.  A request that brings values says where they go: its ``destination``
gives the memory of each, in the channel's inbox thread.

[Note: joining again]  The heartbeat notices both: that the server does not answer, and that it
answers without knowing this trainer.  Then this trainer joins it once more, with the same
incarnation, and gives it its program where the server asks for it.  What was not answered waits
meanwhile in the channels, which open their streams again, and send it again: the server counts each
step once, with those that were decided before.

[Note: silence]  The heartbeat has a connection and a thread of its own.  A server that has not
answered one for longer than the heartbeat timeout is lost: its channels fail with
:class:`~pserver.errors.ServerLost`.  A server that answers, but whose job has failed, says why, and
the channels fail with that.
The time in which this process has not run does not count: see [Note: one's own pause] in
``pserver/running_clock.py``.  A trainer that was away for longer than the heartbeat timeout, and is
not taken back, says that, and blames no server.
Silence may also be the connection's.  A heartbeat that is not answered within a fifth of the
timeout is sent again over a new connection; see [Note: dialling again] in
``pserver/control/control_client.py``.
The same thread watches the channels' streams: one on which an answer is overdue is opened again;
see [Note: sending again].
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pserver import timeouts
from pserver.client.channel import Channel
from pserver.client.replies import (
    Absences,
    Admission,
    MeetingRound,
    PutOff,
    TableStatus,
    counted,
    log_place_of,
)
from pserver.config import PROTOCOL, split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import (
    CorruptFrame,
    PServerError,
    Refused,
    ServerLost,
    TimedOut,
    TrainerLost,
    UnknownSession,
    Unreachable,
    from_wire,
)
from pserver.leases.epoch import Lease
from pserver.leases.table import EpochRange, LeaseAsked
from pserver.limits import PART_BYTES
from pserver.polling import poll
from pserver.running_clock import RUNNING
from pserver.security.access import OPEN, Access
from pserver.side_business import SideBusiness
from pserver.telemetry.trace import Estimate, Recording, parts_of, whole
from pserver.timeouts import Timeouts
from pserver.transport.memory import ByteCounters
from pserver.transport.registry import TRANSPORTS, suited
from pserver.transport.stream import SequencedStream, Stream, greet
from pserver.wire_pb2 import (
    FinishReply,
    FinishRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Hello,
    InstallRequest,
    JoinReply,
    JoinRequest,
    LaneReport,
    LeaseEnd,
    LeaseEpoch,
    LeaseRange,
    LeaseReply,
    LeaseRequest,
    LeaveReply,
    LeaveRequest,
    MeetMode,
    MeetReply,
    MeetRequest,
    SaveReply,
    SaveRequest,
    ShrinkReply,
    ShrinkRequest,
    TraceAction,
    TraceReply,
    TraceRequest,
    TrainerReport,
    WaitStatus,
)
from transpiler.program import Program

# ---- agreed end ----
#
# The end of a job in agreement: a trainer waits until all have said that they take no further step.


log = logging.getLogger(__name__)


def all_finished(
    ask: Callable[[], FinishReply],
    server: str,
    check: Callable[[], None],
    ends: Callable[[], bool],
) -> bool:
    """Waits until a server reports that all trainers have finished.

    Args:
        ask: the server; it may take a second to answer.
        server: for the log.
        check: raises what has ended the job.
        ends: whether this trainer can wait no longer.

    Returns:
        Whether all have; False: it could wait no longer.
    """
    missing: Sequence[int] = ()

    def text() -> str:
        names = ", ".join(map(str, missing))
        return f"this trainer has finished, and waits for trainer {names} (reported by {server})"

    for _ in poll(log, text):
        reply = ask()
        if reply.over:
            return True
        missing = reply.missing
        check()
        if ends():
            break
    return False


# ---- explained ----
#
# Which error a call ends with whose connection has ended meanwhile.


@contextmanager
def explained(
    check: Callable[[], None], lost_while_away: Callable[[PServerError], TrainerLost | None]
) -> Iterator[None]:
    """Replaces a failed call's error by the one that ended the connection: the heartbeat knows the
    reason better than the call, whose channel it has closed.

    Args:
        check: raises what has ended the connection, if something did.
        lost_while_away: explains an unknown session by this trainer's own pause, if it had one.
    """
    try:
        yield
    except PServerError as error:
        check()
        if isinstance(error, UnknownSession) and (cause := lost_while_away(error)):
            raise cause from error
        raise


# ---- lease calls ----
#
# A trainer's calls to server 0 about leases of samples.


class LeaseCalls:
    """The calls of one trainer.  Any thread may make them, one at a time.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        asked: the answer to a call that is given the session of this trainer.
        check: raises what has ended the job.
    """

    def __init__(
        self,
        control: ControlClient,
        asked: Callable[[Callable[[str], LeaseReply]], LeaseReply],
        check: Callable[[], None],
    ) -> None:
        self._control, self._asked, self._check = control, asked, check

    def ask(self, asked: LeaseAsked) -> Lease:
        """One request; where there is nothing now, it waits a second at most."""
        request = LeaseRequest(
            number=asked.number,
            most=asked.most,
            unstepped=asked.unstepped,
            unused=_messages(asked.unused),
            skipped=_messages(asked.skipped),
            stopped=asked.stopped,
            ended=[LeaseEnd(epoch=n, segment=s, length=length) for n, s, length in asked.ended],
        )
        if asked.epoch is not None:
            request.epoch.CopyFrom(LeaseEpoch(**asked.epoch.plain()))
        reply = self._call(request)
        ranges = tuple((each.start, each.stop) for each in reply.ranges)
        return Lease(ranges, reply.batches, reply.over, reply.left, reply.stripes)

    def state(self) -> str:
        """The lease table, for a checkpoint."""
        return self._call(LeaseRequest()).table

    def restore(self, kept: str) -> None:
        """Restores a checkpoint's lease table, if no trainer has asked for a lease yet."""
        self._call(LeaseRequest(restored=kept))

    def _call(self, request: LeaseRequest) -> LeaseReply:
        def ask(session: str) -> LeaseReply:
            request.session = session
            return self._control.lease(request, meanwhile=self._check)

        return self._asked(ask)


def _messages(ranges: Iterable[EpochRange]) -> list[LeaseRange]:
    return [LeaseRange(epoch=n, start=start, stop=stop) for n, start, stop in ranges]


# ---- meetings ----
#
# A trainer's calls at the meeting place of its job, on server 0.  pserver/job/meetings.py has the
# table of their modes.


REPORT_SECONDS = 20.0  # a script that does not come to its next batch or step can say nothing


@dataclass(frozen=True, slots=True)
class PositionAnswer:
    """Another trainer's answer.

    Attributes:
        position: a text of the trainers' own.
        problem: why there is none; "": there is one.
    """

    position: str
    problem: str = ""


class MeetingCalls:
    """The calls of one trainer.  Any thread may make them.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        asked: the answer to a call that is given the session of this trainer.
        check: raises what has ended the job.
        learn: receives which trainers are there.
    """

    def __init__(
        self,
        control: ControlClient,
        asked: Callable[[Callable[[str], MeetReply]], MeetReply],
        check: Callable[[], None],
        learn: Callable[[Absences], None],
    ) -> None:
        self._control, self._asked, self._check, self._learn = control, asked, check, learn

    def barrier(
        self,
        name: str,
        text: str = "",
        meanwhile: Callable[[], None] = lambda: None,
        past: bool = False,
    ) -> dict[int, str]:
        """Waits until every trainer of the job that has not left has reached the barrier of this
        name.

        Args:
            text: this trainer's text for the others.
            meanwhile: called while it waits; raises what should end the wait.
            past: the others have passed it before this trainer joined.

        Returns:
            The trainers' texts, by trainer, without those that gave none.
        """
        mode = MeetMode.MEET_PAST if past else MeetMode.MEET_ALL
        return dict(self._wait(MeetRequest(mode=mode, key=name, text=text), meanwhile).texts)

    def save(
        self, name: str, text: str, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, str]:
        """Waits likewise at the barrier of an automatic save, to which trainers that wait for
        others come, too.

        Raises:
            PutOff: it is not held.
        """
        reply = self._wait(MeetRequest(mode=MeetMode.MEET_SAVE, key=name, text=text), meanwhile)
        if reply.problem:
            raise PutOff(reply.problem)
        return dict(reply.texts)

    def round(
        self,
        text: str,
        after: int,
        meanwhile: Callable[[], None] = lambda: None,
        ends: bool = False,
        averages: int = 0,
        overflows: int = 0,
    ) -> MeetingRound:
        """Waits until every live trainer has arrived.

        Args:
            text: this trainer's text for the others.
            after: the number of the last round that this trainer was in; 0: none.
            meanwhile: called while it waits; raises what should end the wait.
            ends: this trainer takes no further step.
            averages: of the trainers' gradients that were applied, as far as this one knows.
            overflows: further ones, of steps that overflowed on some trainer.
        """
        request = MeetRequest(
            mode=MeetMode.MEET_ROUND,
            text=text,
            number=after,
            ends=ends,
            averages=averages,
            overflows=overflows,
        )
        reply = self._wait(request, meanwhile)
        return MeetingRound(reply.number, reply.changes, dict(reply.texts))

    def agree(self, key: str, text: str = "") -> str:
        """Proposes a text under a key; the first trainer's text counts.

        Args:
            text: "" only asks.

        Returns:
            The first trainer's text; "" where there is none yet.
        """
        return self._kept(MeetRequest(mode=MeetMode.MEET_FIRST, key=key, text=text))

    def set(self, key: str, text: str) -> str:
        """Sets the text under a key, or replaces the one that this trainer has set.

        Returns:
            The text that counts: another trainer's, where that has set it before.
        """
        return self._kept(MeetRequest(mode=MeetMode.MEET_SET, key=key, text=text))

    def ask(self, who: Callable[[], str]) -> PositionAnswer:
        """Asks for the others' position; waits for a while until one of them reports it.

        Args:
            who: gives the trainer that is waited for, in words.
        """
        request = MeetRequest(mode=MeetMode.MEET_ASK)
        what = f"waiting for {who()} to report its position"
        for _ in poll(log, lambda: what, REPORT_SECONDS):
            reply = self._call(request)
            if reply.over:
                return PositionAnswer(_only(reply), reply.problem)
            request.number = reply.number
            self._check()
        why = f"{who()} has not reported its position within {REPORT_SECONDS:g} s"
        return PositionAnswer("", why)

    def answer(self, number: int, told: PositionAnswer, step: int) -> bool:
        """Answers a question for the position.

        Args:
            number: of the question.
            step: that the position is just before, of the lane whose steps need all trainers; 0:
                there is no such lane.

        Returns:
            Whether that was an answer: not where the step is decided already.
        """
        request = MeetRequest(
            mode=MeetMode.MEET_ANSWER,
            number=number,
            text=told.position,
            problem=told.problem,
            step=step,
        )
        return self._call(request).over

    def _kept(self, request: MeetRequest) -> str:
        return _only(self._call(request))

    def _wait(self, request: MeetRequest, meanwhile: Callable[[], None]) -> MeetReply:
        """The reply when all have arrived, or it is put off; a call waits for a second."""
        while not ((reply := self._call(request)).over or reply.problem):
            self._check()
            meanwhile()
        self._learn(Absences.of(reply.roll))
        return reply

    def _call(self, request: MeetRequest) -> MeetReply:
        def ask(session: str) -> MeetReply:
            request.session = session
            return self._control.meet(request, meanwhile=self._check)

        return self._asked(ask)


def _only(reply: MeetReply) -> str:
    """The one text of a reply; "": it has none."""
    return next(iter(reply.texts.values()), "")


# ---- save calls ----
#
# A trainer's calls to one server that have it write what it holds.


@dataclass(frozen=True, slots=True)
class SaveState:
    """The state of a server's save.

    Attributes:
        file: its place, as the server reports it.
        bytes: that are written.
        done: it is whole, and may be read, or has failed.
        failure: why it has failed; "": it has not.
        seconds: since it began; once it is done, how long it took.
        pause_seconds: for how long steps waited for it.
        identity: of what is whole; "": it is not.
    """

    file: str
    bytes: int
    done: bool
    failure: str
    seconds: float
    pause_seconds: float
    identity: str = ""

    @classmethod
    def from_message(cls, reply: SaveReply) -> SaveState:
        """The state that a reply tells."""
        measured = reply.seconds, reply.pause_seconds
        return cls(reply.file, reply.bytes, reply.done, reply.failure, *measured, reply.identity)


class SaveCalls:
    """The saves that one trainer asks of one server.  Any thread may make them.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        session: of this trainer.
    """

    def __init__(self, control: ControlClient, session: str) -> None:
        self._control, self._session = control, session

    def in_background(self, path: str, number: int, base: str = "") -> SaveState:
        """Makes the server write all that it holds now, while steps continue; or asks for the
        progress of that.

        Returns as soon as the moment that is saved is fixed, which is one place in the job's log:
        so it is called on all servers side by side.  The call may be repeated as often as
        one likes: of one number one save is begun.

        Args:
            path: below the server's directory or store.
            number: of this trainer's saves on this server, from 1.
            base: the path of the last of them: of tables only the rows that have changed since
                are written; "": all rows.

        Raises:
            Busy: another save is being written there.
            Refused: the server keeps no files, or cannot write there, or what has changed since
                ``base`` is not known; or it was withdrawn.
        """
        request = SaveRequest(session=self._session, path=path, background=True)
        request.number, request.base = number, base
        return SaveState.from_message(self._control.save(request))

    def withdraw(self, number: int) -> None:
        """Withdraws the save of this number, unless it has begun: another server cannot save."""
        self._control.save(SaveRequest(session=self._session, number=number, withdraw=True))


# ---- server return ----
#
# A server that does not answer any more, and may come back: its launcher starts another
# process in its place, which a trainer joins again.


class ServerReturn:
    """Decides whether, and for how long, a trainer awaits one server.  The heartbeat's thread asks.

    Args:
        server: for the log: "server 1 at HOST:PORT".

    Attributes:
        seconds: for how long, beyond the heartbeat timeout; 0: it does not come back.
        count: how often it has.
    """

    def __init__(self, server: str) -> None:
        self._server, self.seconds, self.count = server, 0.0, 0
        self._said = False

    def awaits(self, error: PServerError, silence: float, limits: Timeouts) -> bool:
        """Whether a server that has not answered a heartbeat is awaited; logs once that it is.

        Args:
            error: what the heartbeat has ended with.
            silence: seconds since the last answer.
            limits: of the job.
        """
        silent = isinstance(error, Unreachable | TimedOut)
        if not (self.seconds and silent and silence <= limits.lost + self.seconds):
            return False
        if not self._said and silence > limits.notice:
            self._said = True
            log.warning(
                "waits for %s, which does not answer, for up to %g s: %s",
                *(self._server, limits.lost + self.seconds, error),
            )
        return True

    def joined(self) -> None:
        """Notes that the server has come back, and that this trainer has joined it again."""
        self._said, self.count = False, self.count + 1
        text = "%s has come back: joined it again, resending what it has not answered"
        log.warning(text, self._server)


# ---- trace calls ----
#
# A trainer's calls to one server that belong to a trace, and the server's clock.


ROUNDS = 8  # of questions for the clock, at either end of a trace


class TraceCalls:
    """The calls of one trainer to one server.  Any thread may make them.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        session: of this trainer.
        name: of the server, for messages.
    """

    def __init__(self, control: ControlClient, session: str, name: str) -> None:
        self._control, self._session, self._name = control, session, name

    def begin(self, number: int) -> None:
        """Makes the server record its spans from now on; measures its clock anew.

        Args:
            number: of this trainer's traces in the job, from 1.
        """
        self._control.clock.restart()
        self._call(TraceAction.TRACE_BEGIN, number)
        self.ask_clock()

    def ask_clock(self) -> None:
        """Asks for the server's clock a few times."""
        for _ in range(ROUNDS):
            self._call(TraceAction.TRACE_CLOCK, 0)

    @property
    def clock(self) -> Estimate | None:
        """The seconds by which the server's clock is ahead; None before the first round."""
        return self._control.clock.estimate()

    def leave(self, number: int, recording: Recording) -> None:
        """Leaves this trainer's spans at the server, for trainer 0."""
        parts = parts_of(recording.to_bytes())
        for index, part in enumerate(parts):
            self._call(TraceAction.TRACE_LEAVE, number, index=index, parts=len(parts), part=part)

    def left_by(self, trainer: int, number: int) -> Recording | None:
        """A trainer's trace; None: it is not complete yet.

        Raises:
            CorruptFrame: it is no recording of that trainer.
        """
        found = self._parts(TraceAction.TRACE_READ, number, trainer)
        return None if found is None else self._recording(found, "trainer", trainer)

    def end(self, number: int, server: int) -> Recording:
        """Ends the trace on the server; returns its recorded spans.

        Args:
            server: its index.

        Raises:
            CorruptFrame: it is no recording of that server.
        """
        return self._recording(self._parts(TraceAction.TRACE_END, number) or b"", "server", server)

    def _recording(self, data: bytes, kind: str, number: int) -> Recording:
        try:
            recording = Recording.from_bytes(data)
        except ValueError as error:
            raise CorruptFrame(f"{self._name}: {error}") from error
        if (recording.kind, recording.number) != (kind, number):
            raise CorruptFrame(f"{self._name}: expected {kind} {number}, got {recording.name}")
        return recording

    def _parts(self, action: TraceAction, number: int, trainer: int = 0) -> bytes | None:
        first = self._call(action, number, trainer=trainer)
        if not first.parts:
            return None
        others = [
            self._call(action, number, trainer=trainer, index=index).part
            for index in range(1, first.parts)
        ]
        return whole([first.part, *others])

    def _call(
        self,
        action: TraceAction,
        number: int,
        trainer: int = 0,
        index: int = 0,
        parts: int = 0,
        part: bytes = b"",
    ) -> TraceReply:
        request = TraceRequest(
            session=self._session,
            action=action,
            number=number,
            trainer=trainer,
            index=index,
            parts=parts,
            part=part,
        )
        return self._control.trace(request, timeouts.CALL_SECONDS)


# ---- report ----
#
# What a trainer says of its training with each heartbeat.


MOST_VALUES = 64  # of a report: a server keeps no more


@dataclass(slots=True)
class TrainerLaneTotals:
    """A trainer's measurements of one lane's steps: running totals.

    Attributes:
        steps: that the script has closed.
        step_seconds: from one step's close to the next one's.
        blocked_seconds: for how long the script's thread waited in steps.
        wait_seconds, waits: by server, from a commit until it was answered, and how many.
    """

    steps: int = 0
    step_seconds: float = 0.0
    blocked_seconds: float = 0.0
    wait_seconds: dict[int, float] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)

    def answered(self, server: int, seconds: float) -> None:
        """Adds the time of a server's answer to a commit.  One thread calls it for each server."""
        self.wait_seconds[server] = self.wait_seconds.get(server, 0.0) + seconds
        self.waits[server] = self.waits.get(server, 0) + 1

    def message(self, server: int) -> LaneReport:
        """The part of the totals for one server, as a message."""
        return LaneReport(
            steps=self.steps,
            step_seconds=self.step_seconds,
            blocked_seconds=self.blocked_seconds,
            wait_seconds=self.wait_seconds.get(server, 0.0),
            waits=self.waits.get(server, 0),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A trainer's report of its training.

    Attributes:
        samples: that the script has reported.
        values: the script's own numbers, by name.
        memory_bytes: resident; 0: not known.
        lanes: by lane.
        saves: checkpoints of the whole job that it has completed.
        since_save_seconds: since the last of them; 0 where there is none.
        position: in the data: passes begun, batches of the last one, and how many it has (0: not
            known).
        settings: of the script, in words.
        wrong_lines: of files, that it has left out.
    """

    samples: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    lanes: Sequence[TrainerLaneTotals] = ()
    saves: int = 0
    since_save_seconds: float = 0.0
    position: tuple[int, int, int] = (0, 0, 0)
    settings: Mapping[str, str] = field(default_factory=dict)
    wrong_lines: int = 0


def heartbeat(
    session: str, activity: str, report: Report, server: int, channels: Iterable[Channel]
) -> HeartbeatRequest:
    """A heartbeat to a server, with its content.

    Args:
        server: its index.
        channels: all to this server.
    """
    streams = list(channels)
    names = sorted(report.values)[:MOST_VALUES]
    passes, batch, batches = report.position
    return HeartbeatRequest(
        session=session,
        activity=activity,
        report=TrainerReport(
            samples=report.samples,
            values={name: report.values[name] for name in names},
            memory_bytes=report.memory_bytes,
            lanes=[lane.message(server) for lane in report.lanes],
            bytes_in=sum(channel.bytes_in for channel in streams),
            bytes_out=sum(channel.bytes_out for channel in streams),
            reconnects=sum(channel.reconnects for channel in streams),
            saves=report.saves,
            since_save_seconds=report.since_save_seconds,
            passes=passes,
            batch=batch,
            batches=batches,
            settings=report.settings,
            wrong_lines=report.wrong_lines,
        ),
    )


# ---- install requests ----
#
# The requests that bring a program to a server: one, or one for each part of a long program.


def install_requests(session: str, program: Program) -> Iterator[InstallRequest]:
    """The messages that install a program, in order.

    Args:
        session: of the trainer that installs.
    """
    message = program.to_proto()
    whole = message.SerializeToString()
    if len(whole) <= PART_BYTES:
        yield InstallRequest(session=session, program=message)
        return
    parts = [whole[begin : begin + PART_BYTES] for begin in range(0, len(whole), PART_BYTES)]
    for number, part in enumerate(parts):
        yield InstallRequest(session=session, part=part, number=number, parts=len(parts))


# ---- client ----


POLL_SECONDS = 0.1  # between two questions whether a server takes this trainer

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Identity:
    """A trainer's description of itself on joining.

    Attributes:
        incarnation: a random text, new for each start of the process.
        fingerprint, manifest: the plan's.
        transports: that the trainer can use, the preferred one first.
        coordinator: the control endpoint of server 0.
    """

    trainer_id: int
    incarnation: str
    fingerprint: str
    manifest: Mapping[str, str]
    transports: Sequence[str]
    coordinator: str = ""


class Client:
    """One trainer's connection to one server.

    The script's thread calls it; the heartbeat's thread reads ``activity`` and fails the channels.

    Args:
        endpoint: the server's control endpoint, HOST:PORT.
        index: of the server in the plan.
        identity: the trainer.
        heartbeat_timeout_seconds: without an answer to a heartbeat for so long the server is lost;
            the server's own number replaces it on joining.
        start_timeout_seconds: how long to wait for the server to come up and to be installed.
        lanes: their number in the plan.
        tables: whether the plan has some.
        access: what is proved to the server, and asked of it.

    Attributes:
        channels: one for each lane, from :meth:`join` on.
        tables: the channel on which rows are read and loaded, if any.
        meanwhile: called while :meth:`join` waits; raises what should end the wait.
        activity: what the trainer does, for ``pserver status``.
        reported: called for each heartbeat: what the trainer says of its training.
        learn: called, in any thread, with the trainers that are absent, as the server reports them.
        asked: called, in the heartbeat's thread, with the number of a question about the script's
            position, which this trainer is to answer.
        traffic: payload bytes by name on the wire.
        late: this trainer has joined others that train already, and does not know their position.
    """

    _waits_said: Collection[int] = ()  # numbers of waits

    def __init__(
        self,
        endpoint: str,
        index: int,
        identity: Identity,
        heartbeat_timeout_seconds: float,
        start_timeout_seconds: float,
        lanes: int,
        tables: bool = False,
        access: Access = OPEN,
    ) -> None:
        self.endpoint = endpoint
        self._program: Program | None = None
        self._access = access
        self.index = index
        self.transport = ""
        self.activity = ""
        self.reported: Callable[[], Report] = Report
        self.learn: Callable[[Absences], None] = lambda absences: None
        self.asked: Callable[[int], None] = lambda number: None
        self.channels: list[Channel] = []
        self.traffic = ByteCounters()
        self.tables: Channel | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._identity = identity
        self._transports = suited(identity.transports, split_endpoint(endpoint)[0])
        self._timeouts = Timeouts(heartbeat_timeout_seconds)
        self._start_timeout = start_timeout_seconds
        self._lanes, self._has_tables = lanes, tables
        self._control = ControlClient(endpoint, heartbeat_timeout_seconds, str(self), access)
        self._reply = JoinReply()
        self._answered = 0.0  # when the last heartbeat began that was answered
        self.late = self._joined = False  # every stream has been opened once
        self._shrinks = 0  # calls
        self._failure: PServerError | None = None  # what the heartbeat has found
        self._return = ServerReturn(str(self))
        self._closing = threading.Event()
        self._heartbeat = threading.Thread(
            target=self._beat, name=f"heartbeat {endpoint}", daemon=True
        )

    def __str__(self) -> str:
        return f"server {self.index} at {self.endpoint}"

    # ---- joining and leaving ----

    def join(self, program: Program | None = None) -> Admission:
        """Joins the server's job and opens a stream for each lane; waits until the server is up and
        installed.

        Args:
            program: of the server, where it may come back when it is lost, and asks for it; None:
                it does not.

        Returns:
            Whether this trainer is to install the server, and the steps that were applied.

        Raises:
            Unreachable: the server does not answer within the start-up timeout.
            TimedOut: it answers, but trainer 0 has not installed it by then.
            Refused: it said no; see the subclasses.
        """
        self._program = program
        self._control.wait_ready(self._start_timeout, lambda: self.meanwhile())
        self._reply = self._ask_to_join(self.meanwhile)
        self.transport = self._reply.transport
        timeout = self._reply.heartbeat_timeout_seconds or self._timeouts.lost
        self._timeouts = Timeouts(timeout)
        if self._reply.awaits_servers and self._program is not None:
            self._return.seconds = self._start_timeout
        self._answered = time.monotonic()
        self._heartbeat.start()
        said = timeout, str(self), self._return.seconds, self._lost_while_away
        for lane in range(self._lanes):
            self.channels.append(Channel(partial(self._open, lane, False), *said))
        if self._has_tables:
            self.tables = Channel(partial(self._open, 0, True), *said)
        self._joined, self.late = True, self._reply.late
        self.learn(Absences.of(self._reply.roll))
        return Admission.from_message(self._reply)

    @property
    def heartbeat_timeout_seconds(self) -> float:
        """The server's own, from :meth:`join` on."""
        return self._timeouts.lost

    @property
    def left(self) -> bool:
        """Whether this trainer has left the job."""
        return self._closing.is_set()

    @property
    def every_channel(self) -> list[Channel]:
        """The lanes' channels, and the tables'."""
        return self.channels if self.tables is None else [*self.channels, self.tables]

    def _open(self, lane: int, tables: bool, number: int) -> Stream:
        """The stream of that number of a lane, or of the tables, after HELLO."""
        stream = SequencedStream(
            self._connect() if self._joined else self._connect_joining(), self.traffic
        )
        own, session = self._identity.trainer_id, self._reply.session
        hello = Hello(session=session, trainer_id=own, lane=lane, stream=number, tables=tables)
        # it has broken already: the channel's inbox sees that, and opens another
        with suppress(Unreachable):
            greet(stream, hello, self._access, self.endpoint, self._timeouts.connection)
        return stream

    def _connect(self) -> Stream:
        host, _ = split_endpoint(self.endpoint)
        return TRANSPORTS[self.transport].connect(
            host,
            self._reply.data_port,
            timeout_seconds=self._timeouts.connection,
            keys=self._access.keys,
        )

    def _connect_joining(self) -> Stream:
        """A stream, tried again for the heartbeat timeout, and for as long as a server is awaited;
        over another transport at once where the trainer can use others.
        """
        text = f"waiting for {self} to open a stream over {self.transport}"
        broken = Unreachable(f"{self}: no stream over {self.transport}")
        seconds = self._timeouts.lost + self._return.seconds
        for _ in poll(log, lambda: text, seconds, POLL_SECONDS):
            try:
                return self._connect()
            except Unreachable as error:
                broken = error
            if len(self._transports) > 1:
                self._take_another_transport(broken)
            elif self.transport == "shm" and not self._return.seconds:  # no network may recover
                break
            else:
                self.check()
                self.meanwhile()
        raise broken

    def _take_another_transport(self, error: Unreachable) -> None:
        before = self.transport
        self._transports.remove(before)
        self._reply = self._ask_to_join(self.meanwhile)
        self.transport = self._reply.transport
        log.warning("%s: %s; taking %s instead of %s", self, error, self.transport, before)

    def _ask_to_join(self, meanwhile: Callable[[], None]) -> JoinReply:
        request = JoinRequest(
            protocol=PROTOCOL,
            trainer_id=self._identity.trainer_id,
            incarnation=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            manifest=dict(self._identity.manifest),
            transports=self._transports,
            server_index=self.index,
            coordinator=self._identity.coordinator,
        )
        text = f"waiting for trainer 0 to install {self} (or for the job there to end)"
        text = f"waiting for {self} to continue the job" if self._joined else text
        end, reply = RUNNING() + self._start_timeout, JoinReply()

        def waiting() -> str:
            if not reply.held:
                return text
            others = ", ".join(map(str, reply.held_by))
            return (
                f"waiting for trainer {others} to finish a pass: they share this trainer's "
                "samples of it, and it steps with them after that"
            )

        for _ in poll(log, waiting, pause_seconds=POLL_SECONDS):
            if (reply := self._control.join(request)).ready:
                return reply
            if reply.held:  # however long that takes
                end = RUNNING() + self._start_timeout
            elif RUNNING() > end:
                break
            if reply.wants_program and self._program is not None:
                with suppress(UnknownSession):  # another process has taken the server's place
                    for part in install_requests(reply.session, self._program):
                        self._control.install(part, self._start_timeout, meanwhile)
            meanwhile()
        raise TimedOut(
            f"{self} is up, but trainer 0 has not started its job there within "
            f"{self._start_timeout:.0f} s"
        )

    def install(self, program: Program) -> None:
        """Gives the server its program.

        Creating its tables may take long: only silence, or the start-up timeout, ends this call.
        """
        with explained(self.check, self._lost_while_away):
            for request in install_requests(self._reply.session, program):
                self._control.install(request, self._start_timeout, self.check)

    def shrink(self, days: float, threshold: float | None, tables: Sequence[str]) -> dict[str, int]:
        """Applies time decay to the server's rows, then drops those below the score threshold or
        past their TTL.  All servers do it at one place in the job's log, so it is called on all of
        them side by side.

        Returns:
            How many rows were dropped, by table.
        """
        self._shrinks += 1
        request = ShrinkRequest(days=days, threshold=threshold, tables=tables)
        request.number = self._shrinks

        def ask(session: str) -> ShrinkReply:
            request.session = session
            return self._control.shrink(request, meanwhile=self.check)

        return dict(self._asked(ask).removed)

    def table_status(self) -> list[TableStatus]:
        """The status of each table on the server."""
        reply = self._asked(lambda session: self._control.status())
        return [TableStatus.from_message(table) for table in reply.tables]

    def update_seconds(self) -> float:
        """How long the server has merged and updated, in all lanes."""
        reply = self._asked(lambda session: self._control.status())
        return sum(lane.update_seconds for lane in reply.lanes)

    def epoch_status(self) -> dict[int, dict[str, int]]:
        """By number, the passes whose samples leases deal out: those under way, or the last one."""
        reply = self._asked(lambda session: self._control.status())
        return {epoch.number: counted(epoch) for epoch in reply.epochs}

    def log_place(self) -> dict[str, Any]:
        """The entry of its recorded log at which the server is; nothing where it records none."""
        return log_place_of(self._control.status().recording)

    def check(self) -> None:
        """Raises the error that ended the connection, if one did."""
        if (failure := self.failure) is not None:
            raise failure

    @property
    def failure(self) -> PServerError | None:
        """The error that ended the connection, if one did."""
        if self._failure is not None:
            return self._failure
        for channel in self.channels:
            if channel.failure is not None:
                return channel.failure
        return None if self.tables is None else self.tables.failure

    def finish(self) -> None:
        """Declares that this trainer takes no further step; the others then step without it.

        Raises:
            PServerError: what ended the job.
        """
        self._asked(lambda session: self._control.finish(FinishRequest(session=session)))

    def all_finished(self, ends: Callable[[], bool] = lambda: False) -> bool:
        """Waits until every trainer of the job has finished.

        Args:
            ends: asked while it waits, whether this trainer can wait no longer.

        Returns:
            Whether they have.

        Raises:
            PServerError: what ended the job.
        """

        def ask() -> FinishReply:
            return self._asked(
                lambda session: self._control.finish(FinishRequest(session=session, wait=True))
            )

        return all_finished(ask, str(self), self.check, ends)

    def announce_end(self, failure: str, timeout: float) -> None:
        """Reports that this trainer ends, and why; does nothing else, so that any thread may call
        it at any time.

        Args:
            timeout: in seconds.
        """
        if session := self._reply.session:
            request = LeaveRequest(session=session, failure=failure)
            with suppress(PServerError):
                self._control.leave(request, timeout)

    def leave(
        self, failure: str = "", returns: bool = False, preempted_after: int | None = None
    ) -> PServerError | None:
        """Leaves, or reports why this trainer cannot continue, and ends the threads; never raises;
        further calls do nothing.

        Args:
            returns: this trainer joins again, with another plan.
            preempted_after: its host takes it away, after this step of the script.

        Returns:
            The error that had ended the job before, if the server reports one.
        """
        if self._closing.is_set():
            return None
        self._closing.set()
        for channel in self.every_channel:
            channel.close(abruptly=bool(failure))
        told = None
        try:
            if session := self._reply.session:
                request = LeaveRequest(session=session, failure=failure, returns=returns)
                request.success = not failure
                if preempted_after is not None:
                    request.preempted, request.step = True, preempted_after
                reply = self._goodbye(request)
                if reply.failure:
                    told = from_wire(reply.error, f"{self}: {reply.failure}")
        except PServerError as error:
            log.warning("could not say goodbye: %s", error)
        self._control.close()
        return told

    def _goodbye(self, request: LeaveRequest) -> LeaveReply:
        """Leaves a server.  An awaited server that is unreachable when this trainer is preempted
        would wait for it for the heartbeat timeout: so this trainer waits as long for that server.
        """
        end = RUNNING() + self._timeouts.lost

        def check_time() -> None:
            if RUNNING() > end:
                raise TimedOut(f"{self} has not come back")

        while True:
            try:
                return self._control.leave(request)
            except (Unreachable, TimedOut, UnknownSession) as error:
                if not (request.preempted and self._return.seconds):
                    raise
                check_time()
                if not isinstance(error, UnknownSession):
                    time.sleep(POLL_SECONDS)
                    continue
            try:
                reply = self._ask_to_join(check_time)  # it has come back
            except TrainerLost:  # it had heard this trainer: nobody waits for it
                return LeaveReply()
            if reply.install:  # likewise, and its job is over
                return LeaveReply()
            request.session = reply.session

    # ---- repeated calls, after the server's return ----

    def _asked(self, call: Callable[[str], Answer]) -> Answer:
        """Makes a call, and repeats it where the server is awaited and has come back.

        Args:
            call: with the session that counts now.
        """
        while True:
            session = self._reply.session
            try:
                with explained(self.check, self._lost_while_away):
                    return call(session)
            except (Unreachable, TimedOut, UnknownSession):
                if not self._return.seconds or self._closing.wait(POLL_SECONDS):
                    raise

    @property
    def store(self) -> str:
        """The directory, or the URL, below which the server keeps files; "": it keeps none."""
        return self._reply.store

    @property
    def saves(self) -> SaveCalls:
        """The calls that have the server write what it holds."""
        return SaveCalls(self._control, self._reply.session)

    @property
    def leases(self) -> LeaseCalls:
        """The calls about leases of samples; server 0 answers them."""
        return LeaseCalls(self._control, self._asked, self.check)

    @property
    def meetings(self) -> MeetingCalls:
        """The calls at the trainers' meeting place; server 0 answers them."""
        return MeetingCalls(self._control, self._asked, self.check, self.learn)

    @property
    def tracing(self) -> TraceCalls:
        """The calls that belong to a trace."""
        return TraceCalls(self._control, self._reply.session, str(self))

    # ---- the heartbeat ----

    @property
    def returned(self) -> int:
        """The number of times that the server has come back, and was joined again."""
        return self._return.count

    def _beat(self) -> None:
        """See [Note: silence]."""
        with RUNNING.ticking():
            self._beat_until_closed()

    def _beat_until_closed(self) -> None:
        interval = self._timeouts.beat
        begun, answered = time.monotonic(), RUNNING()
        unanswered = 0
        reporting = SideBusiness("what a heartbeat says and hears")
        while not self._closing.wait(max(begun + interval - time.monotonic(), 0.0)):
            begun = time.monotonic()
            left = self._timeouts.lost - (RUNNING() - answered)
            left = max(left, timeouts.LAST_BEAT_SECONDS)
            seconds = min(self._timeouts.answer * 2**unanswered, left)
            session, streams = self._reply.session, self.every_channel
            said = reporting.do(self.reported) or Report()
            request = heartbeat(session, self.activity, said, self.index, streams)
            try:
                reply = self._heartbeat_answered(request, seconds, unanswered > 0)
            except PServerError as error:
                unanswered += 1
                if self._comes_back(error, RUNNING() - answered):
                    if isinstance(error, UnknownSession):
                        answered, unanswered = RUNNING(), 0
                    continue
                if self._is_lost(error, RUNNING() - answered):
                    return
                continue
            if unanswered:
                log.warning("%s answers again, over a new connection", self)
            answered, unanswered = RUNNING(), 0
            self._answered = begun
            reporting.do(partial(self.learn, Absences.of(reply.roll)))
            self._say_waits(reply.waits)
            if reply.failure:
                self._fail(from_wire(reply.error, f"{self}: {reply.failure}"))
                return
            if reply.position_asked:
                reporting.do(partial(self.asked, reply.position_asked))
            for channel in self.every_channel:
                channel.end_if_silent()

    def _say_waits(self, waits: Iterable[WaitStatus]) -> None:
        """Logs each long wait of this trainer once, with the trainers that it waits for."""
        said = {each.number: each for each in waits}
        for number, wait in said.items():
            if number not in self._waits_said:
                whom = ", ".join(map(str, wait.for_whom)) or "(none)"
                log.warning(
                    "this trainer waits at %s for trainer %s, for %.0f s now (reported by %s)",
                    *(wait.what, whom, wait.seconds, self),
                )
        self._waits_said = said.keys()

    def _heartbeat_answered(
        self, request: HeartbeatRequest, seconds: float, anew: bool
    ) -> HeartbeatReply:
        try:
            return self._control.heartbeat(request, timeout=seconds, anew=anew)
        except OSError as error:  # of this system: it has no descriptor, or no memory, left
            raise Unreachable(f"{self}: {error}") from error

    def _comes_back(self, error: PServerError, silence: float) -> bool:
        """Whether a server that has not answered is awaited, or has come back and was joined again.

        See [Note: joining again] in client.py.
        """
        known = not isinstance(error, UnknownSession)
        if known and self._lost_while_away(error):
            return False  # lost itself: the servers may have ended without it
        if known or not self._return.seconds:
            return self._return.awaits(error, silence, self._timeouts)
        try:
            reply = self._ask_to_join(self._check_open)
            if reply.install:
                raise ServerLost("it holds nothing of the job")
            self._reply = reply
        except (Unreachable, TimedOut):
            return True  # it has gone once more
        except TrainerLost as lost:  # it was never away, and has dropped this trainer
            self._fail(lost)
            return False
        except PServerError as refusal:
            self._fail(ServerLost(f"{self} has restarted: {refusal}"))
            return False
        self.transport = self._reply.transport
        self._return.joined()
        for channel in self.every_channel:
            channel.renew()
        return True

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Unreachable(f"{self}: this trainer leaves")

    def _is_lost(self, error: PServerError, silence: float) -> bool:
        """Whether a heartbeat that ended with an error means that the server is lost; fails the
        channels then.
        """
        away = self._lost_while_away(error)
        if away and (isinstance(error, Refused) or silence > self._timeouts.lost):
            self._fail(away)
        elif isinstance(error, Refused):  # it answers, and has no such trainer
            self._fail(ServerLost(f"{self} does not know this trainer any more: {error}"))
        elif silence <= self._timeouts.lost:
            return False
        else:
            limit = f"heartbeat timeout {self._timeouts.lost:g} s"
            text = f"{self} has not answered for {silence:.1f} s ({limit}): {error}"
            self._fail(ServerLost(text))
        self._control.close()  # and with it every call that waits for the server
        return True

    def _lost_while_away(self, error: PServerError) -> TrainerLost | None:
        """The error of a trainer that was lost because it did not run; None where it ran.

        A server that answers, and does not know the session, has dropped this trainer where the
        pause made its silence longer than the heartbeat timeout.  For one that does not answer the
        pause alone counts: that silence may be the server's.

        Args:
            error: the server's present answer, or that it gives none.
        """
        seconds, timeout = RUNNING.away_since(self._answered), self._timeouts.lost
        answers = isinstance(error, UnknownSession)
        silence = time.monotonic() - self._answered if answers else seconds
        if not seconds or silence <= timeout:
            return None
        return TrainerLost(
            f"this trainer did not run for {seconds:.1f} s (it was stopped, or its host was), so "
            f"it was silent for longer than the heartbeat timeout of {timeout:g} s: the job has "
            f"gone on, or ended, without it; {self} now: {error}"
        )

    def _fail(self, error: PServerError) -> None:
        self._failure = self._failure or error
        for channel in self.every_channel:
            channel.fail(error)
