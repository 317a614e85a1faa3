"""The handles of tables while programs run: where the rows are, and who steps them.

Each table's variable holds one :class:`~trainer.executor.table_handle.TableHandle`::

    EmbeddingHandle   rows of an embedding of ours: the module's, stepped by the user's optimizer
    WeightHandle      rows of a weight of torch's own, likewise
    DeclaredHandle    rows made from what a loaded program declares, stepped by the program's rules
    ServedHandle      rows of servers, or of a k-step lane

This module imports numba; :mod:`trainer.executor.table_handle` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.embedding.embedding import DistributedEmbedding
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.rows import RowSource
from trainer.executor.table_handle import TableHandle
from transpiler.ir.graph import Op, Role, Storage
from transpiler.ir.rules import Rule
from transpiler.ir.sparse_rows import RowKernels, SparseRows
from transpiler.ir.table_ops import row_rule_of_op, segment_of, table_name, updates_rows
from transpiler.ir.updates import tables_of
from transpiler.program import Program

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
    """A program's gradient of rows as communicators and tables take it."""
    return RowGradient(rows.ids, rows.rows.contiguous(), rows.statistics)


class RangeChecked:
    """A handle that refuses ids outside of its table's range.

    Args:
        name: of the table, which stays its attribute.
        rows: ids are below this; None: ids are any int64.
    """

    def __init__(self, name: str, rows: int | None) -> None:
        self.name = name
        self._count = rows

    def checked(self, ids: Tensor) -> Tensor:
        """The same ids, int64 [n].

        Raises:
            ValueError: one is out of range.
        """
        if self._count is not None and len(ids):
            odd = ids[(ids < 0) | (ids >= self._count)]
            if len(odd):
                raise ValueError(
                    f"table {self.name!r}: ids: expected 0 to {self._count - 1}, got {int(odd[0])}"
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
        """The proxy parameter has the gradient, as after a backward."""
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
        """The weight has the gradient, as after a backward."""
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
    """Rows of servers, or those that a k-step trainer has of them.

    Args:
        source: gives the source to pull from; joins the servers if that has not been done.
        send: queues a gradient of a table, by name.
    """

    def __init__(
        self,
        name: str,
        count: int | None,
        source: Callable[[], RowSource],
        send: Callable[[str, RowGradient], None],
    ) -> None:
        super().__init__(name, count)
        self.source = source
        self._send = send

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`TableHandle`."""
        return self.source().pull(self.checked(ids))

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
