"""Embeddings whose rows need not fit into one machine: a module that looks rows up in this process
or on servers.

[Note: how a table trains]  A forward finds the ids that differ, pulls their rows, and gathers them.
A backward sums the gradients of equal ids and gives them to the module's proxy parameter: one
scalar, by which the table appears in the script's optimizer
(trainer/embedding/proxy_parameter.py).  At the optimizer's step the pending gradient is taken: by
the optimizer itself while the rows are in this process, by the connection to the servers where they
hold them.  A gradient of the whole table never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Never

import torch
from torch import Tensor, nn

from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.embedding.autograd import link_to_proxy, linked_rows
from trainer.embedding.bags import bags_of, pool
from trainer.embedding.inputs import check_range, fits_range, shows_and_clicks, whole_numbers
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.look_ahead import LookAhead, Lookup
from trainer.embedding.proxy_parameter import ProxyParameter
from trainer.embedding.row_cache import RowCache, cache_of
from trainer.embedding.row_source import Arrived, RowSource
from trainer.embedding.table_settings import TableSettings
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Initial, TableEntry
from transpiler.tracing.embedding_lookup import Lookup as TracedLookup
from transpiler.tracing.embedding_lookup import table_of


class DistributedEmbedding(TableSettings):
    """A table of rows of ``embedding_dim`` numbers, by int64 ids of any value.

    A row that nothing was learned for reads the initial value of its id, which depends on ``seed``
    and the id alone; it takes no memory until it is trained.  Alone, the rows are in this process,
    are part of ``state_dict()``, and are trained by any optimizer that has the module's parameters.
    In a job with servers they are the servers': this process holds none.  There ``state_dict()``
    pulls all of them, up to 4 GiB, and ``load_state_dict`` replaces their values; the states of
    their optimizers stay.  ``half()`` and the like change the dtype of forward's result, not that
    of the rows.

    Example::

        words = DistributedEmbedding(16, num_embeddings=1000, pooling="mean")
        optimizer = torch.optim.Adagrad(words.parameters(), lr=0.1)
        words(torch.tensor([[3, 7], [7, 999]])).sum().backward()    # [2, 16]
        optimizer.step()

    Args:
        embedding_dim: numbers in a row.  All further arguments are given by keyword.
        num_embeddings: ids are 0 to num_embeddings - 1; None: any int64.
        name: of the table; None: the module's name in the model.
        init: Normal, Uniform or Constant of ``trainer``; None: Normal().
        optimizer: of the table's own, see :mod:`trainer.row_optimizers`; None: rows follow the
            parameter group that the proxy parameter is in, with its hyper-parameters at each step.
        entry: which ids are admitted: CountFilterEntry, ProbabilityEntry or ShowClickEntry; None:
            all.
        pooling: None: one row for each id; "sum", "mean" or "sqrtn": one for each bag of ids, see
            :func:`trainer.embedding.bags.pool`.
        padding_idx: an id that reads zeros, and is never trained; left out of bags.  Below 0 it
            counts from ``num_embeddings``, where that is given, as in torch.
        dtype: of the rows, torch.float32 or torch.float64.
        seed: of initial values and of a ProbabilityEntry's draws.
        ttl: seconds after which a row that is not trained any more is forgotten.
        capacity: the most rows; those trained least recently (``eviction="lru"``) or least often
            ("lfu") make room.
        memory_bytes: of rows in memory; further rows are on disk.
        cache_rows, cache_staleness: in training, rows that were pulled are read again in the same
            step and for so many steps after it; so many rows are kept for that: see
            :mod:`trainer.embedding.row_cache`.  0 rows: off.

    Attributes:
        proxy: the :class:`~trainer.embedding.proxy_parameter.ProxyParameter`, the module's only
            parameter.
        rows: where rows are pulled from.
        cache: the :class:`~trainer.embedding.row_cache.RowCache`; None: off.
        look_ahead: asks for rows together with other tables; None: this one asks by itself.
        steps: of the optimizer that this table has taken part in.

    Raises:
        TypeError: an argument is of the wrong kind or has another name, or a second one is given by
            position.
        ValueError: a number is out of its range.
    """

    look_ahead: LookAhead | None = None
    padding_row: Tensor | None  # zeros [embedding_dim], of a table with a padding_idx, unpooled

    def __init__(
        self,
        embedding_dim: int,
        *misplaced: Never,
        num_embeddings: int | None = None,
        name: str | None = None,
        init: Initial | None = None,
        optimizer: Any = None,
        entry: TableEntry | None = None,
        pooling: str | None = None,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        ttl: float | None = None,
        capacity: int | None = None,
        eviction: str = "lru",
        memory_bytes: int | None = None,
        cache_rows: int = 0,
        cache_staleness: int = 0,
        **unknown: Never,
    ) -> None:
        _check_call(embedding_dim, misplaced, unknown)
        super().__init__(
            embedding_dim=embedding_dim,
            num_embeddings=num_embeddings,
            name=name,
            init=init,
            optimizer=optimizer,
            entry=entry,
            pooling=pooling,
            padding_idx=padding_idx,
            dtype=dtype,
            seed=seed,
            ttl=ttl,
            capacity=capacity,
            eviction=eviction,
            memory_bytes=memory_bytes,
        )
        self.include_last_offset = False
        self.steps = 0
        self.rows: RowSource = LocalRows(self.table())
        self._initial: tuple[Tensor, Tensor] | None = None
        self.cache: RowCache | None = cache_of(cache_rows, embedding_dim, cache_staleness, dtype)
        self._output = dtype
        padded = padding_idx is not None and pooling is None
        self.register_buffer(
            "padding_row", torch.zeros(embedding_dim, dtype=dtype) if padded else None
        )
        self.proxy = ProxyParameter(torch.zeros((), dtype=dtype))
        self.proxy.bind(self)

    @classmethod
    def from_module(
        cls, module: nn.Embedding | nn.EmbeddingBag, name: str | None = None, **options: Any
    ) -> DistributedEmbedding:
        """An embedding that reads, pools and trains as one of torch's, and begins with its rows.

        ``sparse=True`` needs nothing here: rows are sparse anyway, and the optimizer says the rule
        that they follow (torch's SparseAdam is LazyAdam).  Its rows are copied: a weight that
        another module shares, as an output layer tied to it, is not followed.

        Example::

            words = DistributedEmbedding.from_module(nn.EmbeddingBag(1000, 16), name="words")

        Args:
            module: the embedding, whose rows are copied.
            options: further arguments of the class.

        Returns:
            The embedding, on the module's device, in its training mode.

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
            module.embedding_dim,
            num_embeddings=module.num_embeddings,
            dtype=weight.dtype,
            name=name,
            **options,
        )
        made.include_last_offset = bool(bags and module.include_last_offset)
        made.rows = LocalRows(made.table(), (torch.arange(len(weight)), weight.cpu().clone()))
        if made.padding_row is not None:
            made.padding_row.copy_(weight[made.padding_idx])
        made.proxy.requires_grad_(module.weight.requires_grad)
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
            [*ids.shape, embedding_dim]; with pooling [bags, embedding_dim].

        Raises:
            TypeError: ids are no whole numbers, or there is another keyword argument.
            ValueError: an id is out of range, or shapes do not fit.
        """
        if (table := table_of(self)) is not None:
            return self._traced(table, ids, offsets, per_sample_weights, statistics)
        ids = whole_numbers(self.whose(), ids)
        check_range(self.whose(), ids, self.num_embeddings)
        counted = shows_and_clicks(self.whose(), self.entry, ids, statistics)
        ahead = None if self.look_ahead is None else self.look_ahead.take(self, ids)
        if self.pooling is None:
            if offsets is not None or per_sample_weights is not None:
                raise ValueError(
                    f"{self.whose()}: offsets and per_sample_weights are for a table with pooling"
                )
            rows = self._each(ids.reshape(-1), counted, ahead)
            return rows.reshape(*ids.shape, self.embedding_dim).to(self._output)
        bags = bags_of(self.whose(), ids, offsets, per_sample_weights, self.include_last_offset)
        if self.padding_idx is not None:
            bags, stays = bags.without(self.padding_idx)
            counted = counted if counted is None or stays is None else counted[stays.cpu()]
        rows, inverse, asked, counted = self._pulled(bags.ids, counted, ahead)
        rows = link_to_proxy(self.proxy, rows, asked, counted)
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
        ids = whole_numbers(self.whose(), ids)
        counted = shows_and_clicks(self.whose(), self.entry, ids, statistics)
        if self.pooling is None and (offsets is not None or weights is not None):
            raise ValueError(
                f"{self.whose()}: offsets and per_sample_weights are for a table with pooling"
            )
        lookup = TracedLookup(
            table, self.proxy, self.embedding_dim, self.dtype, self.padding_idx, self.padding_idx
        )
        if self.pooling is not None and offsets is not None:
            ends = self.include_last_offset
            return lookup.ragged(ids, offsets, weights, self.pooling, counted, ends).to(
                self._output
            )
        if self.pooling is not None:
            return lookup.pooled(ids, weights, self.pooling, counted).to(self._output)
        rows = lookup.rows(ids, counted)
        if self.padding_row is not None and self.padding_idx is not None:
            rows = torch.where(
                torch.eq(ids, self.padding_idx).unsqueeze(-1), self.padding_row.to(rows), rows
            )
        return rows.to(self._output)

    def _each(self, ids: Tensor, counted: Tensor | None, ahead: Lookup | None) -> Tensor:
        """A row for each id, int64 [n] -> [n, embedding_dim]."""
        stays = None if self.padding_idx is None else ids != self.padding_idx
        if stays is None or bool(stays.all()):
            return linked_rows(self.proxy, *self._pulled(ids, counted, ahead))
        counted = None if counted is None else counted[stays.cpu()]
        rows = linked_rows(self.proxy, *self._pulled(ids[stays], counted, ahead))
        assert self.padding_row is not None, "a table with a padding_idx, without pooling"
        padded = self.padding_row.to(rows).expand(len(ids), self.embedding_dim)
        return padded.masked_scatter(stays.unsqueeze(1), rows)

    def _pulled(
        self, ids: Tensor, counted: Tensor | None, ahead: Lookup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The rows of the ids that differ, [u, embedding_dim], and each id's index among them, [n],
        on the ids' device; those ids, and their statistics, on the CPU.
        """
        lookup = Lookup.of(ids) if ahead is None else ahead
        asked, inverse = lookup.ids, lookup.inverse
        rows = self._pull(asked, lookup.arrived)
        if rows.shape != (len(asked), self.embedding_dim) or rows.dtype != self.dtype:
            expected = (
                f"expected {self.dtype} [{len(asked)}, {self.embedding_dim}], got {rows.dtype} "
                f"{list(rows.shape)}"
            )
            raise RuntimeError(f"{self.whose()}: rows: {expected}")
        if counted is not None:
            counted = torch.from_numpy(id_arithmetic.merge(inverse, counted.numpy(), len(asked)))
        return rows.to(ids.device), torch.from_numpy(inverse).to(ids.device), asked, counted

    def _pull(self, ids: Tensor, arrived: Arrived | None) -> Tensor:
        if self.cache is None or not self.training:
            return self.rows.pull(ids, arrived)
        rows = torch.empty((len(ids), self.embedding_dim), dtype=self.dtype)
        missing = self.cache.read(ids.numpy(), self.steps, rows.numpy())
        if len(missing):
            positions = torch.from_numpy(missing)
            pulled = self.rows.pull(ids[positions], arrived)
            self.cache.keep(ids.numpy()[missing], pulled.numpy(), self.steps)
            rows[positions] = pulled
        return rows

    def lookup_of(self, given: Tensor) -> Lookup | None:
        """See :class:`~trainer.embedding.look_ahead.AheadTable`."""
        if not fits_range(given, self.num_embeddings):
            return None
        ids = given.reshape(-1)
        return Lookup.of(ids if self.padding_idx is None else ids[ids != self.padding_idx], given)

    def asks(self, ids: Tensor) -> Tensor:
        """See :class:`~trainer.embedding.look_ahead.AheadTable`."""
        if self.cache is not None and self.training:
            ids = ids[torch.from_numpy(self.cache.missing(ids.numpy(), self.steps))]
        return self.rows.asks(ids)

    # ---- steps ----

    def gradient(self) -> RowGradient | None:
        """At a step: a copy of the pending gradient, the sum over all lookups, each id once.

        The script's changes of ``proxy.grad`` are made to the rows: see
        trainer/embedding/proxy_parameter.py.  The gradient stays pending, as ``p.grad`` does, until
        gradients are zeroed or a backward follows.

        Returns:
            On the CPU; None where ``proxy.grad`` is None.
        """
        self.steps += 1
        if self.look_ahead is not None:
            self.look_ahead.drop()
        return self.proxy.waiting()

    def discard(self) -> None:
        """Drops the pending gradient."""
        self.proxy.drop()
        self.proxy.grad = None

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
        """This module looks up the other's table from now on: they have one proxy parameter, and
        the same rows.
        """
        self.proxy, self.rows, self.cache = other.proxy, other.rows, other.cache

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
    def has_row_states(self) -> bool:
        """Whether rows of this process have optimizer state."""
        return isinstance(self.rows, LocalRows) and self.rows.have_states

    @property
    def initial_rows(self) -> tuple[Tensor, Tensor] | None:
        """The rows in this process, or those that were when it was connected: ids, int64 [n], and
        values, [n, embedding_dim].

        None: there are none.  Servers begin with them.  Set to None once they have them.
        """
        return self.rows.whole() if isinstance(self.rows, LocalRows) else self._initial

    @initial_rows.setter
    def initial_rows(self, rows: None) -> None:
        self._initial = rows

    def __getattr__(self, name: str) -> Any:
        """As of any module; a model that reads ``weight`` is told what to do."""
        if name == "weight":
            raise AttributeError(
                f"{self.whose()} has no 'weight', for its rows need not be in this process: call "
                "it to look rows up; for a penalty on all rows give its parameters weight_decay in "
                "the optimizer"
            )
        return super().__getattr__(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        self.proxy.bind(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedEmbedding:
        """``to``, ``half`` and the like: rows keep their dtype, what forward returns gets the other
        one.
        """
        self._output = fn(torch.zeros((), dtype=self._output, device=self.proxy.device)).dtype
        super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)  # type: ignore[no-untyped-call]  # torch's own
        return self


def _check_call(first: Any, misplaced: Sequence[Any], unknown: Iterable[str]) -> None:
    """Refuses several arguments by position, as torch's embeddings have them, and keywords that
    there are not.
    """
    if misplaced:
        raise TypeError(
            "DistributedEmbedding: expected embedding_dim as the only argument by position, got "
            f"{1 + len(misplaced)}: write DistributedEmbedding({misplaced[0]!r}, "
            f"num_embeddings={first!r})"
        )
    for keyword in unknown:
        known = list(DistributedEmbedding.__init__.__kwdefaults__ or ())
        close = get_close_matches(keyword, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, known))}"
        raise TypeError(f"DistributedEmbedding: unexpected keyword {keyword!r}: {hint}")
