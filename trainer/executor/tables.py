"""Tables while programs run: the places of rows, their steps, and the kernels of lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pserver.errors import PServerError
from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.communicator.communicator import Communicator
from trainer.communicator.tables import CachingSource
from trainer.embedding.embedding import DistributedEmbedding
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.rows import Arrived, RowSource
from trainer.executor.table_handle import TableHandle
from trainer.senders.served_rows import CHUNK_ROWS
from transpiler.inference.fed_ids import ProgramLookup
from transpiler.ir.graph import Op, Role, Storage
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.sparse_rows import RowKernels, SparseRows
from transpiler.ir.table_ops import (
    is_sparse,
    row_rule_of_op,
    segment_of,
    start_rows,
    table_name,
    updates_rows,
)
from transpiler.ir.tables import Table
from transpiler.ir.updates import tables_of
from transpiler.plan.plan import Plan
from transpiler.program import Program

# ---- table runtime ----
#
# The handles of tables while programs run: the places of the rows, and their steps.
#
# Each table's variable holds one :class:`~trainer.executor.table_handle.TableHandle`::
#
#   EmbeddingHandle   rows of an embedding of ours: the module's, stepped by the user's optimizer
#   WeightHandle      rows of a weight of torch's own, likewise
#   DeclaredHandle    rows made from what a loaded program declares, stepped by the program's rules
#   ServedHandle      rows of servers, or of a k-step lane
#
# This module imports numba; :mod:`trainer.executor.table_handle` does not.


ByColumns = list[tuple[int, int, Rule]]


class NativeRowKernels(RowKernels):
    """The kernels of lookups over this system's own arithmetic of ids."""

    def unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~transpiler.ir.sparse_rows.RowKernels`."""
        found, inverse = id_arithmetic.unique(ids.contiguous().numpy())
        return torch.from_numpy(found), torch.from_numpy(inverse)

    def merge(self, inverse: Tensor, values: Tensor, count: int) -> Tensor:
        """See :class:`~transpiler.ir.sparse_rows.RowKernels`."""
        return torch.from_numpy(
            id_arithmetic.merge(inverse.numpy(), values.contiguous().numpy(), count)
        )


def as_gradient(rows: SparseRows) -> RowGradient:
    """A program's gradient of rows in the form that communicators and tables take."""
    return RowGradient(rows.ids, rows.rows.contiguous(), rows.statistics)


class RangeChecked:
    """A handle that refuses ids outside of its table's range.

    Args:
        name: of the table, which stays its attribute.
        num_embeddings: ids are below this, which stays its attribute; None: ids are any int64.
    """

    def __init__(self, name: str, num_embeddings: int | None) -> None:
        self.name, self.num_embeddings = name, num_embeddings

    def checked(self, ids: Tensor) -> Tensor:
        """Checks ids, int64 [n], and returns them.

        Raises:
            ValueError: one is out of range.
        """
        if self.num_embeddings is not None and len(ids):
            odd = ids[(ids < 0) | (ids >= self.num_embeddings)]
            if len(odd):
                raise ValueError(
                    f"table {self.name!r}: ids: expected 0 to {self.num_embeddings - 1}, got "
                    f"{int(odd[0])}"
                )
        return ids


class EmbeddingHandle(RangeChecked):
    """Rows of an embedding of ours, in this process or on servers."""

    def __init__(self, name: str, module: DistributedEmbedding) -> None:
        super().__init__(name, module.num_embeddings)
        self._module = module

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`TableHandle`."""
        return self._module.rows.pull(self.checked(ids))

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """Gives the proxy parameter the gradient, as after a backward."""
        with self._module.proxy.lend(as_gradient(gradient)):
            yield


class WeightHandle(RangeChecked):
    """Rows of a weight of torch's own, which an embedding with ``sparse=True`` looks up."""

    def __init__(self, name: str, weight: nn.Parameter) -> None:
        super().__init__(name, len(weight))
        self._weight = weight

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`TableHandle`."""
        return (
            self._weight.detach().index_select(0, self.checked(ids).to(self._weight.device)).cpu()
        )

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """Gives the weight the gradient, as after a backward."""
        before, device = self._weight.grad, self._weight.device
        places, values = gradient.ids.unsqueeze(0).to(device), gradient.rows.to(device)
        self._weight.grad = torch.sparse_coo_tensor(
            places, values, self._weight.shape, check_invariants=False
        )
        try:
            yield
        finally:
            self._weight.grad = before


class DeclaredHandle(RangeChecked):
    """Rows of a table that a loaded program declares.

    Args:
        rules: of its columns; none where nothing updates it.
        unsaved: of the program's storage; the first step notes that the rows are not in it.
    """

    def __init__(
        self,
        name: str,
        count: int | None,
        rows: LocalRows,
        rules: ByColumns,
        unsaved: dict[str, str],
    ) -> None:
        super().__init__(name, count)
        self._unsaved = unsaved
        self._rows = rows
        self._rules = rules

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`TableHandle`."""
        return self._rows.pull(self.checked(ids))

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """Steps the rows at once: no optimizer has them."""
        self._unsaved[self.name] = "its rows have been trained since it was loaded"
        self._rows.update(as_gradient(gradient), self._rules)
        yield


class ServedHandle(RangeChecked):
    """Rows of servers, or a k-step trainer's copies of them.

    Args:
        source: returns the source to pull from; joins the servers if that has not been done.
        send: queues a gradient of a table, by name.

    Attributes:
        known_as: the name, for lookups of coming steps.
        padding_idx: None: a program looks no padding up.
    """

    known_as: str | None
    padding_idx: int | None = None

    def __init__(
        self,
        name: str,
        count: int | None,
        source: Callable[[], RowSource],
        send: Callable[[str, RowGradient], None],
    ) -> None:
        super().__init__(name, count)
        self.known_as = name
        self.source = source
        self._send = send

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`TableHandle`."""
        return self.source().pull(self.checked(ids))

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        """See :class:`~trainer.embedding.rows.RowSource`."""
        return self.source().ids_to_pull(ids)

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """Queues the gradient; the lane steps the rows when the step is closed."""
        self._send(self.name, as_gradient(gradient))
        yield


def local_tables(program: Program) -> dict[str, TableHandle]:
    """The tables of a single-node program, by name."""
    if not program.main.variables_of(Role.TABLE):
        return {}
    storage = program.storage
    if storage is not None and storage.tables:
        return {name: _handle_of(name, modules) for name, modules in storage.tables.items()}
    found: dict[str, TableHandle] = {}
    updates = [op for op in program.main.ops if updates_rows(op)]
    for table in tables_of(program.main):
        rules = [_columns(op) for op in updates if table_name(op) == table.name]
        start = None if storage is None else storage.rows.get(table.name)
        found[table.name] = DeclaredHandle(
            table.name,
            table.rows,
            LocalRows(table, start),
            rules,
            {} if storage is None else storage.unsaved,
        )
    return found


def _columns(op: Op) -> tuple[int, int, Rule]:
    segment = segment_of(op)
    return segment.begin, segment.end, row_rule_of_op(op)


def _handle_of(name: str, modules: Sequence[nn.Module]) -> TableHandle:
    module = modules[0]
    if isinstance(module, DistributedEmbedding):
        return EmbeddingHandle(name, module)
    assert isinstance(module.weight, nn.Parameter), "an embedding of torch's"
    return WeightHandle(name, module.weight)


def row_kernels(tables: Mapping[str, TableHandle]) -> dict[str, Callable[..., Any]]:
    """The kernels of lookups, for programs whose tables are these."""

    def declared(op: Op, **_: Any) -> TableHandle | None:
        return tables.get(op.outputs[0])

    return {**NativeRowKernels().kernels(), "sparse_table": declared, "fake_init": declared}


def live(storage: Storage, name: str) -> list[DistributedEmbedding]:
    """The embeddings of ours that look a table up."""
    return [
        module
        for module in storage.tables.get(name, ())
        if isinstance(module, DistributedEmbedding)
    ]


# ---- served tables ----
#
# Tables of a trainer's program in a job: the kernels that pull their rows from the servers and send
# gradients of rows.
#
# The embeddings of the captured model pull from the servers, too, once these are joined: evaluation
# in plain PyTorch sees the job's rows.  A weight of torch's own (``sparse=True``) has them when the
# Executor is closed.


@dataclass(slots=True)
class DividedGradient(RowGradient):
    """A gradient of rows that is divided by server already: the rows of each server stand together,
    in the servers' order.

    Attributes:
        sizes: the number of rows of each server.
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
        join: joins the servers, on first use, and connects these tables.

    Attributes:
        handles: the values of the tables' variables, by name.
    """

    def __init__(self, plan: Plan, storage: Storage, join: Callable[[], Communicator]) -> None:
        self._plan = plan
        self._storage = storage
        self._join = join
        self._communicator: Communicator | None = None  # once it has joined
        self._sources: dict[str, RowSource] = {}
        self.handles = {table.name: self._handle(table) for table in plan.tables}
        self._arithmetic = NativeRowKernels()

    def _handle(self, table: Table) -> ServedHandle:
        return ServedHandle(
            table.name, table.rows, lambda: self._source(table.name), self._send_rows
        )

    def _send_rows(self, name: str, gradient: RowGradient) -> None:
        (self._communicator or self._join()).send_rows({name: gradient})

    def _source(self, name: str) -> RowSource:
        if name not in self._sources:
            self._join()
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
        self._communicator = communicator
        self._sources = {
            table.name: communicator.rows_of(table.name) for table in self._plan.tables
        }
        for name, source in self._sources.items():
            for module in live(self._storage, name):
                module.connect(source)
                module.look_ahead = communicator.look_ahead  # where the script writes rows
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

    def kernels(self, trains: bool) -> Mapping[str, Callable[..., Any]]:
        """The kernels of lookups and of dividing gradients, by op type.

        Args:
            trains: whether they are a training program's, whose lookups may have been made ahead.
        """
        return {
            "split_ids": self._split,
            "prefetch": partial(self._prefetch, trains),
            "merge_ids": self._merge,
            "distributed_lookup_table": partial(self._pull, trains),
        }

    def asked(self, lookup: ProgramLookup, ids: Sequence[Tensor]) -> Tensor:
        """The ids that a lookup asks for, int64 [u], in its order.

        Args:
            ids: the values of its variables.
        """
        if lookup.split:
            return torch.cat(self._divided(ids, lookup.padding_idx, self._plan.servers))
        return self._unique(ids, lookup.padding_idx)[0]

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
        self._send_rows(name, gradient)

    def _split(self, op: Op, x: Sequence[Any], padding_idx: int | None = None) -> list[Any]:
        servers = len(op.outputs)
        if isinstance(x[0], SparseRows):
            return [
                SparseRows(part.ids, part.rows, part.statistics)
                for part in as_gradient(x[0]).divide(servers)
            ]
        return self._divided(x, padding_idx, servers)

    def _divided(self, x: Sequence[Tensor], padding_idx: Any, servers: int) -> list[Tensor]:
        """The ids of lookups, each once, by server."""
        unique, *_ = self._unique(x, padding_idx)
        if servers == 1:
            return [unique]
        order, offsets = id_arithmetic.partition(unique.numpy(), servers)
        return [
            unique[torch.from_numpy(order[offsets[server] : offsets[server + 1]])]
            for server in range(servers)
        ]

    def _unique(
        self, x: Sequence[Tensor], padding_idx: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The ids of lookups, each once; the place of each among them; and the mask of those that
        are no padding.
        """
        wanted, stays = self._arithmetic.wanted(x, padding_idx)
        return (*self._arithmetic.unique(wanted), stays)

    def _prefetch(
        self, trains: bool, op: Op, w: Sequence[ServedHandle], ids: Sequence[Tensor], **_: Any
    ) -> list[Tensor]:
        count = len(ids) // len(w)  # parts of each table
        parts = [ids[begin : begin + count] for begin in range(0, len(ids), count)]
        wanted = [table.checked(torch.cat(list(own))) for table, own in zip(w, parts, strict=True)]
        arrived = [
            self._made_ahead(table, own) if trains else None
            for table, own in zip(w, wanted, strict=True)
        ]
        missing = [n for n, each in enumerate(arrived) if each is None]
        if len(missing) > 1:
            together = self._together([w[n] for n in missing], [wanted[n] for n in missing])
            for n, each in zip(missing, together, strict=True):
                arrived[n] = each
        rows = list[Tensor]()
        for handle, own, all_ids, found in zip(w, parts, wanted, arrived, strict=True):
            pulled = handle.source().pull(all_ids, found)
            rows += torch.split(pulled, [len(part) for part in own])
        return rows

    def _made_ahead(self, table: ServedHandle, ids: Tensor) -> Arrived | None:
        """The rows of a lookup that was made ahead; None: it was not."""
        look_ahead = (self._communicator or self._join()).look_ahead
        lookup = None if look_ahead is None else look_ahead.claim(table, ids)
        return None if lookup is None else lookup.arrived

    def _together(
        self, tables: Sequence[ServedHandle], wanted: Sequence[Tensor]
    ) -> list[Arrived | None]:
        """Pulls the rows of several tables, in one request to each server."""
        asked = [table.source().ids_to_pull(ids) for table, ids in zip(tables, wanted, strict=True)]
        if not any(map(len, asked)):  # every row is fresh
            return [None] * len(tables)
        lookups = (self._communicator or self._join()).lookups
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
        trains: bool,
        op: Op,
        w: ServedHandle,
        ids: Sequence[Tensor],
        padding_idx: int | None = None,
        **_: Any,
    ) -> list[Tensor]:
        unique, inverse, stays = self._unique(ids, padding_idx)
        arrived = self._made_ahead(w, w.checked(unique)) if trains else None
        rows = w.source().pull(w.checked(unique), arrived)
        return self._arithmetic.spread(rows, inverse, stays, ids)
