"""What a server holds while it has a job: the table, and the steps of each lane over it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pserver.dense.slice_store import SliceStore
from pserver.dense.slice_update import SliceUpdate
from pserver.errors import Refused
from pserver.job.blocking_waits import Standing, wait
from pserver.job.lane import LaneExecutor
from pserver.job.membership import Member, Membership, Wait
from pserver.job.quiesce import Quiesce
from pserver.job.workers import Workers
from pserver.table.gradient import RowGradient
from transpiler.ir.graph import Storage
from transpiler.plan.plan import Plan
from transpiler.program import Program

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


CHUNK_ROWS = 65536  # that a table takes over at a time


class InstalledProgram:
    """An installed program.

    Args:
        scratch: where rows of tables go that leave memory; None: where temporary files go.

    Attributes:
        plan: that it was made for.
        table: the slices.
        lanes: the steps of each lane, by its index in the plan.
        tables: the sparse ones, by name.
        gate: that every step passes while it changes a table.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        members: Membership,
        job: Standing,
        scratch: str | None = None,
    ) -> None:
        self.plan = plan
        self.table = SliceStore(program)
        self._members = members
        self._job = job
        self.gate = Quiesce(job)
        self.tables = _held(program, scratch)
        assert program.deployment is not None and program.deployment.server_index is not None, (
            "a pserver program"
        )
        self._server = program.deployment.server_index
        workers = Workers(torch.get_num_threads())
        self._locks = {name: threading.Lock() for name in self.table.values}
        self.lanes = [
            LaneExecutor(
                index,
                lane,
                self._entries(index),
                self._locks,
                members,
                job,
                self.gate,
                workers,
                self._tables(index),
            )
            for index, lane in enumerate(plan.lanes)
        ]
        self._meeting = ""
        self._barriers: dict[str, set[int]] = {}

    def begin_with(self, values: Storage) -> None:
        """Takes over the values of slices, and those rows of tables that this server holds."""
        self.table.load(values.tensors)
        for name, (ids, rows) in values.rows.items():
            for begin in range(0, len(ids), CHUNK_ROWS):
                chunk = RowGradient(
                    ids[begin : begin + CHUNK_ROWS], rows[begin : begin + CHUNK_ROWS]
                )
                own = chunk.divide(self.plan.servers)[self._server]
                self.tables[name].load(
                    {"ids": own.ids.numpy(), "values": own.rows.contiguous().numpy()}
                )

    def _entries(self, lane: int) -> dict[str, SliceUpdate]:
        return {name: entry for name, entry in self.table.updates.items() if entry.lane == lane}

    def _tables(self, lane: int) -> dict[str, LockedTable]:
        return {name: held for name, held in self.tables.items() if held.table.lane == lane}

    def lane(self, index: int) -> LaneExecutor:
        """The steps of a lane.

        Raises:
            Refused: the plan has no such lane.
        """
        if index >= len(self.lanes):
            raise Refused(f"expected a lane below {len(self.lanes)}, got {index}")
        return self.lanes[index]

    @property
    def version(self) -> int:
        """Updates applied, counted in steps, over all lanes."""
        return sum(steps.version for steps in self.lanes)

    def hand_out(self, member: Member, name: str) -> torch.Tensor | None:
        """A slice or a state as nobody is updating it; None for a state that no update has made
        yet.

        Raises:
            Unprepared: nothing of this name is held here.
        """
        if name in self.table.updates:
            return self.lanes[self.table.updates[name].lane].hand_out(member, name)
        if name in self.table.values:
            return self.table.values[name]
        with self._locks[self.table.slice_of(name)]:
            return self.table.read(name)

    def rendezvous(self, member: Member, place: str) -> str:
        """Where trainers meet that share some work among themselves: trainer 0 says it; "" before
        that.
        """
        if place and member.trainer == 0:
            self._meeting = place
        return self._meeting

    def forget(self) -> None:
        """Slices have been loaded: what readers have been given of them is no longer so."""
        for steps in self.lanes:
            steps.forget()

    def barrier(self, member: Member, name: str, patience: float) -> bool:
        """Waits until every trainer that has not left has come to the barrier of this name, or
        patience (seconds) ends.
        """
        with self._job.changed:
            arrived = self._barriers.setdefault(name, set())
            arrived.add(member.trainer)
            self._job.changed.notify_all()
            end = time.monotonic() + patience

            def passed() -> bool:
                return arrived.issuperset(self._members.awaited())

            def missing() -> list[int]:
                return [trainer for trainer in self._members.awaited() if trainer not in arrived]

            this = Wait(
                member, "barrier", f"barrier {name!r}", lambda: passed() or time.monotonic() >= end
            )
            wait(self._job, self._members, this, missing)
            return passed()


def _held(program: Program, scratch: str | None) -> dict[str, LockedTable]:
    """The sparse tables of a program's plan, by name: every server holds a part of each.

    Raises:
        Refused: rows are to leave memory, and there is no place for them.
    """
    assert program.deployment is not None and program.deployment.server_index is not None, (
        "a pserver program"
    )
    plan, server = program.deployment.plan, program.deployment.server_index
    if not plan.tables:
        return {}
    # which compiles the kernels of rows, or loads them: that takes a while
    from pserver.job.locked_table import LockedTable

    place = None if scratch is None else Path(scratch)
    try:
        return {table.name: LockedTable(table, plan, server, place) for table in plan.tables}
    except (ImportError, OSError) as error:
        raise Refused(f"the tables of this program: {error}") from error
