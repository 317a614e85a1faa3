"""The tables of a model that is captured: which modules look them up, by which rules their rows are
updated.

Two kinds of modules do: those that have a table to say (``trainer.DistributedEmbedding``, known by
what it offers, for nothing here imports it), and torch's own embeddings with ``sparse=True``, whose
weight is the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.ir.graph import Op, Ruled, Variable
from transpiler.ir.rules import Rule
from transpiler.ir.sparse_rows import Rows, SparseRows
from transpiler.ir.table_ops import declared, is_sparse, table_variable, update_op
from transpiler.ir.tables import DTYPES, Segment, Table
from transpiler.plan.table_planner import group_rule

# that torch has for sparse gradients, all without weight decay
SPARSE_RULES = ("sgd", "momentum", "adagrad", "lazy_adam")


@dataclass
class Captured:
    """One table of a model.

    Attributes:
        anchor: the name of the parameter that stands for it in the optimizer.
        modules: that look it up.
        rules: of its segments; none while nothing trains it.
    """

    name: str
    anchor: str
    table: Table
    modules: list[nn.Module]
    rules: list[Rule] = field(default_factory=list)

    @property
    def gradient(self) -> str:
        """The name of its gradient."""
        return f"{self.name}@GRAD"

    @property
    def variable(self) -> Variable:
        """It, as a variable: how many rows there are may be open."""
        return table_variable(self.table)

    def rows(self) -> Rows:
        """What this process holds of it."""
        module: Any = self.modules[0]
        found: Rows = WeightRows(module.weight) if is_sparse(module) else module.rows
        return found

    def declared(self) -> Op:
        """The op that declares it."""
        return declared(self.table)

    def updates(self, grad: str) -> list[Op]:
        """Its optimizer ops."""
        return [
            update_op(self.name, grad, *each)
            for each in zip(self.table.segments, self.rules, strict=True)
        ]


class WeightRows:
    """The rows of a weight of torch's own."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def pull(self, ids: Tensor) -> Tensor:
        """See :class:`~transpiler.ir.sparse_rows.Rows`.

        Raises:
            IndexError: an id is out of range.
        """
        return self._weight.detach().index_select(0, ids.to(self._weight.device)).cpu()


def find_tables(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[Captured], list[Ruled]]:
    """The tables of a model, and the optimizers of tables' own, whose groups come behind the
    optimizer's.

    Modules that name one table share its rows from here on, as in a job.

    Raises:
        ValueError: two modules of one table's name have different settings, or a rule is none for
            rows.
    """
    found: dict[str, Captured] = {}
    for path, module in model.named_modules():
        if is_sparse(module):
            _check_sparse(path, module)
            name = f"{path}.weight".lstrip(".")
            found[name] = Captured(name, name, _of_weight(name, module), [module])
        elif _has_table(module):
            _take(found, path, module)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own: list[Ruled] = []
    for captured in found.values():
        captured.anchor = names[id(_anchor(captured.modules[0]))]
        _train(captured, optimizer, own)
    return list(found.values()), own


def _has_table(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("proxy", "table", "differs", "share", "rules"))


def _anchor(module: Any) -> Tensor:
    anchor: Tensor = module.weight if is_sparse(module) else module.proxy
    return anchor


def _take(found: dict[str, Captured], path: str, module: Any) -> None:
    name = module.name or path or "embedding"
    if module.cache is not None:
        raise ValueError(
            f"capture: table {name!r}: cache_rows: a program's lookups have no cache; leave it at 0"
        )
    known = found.get(name)
    if known is None:
        found[name] = Captured(name, "", module.table(name), [module])
        return
    first: Any = known.modules[0]
    if is_sparse(first) or (difference := first.differs(module)) is not None:
        raise ValueError(f"capture: two embeddings are called {name!r} and differ: {difference}")
    if module.proxy is not first.proxy:
        module.share(first)
    known.modules.append(module)


def _check_sparse(path: str, module: Any) -> None:
    refused = [key for key in ("max_norm", "scale_grad_by_freq") if getattr(module, key)]
    if refused or getattr(module, "mode", "") == "max":
        odd = refused[0] if refused else "mode='max'"
        raise ValueError(
            f"capture: {path or 'the model'} is {type(module).__name__}(sparse=True, {odd}): a "
            "table has none of it"
        )


def _of_weight(name: str, module: Any) -> Table:
    dtype = str(module.weight.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"capture: {name}: expected rows of {' or '.join(DTYPES)}, got {dtype}")
    segments = (Segment(0, module.embedding_dim, 0),)
    return Table(name, module.embedding_dim, segments, dtype=dtype, rows=module.num_embeddings)


def _train(captured: Captured, optimizer: torch.optim.Optimizer, own: list[Ruled]) -> None:
    """Finds the rules of its segments, and their groups."""
    module: Any = captured.modules[0]
    anchor = _anchor(module)
    index = next(
        (
            i
            for i, group in enumerate(optimizer.param_groups)
            if any(anchor is each for each in group["params"])
        ),
        None,
    )
    if index is None or not anchor.requires_grad:
        return
    sparse = is_sparse(module)
    if sparse or module.optimizer is None:
        rule = group_rule(optimizer, optimizer.param_groups[index], f"table {captured.name!r}")
        if sparse and (rule.type not in SPARSE_RULES or rule.hparams.get("weight_decay")):
            why = "torch has no such rule for sparse gradients"
            raise ValueError(
                f"capture: {captured.name} has sparse=True, and is trained by {rule}: {why}"
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


def _with_segments(captured: Captured, segments: Sequence[tuple[int, int, int]]) -> Table:
    return replace(captured.table, segments=tuple(Segment(*segment) for segment in segments))


def _added(own: list[Ruled], optimizer: Ruled) -> int:
    if not any(optimizer is known for known in own):
        own.append(optimizer)
    return next(index for index, known in enumerate(own) if known is optimizer)


# ---- beside an eager step ----


def as_compared(name: str, gradient: SparseRows) -> Mapping[str, Tensor]:
    """A gradient of rows as a rehearsal compares it: by the anchor's name."""
    gradient = gradient.sorted()
    counted = {} if gradient.statistics is None else {f"{name}@STATISTICS": gradient.statistics}
    return {f"{name}@IDS": gradient.ids, f"{name}@GRAD": gradient.rows, **counted}


def eager_gradient(parameter: Any) -> Tensor | SparseRows | None:
    """What an eager step has left for a parameter: of an anchor, or a sparse weight, the gradient
    of its rows.
    """
    grad: Tensor | None = parameter.grad
    if callable(getattr(parameter, "waiting", None)):
        waits = parameter.waiting()
        return None if waits is None else SparseRows(waits.ids, waits.rows, waits.statistics)
    if grad is not None and grad.is_sparse:
        whole = grad.detach().coalesce()
        return SparseRows(whole.indices()[0].cpu(), whole.values().cpu())
    return grad
