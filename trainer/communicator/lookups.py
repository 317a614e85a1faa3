"""Rows of tables from the servers: looked up for a forward, read and loaded chunk by chunk for a
checkpoint.

A request goes to all servers that it concerns at once, on streams of its own, so that a lookup
never waits behind gradients that are on their way.  The script's thread waits for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from pserver.client.channel import Channel
from pserver.client.client import Client
from pserver.errors import PServerError
from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from pserver.transport import codec
from pserver.wire_pb2 import Commit, Done, Frame, Kind, Part, Scan
from trainer.communicator.lane import Request
from transpiler.ir.tables import Table

CHUNK_ROWS = 65536

Chunk = dict[str, np.ndarray]


class Lookups:
    """See the module's docstring.

    Args:
        tables: of the plan, by name.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}
        self.lookups = 0
        self.rows = 0  # that were looked up
        self._clients: list[Client] = []
        # by server: where the present request's arrays go
        self._landings: list[dict[str, torch.Tensor]] = []
        self._turn = threading.Lock()  # one request at a time

    def start(self, clients: list[Client]) -> None:
        """The connections, by server."""
        self._clients = clients
        self._landings = [{} for _ in clients]

    def landing(self, server: int, part: Part) -> torch.Tensor:
        """Where a part of an array goes; called in the channels' threads."""
        if part.name not in self._landings[server]:
            self._landings[server][part.name] = codec.blank(part)
        return self._landings[server][part.name]

    def rows_of(self, name: str) -> ServedRows:
        """What the embeddings of a table pull from."""
        return ServedRows(self, name)

    def pull(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of unique ids, int64 [u] on the CPU -> [u, dim].

        Raises:
            PServerError: a server is lost, or refuses an id.
        """
        return self.pull_all({name: ids})[name]

    def pull_all(self, asked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rows of unique ids of several tables, in one request to each server."""
        servers = len(self._clients)
        orders = {
            name: id_arithmetic.partition(ids.numpy(), servers)
            for name, ids in asked.items()
            if servers > 1
        }
        rows = {name: self._blank(name, len(ids)) for name, ids in asked.items()}
        with self._turn:
            answers = []
            for server in range(servers):
                own = {name: _own(ids, orders.get(name), server) for name, ids in asked.items()}
                own = {name: ids for name, ids in own.items() if len(ids)}
                if own:
                    landing = {
                        name: rows[name] if servers == 1 else self._blank(name, len(ids))
                        for name, ids in own.items()
                    }
                    answers.append(self._ask(server, own, landing))
            self._wait(answers)
            for name, (order, offsets) in orders.items():
                for server, landed in enumerate(self._landings):
                    if name in landed:
                        rows[name][
                            torch.from_numpy(order[offsets[server] : offsets[server + 1]])
                        ] = landed[name]
            self._landings = [{} for _ in self._clients]
        self.lookups += 1
        self.rows += sum(map(len, asked.values()))
        return rows

    def pull_divided(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of unique ids of one table that were divided by server already: int64 [u] each
        -> [u, dim] each.

        Raises:
            PServerError: a server is lost, or refuses an id.
        """
        rows = [self._blank(name, len(ids)) for ids in parts]
        with self._turn:
            asked = [server for server, ids in enumerate(parts) if len(ids)]
            self._wait(
                [self._ask(server, {name: parts[server]}, {name: rows[server]}) for server in asked]
            )
            self._landings = [{} for _ in self._clients]
        self.lookups += 1
        self.rows += sum(map(len, parts))
        return rows

    def _blank(self, name: str, count: int) -> torch.Tensor:
        table = self.tables[name]
        return torch.empty((count, table.dim), dtype=codec.DTYPES[table.dtype])

    def _channel(self, server: int) -> Channel:
        channel = self._clients[server].tables
        assert channel is not None, "a plan with tables has a stream for them"
        return channel

    def _ask(
        self, server: int, own: Mapping[str, torch.Tensor], landing: dict[str, torch.Tensor]
    ) -> Future[Done]:
        self._landings[server] = landing
        channel = self._channel(server)
        answer = channel.begin()
        channel.post(Kind.LOOKUP, 0, own.items())
        channel.pull(own, 0)
        return answer

    @staticmethod
    def _wait(answers: list[Future[Done]]) -> None:
        if answers:
            Request(0, answers).wait()

    # ---- whole tables ----

    def scan(
        self, name: str, changed: bool = False, materialized: bool = False
    ) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        """Chunks of a table from all servers, one after the other, each with its server's metadata."""
        for server in range(len(self._clients)):
            cursor = 0
            while cursor >= 0:
                asked = Scan(
                    table=name,
                    cursor=cursor,
                    limit=CHUNK_ROWS,
                    changed_since_save=changed,
                    materialized=materialized,
                )
                with self._turn:
                    done = self._scan(server, asked)
                    landed, self._landings[server] = self._landings[server], {}
                chunk = {
                    full.removeprefix(f"{name}@"): array.numpy() for full, array in landed.items()
                }
                yield chunk, json.loads(done.metadata)
                cursor = done.cursor

    def _scan(self, server: int, asked: Scan) -> Done:
        self._landings[server] = {}
        channel = self._channel(server)
        answer = channel.begin()
        channel.request(Frame(kind=Kind.SCAN, scan=asked))
        return Request(0, [answer]).wait()

    def saved(self, name: str) -> None:
        """All that has changed of a table until now has been saved."""
        with self._turn:
            for server in range(len(self._clients)):
                self._scan(server, Scan(table=name, mark_saved=True))

    def begin_with(self, server: int, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Gives a server those of these rows that it holds, as values that nothing was learned from
        yet.

        Args:
            ids: int64 [n], each once; values: [n, dim].
        """
        for begin in range(0, len(ids), CHUNK_ROWS):
            part = RowGradient(ids[begin : begin + CHUNK_ROWS], values[begin : begin + CHUNK_ROWS])
            own = part.divide(len(self._clients))[server]
            with self._turn:
                self._wait(
                    [
                        self._give(
                            server,
                            [(f"{name}@ids", own.ids), (f"{name}@values", own.rows.contiguous())],
                            {},
                        )
                    ]
                )

    def begin_anew(self, name: str, metadata: Mapping[str, Any]) -> None:
        """A table without rows, with these metadata, on every server."""
        said = {name: json.dumps(metadata)}
        with self._turn:
            self._wait([self._give(server, [], said) for server in range(len(self._clients))])

    def load(self, name: str, chunk: Chunk) -> None:
        """Gives every server those rows of a chunk that it holds, with their states."""
        arrays = {
            key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in chunk.items()
        }
        with self._turn:
            answers = []
            for server, own in enumerate(_chosen(chunk["ids"], len(self._clients))):
                parts = [
                    (f"{name}@{key}", array[own] if _by_row(key) else array)
                    for key, array in arrays.items()
                ]
                answers.append(self._give(server, parts, {}))
            self._wait(answers)

    def _give(
        self, server: int, arrays: list[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
    ) -> Future[Done]:
        channel = self._channel(server)
        answer = channel.begin()
        channel.post(Kind.VALUE, 0, arrays)
        channel.commit(0, Commit(metadata=metadata))
        return answer

    def metrics(self) -> dict[str, float]:
        """Requests for rows, and rows."""
        return {"lookups": float(self.lookups), "rows_looked_up": float(self.rows)}


def _by_row(key: str) -> bool:
    """Whether an array of a chunk has an entry for each of its rows."""
    return not key.startswith(("waiting.", "removed"))


def _chosen(ids: np.ndarray, servers: int) -> list[torch.Tensor]:
    """Which of the ids each server holds."""
    order, offsets = id_arithmetic.partition(np.ascontiguousarray(ids), servers)
    return [
        torch.from_numpy(order[offsets[server] : offsets[server + 1]]) for server in range(servers)
    ]


def _own(
    ids: torch.Tensor, order: tuple[np.ndarray, np.ndarray] | None, server: int
) -> torch.Tensor:
    if order is None:
        return ids
    positions, offsets = order
    return ids[torch.from_numpy(positions[offsets[server] : offsets[server + 1]])]


class ServedRows:
    """Where the rows of one embedding live when servers hold them: what its module pulls from."""

    def __init__(self, lookups: Lookups, name: str) -> None:
        self._lookups = lookups
        self._name = name

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of unique ids, int64 [u] -> [u, dim], on the ids' device.

        Raises:
            PServerError: a server is lost.
        """
        try:
            return self._lookups.pull(self._name, ids.cpu()).to(ids.device)
        except PServerError as error:
            error.add_note(f"looking up {len(ids)} rows of table {self._name!r}")
            raise

    def pull_divided(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of unique ids that were divided by server, on the CPU: int64 [u] each -> [u, dim]
        each.

        Raises:
            PServerError: a server is lost.
        """
        try:
            return self._lookups.pull_divided(self._name, parts)
        except PServerError as error:
            error.add_note(f"looking up {sum(map(len, parts))} rows of table {self._name!r}")
            raise
