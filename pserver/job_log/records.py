"""The records of a job's log, and servers' notices to the coordinator; as values and messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from pserver import job_log_pb2 as message

# ---- records ----


Messages = TypeVar("Messages", message.Notices, message.Records)


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One start of a trainer's process.

    Attributes:
        trainer: its number in the plan.
        incarnation: random, new for each start.
    """

    trainer: int
    incarnation: str

    def __str__(self) -> str:
        return f"trainer {self.trainer}"


@dataclass(frozen=True, slots=True, order=True)
class ProcessStep:
    """One step of a process in one lane, by its number from 1."""

    process: Process
    step: int


Consumed = tuple[tuple[int, int, int], ...]  # samples: epoch, start, stop

# ---- notices to the coordinator ----


@dataclass(frozen=True, slots=True)
class Staged:
    """A step that is on a server, whole and checked, and waits for its record.

    Attributes:
        rows: of tables that it changes on this server.
        consumed: the leased samples; from server 0, which has leased them.
        refused: why this server refuses it, "nonfinite" or "outlier"; "": it does not.
    """

    lane: int
    step: ProcessStep
    rows: int = 0
    consumed: Consumed = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Silence:
    """The silence of a trainer for the heartbeat timeout, as a server has seen it.

    Attributes:
        text: a sentence about it.
    """

    process: Process
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A control call that all servers carry out at one place in the log: a server is ready for it;
    as a record: all are.

    Attributes:
        kind: "save", "shrink".
        number: of the process's calls of this kind, from 1.
    """

    process: Process
    kind: str
    number: int


Notice = Staged | Silence | Call


# ---- records ----


@dataclass(frozen=True, slots=True)
class Joined:
    """A trainer joins.

    Attributes:
        steps: by lane, the last one that counts as applied.
    """

    process: Process
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """The fencing of a trainer: its staged steps that are not decided never count.

    Attributes:
        text: why; a sentence.
    """

    process: Process
    text: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The departure of a trainer in good order, with all of its steps decided.

    Attributes:
        preempted_after: its host was taken away, after this step; None: it was not.
    """

    process: Process
    preempted_after: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The replacement of the servers' values by others, which no step has made."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Steps of one lane that are applied together.

    Attributes:
        steps: in the order of the trainers: one, where each trainer's step is an update of its own;
            those of a whole round otherwise.
        consumed: the leased samples of each step; empty where no step has any.
        refused: trainers whose steps a server has refused, with the reasons: all servers refuse
            them.
    """

    lane: int
    steps: tuple[ProcessStep, ...] = field(default_factory=tuple)
    consumed: tuple[Consumed, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()


What = Joined | Lost | Left | Loaded | Decided | Call


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log.

    Attributes:
        number: from 1, without gaps.
        time: wall time in seconds since 1970; never less than that of the record before.
    """

    number: int
    time: float
    what: What


# ---- as messages ----


def notices_bytes(notices: Iterable[Notice]) -> bytes:
    """A server's notices to the coordinator, as they travel."""
    found = message.Notices()
    for notice in notices:
        added = found.notices.add()
        if isinstance(notice, Staged):
            added.staged.lane, added.staged.rows = notice.lane, notice.rows
            added.staged.refused = notice.refused
            _write(added.staged.step, notice.step)
        elif isinstance(notice, Call):
            _write_call(added.call, notice)
        else:
            added.silence.text = notice.text
            write_process(added.silence.process, notice.process)
    return found.SerializeToString()


def notices_of(data: bytes) -> list[Notice]:
    """Reads the bytes of :func:`notices_bytes`.

    Raises:
        ValueError: it is something else.
    """
    found: list[Notice] = []
    for each in _parsed(message.Notices(), data).notices:
        match each.WhichOneof("what"):
            case "staged":
                staged, step = each.staged, _step(each.staged.step)
                found.append(Staged(staged.lane, step, staged.rows, refused=staged.refused))
            case "silence":
                found.append(Silence(read_process(each.silence.process), each.silence.text))
            case "call":
                found.append(_call(each.call))
            case _:
                raise ValueError("expected a notice of this version")
    return found


def records_bytes(records: Iterable[Record], resumes: bool = False) -> bytes:
    """Records, as they travel and as files have them.

    Args:
        resumes: a server that follows again gets all after the last one that it has.
    """
    found = message.Records(resumes=resumes)
    for record in records:
        write_record(found.records.add(), record)
    return found.SerializeToString()


def write_record(to: message.Record, record: Record) -> None:
    """Writes a record into an empty message."""
    to.number, to.time = record.number, record.time
    what = record.what
    if isinstance(what, Decided):
        to.decided.lane = what.lane
        for each in what.steps:
            _write(to.decided.steps.add(), each)
        for ranges in what.consumed:
            write_consumed(to.decided.consumed.add(), ranges)
        to.decided.refused.update(what.refused)
    elif isinstance(what, Joined):
        write_process(to.joined.process, what.process)
        to.joined.steps.extend(what.steps)
    elif isinstance(what, Call):
        _write_call(to.called, what)
    elif isinstance(what, Loaded):
        to.loaded.SetInParent()
    elif isinstance(what, Left):
        write_process(to.left.process, what.process)
        if what.preempted_after is not None:
            to.left.preempted_after = what.preempted_after
    else:
        write_process(to.lost.process, what.process)
        to.lost.text = what.text


def records_of(data: bytes) -> list[Record]:
    """Reads the bytes of :func:`records_bytes`.

    Raises:
        ValueError: it is something else.
    """
    return list(map(read_record, _parsed(message.Records(), data).records))


def read_record(found: message.Record) -> Record:
    """Reads the message of :func:`write_record`.

    Raises:
        ValueError: it is of another version.
    """
    what: What
    match found.WhichOneof("what"):
        case "decided":
            consumed = tuple(read_consumed(one) for one in found.decided.consumed)
            steps, refused = _steps(found.decided.steps), sorted(found.decided.refused.items())
            what = Decided(found.decided.lane, steps, consumed, tuple(refused))
        case "joined":
            what = Joined(read_process(found.joined.process), tuple(found.joined.steps))
        case "lost":
            what = Lost(read_process(found.lost.process), found.lost.text)
        case "left":
            preempted = found.left.HasField("preempted_after")
            after = found.left.preempted_after if preempted else None
            what = Left(read_process(found.left.process), after)
        case "loaded":
            what = Loaded()
        case "called":
            what = _call(found.called)
        case _:
            raise ValueError(f"record {found.number}: expected a record of this version")
    return Record(found.number, found.time, what)


def resumes(data: bytes) -> bool:
    """Whether records continue from the last one that a server has.

    Raises:
        ValueError: they are none.
    """
    return bool(_parsed(message.Records(), data).resumes)


def read_consumed(found: message.ConsumedSamples) -> Consumed:
    """Samples, from their message.

    Raises:
        ValueError: they are none.
    """
    flat = found.ranges
    return tuple(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def write_consumed(to: message.ConsumedSamples, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Writes samples into an empty message."""
    to.ranges.extend(chain.from_iterable(ranges))


def _parsed(empty: Messages, data: bytes) -> Messages:
    try:
        empty.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError has another base in each implementation
        raise ValueError(f"expected messages of a job's log: {error}") from error
    return empty


def read_process(found: message.Process) -> Process:
    """A process, from its message."""
    return Process(found.trainer, found.incarnation)


def _call(found: message.Call) -> Call:
    return Call(read_process(found.process), found.kind, found.number)


def _step(found: message.ProcessStep) -> ProcessStep:
    return ProcessStep(read_process(found.process), found.step)


def _steps(found: Sequence[message.ProcessStep]) -> tuple[ProcessStep, ...]:
    return tuple(_step(each) for each in found)


def write_process(to: message.Process, process: Process) -> None:
    """Writes a process into a message."""
    to.trainer, to.incarnation = process.trainer, process.incarnation


def _write_call(to: message.Call, call: Call) -> None:
    write_process(to.process, call.process)
    to.kind, to.number = call.kind, call.number


def _write(to: message.ProcessStep, step: ProcessStep) -> None:
    write_process(to.process, step.process)
    to.step = step.step


# ---- standing ----
#
# The state of a job's log, for a server that was lost and comes back; and its losses.
#
# ::
#
#   of a process and a lane:   begun ......... in the save ............ decided ...> next
#                              |--- in what the server has read ---|--- lost ---|
#
# A process is in the save where the server had applied steps of it by then.  Those that had joined
# before it, with its number, had ended: all of theirs is in the save.  Those that have joined since
# are not in it at all.


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A trainer's process in the log.

    Attributes:
        begun: by lane, the last step that counted as applied when it joined.
        decided: by lane, the last step that is decided.
        rows: by lane, of tables that its decided steps have changed on the server that comes back.
        lost: why it was lost, a sentence; "": it was not.
        left: it has left the job.
        preempted_after: because its host was taken away, after this step; None: it was not.
        calls: by kind, the number of its last control call in the log.
    """

    process: Process
    begun: tuple[int, ...]
    decided: tuple[int, ...]
    rows: tuple[int, ...]
    lost: str = ""
    left: bool = False
    preempted_after: int | None = None
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def present(self) -> bool:
        """Whether it is live."""
        return not (self.lost or self.left)


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """The state of the log.

    Attributes:
        last: the number of the last record.
        processes: in the order in which they have joined.
        loaded: the number of the last record of a load; 0: there is none.
    """

    last: int
    processes: tuple[ProcessSnapshot, ...]
    loaded: int = 0

    def to_bytes(self) -> bytes:
        """The bytes of the state, which travel in the place of records."""
        found = message.Records()
        self.write(found.standing)
        return found.SerializeToString()

    def write(self, to: message.Standing) -> None:
        """Writes the state into an empty message."""
        to.last, to.loaded = self.last, self.loaded
        for each in self.processes:
            added = to.processes.add(
                begun=each.begun,
                decided=each.decided,
                rows=each.rows,
                lost=each.lost,
                left=each.left,
                preempted_after=each.preempted_after,
                calls=each.calls,
            )
            write_process(added.process, each.process)

    @classmethod
    def of(cls, data: bytes) -> LogSnapshot | None:
        """Reads the bytes of :meth:`to_bytes`; None where they are records.

        Raises:
            ValueError: they are neither.
        """
        found = message.Records()
        try:
            found.ParseFromString(data)
        except Exception as error:  # protobuf's DecodeError has another base in each implementation
            raise ValueError(f"expected messages of a job's log: {error}") from error
        return cls.read(found.standing) if found.HasField("standing") else None

    @classmethod
    def read(cls, standing: message.Standing) -> LogSnapshot:
        """Reads the message of :meth:`write`."""
        return cls(
            standing.last,
            tuple(
                ProcessSnapshot(
                    read_process(each.process),
                    tuple(each.begun),
                    tuple(each.decided),
                    tuple(each.rows),
                    each.lost,
                    each.left,
                    each.preempted_after if each.HasField("preempted_after") else None,
                    dict(each.calls),
                )
                for each in standing.processes
            ),
            standing.loaded,
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """A save's state of a trainer's process in one lane.

    Attributes:
        step: the last one that is in it.
        rows: of tables that these steps have changed.
    """

    step: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """Decided steps of one trainer that a server does not have.

    Attributes:
        steps: how many, over all lanes.
        rows: of tables that they have changed there, counted in each step.
    """

    steps: int = 0
    rows: int = 0

    def plus(self, other: Loss) -> Loss:
        """The sum of both."""
        return Loss(self.steps + other.steps, self.rows + other.rows)


def losses(standing: LogSnapshot, saved: Mapping[Process, Sequence[Applied]]) -> dict[int, Loss]:
    """The losses on a server that resumes from a save, by trainer.

    Args:
        saved: of each process in the save, by lane.
    """
    found: dict[int, Loss] = {}
    later: set[int] = set()  # trainers of whom the process in the save has been seen
    for each in reversed(standing.processes):
        trainer = each.process.trainer
        if trainer in later:
            continue  # it had ended before the save
        applied = saved.get(each.process)
        later |= set() if applied is None else {trainer}
        before = applied or [Applied(step) for step in each.begun]
        loss = Loss()
        for lane, (decided, rows) in enumerate(zip(each.decided, each.rows, strict=True)):
            had = before[lane] if lane < len(before) else Applied(0)
            loss = loss.plus(Loss(max(0, decided - had.step), max(0, rows - had.rows)))
        found[trainer] = found.get(trainer, Loss()).plus(loss)
    return found
