"""The sources of rows for the embeddings of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pserver.client.client import Client
from trainer.embedding.rows import RowSource
from trainer.senders.kstep_lane import DiLoCoSender, KStepSender
from trainer.senders.kstep_rows import DiLoCoRows, GeoRows
from trainer.senders.live_trainers import LiveTrainers
from trainer.senders.pipeline import LaneSender
from trainer.senders.served_rows import Lookups, WrittenTables
from trainer.senders.sync_lane import SyncSender
from transpiler.plan.plan import Plan


class TableSources:
    """The sources of a job's tables: the servers, or in a k-step lane the rows that this trainer
    steps.

    Args:
        plan: of the job.
        lookups: of its tables.
        lanes: the senders, by lane.
        clients: the connections, by server.
        live: the live trainers.
        drain: waits until everything sent has been applied.
    """

    def __init__(
        self,
        plan: Plan,
        lookups: Lookups,
        lanes: Sequence[LaneSender],
        clients: Sequence[Client],
        live: LiveTrainers,
        drain: Callable[[], None],
    ) -> None:
        self._plan, self._lookups, self._lanes = plan, lookups, lanes
        self._clients = clients
        self._written = WrittenTables(plan, lookups, live, drain, self._count)
        for index, lane in enumerate(lanes):
            if isinstance(lane, SyncSender):
                lane.follow(self._written, index)

    def source(self, name: str) -> RowSource:
        """The source of one table."""
        table = self._plan.table(name)
        lane = self._lanes[table.lane]
        if not isinstance(lane, KStepSender):
            return self._written.rows_of(name)
        pull, read = partial(self._lookups.pull, name), partial(self._written.read, name)
        rows = DiLoCoRows if isinstance(lane, DiLoCoSender) else GeoRows
        lane.tables[name] = rows(table, self._plan, pull, read)
        return lane.tables[name]

    def _count(self, name: str) -> int:
        """The number of rows that the servers hold of a table now."""
        return sum(
            held.rows
            for client in self._clients
            for held in client.table_status()
            if held.name == name
        )
