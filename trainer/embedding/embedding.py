"""Embeddings whose rows need not fit into one machine: a module that looks rows up in this process
or on servers.

[Note: how a table trains]  A forward finds the ids that differ, pulls their rows, and gathers them.
A backward sums the gradients of equal ids and gives them to the module's proxy parameter: one
scalar, by which the table appears in the script's optimizer
(trainer/embedding/proxy.py).  At the optimizer's step the pending gradient is taken: by
the optimizer itself while the rows are in this process, by the connection to the servers where they
hold them.  A gradient of the whole table never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, Never, Protocol

import torch
from torch import Tensor, nn

from pserver.table.gradient import RowGradient
from pserver.table.string_ids import described, string_ids
from trainer.device_copies import is_on_gpu
from trainer.embedding.autograd import link_to_proxy, linked_rows
from trainer.embedding.bags import bags_of, pool
from trainer.embedding.joined_lookups import JoinedLookup, JoinedLookups, LookupsAhead
from trainer.embedding.local_rows import LocalRows, rows_differ
from trainer.embedding.proxy import ProxyParameter
from trainer.embedding.rows import Arrived, RowCache, RowSource, cache_of
from trainer.embedding.state_dict import check_copied, load_rows, save_rows, split_rows
from trainer.embedding.table_settings import TableSettings
from trainer.row_optimizers import RowOptimizer, Segments
from transpiler.ir.rules import Rule
from transpiler.ir.table_ops import refused_form
from transpiler.ir.tables import Initial, Normal, ShowClickEntry, TableEntry
from transpiler.tracing.tables import CapturedLookup, table_of

# ---- constructor ----
#
# Checks of the constructor's arguments.


def check_call(
    init: Callable[..., None], first: Any, misplaced: Sequence[Any], unknown: Iterable[str]
) -> None:
    """Refuses several arguments by position, as torch's embeddings take them, and unknown
    keywords.

    Args:
        init: the constructor, which has the known keywords.
        first: the argument by position.
        misplaced: further ones.
        unknown: the unknown keywords.

    Raises:
        TypeError: there are misplaced arguments or unknown keywords.
    """
    known = [
        name for name, each in signature(init).parameters.items() if each.kind == each.KEYWORD_ONLY
    ]
    if misplaced:
        dim, count = misplaced[0], first  # as of torch.nn.Embedding, unless they are as ours are
        if isinstance(dim, int) and isinstance(count, int) and count < dim:
            dim, count = count, dim
        raise TypeError(
            "DistributedEmbedding: expected embedding_dim as the only argument by position, got "
            f"{1 + len(misplaced)}: write DistributedEmbedding({dim!r}, num_embeddings={count!r})"
        )
    for keyword in unknown:
        close = get_close_matches(keyword, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, known))}"
        raise TypeError(f"DistributedEmbedding: unexpected keyword {keyword!r}: {hint}")


# ---- inputs ----
#
# Checks of forward's arguments: ids, and their shows and clicks.


def hashed(
    whose: str, ids: Any, name: str | None, num_embeddings: int | None, traced: bool
) -> Tensor:
    """The ids, where they are a tensor; otherwise the ids of strings.

    Args:
        name: of the table's hash; None: it has none.
        traced: whether ``capture`` is tracing.

    Raises:
        TypeError: they are something else, or the table has no hash.
        ValueError: lists of several lengths, or ``capture`` is tracing.
    """
    if isinstance(ids, Tensor) or name is None:
        given: Tensor = ids
        return given  # whole_numbers refuses anything else than a tensor
    if traced:
        raise ValueError(
            f"{whose}: a program takes tensors alone; expected ids: call string_ids(...) of "
            "trainer.nn.functional before the step"
        )
    return string_ids(ids, num_embeddings)


def whole_numbers(whose: str, ids: Tensor) -> Tensor:
    """The ids as int64.

    Args:
        whose: the table, for the message of an error; also below.

    Raises:
        TypeError: they are no tensor of whole numbers.
    """
    if (
        not isinstance(ids, Tensor)
        or ids.is_floating_point()
        or ids.is_complex()
        or ids.dtype == torch.bool
    ):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{whose}: ids: expected a tensor of int64, got {kind}")
    return ids if ids.dtype is torch.int64 else ids.to(torch.int64)


def fits_range(ids: Tensor, num_embeddings: int | None) -> bool:
    """Whether ids, int64 of any shape, are 0 to ``num_embeddings`` - 1; None: any id is right."""
    if num_embeddings is None or not ids.numel():
        return True
    low, high = (int(bound) for bound in torch.aminmax(ids))
    return low >= 0 and high < num_embeddings


def check_range(whose: str, ids: Tensor, num_embeddings: int | None) -> None:
    """Checks that ids, int64 of any shape, are 0 to ``num_embeddings`` - 1; None: any id is right.

    Raises:
        ValueError: one is not; the message has the first and its position.
    """
    if not fits_range(ids, num_embeddings):
        assert num_embeddings is not None, "without a range every id fits"
        flat = ids.reshape(-1)
        at = int(((flat < 0) | (flat >= num_embeddings)).nonzero()[0])
        raise ValueError(
            f"{whose}: ids: expected 0 to {num_embeddings - 1}, got {int(flat[at])} at position "
            f"{at}"
        )


def shows_and_clicks(
    whose: str, entry: TableEntry | None, ids: Tensor, given: Mapping[str, Tensor]
) -> Tensor | None:
    """The shows and clicks of each id, float32 [n, 2] on the CPU; None where the table does not
    count.

    Args:
        entry: the table's; a ShowClickEntry names the two keyword arguments.
        ids: int64 of any shape, n together.
        given: forward's further keyword arguments.

    Raises:
        TypeError: one has another name.
        ValueError: one has a shape that does not broadcast to the ids'.
    """
    names = (entry.show, entry.click) if isinstance(entry, ShowClickEntry) else ()
    for name in given:
        if name not in names:
            known = (
                f"its entry names {names[0]} and {names[1]}"
                if names
                else "it has no ShowClickEntry"
            )
            raise TypeError(
                f"{whose}: forward got an unexpected keyword argument {name!r}: {known}"
            )
    if not names:
        return None
    columns = []
    for name, usual in zip(names, (1.0, 0.0), strict=True):
        counts = torch.as_tensor(given.get(name, usual)).detach().to("cpu", torch.float32)
        try:
            columns.append(counts.expand(ids.shape).reshape(-1))
        except RuntimeError:
            raise ValueError(
                f"{whose}: {name}: expected a shape that broadcasts to {list(ids.shape)}, got "
                f"{list(counts.shape)}"
            ) from None
    return torch.stack(columns, 1)


# ---- torch embeddings ----
#
# The arguments of tables that replace torch's own embeddings.


def options_of(module: nn.Embedding | nn.EmbeddingBag) -> dict[str, Any]:
    """The arguments of a DistributedEmbedding that reads, pools and trains as this module.

    Raises:
        TypeError: the module is another one.
        ValueError: it has ``max_norm``, ``scale_grad_by_freq`` or mode "max".
    """
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise TypeError(
            f"from_module: expected an nn.Embedding or nn.EmbeddingBag, got {type(module).__name__}"
        )
    if (reason := refused_form(module)) is not None:
        raise ValueError(f"from_module: {reason}")
    return {
        "pooling": module.mode if isinstance(module, nn.EmbeddingBag) else None,
        "padding_idx": module.padding_idx,
        "num_embeddings": module.num_embeddings,
        "dtype": module.weight.dtype,
    }


# ---- traced rows ----
#
# An embedding's forward in a captured step: an op of the program.


class Traced(Protocol):
    """An embedding, as far as its op needs it."""

    settings: TableSettings
    proxy: ProxyParameter
    padding_row: Tensor | None
    include_last_offset: bool


def traced_rows(
    module: Traced,
    table: str,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    statistics: Mapping[str, Tensor],
) -> Tensor:
    """Adds an op in place of the lookup; it checks the range of ids when it runs.

    Args:
        table: its name in the program; the others as of forward.

    Returns:
        As forward, in the dtype that rows are computed in.

    Raises:
        TypeError, ValueError: as of forward.
    """
    own = module.settings
    ids = whole_numbers(own.whose(), ids)
    counted = shows_and_clicks(own.whose(), own.entry, ids, statistics)
    if own.pooling is None and (offsets is not None or weights is not None):
        raise ValueError(
            f"{own.whose()}: offsets and per_sample_weights are for a table with pooling"
        )
    padding = own.padding_idx
    lookup = CapturedLookup(
        table, module.proxy, own.embedding_dim, own.computes_in, padding, padding
    )
    if own.pooling is not None and offsets is not None:
        ends = module.include_last_offset
        return lookup.ragged(ids, offsets, weights, own.pooling, counted, ends)
    if own.pooling is not None:
        return lookup.pooled(ids, weights, own.pooling, counted)
    rows = lookup.rows(ids, counted)
    if module.padding_row is None or padding is None:
        return rows
    padded = torch.eq(ids, padding).unsqueeze(-1)
    return torch.where(padded, module.padding_row.to(rows), rows)


# ---- embedding ----


OF_SETTINGS = (
    "embedding_dim",
    "num_embeddings",
    "padding_idx",
    "pooling",
    "dtype",
    "entry",
    "name",
    "known_as",
)


class DistributedEmbedding(nn.Module):
    """A table of rows of ``embedding_dim`` numbers, by int64 ids of any value.

    An untrained row has the initial value of its id, which depends on ``seed`` and the id alone; it
    takes no memory until it is trained.  Alone, the rows are in this process, are part of
    ``state_dict()``, and are trained by any optimizer that has the module's parameters.  In a job
    with servers the servers hold them: this process holds none.  There ``state_dict()`` pulls all
    of them, up to 4 GiB, and ``load_state_dict`` replaces their values; the states of their
    optimizers stay.  ``half()`` and the like change the dtype of forward's result, not that
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
        dtype: of the rows: torch.float32, torch.float64, or torch.bfloat16 or torch.float16, which
            take half of the memory and of the bytes on the wire.  Of these forward gives float32,
            their optimizer's states are float32, and a step rounds them stochastically.
        seed: of initial values and of a ProbabilityEntry's draws.
        ttl: seconds without training after which a row is dropped.
        capacity: the most rows; those trained least recently (``eviction="lru"``) or least often
            ("lfu") are evicted.
        memory_bytes: of rows in memory; further rows are on disk.
        hash: "xxh3": ids may be strings, whose hash is the id (below ``num_embeddings``, where that
            is given), see :func:`pserver.table.string_ids.string_ids`; None: ids are numbers.
        cache_rows, cache_staleness: in training, a cache of this many pulled rows, which are read
            again in the same step and in this many steps after it: see
            :mod:`trainer.embedding.rows`.  0 rows: off.

    Attributes:
        settings: of the table; those that :class:`torch.nn.Embedding` has, too, and ``pooling``,
            ``dtype``, ``entry`` and ``name`` are attributes of the module as well.
        proxy: the :class:`~trainer.embedding.proxy.ProxyParameter`, the module's only
            parameter.
        rows: the source from which rows are pulled.
        cache: the :class:`~trainer.embedding.rows.RowCache`; None: off.
        joined: asks for rows together with other tables; None: this one asks by itself.
        look_ahead: asks for rows of coming steps; None: it does not.
        steps: of the optimizer, as :meth:`gradient` counts them where rows are cached.

    Raises:
        TypeError: an argument is of the wrong kind or has another name, or a second one is given by
            position.
        ValueError: a number is out of its range.
    """

    embedding_dim: int
    num_embeddings: int | None
    padding_idx: int | None
    pooling: str | None
    dtype: torch.dtype
    entry: TableEntry | None
    name: str | None
    known_as: str | None
    include_last_offset: bool = False  # as torch's bags have it
    joined: JoinedLookups | None = None
    look_ahead: LookupsAhead | None = None
    warned: frozenset[str] = frozenset()
    steps: int = 0
    _initial: tuple[Tensor, Tensor] | None = None
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
        hash: str | None = None,
        cache_rows: int = 0,
        cache_staleness: int = 0,
        **unknown: Never,
    ) -> None:
        check_call(DistributedEmbedding.__init__, embedding_dim, misplaced, unknown)
        super().__init__()
        self.settings = TableSettings(
            embedding_dim=embedding_dim,
            num_embeddings=num_embeddings,
            name=name,
            init=Normal() if init is None else init,
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
            hash=hash,
        )
        self._output = number = self.settings.computes_in
        self.rows: RowSource = LocalRows(self.settings.table())
        self.cache: RowCache | None = cache_of(cache_rows, embedding_dim, cache_staleness, number)
        padded = padding_idx is not None and pooling is None
        zeros = torch.zeros(embedding_dim, dtype=number) if padded else None
        self.register_buffer("padding_row", zeros)
        self.register_buffer("hash", described(hash, num_embeddings) if hash else None)
        self.proxy = ProxyParameter(torch.zeros((), dtype=number))
        self.proxy.bind(self)

    @classmethod
    def from_module(
        cls, module: nn.Embedding | nn.EmbeddingBag, name: str | None = None, **options: Any
    ) -> DistributedEmbedding:
        """An embedding that reads, pools and trains as one of torch's, and begins with its rows.

        ``sparse=True`` needs nothing here: rows are sparse anyway, and the optimizer determines
        their update rule (torch's SparseAdam is LazyAdam).  Its rows are copied: a weight that
        another module shares, such as a tied output layer, does not stay tied.

        Example::

            words = DistributedEmbedding.from_module(nn.EmbeddingBag(1000, 16), name="words")

        Args:
            module: the embedding, whose rows are copied.
            options: further arguments of the class.

        Returns:
            The embedding, on the module's device, in its training mode.

        Raises:
            TypeError: the module is another one.
            ValueError: it has ``max_norm``, ``scale_grad_by_freq``, mode "max", or a dtype that
                rows cannot have.
        """
        options = {**options_of(module), **options}
        weight = module.weight.detach()
        made = cls(module.embedding_dim, name=name, **options)
        made._output = weight.dtype
        made.include_last_offset = getattr(module, "include_last_offset", False)
        made.rows = LocalRows(
            made.settings.table(), (torch.arange(len(weight)), weight.cpu().clone())
        )
        if made.padding_row is not None:
            made.padding_row.copy_(weight[made.padding_idx])
        made.proxy.requires_grad_(module.weight.requires_grad)
        return made.to(weight.device).train(module.training)

    # ---- lookups ----

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import the compiler here
    def forward(
        self,
        ids: Any,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        **statistics: Tensor,
    ) -> Tensor:
        """Rows, or pooled rows.

        Args:
            ids: int64, of any shape; with pooling [bags, size], or [n] with offsets.  With ``hash``
                strings, too, as :func:`pserver.table.string_ids.string_ids` takes them.
            offsets: int64 [bags], where each bag begins: 0 first, in ascending order.
            per_sample_weights: float, of ids' shape; with pooling.
            statistics: the two keyword arguments that a ShowClickEntry names: numbers of a shape
                that broadcasts to the ids'.

        Returns:
            [*ids.shape, embedding_dim]; with pooling [bags, embedding_dim].

        Raises:
            TypeError: ids are no whole numbers, or there is another keyword argument.
            ValueError: an id is out of range, or shapes do not fit.
        """
        table, settings = table_of(self), self.settings
        whose = settings.whose()
        if table is not None:
            ids = hashed(whose, ids, settings.hash, settings.num_embeddings, traced=True)
            given = offsets, per_sample_weights, statistics
            return traced_rows(self, table, ids, *given).to(self._output)
        size, device = settings.num_embeddings, None
        ids = hashed(whose, ids, settings.hash, size, traced=False)
        if isinstance(ids, Tensor) and (is_on_gpu(ids) or not ids.is_cpu):
            device, ids = ids.device, self._in_main_memory(ids)
        ids = whole_numbers(whose, ids)
        counted = shows_and_clicks(whose, settings.entry, ids, statistics)
        ahead = None if self.look_ahead is None else self.look_ahead.claim(self, ids)
        if ahead is None and self.joined is not None:
            ahead = self.joined.claim(self, ids, device)
        if ahead is None:  # the range of ids that were asked for ahead is checked there
            check_range(whose, ids, size)
        if settings.pooling is None:
            if offsets is not None or per_sample_weights is not None:
                raise ValueError(
                    f"{whose}: offsets and per_sample_weights are for a table with pooling"
                )
            if ids.dim() == 1:
                rows = self._each(ids, counted, ahead, device)
            else:
                rows = self._each(ids.reshape(-1), counted, ahead, device)
                rows = rows.reshape(*ids.shape, settings.embedding_dim)
            return rows if rows.dtype is self._output else rows.to(self._output)
        bags = bags_of(whose, ids, offsets, per_sample_weights, self.include_last_offset)
        if settings.padding_idx is not None:
            bags, stays = bags.without(settings.padding_idx)
            counted = counted if counted is None or stays is None else counted[stays]
        rows, inverse, asked, counted = self._pulled(bags.ids, counted, ahead, device)
        rows = link_to_proxy(self.proxy, rows, asked, counted)
        bags = bags if device is None else bags.to(device)
        return pool(rows, inverse.to(torch.int64), bags, settings.pooling).to(self._output)

    def _in_main_memory(self, ids: Tensor) -> Tensor:
        return ids.cpu() if self.joined is None else self.joined.in_main_memory(ids)

    def _each(
        self,
        ids: Tensor,
        counted: Tensor | None,
        ahead: JoinedLookup | None,
        device: torch.device | None,
    ) -> Tensor:
        """A row for each id, int64 [n] -> [n, embedding_dim], on a device; None: the CPU."""
        padding = self.settings.padding_idx
        stays = None if padding is None else ids != padding
        if stays is None or bool(stays.all()):
            return linked_rows(self.proxy, *self._pulled(ids, counted, ahead, device))
        counted = None if counted is None else counted[stays]
        rows = linked_rows(self.proxy, *self._pulled(ids[stays], counted, ahead, device))
        assert self.padding_row is not None, "a table with a padding_idx, without pooling"
        padded = self.padding_row.to(rows).expand(len(ids), self.embedding_dim)
        stays = stays.to(rows.device, non_blocking=True)
        return padded.masked_scatter(stays.unsqueeze(1), rows)

    def _pulled(
        self,
        ids: Tensor,
        counted: Tensor | None,
        ahead: JoinedLookup | None,
        device: torch.device | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The rows of the unique ids, [u, embedding_dim], and each id's index among them, [n], on a
        device; the unique ids, and their statistics, on the CPU.
        """
        lookup = JoinedLookup.of(ids) if ahead is None else ahead
        asked, inverse = lookup.ids, lookup.inverse
        rows = self._pull(asked, lookup.arrived)
        number, dim = self.settings.computes_in, self.settings.embedding_dim
        if rows.shape != (asked.numel(), dim) or rows.dtype is not number:
            expected = (
                f"expected {number} [{len(asked)}, {dim}], got {rows.dtype} {list(rows.shape)}"
            )
            raise RuntimeError(f"{self.whose()}: rows: {expected}")
        if counted is not None:
            from pserver.table.ids import merge  # imports numba

            counted = torch.from_numpy(merge(inverse, counted.numpy(), len(asked)))
        if device is not None:
            return *lookup.on(device, rows), asked, counted
        return rows, torch.from_numpy(inverse), asked, counted

    def _pull(self, ids: Tensor, arrived: Arrived | None) -> Tensor:
        if self.cache is None or not self.training:
            return self.rows.pull(ids, arrived)
        rows = torch.empty((len(ids), self.embedding_dim), dtype=self.settings.computes_in)
        missing = self.cache.read(ids.numpy(), self.steps, rows.numpy())
        if len(missing):
            positions = torch.from_numpy(missing)
            pulled = self.rows.pull(ids[positions], arrived)
            self.cache.keep(ids.numpy()[missing], pulled.numpy(), self.steps)
            rows[positions] = pulled
        return rows

    def checked(self, ids: Any) -> Tensor:
        """The ids, int64, or those of strings, where they are of this table.

        Raises:
            TypeError: they are no whole numbers.
            ValueError: one is out of range.
        """
        whose, size = self.settings.whose(), self.settings.num_embeddings
        found = whole_numbers(whose, hashed(whose, ids, self.settings.hash, size, traced=False))
        check_range(whose, found, size)
        return found

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        """See :class:`~trainer.embedding.joined_lookups.AheadTable`."""
        if self.cache is not None and self.training:
            ids = ids[torch.from_numpy(self.cache.missing(ids.numpy(), self.steps))]
        return self.rows.ids_to_pull(ids)

    # ---- steps ----

    @property
    def optimizer(self) -> RowOptimizer | Segments | None:
        """The table's own optimizer; its hyper-parameters may be set at any time."""
        return self.settings.optimizer

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        self.settings.follow(given)

    def rules(self, group: Callable[[], Rule] | None = None) -> list[tuple[int, int, Rule]]:
        """See :meth:`~trainer.embedding.table_settings.TableSettings.rules`."""
        return self.settings.rules(group)

    def whose(self) -> str:
        """The table, in words."""
        return self.settings.whose()

    def gradient(self) -> RowGradient | None:
        """Ends a step's lookups, and copies the pending gradient: the sum over all lookups, each id
        once.

        The script's changes of ``proxy.grad`` are made to the rows: see
        trainer/embedding/proxy.py.  The gradient stays pending, as ``p.grad`` does, until
        gradients are zeroed or a backward follows.

        Returns:
            The copy, on the CPU; None where ``proxy.grad`` is None.
        """
        if self.cache is not None:
            self.steps += 1
        if self.joined is not None:
            self.joined.drop()
        return self.proxy.waiting()

    def discard(self) -> None:
        """Drops the pending gradient."""
        self.proxy.drop()
        self.proxy.grad = None

    def steps_here(self) -> bool:
        """Whether the rows are in this process."""
        return isinstance(self.rows, LocalRows)

    def step(self, rules: list[tuple[int, int, Rule]], scale: float = 1.0) -> None:
        """Steps the rows in this process, by these rules; gradients are multiplied by ``scale``."""
        assert isinstance(self.rows, LocalRows), "servers step the rows that they hold"
        gradient = self.gradient()
        if gradient is not None:
            self.rows.update(gradient if scale == 1.0 else gradient.mul_(scale), rules)

    # ---- row sources ----

    def differs(self, other: DistributedEmbedding) -> str | None:
        """The first difference, in words, that keeps two modules from sharing one table: in their
        settings, or in the rows that they have; None: there is none.
        """
        return self.settings.differs(other.settings) or rows_differ(self.rows, other.rows)

    def share(self, other: DistributedEmbedding) -> None:
        """Makes this module look up the other's table: they have one proxy parameter, and the same
        rows.
        """
        self.proxy, self.rows, self.cache = other.proxy, other.rows, other.cache

    def connect(self, source: RowSource) -> None:
        """Makes lookups pull rows from ``source``; those in this process become
        :attr:`initial_rows`.
        """
        self._initial = self.initial_rows
        self.rows = source
        self.discard()
        self.forget_pulled()

    def forget_pulled(self) -> None:
        """Drops rows that were pulled before."""
        if self.cache is not None:
            self.cache.clear()
        if self.joined is not None:
            self.joined.drop()
        if self.look_ahead is not None:
            self.look_ahead.withdraw()

    @property
    def has_row_states(self) -> bool:
        """Whether rows of this process have optimizer state."""
        return isinstance(self.rows, LocalRows) and self.rows.have_states

    @property
    def initial_rows(self) -> tuple[Tensor, Tensor] | None:
        """The rows in this process, or those before it was connected: ids, int64 [n], and values,
        [n, embedding_dim].

        None: there are none.  Servers begin with them.  Set to None once they have them.
        """
        return self.rows.whole() if isinstance(self.rows, LocalRows) else self._initial

    @initial_rows.setter
    def initial_rows(self, rows: None) -> None:
        self._initial = rows

    # ---- as a module ----

    def __getattr__(self, name: str) -> Any:
        """Attributes of any module, and settings; ``weight`` raises with advice."""
        if name == "weight":
            raise AttributeError(
                f"{self.whose()} has no 'weight', for its rows need not be in this "
                "process: call it to look rows up; for a penalty on all rows give its parameters "
                "weight_decay in the optimizer"
            )
        if name in OF_SETTINGS and "settings" in self.__dict__:
            return getattr(self.settings, name)
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """The settings that differ from the defaults, and the place of the rows."""
        return f"{self.settings}, rows {'in this process' if self.steps_here() else 'on servers'}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_rows(self, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given, others = split_rows(state_dict, prefix)
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        try:
            missing = load_rows(self, given, prefix)
        except (ValueError, KeyError, TypeError) as error:
            error_msgs.append(f"{self.whose()}: {error}")
        else:
            missing_keys.extend(missing if strict else [])

    def __getstate__(self) -> dict[str, Any]:
        check_copied(self)
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        self.proxy.bind(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedEmbedding:
        """``to``, ``half`` and the like: rows keep their dtype, forward's result gets the new
        one.
        """
        self._output = fn(torch.zeros((), dtype=self._output, device=self.proxy.device)).dtype
        super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)  # type: ignore[no-untyped-call]  # torch's own
        return self
