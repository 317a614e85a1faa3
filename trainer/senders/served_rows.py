"""Rows of tables on the servers: looked up for a forward, scanned and loaded chunk by chunk for a
checkpoint.

A request goes at once to all servers that it concerns, on separate streams, so that a lookup never
waits behind gradients.  The script's thread waits for it.

[Note: what a script writes into tables]  The loaded rows replace the values of all rows: a row that
is not among them has its id's initial value afterwards.  Optimizer states stay.  If the steps of a
lane do not wait for other trainers, or there is one trainer, the servers have the rows at once.  In
a sync lane of several trainers each loads in its own time::

    load_state_dict    the trainer keeps the rows, and its own lookups read them there
    the next step      the leader sends the rows before it closes the step; every trainer closes it
                       with the checksum of its own; the servers compare
    after that         all trainers read the servers' rows

A load whose connection broke is repeated: it assigns, so repeating it does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from pserver.client.channel import Channel
from pserver.client.client import Client
from pserver.client.replies import Reply, first_of
from pserver.client.stream import Destination
from pserver.errors import PServerError
from pserver.table import counts
from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from pserver.table.rows import initial_values
from pserver.telemetry.trace import SPANS, now
from pserver.transport.arrays import PLACES, ROWS, checksum
from pserver.transport.frames import DTYPES
from trainer.embedding.rows import Arrived
from trainer.senders.live_trainers import LiveTrainers
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan

# ---- lookups ----


CHUNK_ROWS = 65536

Chunk = dict[str, np.ndarray]
Arrays = dict[str, torch.Tensor]  # of one answer, by name


def _into(arrays: Arrays) -> Destination:
    """The destination of an answer whose arrays come into these, or into new ones beside them."""

    def destination(name: str, blank: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in arrays:
            arrays[name] = blank()
        return arrays[name]

    return destination


@dataclass(slots=True, eq=False)
class KeptLookup:
    """A lookup ahead of its step, which servers keep.

    Attributes:
        number: by which they know it.
        ids: by table, int64 [u].
        divided: by table, the places of the ids that each server holds; empty where one holds all.
        rows: by table, [u, dim].
    """

    number: int
    ids: dict[str, torch.Tensor]
    divided: Mapping[str, Sequence[torch.Tensor]]
    rows: dict[str, torch.Tensor]

    @property
    def count(self) -> int:
        """Rows of all tables."""
        return sum(map(len, self.ids.values()))

    def ids_of(self, name: str, server: int) -> torch.Tensor:
        """The ids of a table that a server holds."""
        return _own(self.ids[name], self.divided, name, server)

    def take(self, server: int, names: Iterable[str], arrays: Mapping[str, torch.Tensor]) -> int:
        """Takes a server's changed rows in; returns their number."""
        changed = 0
        for name in names:
            if name + PLACES in arrays:
                places, rows = arrays[name + PLACES], self.rows[name]
                own = self.divided[name][server][places] if name in self.divided else places
                rows[own] = arrays[name + ROWS].to(rows.dtype)
                changed += len(places)
        return changed


class Lookups:
    """Requests for rows of a job's tables, to all servers, one request at a time.

    Any thread may call it; destinations are asked for in the channels' threads.

    Args:
        tables: of the plan.

    Attributes:
        tables: by name.
        lookups, rows: the numbers of requests for rows, and of rows looked up, since the start.
        rows_ahead: those that were looked up ahead of their step.
        rows_refreshed, rows_awaited: those of them that had changed since, each time; and those for
            which a forward waited.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}
        self.lookups = self.rows = 0
        self.rows_ahead = self.rows_refreshed = self.rows_awaited = 0
        self._kept = 0  # lookups ahead
        self._clients: list[Client] = []
        # One request at a time.  It is taken by ``with``: in a context manager of ours Ctrl-C could
        # come when the lock is taken, and before anyone is to release it.
        self._one = threading.Lock()

    def start(self, clients: list[Client]) -> None:
        """Sets the connections, by server."""
        self._clients = clients

    # ---- requests ----

    def pull(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of unique ids, int64 [u] on the CPU -> [u, dim].

        Raises:
            PServerError: a server is lost, or refuses an id.
        """
        return self.pull_all({name: ids})[name]

    def pull_all(self, asked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rows of unique ids of several tables, in one request to each server."""
        began = now() if SPANS.on else 0.0
        with self._one:
            rows = self._look_up(asked, self._divided(asked))
        self.lookups += 1
        count = sum(ids.numel() for ids in asked.values())
        self.rows += count
        if began:
            SPANS.add("lookup", began, now(), tables=", ".join(asked), rows=count)
        return rows

    def _divided(self, asked: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """By table, the places of the ids that each server holds; empty where one holds all."""
        servers = len(self._clients)
        if servers == 1:
            return {}
        places = {}
        for name, ids in asked.items():
            order, offsets = id_arithmetic.partition(ids.numpy(), servers)
            bounds = pairwise(offsets.tolist())
            places[name] = [torch.from_numpy(order[begin:end]) for begin, end in bounds]
        return places

    def _look_up(
        self,
        asked: Mapping[str, torch.Tensor],
        divided: Mapping[str, Sequence[torch.Tensor]],
        number: int = 0,
    ) -> dict[str, torch.Tensor]:
        """The rows of these ids.  The caller holds the turn.

        Args:
            divided: see :meth:`_divided`.
            number: under which the servers keep the lookup; 0: they do not.
        """
        rows = {name: self._blank(name, ids.numel()) for name, ids in asked.items()}
        replies, answers = list[Future[Reply]](), dict[int, Arrays]()
        for server in range(len(self._clients)):
            own = {name: _own(ids, divided, name, server) for name, ids in asked.items()}
            own = {name: ids for name, ids in own.items() if ids.numel()}
            if own:
                into = answers[server] = {
                    name: self._blank(name, ids.numel()) if divided else rows[name]
                    for name, ids in own.items()
                }
                replies.append(self._channel(server, own).lookup(own, _into(into), number))
        _await(replies)
        for name, places in divided.items():
            for server, arrived in answers.items():
                if name in arrived:
                    rows[name][places[server]] = arrived[name]
        return {name: self._computed(name, found) for name, found in rows.items()}

    def _computed(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the dtype that their table computes in."""
        dtype = DTYPES[self.tables[name].computes_in]
        return rows if rows.dtype is dtype else rows.to(dtype)

    # ---- lookups ahead ----

    def look_up_ahead(self, asked: Mapping[str, torch.Tensor]) -> KeptLookup:
        """As :meth:`pull_all`; the servers keep what they send, so that :meth:`refresh` needs only
        what has changed.

        Raises:
            PServerError: a server is lost, or refuses an id.
        """
        began = now() if SPANS.on else 0.0
        divided = self._divided(asked)
        with self._one:
            self._kept += 1
            kept = KeptLookup(self._kept, dict(asked), divided, {})
            kept.rows = self._look_up(asked, divided, kept.number)
        self.lookups += 1
        self.rows_ahead += kept.count
        if began:
            SPANS.add("look ahead", began, now(), tables=", ".join(asked), rows=kept.count)
        return kept

    def refresh(
        self,
        kept: KeptLookup,
        names: Collection[str],
        awaited: bool,
        after: Mapping[int, int] = MappingProxyType({}),
    ) -> bool:
        """Brings rows that were looked up ahead to what a lookup would read now.

        Args:
            names: of the tables whose rows are refreshed.
            awaited: a forward waits for them.
            after: by lane, a step of this trainer, which may be on its way, that is applied before.

        Returns:
            Whether they are; False where a server cannot tell what has changed after these steps.

        Raises:
            PServerError: a server is lost.
        """
        began = now() if SPANS.on else 0.0
        changed = 0
        with self._one:
            replies, arrived = dict[int, Future[Reply]](), dict[int, Arrays]()
            for server in range(len(self._clients)):
                own = [name for name in names if len(kept.ids_of(name, server))]
                if own:
                    into = arrived[server] = Arrays()
                    channel = self._channel(server, own)
                    replies[server] = channel.refresh(kept.number, own, _into(into), after)
            _await(list(replies.values()))
            known = {n: not reply.result().unknown_lookup for n, reply in replies.items()}
            for server in known:
                if known[server]:
                    changed += kept.take(server, names, arrived[server])
                elif not after:
                    changed += self._look_up_again(kept, names, server)
        self.rows_refreshed += changed
        self.rows_awaited += changed if awaited else 0
        if began:
            SPANS.add("refresh", began, now(), tables=", ".join(names), rows=changed)
        return not after or all(known.values())

    def _look_up_again(self, kept: KeptLookup, names: Iterable[str], server: int) -> int:
        """Looks up all rows of a server that does not know the lookup; their number."""
        own = {name: kept.ids_of(name, server) for name in names}
        own = {name: ids for name, ids in own.items() if len(ids)}
        rows = {name: self._blank(name, len(ids)) for name, ids in own.items()}
        _await([self._channel(server, own).lookup(own, _into(rows))])
        every = {name + PLACES: torch.arange(len(ids)) for name, ids in own.items()}
        return kept.take(server, own, every | {name + ROWS: each for name, each in rows.items()})

    def _blank(self, name: str, count: int) -> torch.Tensor:
        table = self.tables[name]
        return torch.empty((count, table.dim), dtype=DTYPES[table.dtype])

    def _channel(self, server: int, names: Iterable[str]) -> Channel:
        """The stream of the tables to a server, for a request about some of them."""
        if self._clients[server].left:
            raise RuntimeError(
                "this trainer has left the job: no lookup in table "
                f"{', '.join(map(repr, names))} after fleet.finish() or Executor.close()"
            )
        channel = self._clients[server].tables
        assert channel is not None, "a plan with tables has a stream for them"
        return channel

    # ---- whole tables ----

    def scan(
        self, name: str, changed: bool = False, materialized: bool = False
    ) -> Iterator[tuple[Chunk, Mapping[str, Any]]]:
        """Yields chunks of a table from all servers, one after the other, each with the joint
        metadata of the servers so far: the last chunk has the counts of all servers.

        Args:
            changed: whether to give only rows that changed since :meth:`mark_saved`.
            materialized: whether to give rows as a lookup reads them.

        Raises:
            OSError: a server has restarted meanwhile, with rows of another moment.
        """
        known: list[Mapping[str, Any]] = []
        for server, client in enumerate(self._clients):
            cursor, returned = 0, client.returned
            while cursor >= 0:
                with self._one:
                    arrived = Arrays()
                    reply = self._channel(server, [name]).scan(
                        name, cursor, CHUNK_ROWS, _into(arrived), changed, materialized
                    )
                    _await([reply])
                done = reply.result()
                if client.returned != returned:  # with rows of another moment
                    raise OSError(f"{client} has restarted while table {name!r} was read")
                chunk = {
                    full.removeprefix(f"{name}@"): array.numpy() for full, array in arrived.items()
                }
                known[server:] = [done.metadata]
                yield chunk, counts.joint(known)
                cursor = done.cursor

    def mark_saved(self, name: str) -> None:
        """Tells the servers that all changes of a table until now have been saved."""
        with self._one:
            for server in range(len(self._clients)):
                _await([self._channel(server, [name]).mark_saved(name)])

    def load_initial(self, server: int, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Loads rows without optimizer state into one server: those that it holds.

        Args:
            ids: int64 [n], each once.
            values: [n, dim].
        """
        for begin in range(0, len(ids), CHUNK_ROWS):
            part = RowGradient(ids[begin : begin + CHUNK_ROWS], values[begin : begin + CHUNK_ROWS])
            own = part.divide(len(self._clients))[server]
            rows = own.rows.to(DTYPES[self.tables[name].computes_in]).contiguous()
            arrays = [(f"{name}@ids", own.ids), (f"{name}@values", rows)]
            with self._one:
                _await([self._channel(server, [name]).load(arrays)])

    def reset(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Empties a table on every server, and sets its metadata."""
        with self._one:
            parts = [counts.part(metadata, server) for server in range(len(self._clients))]
            _await(
                [
                    self._channel(server, [name]).load([], {name: part})
                    for server, part in enumerate(parts)
                ]
            )

    def load(self, name: str, chunk: Chunk) -> None:
        """Loads the rows of a chunk, with their states, into the servers that hold them."""
        arrays = {
            key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in chunk.items()
        }
        with self._one:
            replies = []
            for server, own in enumerate(_chosen(chunk["ids"], len(self._clients))):
                parts = [
                    (f"{name}@{key}", array[own] if _by_row(key) else array)
                    for key, array in arrays.items()
                ]
                replies.append(self._channel(server, [name]).load(parts))
            _await(replies)

    def metrics(self, ahead: bool) -> dict[str, float]:
        """Requests for rows, and rows, since the start.

        Args:
            ahead: whether rows are looked up ahead of their steps.
        """
        counts = {"lookups": float(self.lookups), "rows_looked_up": float(self.rows)}
        if ahead:
            counts["rows_ahead"] = float(self.rows_ahead)
            counts["rows_refreshed"] = float(self.rows_refreshed)
            counts["rows_awaited"] = float(self.rows_awaited)
        return counts


def _await(replies: Sequence[Future[Reply]]) -> None:
    """Waits for the replies to one request, if any server was asked."""
    if replies:
        first_of(replies)


def _by_row(key: str) -> bool:
    """Whether an array of a chunk has one element for each of the chunk's rows."""
    return not key.startswith(("waiting.", "removed"))


def _chosen(ids: np.ndarray, servers: int) -> list[torch.Tensor]:
    """The positions of the ids that each server holds, by server."""
    order, offsets = id_arithmetic.partition(np.ascontiguousarray(ids), servers)
    return [
        torch.from_numpy(order[offsets[server] : offsets[server + 1]]) for server in range(servers)
    ]


def _own(
    ids: torch.Tensor, divided: Mapping[str, Sequence[torch.Tensor]], name: str, server: int
) -> torch.Tensor:
    """The ids of a table that a server holds."""
    return ids[divided[name][server]] if name in divided else ids


class ServedRows:
    """The rows of one table on the servers; a :class:`trainer.embedding.rows.RowSource`.

    Args:
        name: of the table.
    """

    def __init__(self, lookups: Lookups, name: str) -> None:
        self._lookups = lookups
        self._name = name

    def ids_to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """See :class:`~trainer.embedding.rows.RowSource`."""
        return ids

    def pull(self, ids: torch.Tensor, arrived: Arrived | None = None) -> torch.Tensor:
        """Rows of unique ids, int64 [u] -> [u, dim], on the ids' device.

        Args:
            arrived: see :class:`~trainer.embedding.rows.RowSource`.

        Raises:
            PServerError: a server is lost.
        """
        if arrived is not None and (rows := arrived.of(ids)) is not None:
            return rows
        try:
            return self._lookups.pull(self._name, ids.cpu()).to(ids.device)
        except PServerError as error:
            error.add_note(f"looking up {len(ids)} rows of table {self._name!r}")
            raise


# ---- written tables ----
#
# Rows of tables on servers as a script reads and writes them whole: ``state_dict`` and
# ``load_state_dict`` of an embedding.


MAX_BYTES = 1 << 32  # of a table in a state_dict, as in an export

Rows = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [n], ascending, and values, [n, dim]


class WrittenTables:
    """Reads and writes whole tables on servers.  See [Note: what a script writes into tables].

    The script's thread calls it.

    Args:
        plan: of the job.
        lookups: of its tables.
        live: the live trainers.
        drain: waits until everything sent has been applied.
        count: gives the number of a table's rows now, on all servers.
    """

    def __init__(
        self,
        plan: Plan,
        lookups: Lookups,
        live: LiveTrainers,
        drain: Callable[[], None],
        count: Callable[[str], int],
    ) -> None:
        self._plan, self._lookups, self._live = plan, lookups, live
        self._drain, self._count = drain, count
        self._waiting: dict[str, Rows] = {}  # written since the last step, in sync lanes
        self._sent: set[str] = set()  # those of them that the servers have

    def rows_of(self, name: str) -> WritableRows:
        """The source that the embeddings of a table pull from."""
        return WritableRows(self, self._lookups, name)

    # ---- calls of the script ----

    def read(self, name: str) -> Rows | None:
        """All rows of a table that differ from their initial values or once did, with every step of
        this trainer; None if they have more than ``MAX_BYTES``.

        Raises:
            PServerError: a server is lost.
        """
        if name in self._waiting:
            return self._waiting[name]
        self._drain()
        return None if self.bytes_of(name) > MAX_BYTES else self._scanned(name)

    def bytes_of(self, name: str) -> int:
        """Bytes of a table's ids and values on all servers."""
        table = self._lookups.tables[name]
        return self._count(name) * (8 + table.dim * DTYPES[table.computes_in].itemsize)

    def write(self, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the values of all rows of a table: ids, int64 [n], each once, and values, [n,
        dim]; the tensors are not kept.

        Raises:
            PServerError: a server is lost.
        """
        ordered, order = ids.sort()
        rows = ordered, values[order]
        lane = self._plan.lanes[self._lookups.tables[name].lane]
        if lane.kind.waits_for_all and self._plan.trainers > 1:
            self._waiting[name] = rows
            self._sent.discard(name)
        else:
            self._drain()
            self._assign(name, rows)

    def waits(self, name: str) -> bool:
        """Whether a table was written since the last step, so that its rows are read here."""
        return name in self._waiting

    def waiting(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, [n, dim], of a table that :meth:`waits`."""
        known, values = self._waiting[name]
        rows = initial_of(self._lookups.tables[name], ids)
        if len(known):
            places = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
            here = known[places] == ids
            rows[here] = values[places[here]]
        return rows

    # ---- steps ----

    def send(self, lane: int) -> None:
        """Sends, on the leader, the rows that were written into a lane's tables to the servers."""
        for name in self._of(lane) if self._live.is_leader else ():
            if name not in self._sent:
                self._assign(name, self._waiting[name])
                self._sent.add(name)

    def close(self, lane: int) -> dict[str, int]:
        """Sends, on the leader, the rows that were written since the last step, before a lane's
        step is closed; gives this trainer's checksums of them, by table.
        """
        self.send(lane)
        return {name: _checksum(self._waiting[name]) for name in self._of(lane)}

    def forget(self, lane: int) -> None:
        """Drops the written rows: after a lane's step, or when the servers' rows have been replaced
        otherwise.
        """
        for name in self._of(lane):
            del self._waiting[name]
            self._sent.discard(name)

    def _of(self, lane: int) -> list[str]:
        return [name for name in self._waiting if self._lookups.tables[name].lane == lane]

    # ---- servers ----

    def _scanned(self, name: str) -> Rows:
        table = self._lookups.tables[name]
        ids, values = [np.empty(0, np.int64)], [np.empty((0, table.dim), table.computes_in)]
        for chunk, _ in self._lookups.scan(name, materialized=True):
            ids.append(chunk["ids"])
            values.append(chunk["values"])
        ordered, order = torch.from_numpy(np.concatenate(ids)).sort()
        return ordered, torch.from_numpy(np.concatenate(values))[order]

    def _assign(self, name: str, rows: Rows) -> None:
        ids, values = rows
        known = [torch.from_numpy(chunk["ids"]) for chunk, _ in self._lookups.scan(name)]
        others = torch.cat([part[~torch.isin(part, ids)] for part in known])
        for begin in range(0, len(others), CHUNK_ROWS):
            part = others[begin : begin + CHUNK_ROWS]
            initial = initial_of(self._lookups.tables[name], part)
            self._lookups.load(name, {"ids": part.numpy(), "values": initial.numpy()})
        for begin in range(0, len(ids), CHUNK_ROWS):
            end = begin + CHUNK_ROWS
            chunk = {"ids": ids[begin:end].numpy(), "values": values[begin:end].numpy()}
            self._lookups.load(name, chunk)


class WritableRows(ServedRows):
    """The rows of one table on servers, which a script may read and write whole; a
    :class:`trainer.embedding.state_dict.WholeRows`.

    Args:
        written: the job's written tables.
        lookups: of its tables.
        name: of the table.
    """

    def __init__(self, written: WrittenTables, lookups: Lookups, name: str) -> None:
        super().__init__(lookups, name)
        self._written = written

    def ids_to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """See :class:`ServedRows`."""
        return ids[:0] if self._written.waits(self._name) else ids

    def pull(self, ids: torch.Tensor, arrived: Arrived | None = None) -> torch.Tensor:
        """See :class:`ServedRows`."""
        if not self._written.waits(self._name):
            return super().pull(ids, arrived)
        return self._written.waiting(self._name, ids.cpu()).to(ids.device)

    def read(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :meth:`WrittenTables.read`."""
        try:
            return self._written.read(self._name)
        except PServerError as error:
            error.add_note(f"reading the rows of table {self._name!r} for a state_dict")
            raise

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """See :meth:`WrittenTables.write`."""
        try:
            self._written.write(self._name, ids, values)
        except PServerError as error:
            error.add_note(f"loading {len(ids)} rows into table {self._name!r}")
            raise


def initial_of(table: Table, ids: torch.Tensor) -> torch.Tensor:
    """The initial values of the rows of ids, int64 [n] -> [n, dim]."""
    rows = torch.empty((len(ids), table.dim), dtype=DTYPES[table.computes_in])
    initial_values(table, ids.contiguous().numpy(), rows.numpy())
    return rows


def _checksum(rows: Rows) -> int:
    parts = np.array([checksum(part.contiguous()) for part in rows], np.uint64)
    return checksum(torch.from_numpy(parts.view(np.int64)))
