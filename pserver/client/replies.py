"""A server's answers, as plain values: no caller sees a message of the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pserver.errors import CorruptFrame
from pserver.finite import NonFiniteStep
from pserver.transport.arrays import OutlierPush, PushNorm
from pserver.wire_pb2 import (
    Done,
    EpochStatus,
    Frame,
    JoinReply,
    Kind,
    Part,
    RecordingStatus,
    Roll,
    RowChanges,
)
from pserver.wire_pb2 import TableStatus as TableStatusMessage
from transpiler.files import bounded_json

# ---- missed values ----
#
# Values that changed while they were read where they are: they are asked for once more.


class MissedValues:
    """The missed parts of a reply.  The inbox's thread uses it.

    See [Note: values that change] in pserver/transport/zones.py.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._done: Done | None = None  # of the reply whose values are asked for again

    def add(self, header: Frame) -> None:
        """Notes that a VALUE frame has brought nothing."""
        self._names.update((part.name, None) for part in header.parts)

    def end(self, done: Done) -> Done | None:
        """Takes a DONE, which ends the reply when no part of it is missed."""
        if self._names:
            self._done = self._done or done
            return None
        done, self._done = self._done or done, None
        return done

    def ask(self, request: int) -> Frame:
        """Requests the missed parts, once."""
        names, self._names = self._names, {}
        return Frame(kind=Kind.PULL, request=request, parts=[Part(name=name) for name in names])

    def forget(self) -> None:
        """Forgets the missed parts: the whole request is sent again."""
        self._names, self._done = {}, None


# ---- replies ----


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """The rows of a table that other trainers have changed.

    Attributes:
        position: up to which a server tells them.
        ids: int64[u], each once; None: any row may have changed.
    """

    position: int
    ids: np.ndarray | None

    @classmethod
    def from_message(cls, told: RowChanges) -> ChangedRows:
        """The same as a plain value.

        Raises:
            CorruptFrame: its ids are not whole numbers of 64 bits.
        """
        if len(told.ids) % 8:
            raise CorruptFrame(f"expected ids of 8 bytes each, got {len(told.ids)} bytes of them")
        return cls(told.position, None if told.any else np.frombuffer(told.ids, "<i8"))


def _changed(done: Done) -> dict[str, ChangedRows]:
    return {name: ChangedRows.from_message(told) for name, told in done.changes.items()}


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a server's answer to one request; values have arrived at their destinations.

    Attributes:
        version: updates applied to the server so far, counted in steps.
        committed: trainers whose gradients are in this update.
        overflow: some trainer saw an overflow, and nothing was applied.
        cursor: of a scan: where the next chunk begins; -1 after the last one.
        metadata: of a scan: what the server knows of the table besides its rows.
        refused: a value was not finite, or a norm an outlier, and nothing of this trainer's step
            was applied.
        nonfinite: the steps in this update with such values.
        outliers: what in this update is far beyond its trainer's history.
        checksums: of the variables that were asked for, by name.
        changes: of rows by other trainers, by table, where the step asked for them.
        unknown_lookup: the server does not know the lookup to be refreshed.
    """

    version: int = 0
    committed: int = 0
    overflow: bool = False
    cursor: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict)
    refused: bool = False
    nonfinite: tuple[NonFiniteStep, ...] = ()
    outliers: tuple[OutlierPush, ...] = ()
    changes: Mapping[str, ChangedRows] = field(default_factory=dict)
    unknown_lookup: bool = False

    @classmethod
    def from_message(cls, done: Done) -> Reply:
        """The reply that a DONE frame brings.

        Raises:
            ValueError: its metadata are not JSON.
            CorruptFrame: ids of changed rows are not whole.
        """
        metadata = bounded_json.loads(done.metadata) if done.metadata else {}
        return cls(
            done.version,
            done.committed,
            done.overflow,
            done.cursor,
            metadata,
            dict(done.checksums),
            done.refused,
            tuple(
                NonFiniteStep(each.trainer_id, each.step, tuple(each.variables))
                for each in done.nonfinite
            ),
            tuple(
                OutlierPush(
                    each.trainer_id,
                    each.step,
                    each.norm.variable,
                    PushNorm(each.norm.norm, tuple(each.norm.rows)),
                    each.history,
                )
                for each in done.outliers
            ),
            _changed(done) if done.changes else {},
            done.unknown_lookup,
        )

    def joined(self, others: Sequence[Reply]) -> Reply:
        """This reply, joined with other servers' findings about the same step."""
        replies = (self, *others)
        if not any(each.nonfinite or each.outliers for each in replies):
            return self
        found: dict[tuple[int, int], set[str]] = {}
        outliers: dict[tuple[int, int, str], OutlierPush] = {}
        for reply in replies:
            for step in reply.nonfinite:
                found.setdefault((step.trainer, step.step), set()).update(step.variables)
            for push in reply.outliers:
                outliers.setdefault((push.trainer, push.step, push.variable), push)
        return replace(
            self,
            refused=any(each.refused for each in replies),
            nonfinite=tuple(
                NonFiniteStep(*key, tuple(sorted(variables)))
                for key, variables in sorted(found.items())
            ),
            outliers=tuple(outliers[key] for key in sorted(outliers)),
        )


def first_of(replies: Sequence[Future[Reply]]) -> Reply:
    """Waits for the replies of one request to several servers.

    Heartbeats end the wait: a server that stays silent fails its channels.

    Args:
        replies: one for each server that was asked; at least one.

    Returns:
        The first server's reply, when all have come, with the non-finite values that all have
        found.

    Raises:
        PServerError: the first failure, as soon as it is known.
    """
    done, _ = wait(replies, return_when=FIRST_EXCEPTION)
    for reply in done:
        reply.result()
    first, *others = (reply.result() for reply in replies)
    return first.joined(others)


@dataclass(frozen=True, slots=True)
class Admission:
    """A server's acceptance of this trainer.

    Attributes:
        install: this trainer is to install the program and its values (trainer 0, on an empty
            server).
        steps: by lane, the last step of this trainer that the server has applied; empty before the
            server is installed.
        run: names this run of the job, the same on all its processes.
    """

    install: bool
    steps: tuple[int, ...]
    run: str = ""

    @classmethod
    def from_message(cls, reply: JoinReply) -> Admission:
        """The plain part of a JoinReply."""
        return cls(reply.install, tuple(reply.steps), reply.run)


@dataclass(frozen=True, slots=True)
class Absences:
    """The trainers of the plan that are absent before the job's end, as a server knows them.

    Attributes:
        changes: joins, and ends before the job's: a greater number is later.
        absent: those that were preempted or lost, or that leave after a step that has arrived.
        preempted: those that were, with the last step that each has taken.
        first: the leader; None: the lowest-ranked live trainer.
    """

    changes: int = 0
    absent: frozenset[int] = frozenset()
    preempted: Mapping[int, int] = field(default_factory=dict)
    first: int | None = None

    @classmethod
    def of(cls, roll: Roll) -> Absences:
        """The plain form of a message."""
        first = roll.first if roll.HasField("first") else None
        return cls(roll.changes, frozenset(roll.absent), dict(roll.preempted), first)


class PutOff(Exception):
    """A meeting for an automatic save is put off: the trainers would wait for one another
    forever.
    """


@dataclass(frozen=True, slots=True)
class MeetingRound:
    """A completed round of the live trainers.

    Attributes:
        number: from 1.
        changes: of the members until then, as in :class:`Absences`.
        texts: the text of each trainer that was in it.
    """

    number: int
    changes: int
    texts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table's part on one server.

    Attributes:
        rows: that the server holds.
        bytes_held: by them, with their optimizer states.
        counters: what was counted since the start: "admitted", "evicted", ...
    """

    name: str
    rows: int
    bytes_held: int
    counters: Mapping[str, int]

    @classmethod
    def from_message(cls, message: TableStatusMessage) -> TableStatus:
        """The same as a plain value."""
        return cls(message.name, message.rows, message.bytes_held, dict(message.counters))


def counted(epoch: EpochStatus) -> dict[str, int]:
    """The counts of an epoch's samples, by the words of ``pserver status``."""
    words = "samples", "decided", "leased", "skipped", "handed_back", "left_out"
    return {word: getattr(epoch, word) for word in words}


def log_place_of(recording: RecordingStatus) -> dict[str, Any]:
    """The entry of its recorded log at which a server is, as a checkpoint has it; nothing where it
    records none.
    """
    if not recording.recording or recording.failure:
        return {}
    return {
        "recording": recording.recording,
        "entry": recording.entry,
        "record": recording.record,
        "versions": list(recording.versions),
        "tables": dict(recording.tables),
    }
