"""A server's state during a job: the slices, the tables, and a lane executor for each lane
that updates them.

[Note: a server's file]  A pserver program with these values is all that a job needs of its server:
slices, optimizer states, rows, hyper-parameters, and how many steps each trainer has taken.  A
server that starts with such a file begins where that one ended, and a trainer that joins it counts
its steps from there, whatever process it is.  The checkpoints of job_files.py differ: they go back
into a job whose trainers live, and know these by their incarnation.

[Note: one moment]  An observer asks for a pause, in which no step changes a value, and reads slices
and rows while it lasts.  A pause ends when the observer ends it, or when the observer has been
silent for the heartbeat timeout: an operator's process that dies does not stop the job for longer.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pserver.checkpoint.checkpoint import Saved
from pserver.dense.slices import SliceStore
from pserver.dense.update import SliceUpdate
from pserver.errors import Busy, Refused, Unprepared
from pserver.job.averaged_steps import AveragedSteps
from pserver.job.meetings import Meetings
from pserver.job.rings import Rings
from pserver.job_log.own_state import TextBudget
from pserver.job_log.records import Loss
from pserver.lane.lane import LaneExecutor, partial_steps
from pserver.lane.leases import JobLeases
from pserver.lane.recording import LogRecording
from pserver.lane.rounds import SharedBuffers
from pserver.lane.tasks import Workers
from pserver.lane.updates import LaneState
from pserver.limits import Limits
from pserver.membership.decisions import Decisions, LoggedCalls, Quiesce
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership
from pserver.table.gradient import RowGradient
from pserver.telemetry.metrics import JobSteps
from pserver.telemetry.trace import Spans
from transpiler.ir.graph import Role, Storage
from transpiler.ir.schema import DTYPES
from transpiler.ir.served import HeldRows, Served
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.program_pb2 import Program as ProgramMessage
from transpiler.verify.untrusted import check_server_program

if TYPE_CHECKING:
    from pserver.lane.tables import LockedTable

log = logging.getLogger(__name__)


# ---- last save ----
#
# The last save that a later one may continue.


@dataclass(frozen=True, slots=True)
class LastSave:
    """A save that was written, with numbers that tell whether all changes since are known.

    Attributes:
        saved: the save.
        epochs: by table: how often its changes had been counted as saved, this save included.
    """

    saved: Saved
    epochs: Mapping[str, int]


# ---- memory budget ----
#
# The memory of a server that a job's slices leave to its tables.


GRANTED = 64  # this part of the memory that is left is given without a further look


class MemoryBudget:
    """Refuses new rows before they take more memory than the server may use.

    A row is made by the first push to it, so a table's size is not known when its program comes.

    Args:
        limit_bytes: that slices and tables may take together.
        slices_bytes: that the slices and their optimizer states take.
        tables: the server's, by name.
        texts: gives the bytes of trainers' texts for one another.
    """

    def __init__(
        self,
        limit_bytes: int,
        slices_bytes: int,
        tables: Mapping[str, LockedTable],
        texts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._limit, self._slices, self._tables = limit_bytes, slices_bytes, tables
        self._texts = texts
        self._lock = threading.Lock()  # guards the next
        self._granted = 0  # bytes of new rows for which no table is asked what it holds

    def has_room(self, arriving: Mapping[str, int]) -> bool:
        """Whether there is room for so many new rows, by table.

        Where there is much, tables are asked for what they hold once in many steps: after new rows
        for a small part of it.
        """
        more = self._growth(arriving)
        with self._lock:
            if more <= self._granted:
                self._granted -= more
                return True
            left = self.left
            self._granted = max(left // GRANTED - more, 0)
        return more <= left

    @property
    def left(self) -> int:
        """The bytes that the server may still take."""
        held = sum(table.bytes_held for table in self._tables.values())
        return self._limit - self._slices - held - self._texts()

    def _growth(self, arriving: Mapping[str, int]) -> int:
        return sum(self._tables[name].growth(count) for name, count in arriving.items())

    def check(self, arriving: Mapping[str, int]) -> None:
        """Returns if there is room for so many new rows, by table.

        Raises:
            Refused: there is not.
        """
        with self._lock:
            self._granted = 0  # what is checked here may take it
        left, more = self.left, self._growth(arriving)
        if more > left:
            names = ", ".join(map(repr, arriving))
            raise Refused(
                f"expected rows for {left / 1e6:.1f} MB or less, "
                f"got new ones of table {names} for {more / 1e6:.1f} MB: this server takes "
                f"{self._limit / 1e9:.1f} GB (--max-memory); use more servers, a capacity, or "
                "memory_bytes with the rest on disk"
            )


# ---- installed program ----


CHUNK_ROWS = 65536  # rows that a table loads at a time


class InstalledProgram:
    """A pserver program at work on this server.

    Any thread may call it; the locks are those of the lane executors and of the tables.

    Args:
        program: a pserver program; :func:`check_program` has accepted it.
        members: the job's trainers.
        job: for its lock and its end.
        decisions: of the job's log.
        limits: of the server.
        scratch: the directory for rows of tables that do not fit in memory; None: the system's
            directory for temporary files.
        spans: take this server's part of a trace; None: there is none.

    Attributes:
        program: the server's.
        decisions: of the job's log.
        plan: the plan that the program was made for.
        slices: the slices that this server holds.
        lanes: the lane executors, by the lane's index in the plan.
        tables: the sparse tables, by name.
        budget: the memory for their rows.
        quiesce: keeps steps from changing values during a save, a load or a shrink.
        steps: what is measured of them.
        last_save: which save a later one may continue; None: none.
        leases: of the samples; server 0's counts.
        recording: of the job's log.
        lost: by trainer, of decided steps, what this server has lost as it came back from saves.
        calls: those that have a place in the job's log.
        meetings: where trainers wait for one another and leave texts; server 0's count.
        rings: breaks those of trainers that wait for one another; server 0's counts.
    """

    lost: Mapping[int, Loss] = MappingProxyType({})

    def __init__(
        self,
        program: Program,
        members: Membership,
        job: Lifecycle,
        decisions: Decisions,
        limits: Limits,
        scratch: str | None = None,
        spans: Spans | None = None,
    ) -> None:
        deployment = program.deployment
        assert deployment is not None and deployment.server_index is not None, "a pserver program"
        self.program = program
        self.plan, self._server = deployment.plan, deployment.server_index
        self.slices = SliceStore(program)
        self._members, self._job = members, job
        self.decisions = decisions
        self.steps = JobSteps(spans)
        self.last_save: LastSave | None = None
        self.quiesce = Quiesce(job, self.steps.paused)
        self.tables = _open_tables(self.plan, self._server, scratch)
        texts = TextBudget(lambda: self.budget.left)
        self.budget = MemoryBudget(
            limits.memory_bytes, slices_bytes(program), self.tables, lambda: texts.bytes_held
        )
        self.leases = JobLeases(members, job)
        self.leases.catches_up = self.plan.averages_alone
        self.recording = LogRecording()
        decisions.recorded = self.recording.record
        workers = Workers(torch.get_num_threads())
        self._locks = {name: threading.Lock() for name in self.slices.values}
        self.lanes = [self._lane(index, workers) for index in range(len(self.plan.lanes))]
        decisions.lanes = self.lanes
        self.calls = LoggedCalls(job, self.quiesce, self.lanes, decisions.ready)
        decisions.calls = self.calls
        self.meetings = Meetings(
            members,
            job,
            lambda: self.version > 0,
            self._undecided,
            AveragedSteps(self.plan, self.steps.trainers, job.events),
            texts,
        )
        self.rings = Rings(members, job, self.meetings)
        self._names = {*self.slices.values, *self.slices.states, *self.tables}

    def _lane(self, index: int, workers: Workers) -> LaneExecutor:
        lane, held, members = self.plan.lanes[index], self.slices.held, self._members
        updates = self._updates(index)
        state = LaneState(
            index,
            lane,
            updates,
            {name: update.value for name, update in updates.items()} | dict(held),
            self._tables(index),
            self._locks,
            self.slices.writing,
            SharedBuffers(
                lane.buffers, lane.kind.merges_gradients, held, self._locks, lambda: members.first
            ),
            members,
            self._job,
            self.leases,
            self.recording,
            self.steps.lane(index),
        )
        return LaneExecutor(state, self.decisions, self.quiesce, workers, self.steps)

    def own_rows(self, rows: RowGradient) -> RowGradient:
        """The part of a row gradient that belongs to this server."""
        return rows.divide(self.plan.servers)[self._server]

    def _updates(self, lane: int) -> dict[str, SliceUpdate]:
        return {name: own for name, own in self.slices.updates.items() if own.lane == lane}

    def _tables(self, lane: int) -> dict[str, LockedTable]:
        return {name: table for name, table in self.tables.items() if table.table.lane == lane}

    def has(self, name: str) -> bool:
        """Whether a name on the wire is of something held here: a slice, a state or a table, or one
        of its companions ("w@scale").
        """
        names = self._names
        return name in names or name.rpartition("@")[0] in names

    def lane(self, index: int) -> LaneExecutor:
        """The executor of a lane.

        Raises:
            Refused: the plan has no such lane.
        """
        if index >= len(self.lanes):
            raise Refused(f"expected a lane below {len(self.lanes)}, got {index}")
        return self.lanes[index]

    @property
    def outlives_trainers(self) -> bool:
        """Whether the job continues without a lost trainer."""
        return self.plan.outlives_trainers

    @property
    def between_rounds(self) -> bool:
        """Whether every step of all trainers that is decided is applied."""
        together = (lane for lane in self.lanes if lane.lane.kind.waits_for_all)
        return all(lane.queued == lane.undecided for lane in together)

    def count_partial(self, member: Member) -> int:
        """Counts those steps of a lost trainer that are decided in some of its lanes only; the
        caller holds the job's lock, and has dropped what was staged.
        """
        partial = partial_steps(member.watermarks, self.plan.lanes)
        if partial:
            self.steps.trainers.count(member.trainer, "partial", partial)
        return partial

    def _undecided(self, member: Member, step: int) -> bool:
        """Whether a trainer's step has no record yet, in the lane whose steps need all trainers."""
        lane = next((each for each in self.lanes if each.lane.kind.merges_gradients), None)
        if lane is None:
            return True
        mark = member.watermark(lane.index)
        has_come = mark.taking == step
        return step > mark.applied and bool(lane.undecided or not has_come)

    @property
    def training_started(self) -> bool:
        """Whether the trainers are past their beginning, as far as this server knows."""
        reports = (member.report for member in self._members.joined())
        stepped = any(lane.steps for report in reports for lane in report.lanes)
        return bool(self.version or self.meetings.state.passed or stepped)

    @property
    def version(self) -> int:
        """Updates applied, counted in steps, over all lanes."""
        return sum(lane.version for lane in self.lanes)

    def read(self, member: Member, name: str, in_place: bool = False) -> torch.Tensor | None:
        """A slice or an optimizer state between two updates; None for a state that no update has
        made yet.

        Args:
            member: the trainer that reads; delay compensation remembers what it has read.
            in_place: the trainer reads it where it is, and notices when it changes: see [Note:
                values that change] in pserver/transport/zones.py.

        Raises:
            Unprepared: nothing of this name is held here.
        """
        if name in self.slices.updates:
            return self.lanes[self.slices.updates[name].lane].read(member, name, in_place)
        if name in self.slices.values:
            with self._locks[name]:  # a step may assign it
                return self.slices.values[name].clone()
        with self._locks[self.slices.slice_of(name)]:
            return self.slices.read(name)

    def check_rows(self, gradients: Mapping[str, RowGradient]) -> None:
        """Returns if gradients of tables, by name, can be applied; nothing is changed.

        Raises:
            Refused: an id comes twice, or is outside of its table's range; or there is no memory
                for new rows.
        """
        for name, gradient in gradients.items():
            self.tables[name].check(gradient)
        most = {name: len(each.ids) for name, each in gradients.items()}
        if gradients and not self.budget.has_room(most):  # where none of the ids has a row yet
            new = {name: self.tables[name].absent(each) for name, each in gradients.items()}
            self.budget.check(new)

    def discard_snapshots(self) -> None:
        """Drops all copies of slices, because slices have been loaded."""
        for lane in self.lanes:
            lane.discard_snapshots()

    def shrink(
        self, names: Sequence[str], days: float, threshold: float | None, number: int
    ) -> dict[str, int]:
        """Applies time decay to tables, then drops rows below the score threshold or past their
        time to live.

        Args:
            names: of the tables; none means all.
            days: how many have passed.
            threshold: in place of the tables' own; None: theirs.
            number: of the caller's calls.

        Returns:
            How many rows each table has dropped.

        Raises:
            Busy: a save is being written, and does not end.
        """
        self.quiesce.await_cut()
        removed = {}
        with self.quiesce.paused():
            for name in names or self.tables:
                now = self.tables[name].now
                self.recording.shrunk(name, now, days, threshold, number)
                removed[name] = self.tables[name].shrink(days, threshold, now)
        return removed

    def check_tables(self, names: Sequence[str]) -> None:
        """Returns if the plan has tables of these names.

        Raises:
            Unprepared: it has not.
        """
        unknown = set(names) - set(self.tables)
        if unknown:
            raise Unprepared(
                f"the plan has no table {min(unknown)!r}; it has {', '.join(self.tables) or 'none'}"
            )

    # ---- loading, with recording: the caller keeps steps from changing anything ----

    def record_values(self) -> None:
        """Records the slices and states, which have been loaded."""
        hparams = {group: held for lane in self.lanes for group, held in lane.hparams.items()}
        self.recording.values(self.slices, [lane.version for lane in self.lanes], hparams)

    def restore_table(self, name: str, metadata: str) -> None:
        """Drops all rows of a table, and takes over what is known of it besides its rows.

        Raises:
            Refused: that is of another table.
        """
        self.tables[name].restore(metadata)
        self.recording.rows(name, {}, metadata)

    def load_rows(self, name: str, chunk: Mapping[str, np.ndarray]) -> None:
        """Takes over those rows of a chunk that this server holds.

        Raises:
            Refused: the chunk is of another table.
        """
        self.tables[name].load(dict(chunk))
        self.recording.rows(name, chunk)

    @property
    def log_place(self) -> dict[str, Any]:
        """The record of the job's log at which everything here is; and, where the log is recorded,
        the entry and the recording.
        """
        recording, entry = self.recording.place
        recorded = {"recording": recording, "entry": entry} if recording else {}
        return {"record": max((lane.record for lane in self.lanes), default=0), **recorded}

    # ---- trainers among themselves ----


def check_parts(message: ProgramMessage, limits: Limits) -> None:
    """Returns if a program has no more parts than this server takes.

    Raises:
        Refused: it has.
    """
    plan = message.deployment.plan
    parts = len(plan.lanes) + len(plan.tables) + len(plan.groups) + len(message.blocks)
    parts += sum(1 + len(placement.slices) for placement in plan.placements)
    parts += sum(len(block.ops) + len(block.variables) for block in message.blocks)
    if parts > limits.program_parts:
        raise Refused(
            f"expected a program of up to {limits.program_parts} ops, variables, slices, lanes and "
            f"tables, got {parts}"
        )


def slices_bytes(program: Program) -> int:
    """The bytes of a program's slices and their states."""
    held = program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.STATE)
    return sum(math.prod(map(int, each.shape)) * DTYPES[each.dtype].itemsize for each in held)


def check_memory(program: Program, limits: Limits) -> None:
    """Returns if this server has room for a program: for its slices and their states.

    Raises:
        Refused: it has not.
    """
    size = slices_bytes(program)
    if size > limits.memory_bytes:
        raise Refused(
            f"the program's slices and optimizer states take {size / 1e9:.1f} GB here, and this "
            f"server takes {limits.memory_bytes / 1e9:.1f} GB (--max-memory): use more servers"
        )


def check_program(program: Program) -> tuple[Plan, int]:
    """Checks a program that a peer or a file brings.

    Returns:
        Its plan, and the index of the server that it was made for.

    Raises:
        Refused: it is no pserver program, or has an op or an argument that is not allowed.
    """
    deployment = program.deployment
    if deployment is None or deployment.server_index is None:
        raise Refused(
            "expected a pserver program with its deployment, got a single-node or a trainer program"
        )
    try:
        check_server_program(program)
    except ValueError as error:
        raise Refused(f"the program is refused: {error}") from error
    return deployment.plan, deployment.server_index


def _open_tables(plan: Plan, server: int, scratch: str | None) -> dict[str, LockedTable]:
    """The sparse tables of a plan, by name: every server holds a part of each.

    Raises:
        Refused: rows are to leave memory, and there is no place for them.
    """
    if not plan.tables:
        return {}
    # here, because the import compiles the rows' kernels or loads them, which takes a while
    from pserver.lane.tables import LockedTable

    place = None if scratch is None else Path(scratch)
    try:
        return {table.name: LockedTable(table, plan, server, place) for table in plan.tables}
    except (ImportError, OSError) as error:
        # the trainer gets one line; which memory or file it was stands here
        log.error("the tables of this program cannot be opened", exc_info=error)
        raise Refused(f"the tables of this program: {error}") from error


# ---- held values ----
#
# What a server holds as a program's values: given to a server that starts, taken from one that
# ends.


def check_values(program: Program, values: Storage) -> None:
    """Returns if a server may start with these values of its program.

    Raises:
        Refused: a slice has none, or the values are of another job.
    """
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
        if variable.name not in values.tensors:
            raise Refused(
                f"expected a pserver program with its values, as Executor.save writes it; got no "
                f"value of {variable.name!r}"
            )
    assert program.deployment is not None, "a pserver program"
    plan = program.deployment.plan
    if values.served is not None and (
        len(values.served.versions) != len(plan.lanes)
        or values.served.tables.keys() != {table.name for table in plan.tables}
    ):
        raise Refused("how far the job had come: expected the lanes and tables of the program's")


def give_values(values: Storage, installed: InstalledProgram, members: Membership) -> None:
    """Gives a starting server copies of these values.

    Raises:
        Refused: a table's rows are of another table.
    """
    installed.slices.load(values.tensors)
    for name, (ids, rows) in values.rows.items():
        _give_rows(installed, name, ids, rows)
    if values.served is None:
        return
    for name, held in values.served.tables.items():
        installed.restore_table(name, held.metadata)
        installed.load_rows(name, {key: array.numpy() for key, array in held.arrays.items()})
    for lane, version in zip(installed.lanes, values.served.versions, strict=True):
        lane.version = version
        lane.hparams = values.served.hparams
    members.begin_at(values.served.steps)


def _give_rows(
    installed: InstalledProgram, name: str, ids: torch.Tensor, rows: torch.Tensor
) -> None:
    """Loads the first rows of a table, of which this server takes its own."""
    for begin in range(0, len(ids), CHUNK_ROWS):
        chunk = RowGradient(ids[begin : begin + CHUNK_ROWS], rows[begin : begin + CHUNK_ROWS])
        own = installed.own_rows(chunk)
        installed.load_rows(name, {"ids": own.ids.numpy(), "values": own.rows.contiguous().numpy()})


def take_values(values: Storage, installed: InstalledProgram, members: Membership) -> None:
    """Puts copies of all that a server holds into ``values``, of one moment between two steps."""
    with installed.quiesce.paused():
        values.tensors = {name: held.clone() for name, held in installed.slices.tensors()}
        values.rows = {}
        values.served = Served(
            [lane.version for lane in installed.lanes],
            members.steps(len(installed.lanes)),
            {group: held for lane in installed.lanes for group, held in lane.hparams.items()},
            {name: _rows(table) for name, table in installed.tables.items()},
        )
        values.steps = values.served.step


def _rows(table: LockedTable) -> HeldRows:
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, 0, changed_since_save=False, materialized=False)
        chunks.append(chunk)
    arrays = {
        name: torch.from_numpy(np.concatenate([chunk[name] for chunk in chunks]))
        for name in chunks[0]
    }
    return HeldRows(arrays, table.metadata())


# ---- observations ----
#
# Observers read a job's values without joining it: ``pserver save``.
#
# No clock: time is an argument.  The caller holds the job's lock but where a method says otherwise.


@dataclass(slots=True)
class Observation:
    """One observer's view of a job's values, which outlives the job.

    Attributes:
        installed: what it reads.
        last_heard: in seconds of the job's clock.
        session: the secret that its calls and its stream repeat.
        paused: its pause lasts.
        wanted: it has asked for one, and not for its end.
        ended: it reads no more, and pauses nothing any more.
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
        """Begins or ends its pause; waits for running steps, and releases the job's lock meanwhile.
        A pause that is ended before it begins does not begin.
        """
        quiesce = self.installed.quiesce
        with quiesce.condition:
            self.wanted = paused and not self.ended
            quiesce.rested.notify()  # for a pause that is not wanted any more
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
        """Adds an observer."""
        observation = Observation(installed, now)
        self._by_session[observation.session] = observation
        return observation

    def check_room(self, most: int) -> None:
        """Returns if another observer may begin.

        Raises:
            Busy: the number of observers has reached its limit.
        """
        if len(self._by_session) >= most:
            raise Busy(f"{most} observers read what this server holds: ask again when one has left")

    def find(self, session: str) -> Observation | None:
        """The observer that holds a session."""
        return self._by_session.get(session)

    def of_session(self, session: str, now: float) -> Observation:
        """The observer that holds a session; the call counts as a sign of life.

        Raises:
            Refused: there is none.
        """
        observation = self.find(session)
        if observation is None:
            raise Refused("this session of an observer is not known here: it was silent too long")
        observation.last_heard = now
        return observation

    def end(self, observation: Observation) -> None:
        """Ends an observer."""
        observation.ended = True
        if self._by_session.pop(observation.session, None) is not None:
            observation.set_pause(False)

    def lose_silent(self, now: float, timeout: float) -> None:
        """Ends those that have been silent for longer than the heartbeat timeout."""
        for observation in list(self._by_session.values()):
            if now - observation.last_heard > timeout:
                self.end(observation)
