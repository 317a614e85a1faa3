"""Embeddings whose rows need not fit into one machine: a module that looks rows up, wherever they
live.

[Note: how it trains]  A forward finds out which ids differ, pulls their rows, and gathers.  A
backward sums the gradients of the same id and leaves them with the module's anchor, a parameter of
one number that stands for the table in the script's optimizer (trainer/embedding/proxy_parameter.py).  At the
optimizer's step the rows that wait are taken: by the optimizer itself while the rows are in this
process, by the connection to the servers where they hold them.  A gradient of the whole table never
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.embedding.autograd import attach, gather
from trainer.embedding.bags import POOLINGS, bags_of, pool
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.proxy_parameter import ProxyParameter
from trainer.embedding.row_cache import RowCache
from trainer.embedding.table_settings import DTYPES, TableSettings
from transpiler.ir.rules import Rule
from transpiler.ir.tables import (
    CountFilterEntry,
    Initial,
    Normal,
    ProbabilityEntry,
    ShowClickEntry,
    TableEntry,
)
from transpiler.tracing.embedding_lookup import Lookup, table_of


class RowSource(Protocol):
    """Where rows live."""

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of ids, int64 [u] on the CPU, each once -> [u, dim] in the table's dtype, on the
        CPU.
        """


class DistributedEmbedding(TableSettings):
    """Rows of ``dim`` numbers for int64 ids of any value.

    A row that nothing was learned for reads the initial value of its id, which depends on ``seed``
    and the id alone; it takes no memory until it is trained.  Alone, the rows are in this process,
    are part of ``state_dict()``, and are trained by any optimizer that has the module's parameters.
    In a job with servers they are the servers': this process holds none, ``fleet.save``,
    ``fleet.load`` and ``fleet.export`` have them, and ``state_dict()`` has not.  ``half()`` and the
    like change what ``forward`` returns, not the rows.

    Args:
        dim: of a row.
        num_embeddings: ids are 0 to num_embeddings - 1; None: any int64.
        init: Normal, Uniform or Constant of ``trainer``.
        optimizer: of the table's own, see :mod:`trainer.row_optimizers`; None: rows follow the
            parameter group that the anchor is in, with its numbers at each step.
        entry: which ids are admitted: CountFilterEntry, ProbabilityEntry or ShowClickEntry; None:
            all.
        ttl: seconds after which a row that is not trained any more is forgotten.
        padding_idx: an id that reads zeros, and is never trained; left out of bags.  Below 0 it
            counts from ``num_embeddings``, where that is given, as in torch.
        pooling: None: one row for each id; "sum", "mean" or "sqrtn": one for each bag of ids, see
            :func:`trainer.embedding.bags.pool`.
        dtype: of the rows, torch.float32 or torch.float64.
        name: of the table; None: the module's name in the model.
        seed: of initial values and of what ProbabilityEntry admits.
        capacity: the most rows; those trained least recently (``eviction="lru"``) or least often
            ("lfu") make room.
        memory_bytes: of rows in memory; what is beyond is on disk.
        cache_rows, cache_staleness: rows that were pulled are read again, in training, in the same
            step and for so many steps after it, and so many rows are kept for that: see
            :mod:`trainer.embedding.row_cache`.  0 rows: off.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a number is out of its range.
    """

    padding_row: Tensor | None

    def __init__(
        self,
        dim: int,
        num_embeddings: int | None = None,
        init: Initial | None = None,
        optimizer: Any = None,
        entry: TableEntry | None = None,
        ttl: float | None = None,
        padding_idx: int | None = None,
        pooling: str | None = None,
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        *,
        seed: int = 0,
        capacity: int | None = None,
        eviction: str = "lru",
        memory_bytes: int | None = None,
        cache_rows: int = 0,
        cache_staleness: int = 0,
    ) -> None:
        super().__init__()
        whole = {
            "dim": dim,
            "num_embeddings": num_embeddings,
            "padding_idx": padding_idx,
            "seed": seed,
        }
        _check_kinds(
            {**whole, "capacity": capacity, "memory_bytes": memory_bytes, "cache_rows": cache_rows},
            init,
            entry,
        )
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(f"pooling: expected None, {', '.join(POOLINGS)}, got {pooling!r}")
        self.name, self.dim, self.num_embeddings, self.dtype, self.pooling = (
            name,
            dim,
            num_embeddings,
            dtype,
            pooling,
        )
        self.init, self.entry, self.ttl, self.seed = (
            Normal() if init is None else init,
            entry,
            ttl,
            seed,
        )
        self.capacity, self.eviction, self.memory_bytes = capacity, eviction, memory_bytes
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.include_last_offset = False
        self.optimizer = optimizer
        self.steps = 0  # of the optimizer that this table has seen
        self.rows: RowSource = LocalRows(self.table())
        self._initial: tuple[Tensor, Tensor] | None = None
        if cache_staleness and not cache_rows:
            raise ValueError(
                "cache_staleness: expected cache_rows with it; without a cache every row is "
                "pulled when it is read"
            )
        numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self.cache = RowCache(cache_rows, dim, cache_staleness, numpy_dtype) if cache_rows else None
        self._output = dtype
        self.register_buffer(
            "padding_row", None if padding_idx is None or pooling else torch.zeros(dim, dtype=dtype)
        )
        self.anchor = ProxyParameter(torch.zeros((), dtype=dtype))
        self.anchor.bind(self)

    @classmethod
    def from_module(
        cls, module: nn.Embedding | nn.EmbeddingBag, name: str | None = None, **options: Any
    ) -> DistributedEmbedding:
        """An embedding that reads, pools and trains as one of torch's, whose present rows it begins
        with.

        ``sparse=True`` needs nothing here: rows are sparse anyway, and which rule they follow the
        optimizer says (torch's SparseAdam is LazyAdam).  Its rows are copied: a weight that another
        module shares, as an output layer tied to it, is not followed.

        Args:
            options: further arguments of the class.

        Raises:
            TypeError: the module is another one.
            ValueError: it is one of ``max_norm``, of ``scale_grad_by_freq``, of mode "max", or of
                16-bit floats.
        """
        bags = isinstance(module, nn.EmbeddingBag)
        if type(module) not in (nn.Embedding, nn.EmbeddingBag):
            raise TypeError(
                "from_module: expected an nn.Embedding or nn.EmbeddingBag, got "
                f"{type(module).__name__}"
            )
        refused = [key for key in ("max_norm", "scale_grad_by_freq") if getattr(module, key)]
        if refused:
            raise ValueError(
                f"from_module: {refused[0]}: a DistributedEmbedding has nothing of the kind"
            )
        if bags and module.mode == "max":
            raise ValueError(
                "from_module: mode 'max': a DistributedEmbedding pools by sum, mean or sqrtn"
            )
        weight = module.weight.detach()
        options = {
            "pooling": module.mode if bags else None,
            "padding_idx": module.padding_idx,
            **options,
        }
        made = cls(
            module.embedding_dim, module.num_embeddings, dtype=weight.dtype, name=name, **options
        )
        made.include_last_offset = bool(bags and module.include_last_offset)
        made.rows = LocalRows(made.table(), (torch.arange(len(weight)), weight.cpu().clone()))
        if made.padding_row is not None:
            made.padding_row.copy_(weight[made.padding_idx])
        made.anchor.requires_grad_(module.weight.requires_grad)
        return made.to(weight.device).train(module.training)

    # ---- lookups ----

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import the compiler here
    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        **statistics: Tensor,
    ) -> Tensor:
        """Rows, or pooled rows.

        Args:
            ids: int64, of any shape; with pooling [bags, size], or [n] with offsets.
            offsets: int64 [bags], where each bag begins: 0 first, never going down.
            per_sample_weights: float, of ids' shape; with pooling.
            statistics: the two keyword arguments that a ShowClickEntry names: numbers of a shape
                that broadcasts to the ids'.

        Returns:
            [*ids.shape, dim]; with pooling [bags, dim].

        Raises:
            TypeError: ids are no whole numbers, or there is another keyword argument.
            ValueError: an id is out of range, or shapes do not fit.
        """
        if (table := table_of(self)) is not None:
            return self._traced(table, ids, offsets, per_sample_weights, statistics)
        ids = self._checked(ids)
        counted = self._counted(ids, statistics)
        if self.pooling is None:
            if offsets is not None or per_sample_weights is not None:
                raise ValueError(
                    f"{self.whose()}: offsets and per_sample_weights are for a table with pooling"
                )
            return (
                self._each(ids.reshape(-1), counted).reshape(*ids.shape, self.dim).to(self._output)
            )
        bags = bags_of(self.whose(), ids, offsets, per_sample_weights, self.include_last_offset)
        if self.padding_idx is not None:
            bags, stays = bags.without(self.padding_idx)
            counted = counted if counted is None or stays is None else counted[stays.cpu()]
        rows, inverse = self._pulled(bags.ids, counted)
        return pool(rows, inverse.to(torch.int64), bags, self.pooling).to(self._output)

    def _traced(
        self,
        table: str,
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        statistics: Mapping[str, Tensor],
    ) -> Tensor:
        """In a step that is captured: an op in place of the lookup, which finds ids out of range
        when it runs.
        """
        ids = self._whole_numbers(ids)
        counted = self._counted(ids, statistics)
        if offsets is not None or (weights is not None and self.pooling is None):
            which = (
                "bags of one size, as ids [bags, size]"
                if self.pooling
                else "offsets and weights with pooling only"
            )
            raise ValueError(
                f"{self.whose()}: a captured program has {which}; got offsets or per_sample_weights"
            )
        lookup = Lookup(
            table, self.anchor, self.dim, self.dtype, self.padding_idx, self.padding_idx
        )
        if self.pooling is not None:
            return lookup.pooled(ids, weights, self.pooling, counted).to(self._output)
        rows = lookup.rows(ids, counted)
        if self.padding_row is not None and self.padding_idx is not None:
            rows = torch.where(
                torch.eq(ids, self.padding_idx).unsqueeze(-1), self.padding_row.to(rows), rows
            )
        return rows.to(self._output)

    def _whole_numbers(self, ids: Tensor) -> Tensor:
        if (
            not isinstance(ids, Tensor)
            or ids.is_floating_point()
            or ids.is_complex()
            or ids.dtype == torch.bool
        ):
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"{self.whose()}: ids: expected a tensor of int64, got {kind}")
        return ids.detach().to(torch.int64)

    def _checked(self, ids: Tensor) -> Tensor:
        ids = self._whole_numbers(ids)
        if self.num_embeddings is not None and ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                flat = ids.reshape(-1)
                at = int(((flat < 0) | (flat >= self.num_embeddings)).nonzero()[0])
                said = (
                    f"expected 0 to {self.num_embeddings - 1}, got {int(flat[at])} at position {at}"
                )
                raise ValueError(f"{self.whose()}: ids: {said}")
        return ids

    def _counted(self, ids: Tensor, given: Mapping[str, Tensor]) -> Tensor | None:
        """How often each id was shown and clicked, float32 [n, 2] on the CPU; None where the table
        does not count.
        """
        names = (
            (self.entry.show, self.entry.click) if isinstance(self.entry, ShowClickEntry) else ()
        )
        for name in given:
            if name not in names:
                known = (
                    f"its entry names {names[0]} and {names[1]}"
                    if names
                    else "it has no ShowClickEntry"
                )
                raise TypeError(
                    f"{self.whose()}: forward got an unexpected keyword argument {name!r}: {known}"
                )
        if not names:
            return None
        columns = []
        for name, usual in zip(names, (1.0, 0.0), strict=True):
            hparams = torch.as_tensor(given.get(name, usual)).detach().to("cpu", torch.float32)
            try:
                columns.append(hparams.expand(ids.shape).reshape(-1))
            except RuntimeError:
                shapes = (
                    f"expected a shape that broadcasts to {list(ids.shape)}, got "
                    f"{list(hparams.shape)}"
                )
                raise ValueError(f"{self.whose()}: {name}: {shapes}") from None
        return torch.stack(columns, 1)

    def _each(self, ids: Tensor, counted: Tensor | None) -> Tensor:
        """A row for each id, int64 [n] -> [n, dim]."""
        stays = None if self.padding_idx is None else ids != self.padding_idx
        if stays is None or bool(stays.all()):
            return gather(*self._pulled(ids, counted))
        rows = gather(*self._pulled(ids[stays], None if counted is None else counted[stays.cpu()]))
        assert self.padding_row is not None, "a table with a padding_idx, without pooling"
        padded = self.padding_row.to(rows).expand(len(ids), self.dim)
        return padded.masked_scatter(stays.unsqueeze(1), rows)

    def _pulled(self, ids: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows of the ids that differ, [u, dim], and which of them each id is, [n]; on the ids'
        device.
        """
        unique, inverse = id_arithmetic.unique(ids.cpu().contiguous().numpy())
        asked = torch.from_numpy(unique)
        rows = self._pull(asked)
        if rows.shape != (len(asked), self.dim) or rows.dtype != self.dtype:
            expected = (
                f"expected {self.dtype} [{len(asked)}, {self.dim}], got {rows.dtype} "
                f"{list(rows.shape)}"
            )
            raise RuntimeError(f"{self.whose()}: rows: {expected}")
        if counted is not None:
            counted = torch.from_numpy(id_arithmetic.merge(inverse, counted.numpy(), len(unique)))
        rows = attach(self.anchor, rows.to(ids.device), asked, counted)
        return rows, torch.from_numpy(inverse).to(ids.device)

    def _pull(self, ids: Tensor) -> Tensor:
        if self.cache is None or not self.training:
            return self.rows.pull(ids)
        rows = torch.empty((len(ids), self.dim), dtype=self.dtype)
        missing = self.cache.read(ids.numpy(), self.steps, rows.numpy())
        if len(missing):
            positions = torch.from_numpy(missing)
            pulled = self.rows.pull(ids[positions])
            self.cache.keep(ids.numpy()[missing], pulled.numpy(), self.steps)
            rows[positions] = pulled
        return rows

    # ---- steps ----

    def gradient(self) -> RowGradient | None:
        """At a step: a copy of the gradient that waits, of all lookups together, each id once.

        What was done to ``anchor.grad`` is done to the rows: see trainer/embedding/proxy_parameter.py.  It waits on,
        as ``p.grad`` does, until gradients are zeroed or a backward follows.

        Returns:
            On the CPU; None where ``anchor.grad`` is None.
        """
        self.steps += 1
        return self.anchor.waiting()

    def discard(self) -> None:
        """Drops the gradient that waits."""
        self.anchor.drop()
        self.anchor.grad = None

    def steps_here(self) -> bool:
        """Whether the rows are in this process."""
        return isinstance(self.rows, LocalRows)

    def step(self, rules: list[tuple[int, int, Rule]], scale: float = 1.0) -> None:
        """One step of rows in this process, by these rules; gradients are multiplied by
        ``scale``.
        """
        assert isinstance(self.rows, LocalRows), "servers step the rows that they hold"
        gradient = self.gradient()
        if gradient is not None:
            self.rows.update(gradient if scale == 1.0 else gradient.mul_(scale), rules)

    # ---- where rows live ----

    def share(self, other: DistributedEmbedding) -> None:
        """This module looks up the other's table from now on: they have one anchor, and the same
        rows.
        """
        self.anchor, self.rows, self.cache = other.anchor, other.rows, other.cache

    def connect(self, source: RowSource) -> None:
        """Rows are pulled from ``source`` from now on; those in this process are
        :attr:`initial_rows`.
        """
        self._initial = self.initial_rows
        self.rows = source
        self.discard()
        if self.cache is not None:
            self.cache.clear()

    @property
    def initial_rows(self) -> tuple[Tensor, Tensor] | None:
        """The rows in this process, or those that were when it was connected: ids, int64 [n], and
        values, [n, dim].

        None: there are none.  Servers begin with them.  Set to None once they have them.
        """
        return self.rows.whole() if isinstance(self.rows, LocalRows) else self._initial

    @initial_rows.setter
    def initial_rows(self, rows: None) -> None:
        self._initial = rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        self.anchor.bind(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedEmbedding:
        """``to``, ``half`` and the like: rows keep their dtype, what forward returns gets the other
        one.
        """
        self._output = fn(torch.zeros((), dtype=self._output, device=self.anchor.device)).dtype
        super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)  # type: ignore[no-untyped-call]  # torch's own
        return self


def _check_kinds(
    hparams: Mapping[str, int | None], init: Initial | None, entry: TableEntry | None
) -> None:
    for name, number in hparams.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name}: expected a whole number, got {number!r}")
    for name in ("num_embeddings", "cache_rows"):
        number = hparams[name]
        if number is not None and number < (name == "num_embeddings"):
            raise ValueError(
                f"{name}: expected {int(name == 'num_embeddings')} or more, got {number}"
            )
    if init is not None and not isinstance(init, Initial):
        raise TypeError(f"init: expected Normal(...), Uniform(...) or Constant(...), got {init!r}")
    if entry is not None and not isinstance(
        entry, CountFilterEntry | ProbabilityEntry | ShowClickEntry
    ):
        raise TypeError(
            f"entry: expected CountFilterEntry, ProbabilityEntry or ShowClickEntry, got {entry!r}"
        )


def _padding(padding: int | None, rows: int | None) -> int | None:
    """The id that ``padding_idx`` means."""
    if padding is None or rows is None:
        return padding
    if not -rows <= padding < rows:
        raise ValueError(f"padding_idx: expected {-rows} to {rows - 1}, got {padding}")
    return padding % rows
