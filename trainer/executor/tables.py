"""Tables of a trainer's program in a job: the kernels that pull their rows from the servers and
send gradients of rows.

The embeddings of the captured model pull from the servers, too, once these are joined: evaluation
in plain PyTorch sees the job's rows.  A weight of torch's own (``sparse=True``) has them when the
Executor is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pserver.errors import PServerError
from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.communicator.communicator import Communicator
from trainer.communicator.tables import CachingSource
from trainer.embedding.rows import Arrived, RowSource
from trainer.executor.table_runtime import NativeRowKernels, ServedHandle, as_gradient, live
from trainer.senders.served_rows import CHUNK_ROWS
from transpiler.ir.graph import Op, Storage
from transpiler.ir.rules import Hparam
from transpiler.ir.sparse_rows import SparseRows
from transpiler.ir.table_ops import is_sparse, start_rows
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan


@dataclass(slots=True)
class DividedGradient(RowGradient):
    """A gradient of rows that is divided by server already: the rows of each server stand together,
    in the servers' order.

    Attributes:
        sizes: how many rows each server has.
    """

    sizes: tuple[int, ...] = ()

    def divide(self, servers: int) -> list[RowGradient]:
        """The part of each server; divided anew where rows have been added since."""
        if len(self.sizes) != servers or sum(self.sizes) != len(self.ids):
            return RowGradient(self.ids, self.rows, self.statistics).divide(servers)
        sizes = list(self.sizes)
        counted = (
            [None] * servers if self.statistics is None else torch.split(self.statistics, sizes)
        )
        parts = zip(
            torch.split(self.ids, sizes), torch.split(self.rows, sizes), counted, strict=True
        )
        return [RowGradient(*part) for part in parts]


class ServedTables:
    """The tables of a trainer's program whose rows servers hold.

    Args:
        plan: of the job.
        storage: the program's.
        communicator: gives the connection, joined on first use.

    Attributes:
        handles: the values of the tables' variables, by name.
    """

    def __init__(
        self, plan: Plan, storage: Storage, communicator: Callable[[], Communicator]
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._communicator = communicator
        self._sources: dict[str, RowSource] = {}
        self.handles = {table.name: self._handle(table) for table in plan.tables}
        self._arithmetic = NativeRowKernels()

    def _handle(self, table: Table) -> ServedHandle:
        def send(name: str, gradient: RowGradient) -> None:
            self._communicator().send_rows(name, gradient)

        return ServedHandle(table.name, table.rows, lambda: self._source(table.name), send)

    def _source(self, name: str) -> RowSource:
        if name not in self._sources:
            self._communicator()
        return self._sources[name]

    def start_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The rows that servers begin with, where this process has some, by table: ids, int64 [n],
        and values, [n, dim].
        """
        held = {table.name: self._storage.tables.get(table.name, ()) for table in self._plan.tables}
        found = {
            name: self._storage.rows.get(name) or start_rows(modules)
            for name, modules in held.items()
        }
        return {name: rows for name, rows in found.items() if rows is not None}

    def connect(self, communicator: Communicator) -> None:
        """Makes handles, and the model's embeddings, pull their rows from the servers."""
        self._sources = {
            table.name: communicator.rows_of(table.name) for table in self._plan.tables
        }
        for name, source in self._sources.items():
            for module in live(self._storage, name):
                module.connect(source)
                module.initial_rows = None

    def invalidate_caches(self) -> None:
        """Drops copies of rows."""
        for source in self._sources.values():
            if isinstance(source, CachingSource):
                source.invalidate()

    def hparams(self) -> dict[int, Mapping[str, Hparam]]:
        """The present hyper-parameters of the tables' own optimizers, by the group of the plan."""
        own = self._storage.own
        first = len(self._plan.groups) - len(own)
        return {first + index: each.rule().hparams for index, each in enumerate(own)}

    def pull_weights(self, communicator: Communicator) -> None:
        """Copies the servers' rows into the weights of torch's own that they came from."""
        held = {
            name: modules[0]
            for name, modules in self._storage.tables.items()
            if name in self.handles
        }
        weights = {name: module.weight for name, module in held.items() if is_sparse(module)}
        if not weights or communicator.lookups is None:
            return
        for name, weight in weights.items():
            assert isinstance(weight, Tensor), "an embedding of torch's"
            for ids in torch.split(torch.arange(len(weight)), CHUNK_ROWS):
                weight.detach()[ids] = communicator.lookups.pull(name, ids).to(weight.device)

    # ---- kernels ----

    def kernels(self) -> Mapping[str, Callable[..., Any]]:
        """The kernels of lookups and of dividing gradients, by op type."""
        return {
            "split_ids": self._split,
            "prefetch": self._prefetch,
            "merge_ids": self._merge,
            "distributed_lookup_table": self._pull,
        }

    def send(self, name: str, parts: Sequence[SparseRows]) -> None:
        """Queues a table's gradient, whole or in parts by server."""
        if len(parts) == 1:
            gradient = as_gradient(parts[0])
        else:
            counted = [part.statistics for part in parts if part.statistics is not None]
            ids, rows = (
                torch.cat([part.ids for part in parts]),
                torch.cat([part.rows for part in parts]),
            )
            sizes = tuple(len(part.ids) for part in parts)
            gradient = DividedGradient(ids, rows, torch.cat(counted) if counted else None, sizes)
        self._communicator().send_rows(name, gradient)

    def _split(self, op: Op, x: Sequence[Any], padding_idx: int | None = None) -> list[Any]:
        servers = len(op.outputs)
        if isinstance(x[0], SparseRows):
            return [
                SparseRows(part.ids, part.rows, part.statistics)
                for part in as_gradient(x[0]).divide(servers)
            ]
        wanted, _ = self._arithmetic.wanted(x, padding_idx)
        unique, _ = self._arithmetic.unique(wanted)
        if servers == 1:
            return [unique]
        order, offsets = id_arithmetic.partition(unique.numpy(), servers)
        return [
            unique[torch.from_numpy(order[offsets[server] : offsets[server + 1]])]
            for server in range(servers)
        ]

    def _prefetch(
        self, op: Op, w: Sequence[ServedHandle], ids: Sequence[Tensor], **_: Any
    ) -> list[Tensor]:
        count = len(ids) // len(w)  # parts of each table
        parts = [ids[begin : begin + count] for begin in range(0, len(ids), count)]
        wanted = [table.checked(torch.cat(list(own))) for table, own in zip(w, parts, strict=True)]
        ahead = self._together(w, wanted) if len(w) > 1 else [None]
        rows = list[Tensor]()
        for handle, own, all_ids, arrived in zip(w, parts, wanted, ahead, strict=True):
            found = handle.source().pull(all_ids, arrived)
            rows += torch.split(found, [len(part) for part in own])
        return rows

    def _together(
        self, tables: Sequence[ServedHandle], wanted: Sequence[Tensor]
    ) -> list[Arrived | None]:
        """What servers have of the rows of several tables, in one request to each server."""
        asked = [table.source().asks(ids) for table, ids in zip(tables, wanted, strict=True)]
        if not any(map(len, asked)):  # every row is fresh
            return [None] * len(tables)
        lookups = self._communicator().lookups
        assert lookups is not None, "the plan has tables"
        names = [table.name for table in tables]
        try:
            rows = lookups.pull_all(
                {name: ids for name, ids in zip(names, asked, strict=True) if len(ids)}
            )
        except PServerError as error:
            error.add_note(f"looking up {sum(map(len, asked))} rows of {len(tables)} tables")
            raise
        return [
            Arrived(ids, rows[name]) if name in rows else None
            for name, ids in zip(names, asked, strict=True)
        ]

    def _merge(
        self,
        op: Op,
        x: Sequence[Tensor],
        ids: Sequence[Tensor],
        rows: Sequence[Tensor],
        padding_idx: int | None = None,
    ) -> list[Tensor]:
        wanted, stays = self._arithmetic.wanted(x, padding_idx)
        known = torch.cat(list(ids))
        # in order of occurrence: the known ones first
        _, places = self._arithmetic.unique(torch.cat([known, wanted]))
        return self._arithmetic.spread(torch.cat(list(rows)), places[len(known) :], stays, x)

    def _pull(
        self,
        op: Op,
        w: ServedHandle,
        ids: Sequence[Tensor],
        padding_idx: int | None = None,
        **_: Any,
    ) -> list[Tensor]:
        wanted, stays = self._arithmetic.wanted(ids, padding_idx)
        unique, inverse = self._arithmetic.unique(wanted)
        return self._arithmetic.spread(w.pull(unique), inverse, stays, ids)
