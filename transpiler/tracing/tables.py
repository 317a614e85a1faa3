"""The tables of a model that is captured: which modules look them up, by which rules their rows are
updated.

Two kinds of modules look tables up: ``trainer.DistributedEmbedding``, which is recognised by its
attributes, because nothing here may import the trainer; and torch's own embeddings with
``sparse=True``, whose weight is the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.ir.graph import HasRule, Op, Variable
from transpiler.ir.rules import Rule
from transpiler.ir.sparse_rows import Rows, SparseRows
from transpiler.ir.table_ops import declared, is_sparse, refused_form, table_variable, update_op
from transpiler.ir.tables import WHOLE, Segment, Table
from transpiler.plan.planner import group_rule

# the rules that torch has for sparse gradients, all without weight decay
SPARSE_RULES = ("sgd", "momentum", "adagrad", "lazy_adam")


@dataclass
class CapturedTable:
    """One table of a model.

    Attributes:
        name: the table's name.
        proxy: the name of its proxy parameter in the optimizer; of a weight, the weight itself.
        table: its settings.
        modules: the modules that look it up.
        rules: of its segments; none while no optimizer trains it.
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

    def rows(self) -> Rows:
        """The rows that this process holds."""
        module: Any = self.modules[0]
        found: Rows = WeightRows(module.weight) if is_sparse(module) else module.rows
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
        """See :class:`~transpiler.ir.sparse_rows.Rows`.

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
            f"{paths[first]!r} and {paths[module]!r}; those of one name share a table: give one "
            "another name"
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
