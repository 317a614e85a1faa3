"""A trace on one trainer: from its start to the file that trainer 0 writes.

The spans of a few steps are recorded in memory; afterwards a thread gathers those of all processes,
while training continues.

::

    ARMED --the step before the first one ends--> NOTING --its last step ends--> TELLING --> OVER
                                                    `-----the job ends----------^
"""

from __future__ import annotations

import atexit
import enum
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pserver.client.client import Client
from pserver.errors import PServerError, Unreachable
from pserver.onlookers import look_again, onlooker
from pserver.polling import poll
from pserver.storage.single_file import file_to_write
from pserver.telemetry.trace import SPANS, Estimate, Recording, document, now
from trainer.environment.environment import Connection
from transpiler.files.files import is_url, shown

if TYPE_CHECKING:
    from trainer.communicator.communicator import Communicator


# ---- gathering through servers ----
#
# How the trainers of a job with servers gather the spans of a trace: the others leave theirs at
# server 0, and trainer 0 reads those and the servers'.


PAUSE_SECONDS = 0.1  # between two looks

log = logging.getLogger(__name__)


class ServerMeeting:
    """One trainer's part in gathering spans; see
    :class:`~trainer.communicator.trace.SpanGathering`.

    Clocks are compared with those of servers: a trainer's with trainer 0's by way of server 0.

    Args:
        clients: the connections, by server.
        trainers: of the job.
    """

    def __init__(self, clients: Sequence[Client], trainers: int) -> None:
        self._clients, self._trainers = clients, trainers

    def begin(self, number: int) -> None:
        """Starts recording on the servers.

        Raises:
            PServerError: one of them cannot be reached.
        """
        for client in self._clients:
            client.tracing.begin(number)

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """Leaves the spans of a trainer other than 0 at server 0.

        Raises:
            PServerError: the server cannot be reached, or refuses.
        """
        calls = self._clients[0].tracing
        calls.ask_clock()
        clock = _known(calls.clock, "server 0")
        recording.offset_ns, recording.bound_ns = -clock.offset_ns, clock.bound_ns
        recording.clock = f"the shortest of {clock.rounds} rounds with server 0"
        calls.leave(number, recording)

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """Reads, on trainer 0, the spans that the others have left, and the servers' spans.

        Args:
            seconds: to wait for the other trainers.
            hurried: whether to wait no longer.

        Returns:
            Their recordings, by trainer 0's clock; and the missing processes, with the reasons.
        """
        found: list[Recording] = []
        missing: dict[str, str] = {}
        try:
            self._clients[0].tracing.ask_clock()
            first = _known(self._clients[0].tracing.clock, "server 0")
            missing |= self._trainers_left(number, seconds, hurried, found)
        except PServerError as error:
            missing |= {f"trainer {each}": str(error) for each in range(1, self._trainers)}
        for recording in found:
            recording.offset_ns += first.offset_ns
            recording.bound_ns += first.bound_ns
            recording.clock += f", and of {first.rounds} of trainer 0 with it"
        for client in self._clients:
            try:
                found.append(_of_server(client, number))
            except PServerError as error:
                missing[f"server {client.index}"] = str(error)
        return found, missing

    def _trainers_left(
        self, number: int, seconds: float, hurried: Callable[[], bool], found: list[Recording]
    ) -> dict[str, str]:
        """Adds the other trainers' recordings to ``found``; returns the trainers that left none."""
        client, wanted = self._clients[0], set(range(1, self._trainers))

        def text() -> str:
            return f"the trace waits for trainer {', '.join(map(str, sorted(wanted)))}"

        for _ in poll(log, text, seconds, PAUSE_SECONDS):
            for trainer in sorted(wanted):
                if (recording := client.tracing.left_by(trainer, number)) is not None:
                    found.append(recording)
                    wanted.discard(trainer)
            if not wanted or hurried() or client.failure is not None:
                break
        return {f"trainer {trainer}": "it left no spans" for trainer in sorted(wanted)}


def _of_server(client: Client, number: int) -> Recording:
    calls = client.tracing
    calls.ask_clock()
    clock = _known(calls.clock, str(client))
    recording = calls.end(number, client.index)
    recording.offset_ns, recording.bound_ns = clock.offset_ns, clock.bound_ns
    recording.clock = f"the shortest of {clock.rounds} rounds of trainer 0"
    return recording


def _known(clock: Estimate | None, name: str) -> Estimate:
    if clock is None:
        raise Unreachable(f"{name}: its clock is not known")
    return clock


# ---- torch spans ----
#
# The spans of torch.profiler for this process, beside the trainer's own.


MARK = "pserver trace"  # torch's spans whose times both clocks know
MARKS = 8


class TorchSpans:
    """One run of torch.profiler.  The script's thread uses it."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._began = 0.0
        self._marks: dict[
            str, tuple[float, float]
        ] = {}  # by name: how long it took, and since when

    def begin(self) -> None:
        """Begins, and records a few moments by both clocks.

        Raises:
            RuntimeError: another profiler is active.
        """
        self._profile.start()
        self._began = now()
        for number in range(MARKS):
            before = now()
            with record_function(f"{MARK} {number}"):
                self._marks[f"{MARK} {number}"] = (now() - before, before)

    def end(self) -> None:
        """Ends, and adds the recorded events to the spans of this trainer."""
        self._profile.stop()
        events = self._profile.events() or ()  # type: ignore[no-untyped-call]  # torch's own
        found = [
            (*self._marks[event.name], event.time_range.start)
            for event in events
            if event.name in self._marks
        ]
        if not found:
            return
        # the mark that was made fastest relates the two clocks best
        _, moment, torchs = min(found)
        for event in events:
            began, ended = (
                moment + (at - torchs) / 1e6
                for at in (event.time_range.start, event.time_range.end)
            )
            if event.name not in self._marks and began >= self._began:
                SPANS.add(event.name, began, ended, _track(event))


def _track(event: object) -> str:
    on_device = "CPU" not in str(getattr(event, "device_type", "CPU"))
    kind = f"GPU {getattr(event, 'device_index', 0)}" if on_device else "torch"
    return f"{kind}, thread {getattr(event, 'thread', 0)}"


# ---- trace ----


GATHER_SECONDS = 30.0  # for the other trainers' last steps, when trainer 0's are over
JOIN_SECONDS = GATHER_SECONDS + 15.0  # and for the calls besides


class SpanGathering(Protocol):
    """The way in which the processes of a job gather their spans."""

    def begin(self, number: int) -> None:
        """Begins a trace.

        Args:
            number: of this process's traces, from 1; the same on every trainer.
        """

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """Leaves the spans of a trainer other than 0 for trainer 0."""

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """Gives trainer 0 the recordings of all other processes by its own clock, and the missing
        processes, with the reasons.
        """


class Alone:
    """The meeting of a process that trains alone."""

    def begin(self, number: int) -> None:
        """Does nothing: there is no other process."""

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """Does nothing: there is no other process."""

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """Gives nothing: there is no other process."""
        return [], {}


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The steps to trace, and the path of the file.

    Attributes:
        path: of the file, or its URL.
        steps: the number of this trainer's steps to trace.
        after: the number of steps to skip before the first.
        profiler: whether the file has torch.profiler's spans, too.

    Raises:
        TypeError, ValueError: a setting is invalid.
    """

    path: str
    steps: int = 3
    after: int = 0
    profiler: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int):
            raise TypeError(f"steps: expected a whole number, got {self.steps!r}")
        if self.steps < 1:
            raise ValueError(f"steps: expected 1 or more, got {self.steps}")
        is_url(self.path)


class TracePhase(enum.Enum):
    """The phase of a trace."""

    ARMED = "armed"
    NOTING = "noting"
    TELLING = "telling"
    OVER = "over"


class Trace:
    """One trace of this trainer.  The script's thread calls it.

    Args:
        settings: of it.
        number: of this process's traces, from 1.
        trainer: this one.
        meeting: gives the way in which spans are gathered; None: this trainer has not joined its
            job yet.
        watch: called when it begins; what it returns is called when it ends.

    Raises:
        OSError, ImportError, ValueError: trainer 0 cannot write to the path.
        RuntimeError: another profiler is active.
    """

    def __init__(
        self,
        settings: TraceSettings,
        number: int,
        trainer: int,
        meeting: Callable[[], SpanGathering | None],
        watch: Callable[[], Callable[[], None]],
    ) -> None:
        self.settings = settings
        self.phase = TracePhase.ARMED
        self._number, self._trainer = number, trainer
        self._find, self._watch = meeting, watch
        self._meeting: SpanGathering = Alone()
        self._left, self._taken = settings.after, 0  # steps
        self._torch = TorchSpans() if settings.profiler else None
        self._notes: list[str] = []
        self._stop_watching: Callable[[], None] = lambda: None
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="trace", daemon=True)
        if trainer == 0:
            write(settings.path, document([], {}, {"state": "the trace is not over"}))
        if not self._left:
            self._begin()

    @onlooker("the trace", end=lambda trace: trace.abandon())
    def stepped(self) -> None:
        """Notes that a step of this trainer is over."""
        if self.phase is TracePhase.ARMED:
            self._left -= 1
            if self._left <= 0:
                self._begin()
        elif self.phase is TracePhase.NOTING:
            self._taken += 1
            if self._taken == self.settings.steps:
                self._end()
                self._thread.start()

    def finish(self, failed: bool = False, exiting: bool = False) -> None:
        """Ends the trace with what it has, at the end of the job; returns when the file is written.

        Args:
            failed: trainer 0 does not wait for other trainers.
            exiting: threads can no longer be started.
        """
        if failed:
            self._hurried.set()
        if self.phase is TracePhase.ARMED:
            self.phase = TracePhase.OVER
            log.warning("trace: the job ended before its first step to be traced")
        elif self.phase is TracePhase.NOTING:
            self._notes.append(f"the job ended after {self._taken} of {self.settings.steps} steps")
            self._end()
            if exiting:
                self._tell()
            else:
                self._thread.start()
        self.wait()

    def wait(self) -> None:
        """Waits until the spans have been gathered, if that is under way."""
        if self.phase is TracePhase.TELLING:
            self._thread.join(JOIN_SECONDS)

    def abandon(self) -> None:
        """Ends the trace without a file, and drops its spans."""
        atexit.unregister(self._exits)
        self.phase = TracePhase.OVER
        SPANS.end()
        self._stop_watching()

    # ---- implementation ----

    def _begin(self) -> None:
        """Begins, if this trainer has joined its job; otherwise after its next step."""
        meeting = self._find()
        if meeting is None:
            return
        if self._torch is not None:
            self._torch.begin()
        self._meeting = meeting
        try:
            meeting.begin(self._number)
        except PServerError as error:
            self._notes.append(f"the trace did not begin everywhere: {error}")
        atexit.register(self._exits)
        SPANS.begin()
        self._stop_watching = self._watch()
        self.phase = TracePhase.NOTING

    def _end(self) -> None:
        self._stop_watching()
        if self._torch is not None:
            self._torch.end()
        SPANS.end()
        self.phase = TracePhase.TELLING

    def _exits(self) -> None:
        """Ends the trace as the process ends without having left its job."""
        self.finish(failed=True, exiting=True)

    def _tell(self) -> None:
        """Gathers the spans; the trace's thread runs it."""
        spans, dropped = SPANS.drain()
        own = Recording("trainer", self._trainer, spans, dropped, notes=self._notes)
        try:
            if self._trainer:
                self._meeting.deliver(self._number, own, GATHER_SECONDS)
            else:
                own.clock = "the clock of this file"
                self._gather(own)
        except (PServerError, OSError, ValueError) as error:
            log.warning("trace: %s", error)
        except Exception:
            log.exception("trace")
        finally:
            self.phase = TracePhase.OVER
            atexit.unregister(self._exits)

    def _gather(self, own: Recording) -> None:
        """Gathers the spans on trainer 0, writes the file, and prints a summary."""
        wait = self._hurried.is_set
        others, missing = self._meeting.gather(self._number, GATHER_SECONDS, wait)
        content = document([own, *others], missing, {"steps": self._taken, "pid": os.getpid()})
        write(self.settings.path, content)
        about = content["otherData"]
        spans, dropped = (
            sum(each[key] for each in about["processes"].values()) for key in ("spans", "dropped")
        )
        said = [
            f"trace: {shown(self.settings.path)}: steps {self._taken}, processes "
            f"{len(about['processes'])}, spans {spans}, clocks within "
            f"{about['clock_error_bound_us'] / 1e3:.3f} ms",
            f"dropped beyond the limit: {dropped}" if dropped else "",
            *(f"{name} is missing: {reason}" for name, reason in missing.items()),
        ]
        print("; ".join(filter(None, said)), flush=True)


def write(path: str, content: dict[str, object]) -> None:
    """Writes the file, whole or not at all.

    Raises:
        OSError, ImportError, ValueError: the path cannot be written to.
    """
    text = json.dumps(content, separators=(",", ":")) + "\n"
    try:
        with file_to_write(path) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"the trace cannot be written to {shown(path)!r}: {error}") from error


# ---- tracing ----
#
# The traces of this process: one at a time.


AFTER = 2  # steps that a trace of ``launch --trace`` skips: the first ones are slower


class Tracing:
    """The present trace of this process, and the connection over which spans are gathered.

    The script's thread uses it.
    """

    def __init__(self) -> None:
        self._present: Trace | None = None
        self._count = 0
        self._counts: Callable[[object], bool] = lambda _: True
        # of programs; their connections belong to their Executor
        self._programs: Callable[[], SpanGathering] | None = None

    def begin(
        self,
        settings: TraceSettings,
        trainer: int,
        meeting: Callable[[], SpanGathering | None],
        watch: Callable[[], Callable[[], None]],
        counts: Callable[[object], bool] = lambda _: True,
    ) -> None:
        """Begins a trace; see :class:`Trace`.

        Args:
            counts: whether the steps of an optimizer, or of a program (None), count for the trace.

        Raises:
            RuntimeError: a trace is under way, or another profiler is active.
            OSError, ImportError, ValueError: trainer 0 cannot write to the path.
        """
        if self._present is not None:
            self._present.wait()
            if self._present.phase is not TracePhase.OVER:
                raise RuntimeError(
                    f"a trace is under way, to {self._present.settings.path!r}: one at a time"
                )
        trace = Trace(settings, self._count + 1, trainer, meeting, watch)
        self._count += 1
        self._present, self._counts = trace, counts
        look_again(self)
        SPANS.watcher = self.stepped

    @onlooker("the trace")
    def stepped(self, optimizer: object) -> None:
        """Notes that a step of an optimizer, or of a program (None), is over."""
        if self._present is not None and self._counts(optimizer):
            self._present.stepped()

    def finish(self, failed: bool = False) -> None:
        """Ends the trace at the end of the job; harmless if no trace is under way."""
        trace, self._present = self._present, None
        SPANS.watcher = self._programs = None
        if trace is not None:
            trace.finish(failed)

    # ---- programs ----

    def joined(self, trainer: int, meeting: Callable[[], SpanGathering]) -> None:
        """Called when an Executor has joined a job.  Begins the trace that the environment asks
        for, if no trace has begun in this process.

        Args:
            trainer: its number.
            meeting: gives the way in which spans are gathered.

        Raises:
            OSError, ImportError, ValueError: trainer 0 cannot write to the path.
        """
        self._programs = meeting
        settings = asked(Connection.from_environment())
        if settings is not None and self._count == 0:
            self.begin(settings, trainer, self.of_programs, lambda: lambda: None)

    def of_programs(self) -> SpanGathering | None:
        """The way in which spans of programs are gathered; None before an Executor has joined its
        job.
        """
        return None if self._programs is None else self._programs()


def meeting_of(communicator: Communicator) -> SpanGathering:
    """The way in which a trainer of a job with servers gathers spans."""
    return ServerMeeting(communicator.clients, communicator.plan.trainers)


def asked(connection: Connection) -> TraceSettings | None:
    """The value of PSERVER_TRACE, if there is one.

    Raises:
        ValueError: the number of steps is below 1.
    """
    if not connection.trace:
        return None
    return TraceSettings(connection.trace, connection.trace_steps, AFTER)


TRACING = Tracing()
