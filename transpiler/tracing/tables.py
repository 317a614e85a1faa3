"""The tables of a captured model: the modules that look them up, and the update rules of their
rows.

Two kinds of modules look tables up: ``trainer.DistributedEmbedding``, which is recognised by its
attributes, because nothing here may import the trainer; and torch's own embeddings with
``sparse=True``, whose weight is the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transpiler.ir.graph import HasRule, Op, Variable
from transpiler.ir.rules import Rule
from transpiler.ir.sparse_rows import PullableRows, SparseRows
from transpiler.ir.table_ops import declared, is_sparse, refused_form, table_variable, update_op
from transpiler.ir.tables import WHOLE, Segment, Table
from transpiler.plan.planner import group_rule

# ---- embedding lookup ----
#
# Lookups in a trace: a sparse embedding that is traced becomes one op, ``lookup_table``.
#
# The results of such a module have sizes that depend on data (which ids differ, how many there
# are), so a program cannot hold its ops.  One op takes the place of all of them; pooling is
# ordinary compute on its result.  Neither this op nor its gradient ever runs: traces run on fake
# tensors (trace.py declares them there), and programs have kernels of their own
# (ir/sparse_rows.py).


LOOKUP, GRADIENT = "lookup_table", "lookup_table_grad"
NAMESPACE = "pserver"

# the tables that modules look up: names by the module's id; None: nothing is traced
_names: dict[int, str] | None = None


@dataclass(frozen=True, slots=True)
class CapturedLookup:
    """One lookup in a step.

    Attributes:
        table: the table's name.
        proxy: the table's proxy parameter in the optimizer; its gradient is the sum of the
            lookups'.
        dim: columns of a row.
        dtype: of the rows.
        skipped: an id that is not looked up: it reads zeros.
        untrained: an id whose row gets no gradient.
    """

    table: str
    proxy: Tensor
    dim: int
    dtype: torch.dtype
    skipped: int | None = None
    untrained: int | None = None

    def rows(self, ids: Tensor, counted: Tensor | None = None) -> Tensor:
        """int64 ids of any shape -> [*shape, dim]."""
        found: Tensor = _Looked.apply(self.proxy, ids, counted, self)  # type: ignore[no-untyped-call]  # torch's own
        return found

    def pooled(
        self, ids: Tensor, weights: Tensor | None, pooling: str, counted: Tensor | None = None
    ) -> Tensor:
        """The rows of each bag of one size, pooled as :func:`trainer.embedding.bags.pool` does.

        Args:
            ids: int64 [bags, size].
            weights: [bags, size], of the ids; None: 1 each.
            pooling: "sum", "mean" or "sqrtn".
            counted: float32 [ids, 2], shows and clicks.

        Returns:
            [bags, dim].

        Raises:
            ValueError: ids have another shape.
        """
        if ids.dim() != 2:
            raise ValueError(
                f"table {self.table!r}: expected ids [bags, size], or [n] with offsets, got ids "
                f"{list(ids.shape)} and none"
            )
        rows, given = self.rows(ids, counted), None if weights is None else weights.to(self.dtype)
        counts = given
        if self.untrained is not None:
            stays = (ids != self.untrained).to(self.dtype)
            counts = stays if given is None else given * stays
        sums = rows.sum(1) if counts is None else (rows * counts.unsqueeze(2)).sum(1)
        if pooling == "sum":
            return sums
        if counts is None:
            return sums / (ids.shape[1] if pooling == "mean" else ids.shape[1] ** 0.5)
        total = counts.sum(1) if pooling == "mean" else counts.square().sum(1)
        # an empty bag, or one of zeros
        total = torch.where(total == 0, torch.ones_like(total), total)
        return sums / (total if pooling == "mean" else total.sqrt()).unsqueeze(1)

    def ragged(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        pooling: str,
        counted: Tensor | None = None,
        ends: bool = False,
    ) -> Tensor:
        """The rows of each bag of any size, pooled in the same way.

        Args:
            ids: int64 [n].
            offsets: int64 [bags], the beginning of each bag.
            weights: [n], of the ids; None: 1 each.
            pooling: "sum", "mean" or "sqrtn".
            counted: float32 [ids, 2], shows and clicks.
            ends: whether there is one more offset, the end of the last bag.

        Returns:
            [bags, dim].

        Raises:
            ValueError: shapes do not fit.
        """
        if ids.dim() != 1 or offsets.dim() != 1:
            raise ValueError(
                f"table {self.table!r}: expected ids [n] and offsets [bags], got "
                f"{list(ids.shape)} and {list(offsets.shape)}"
            )
        rows, each = self.rows(ids, counted), torch.arange(ids.shape[0], device=ids.device)
        offsets = offsets.to(ids.dtype)
        counts = None if weights is None else weights.to(self.dtype)
        if self.untrained is not None:
            stays = (ids != self.untrained).to(self.dtype)
            counts = stays if counts is None else counts * stays
        mode = "mean" if pooling == "mean" and counts is None else "sum"
        sums = F.embedding_bag(
            each, rows, offsets, mode=mode, per_sample_weights=counts, include_last_offset=ends
        )
        if pooling == "sum" or mode == "mean":
            return sums
        begins = offsets[:-1] if ends else offsets
        counts = torch.ones_like(each, dtype=self.dtype) if counts is None else counts
        bag_of = torch.searchsorted(begins, each, right=True) - 1
        added = counts if pooling == "mean" else counts.square()
        total = torch.zeros_like(begins, dtype=self.dtype).index_add(0, bag_of, added)
        # an empty bag, or one of zeros
        total = torch.where(total == 0, torch.ones_like(total), total)
        return sums / (total if pooling == "mean" else total.sqrt()).unsqueeze(1)


class _Looked(torch.autograd.Function):
    """The lookup op in autograd: its gradient is that of the proxy parameter."""

    @staticmethod
    def forward(
        ctx: Any, proxy: Tensor, ids: Tensor, counted: Tensor | None, lookup: CapturedLookup
    ) -> Tensor:
        """Puts the lookup op into the trace."""
        ctx.save_for_backward(proxy, ids, counted)
        ctx.lookup = lookup
        found: Tensor = torch.ops.pserver.lookup_table(
            proxy.detach(), ids, lookup.table, lookup.dim, lookup.dtype, lookup.skipped
        )
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Puts the op of the rows' gradient into the trace."""
        proxy, ids, counted = ctx.saved_tensors
        lookup = ctx.lookup
        return (
            torch.ops.pserver.lookup_table_grad(
                proxy, ids, grad, counted, lookup.table, lookup.untrained
            ),
            None,
            None,
            None,
        )


def table_of(module: nn.Module) -> str | None:
    """The table that a module looks up in the step that is being traced; None outside tracing."""
    return None if _names is None else _names.get(id(module))


@contextmanager
def looking_up(tables: Mapping[str, list[nn.Module]]) -> Iterator[None]:
    """Lets modules put lookup ops into the step that is traced inside.

    Args:
        tables: the modules that look up each table, by the table's name.
    """
    global _names
    before, own = (
        _names,
        [module for modules in tables.values() for module in modules if is_sparse(module)],
    )
    _names = {id(module): name for name, modules in tables.items() for module in modules}
    for module in own:
        module.forward = partial(_of_torch, module)
    try:
        yield
    finally:
        _names = before
        for module in own:
            del module.forward


def _of_torch(
    module: Any,
    ids: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """The forward of an embedding of torch's own."""
    table = table_of(module)
    assert table is not None, "it is being traced"
    lookup = CapturedLookup(
        table, module.weight, module.embedding_dim, module.weight.dtype, None, module.padding_idx
    )
    if isinstance(module, nn.Embedding):
        return lookup.rows(ids)
    if offsets is not None:
        return lookup.ragged(
            ids, offsets, per_sample_weights, module.mode, ends=module.include_last_offset
        )
    return lookup.pooled(ids, per_sample_weights, module.mode)


# ---- embedding tables ----


# the rules that torch has for sparse gradients, all without weight decay
SPARSE_RULES = ("sgd", "momentum", "adagrad", "lazy_adam")


@dataclass
class CapturedTable:
    """One table of a model.

    Attributes:
        name: the table's name.
        proxy: the name of its proxy parameter in the optimizer; for a weight, that of the weight.
        table: its settings.
        modules: the modules that look it up.
        rules: of its segments; none if no optimizer trains it.
    """

    name: str
    proxy: str
    table: Table
    modules: list[nn.Module]
    rules: list[Rule] = field(default_factory=list)

    @property
    def gradient(self) -> str:
        """The name of its gradient's variable."""
        return f"{self.name}@GRAD"

    @property
    def variable(self) -> Variable:
        """Its variable; the number of rows may be a symbol."""
        return table_variable(self.table)

    def rows(self) -> PullableRows:
        """The rows that this process holds."""
        module: Any = self.modules[0]
        found: PullableRows = WeightRows(module.weight) if is_sparse(module) else module.rows
        return found

    def declared(self) -> Op:
        """The ``sparse_table`` op that declares it."""
        return declared(self.table)

    def updates(self, grad: str) -> list[Op]:
        """Its optimizer ops, one for each segment.

        Args:
            grad: the name of the gradient that they read.
        """
        return [
            update_op(self.name, grad, *each)
            for each in zip(self.table.segments, self.rules, strict=True)
        ]


class WeightRows:
    """The weight of one of torch's embeddings, as rows."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`~transpiler.ir.sparse_rows.PullableRows`.

        Raises:
            IndexError: an id is out of range.
        """
        return self._weight.detach().index_select(0, ids.to(self._weight.device)).cpu()


def find_tables(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[list[CapturedTable], list[HasRule]]:
    """Finds the tables of a model.

    Modules that name one table share its rows from here on, as in a job.

    Returns:
        The tables, and the optimizers that belong to single tables; their groups come after the
        groups of ``optimizer``.

    Raises:
        ValueError: two modules of one table's name have different settings, or rows cannot be
            updated by the optimizer's rule.
    """
    found: dict[str, CapturedTable] = {}
    paths = {module: path for path, module in model.named_modules()}
    for module, path in paths.items():
        if is_sparse(module):
            _check_sparse(path, module)
            name = f"{path}.weight".lstrip(".")
            found[name] = CapturedTable(name, name, _of_weight(name, module), [module])
        elif _has_table(module):
            _take(found, paths, module)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own: list[HasRule] = []
    for captured in found.values():
        captured.proxy = names[id(_proxy_of(captured.modules[0]))]
        if optimizer is not None:
            _train(captured, optimizer, own)
    return list(found.values()), own


def _has_table(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("proxy", "settings", "share", "rules"))


def _proxy_of(module: Any) -> Tensor:
    proxy: Tensor = module.weight if is_sparse(module) else module.proxy
    return proxy


def _take(found: dict[str, CapturedTable], paths: Mapping[nn.Module, str], module: Any) -> None:
    name = module.name or paths[module] or "embedding"
    if module.cache is not None:
        raise ValueError(
            f"capture: table {name!r}: cache_rows: a program's lookups have no cache; leave it at 0"
        )
    known = found.get(name)
    if known is None:
        found[name] = CapturedTable(name, "", module.settings.table(name), [module])
        return
    first: Any = known.modules[0]
    difference = "one is torch's own" if is_sparse(first) else first.differs(module)
    if difference is not None:
        raise ValueError(
            f"capture: two embeddings are called {name!r} and differ: {difference} of "
            f"{paths[first]!r} and {paths[module]!r}; embeddings of one name share a table: give "
            "one another name"
        )
    if _proxy_of(module) is not _proxy_of(first):
        module.share(first)
    known.modules.append(module)


def _check_sparse(path: str, module: Any) -> None:
    if (reason := refused_form(module)) is not None:
        raise ValueError(
            f"capture: {path or 'the model'}: {type(module).__name__}(sparse=True) is a table, "
            f"which cannot have {reason}"
        )


def _of_weight(name: str, module: Any) -> Table:
    dtype = str(module.weight.dtype).removeprefix("torch.")
    if dtype not in WHOLE:
        raise ValueError(f"capture: {name}: expected rows of {' or '.join(WHOLE)}, got {dtype}")
    segments = (Segment(0, module.embedding_dim, 0),)
    return Table(name, module.embedding_dim, segments, dtype=dtype, rows=module.num_embeddings)


def _train(captured: CapturedTable, optimizer: torch.optim.Optimizer, own: list[HasRule]) -> None:
    """Finds the rules of its segments, and their groups."""
    module: Any = captured.modules[0]
    proxy = _proxy_of(module)
    index = next(
        (
            i
            for i, group in enumerate(optimizer.param_groups)
            if any(proxy is each for each in group["params"])
        ),
        None,
    )
    if index is None or not proxy.requires_grad:
        return
    sparse = is_sparse(module)
    if sparse or module.optimizer is None:
        rule = group_rule(optimizer, optimizer.param_groups[index], f"table {captured.name!r}")
        if sparse and (rule.type not in SPARSE_RULES or rule.hparams.get("weight_decay")):
            decay = " with weight_decay" if rule.hparams.get("weight_decay") else ""
            raise ValueError(
                f"capture: {captured.name} has sparse=True: expected SGD, Adagrad or SparseAdam "
                f"without weight_decay, which torch has for sparse gradients, got {rule.type}"
                f"{decay}: use one of these, or a DistributedEmbedding, which has rules of its own"
            )
        segments, captured.rules = [(0, captured.table.dim, index)], [rule]
    else:
        parts = module.optimizer.segments(captured.table.dim)
        segments = [
            (begin, end, len(optimizer.param_groups) + _added(own, each))
            for begin, end, each in parts
        ]
        captured.rules = [each.rule() for _, _, each in parts]
    captured.table = _with_segments(captured, segments)


def _with_segments(captured: CapturedTable, segments: Sequence[tuple[int, int, int]]) -> Table:
    return replace(captured.table, segments=tuple(Segment(*segment) for segment in segments))


def _added(own: list[HasRule], optimizer: HasRule) -> int:
    if not any(optimizer is known for known in own):
        own.append(optimizer)
    return next(index for index, known in enumerate(own) if known is optimizer)


# ---- in the equivalence check ----


def comparable(name: str, gradient: SparseRows) -> Mapping[str, Tensor]:
    """A gradient of rows as tensors that the equivalence check compares.

    Args:
        name: of the table's proxy parameter.
    """
    gradient = gradient.sorted()
    counted = {} if gradient.statistics is None else {f"{name}@STATISTICS": gradient.statistics}
    return {f"{name}@IDS": gradient.ids, f"{name}@GRAD": gradient.rows, **counted}


def eager_gradient(parameter: Any) -> Tensor | SparseRows | None:
    """The gradient that an eager step left at a parameter.

    For a proxy parameter or a sparse weight it is that of the rows.
    """
    grad: Tensor | None = parameter.grad
    if callable(getattr(parameter, "waiting", None)):
        waits = parameter.waiting()
        return None if waits is None else SparseRows(waits.ids, waits.rows, waits.statistics)
    if grad is not None and grad.is_sparse:
        whole = grad.detach().coalesce()
        return SparseRows(whole.indices()[0].cpu(), whole.values().cpu())
    return grad
