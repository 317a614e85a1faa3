"""Tables while programs run: where their rows are, and what an update of rows means there.

One object for each table is the value of its variable: lookups pull from it, optimizer ops step it.
In a single-node program of the process that captured it that is the module's own table (or the
weight of torch's), and the step is that of the user's optimizer, as in an eager script.  A program
that was loaded has tables made of what it says of them.  In a job the rows are the servers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.embedding.embedding import DistributedEmbedding, RowSource
from trainer.embedding.local_rows import LocalRows
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
    """A program's gradient of rows as everything else here has it."""
    return RowGradient(rows.ids, rows.rows.contiguous(), rows.statistics)


class HeldRows(Protocol):
    """The value of a table's variable."""

    def pull(self, ids: Tensor) -> Tensor:
        """Rows of unique ids, int64 [u] on the CPU -> [u, dim]."""

    def stepping(self, gradient: SparseRows) -> Any:
        """A context in which the step of these rows is taken, if not at once: a step of the user's
        optimizer takes it.
        """


class InRange:
    """What all of them do with ids.

    Args:
        rows: how many there are; None: ids are any int64.
    """

    def __init__(self, name: str, rows: int | None) -> None:
        self._name = name
        self._count = rows

    def checked(self, ids: Tensor) -> Tensor:
        """The same ids.

        Raises:
            ValueError: one is out of range.
        """
        if self._count is not None and len(ids):
            odd = ids[(ids < 0) | (ids >= self._count)]
            if len(odd):
                raise ValueError(
                    f"table {self._name!r}: ids: expected 0 to {self._count - 1}, got {int(odd[0])}"
                )
        return ids


class ModuleRows(InRange):
    """Rows of an embedding of ours, in this process or on servers: wherever it has them."""

    def __init__(self, name: str, module: DistributedEmbedding) -> None:
        super().__init__(name, module.num_embeddings)
        self._module = module

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`HeldRows`."""
        return self._module.rows.pull(self.checked(ids))

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """The anchor has the gradient, as after a backward."""
        with self._module.proxy.lend(as_gradient(gradient)):
            yield


class WeightRows(InRange):
    """Rows of a weight of torch's own, which an embedding with ``sparse=True`` looks up."""

    def __init__(self, name: str, weight: nn.Parameter) -> None:
        super().__init__(name, len(weight))
        self._weight = weight

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`HeldRows`."""
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


class MadeRows(InRange):
    """Rows of a table that a loaded program declares.

    Args:
        rules: of its columns; none where nothing updates it.
    """

    def __init__(self, name: str, count: int | None, rows: LocalRows, rules: ByColumns) -> None:
        super().__init__(name, count)
        self._rows = rows
        self._rules = rules

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`HeldRows`."""
        return self._rows.pull(self.checked(ids))

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """At once: no optimizer knows of it."""
        self._rows.update(as_gradient(gradient), self._rules)
        yield


class ServedRows(InRange):
    """Rows of servers, or those that a k-step trainer has of them.

    Args:
        source: gives where to pull, once the servers are joined.
        send: takes a gradient to them.
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
        """See :class:`HeldRows`."""
        return self.source().pull(self.checked(ids))

    @contextmanager
    def stepping(self, gradient: SparseRows) -> Iterator[None]:
        """The lane takes the step when it is closed."""
        self._send(self._name, as_gradient(gradient))
        yield


def local_tables(program: Program) -> dict[str, HeldRows]:
    """The tables of a single-node program, by name."""
    if not program.main.variables_of(Role.TABLE):
        return {}
    storage = program.storage
    if storage is not None and storage.tables:
        return {name: _held(name, modules) for name, modules in storage.tables.items()}
    found: dict[str, HeldRows] = {}
    updates = [op for op in program.main.ops if updates_rows(op)]
    for table in tables_of(program.main):
        rules = [_columns(op) for op in updates if table_name(op) == table.name]
        start = None if storage is None else storage.rows.get(table.name)
        found[table.name] = MadeRows(table.name, table.rows, LocalRows(table, start), rules)
    return found


def _columns(op: Op) -> tuple[int, int, Rule]:
    segment = segment_of(op)
    return segment.begin, segment.end, row_rule_of_op(op)


def _held(name: str, modules: Sequence[nn.Module]) -> HeldRows:
    module = modules[0]
    if isinstance(module, DistributedEmbedding):
        return ModuleRows(name, module)
    assert isinstance(module.weight, nn.Parameter), "an embedding of torch's"
    return WeightRows(name, module.weight)


def row_kernels(tables: Mapping[str, HeldRows]) -> dict[str, Callable[..., Any]]:
    """The kernels of lookups, for programs whose tables are these."""

    def declared(op: Op, **_: Any) -> HeldRows | None:
        return tables.get(op.outputs[0])

    return {**NativeRowKernels().kernels(), "sparse_table": declared, "fake_init": declared}


def as_tensor(name: str, gradient: SparseRows, program: Program) -> Tensor:
    """A fetched gradient of rows: sparse, of the table's shape.

    Raises:
        ValueError: the table has no shape, for ids are any int64.
    """
    table = program.main.variables[program.main.variables[name].of]
    if not all(isinstance(size, int) for size in table.shape):
        raise ValueError(
            f"fetch_list: {name!r} has rows for ids of any int64: no tensor is so large"
        )
    shape = [int(size) for size in table.shape]
    return torch.sparse_coo_tensor(
        gradient.ids.unsqueeze(0), gradient.rows, shape, check_invariants=False
    )


def live(storage: Storage, name: str) -> list[DistributedEmbedding]:
    """The embeddings of ours that look a table up."""
    return [
        module
        for module in storage.tables.get(name, ())
        if isinstance(module, DistributedEmbedding)
    ]
