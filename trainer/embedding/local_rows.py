"""The rows of a table in this process, which an embedding looks up and trains when no server holds
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pserver.table.gradient import RowGradient
from trainer.embedding.rows import Arrived, RowSource
from transpiler.ir.rules import Rule
from transpiler.ir.schema import DTYPES
from transpiler.ir.tables import Segment, Table

if TYPE_CHECKING:
    from pserver.table.table import SparseTable

CHUNK_ROWS = 65536

ByColumns = list[tuple[int, int, Rule]]
Chunk = dict[str, np.ndarray]

# before the first step rows have no states
_UNKNOWN = Rule("sgd", {"lr": 0.0, "weight_decay": 0.0}, {"maximize": False})


class LocalRows:
    """A table of this process, whose update rules are those of the latest step.

    At the first step, and where the rules change, rows get new states and keep their values.  Not
    thread-safe.

    Args:
        table: all of it but its segments, which follow the rules.
        start: values that rows begin with: ids, int64 [n], and rows, [n, dim].
        clock: seconds, for a time to live.

    Attributes:
        dim, dtype: of a row, as it is looked up.
    """

    def __init__(
        self,
        table: Table,
        start: tuple[Tensor, Tensor] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._start = start
        self._clock = clock
        self.dim = table.dim
        self.dtype, self._travels = DTYPES[table.computes_in], DTYPES[table.gradients_in]
        self._rules: ByColumns = [(0, table.dim, _UNKNOWN)]
        self._rows: SparseTable | None = None

    @property
    def rows(self) -> SparseTable:
        """The table, created on first use."""
        if self._rows is None:
            self._rows = self._made()
            if self._start is not None:
                self.assign(*self._start)
                self._start = None
        return self._rows

    def _made(self) -> SparseTable:
        from pserver.table.tiered import open_table  # imports numba

        segments = tuple(
            Segment(begin, end, index) for index, (begin, end, _) in enumerate(self._rules)
        )
        return open_table(
            replace(self._table, segments=segments), [rule for _, _, rule in self._rules]
        )

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        """See :class:`~trainer.embedding.rows.RowSource`: none, all rows are in this process."""
        return ids[:0]

    def pull(self, ids: Tensor, arrived: Arrived | None = None) -> Tensor:
        """See :class:`~trainer.embedding.rows.RowSource`."""
        out = torch.empty((len(ids), self._table.dim), dtype=self.dtype)
        self.rows.lookup(ids.numpy(), out.numpy(), self._clock())
        return out

    def update(self, gradient: RowGradient, rules: ByColumns) -> None:
        """Takes one step; the gradient is consumed."""
        self._follow(rules)
        rows = gradient.rows
        if self._travels != self.dtype:  # so that one trainer with servers gets the same
            rows = rows.to(self._travels).to(self.dtype)
        statistics = None if gradient.statistics is None else gradient.statistics.numpy()
        hparams = [rule.hparams for _, _, rule in rules]
        self.rows.update(gradient.ids.numpy(), rows.numpy(), hparams, statistics, self._clock())

    def _follow(self, rules: ByColumns) -> None:
        if _form(rules) == _form(self._rules):
            return
        before = self.rows
        self._rules = list(rules)
        self._rows = self._made()
        for chunk in chunks_of(before, materialized=True):
            self._rows.assign(chunk["ids"], chunk["values"])

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Sets the values of rows, int64 [n], each once, and [n, dim]; their states are those of
        new rows.
        """
        for begin in range(0, len(ids), CHUNK_ROWS):
            part = slice(begin, begin + CHUNK_ROWS)
            self.rows.assign(
                ids[part].numpy(), rows[part].detach().to(self.dtype).contiguous().numpy()
            )

    def put(self, chunk: Chunk, rules: ByColumns) -> None:
        """Loads the rows of a chunk of a table with these rules, see
        :meth:`~pserver.table.table.SparseTable.load`; other rows stay.
        """
        self._follow(rules)
        self.rows.load(chunk)

    def status(self) -> dict[str, int]:
        """Rows, bytes, and counters."""
        return {"bytes_held": self.rows.bytes_held, **self.rows.counters(), "rows": len(self.rows)}

    def shrink(self, days: float, threshold: float | None) -> int:
        """Applies ``days`` of time decay, then drops rows below the score threshold or past their
        TTL; gives the number of dropped rows.
        """
        now = self._clock()
        return self.rows.shrink(now, days, threshold) + self.rows.expire(now)

    # ---- all rows ----

    @property
    def have_states(self) -> bool:
        """Whether rows have optimizer states: another rule than SGD has trained them."""
        return self._rows is not None and any(rule.type != "sgd" for _, _, rule in self._rules)

    def state(self, changed: bool = False) -> tuple[Chunk, dict[str, Any]]:
        """Copies of all rows, or of those that changed since they were saved, with their states,
        and the table's metadata.
        """
        chunks = list(chunks_of(self.rows, changed=changed))
        whole = {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
        rules = [
            [begin, end, rule.type, dict(rule.hparams), dict(rule.flags)]
            for begin, end, rule in self._rules
        ]
        return whole, {"rules": rules, "table": self.rows.metadata()}

    def begin_anew(self, metadata: Mapping[str, Any]) -> None:
        """Drops all rows, and takes these metadata, which :meth:`state` gave."""
        self._rules = [(begin, end, _rule(*rest)) for begin, end, *rest in metadata["rules"]]
        self._start = None
        self._rows = self._made()
        self._rows.restore(metadata["table"])

    def load(self, rows: Chunk, metadata: Mapping[str, Any]) -> None:
        """Replaces all rows by the result of :meth:`state`.

        Raises:
            ValueError: the rows have another width or dtype; nothing is changed.
        """
        if rows["values"].ndim != 2 or rows["values"].shape[1] != self._table.dim:
            raise ValueError(
                f"expected rows of {self._table.dim} numbers, got an array of shape "
                f"{list(rows['values'].shape)}"
            )
        if rows["values"].dtype != np.dtype(self._table.computes_in):
            expected = self._table.computes_in
            raise ValueError(f"expected rows of {expected}, got {rows['values'].dtype}")
        before = self._rules, self._rows
        self._rules = [(begin, end, _rule(*rest)) for begin, end, *rest in metadata["rules"]]
        self._rows = self._made()
        try:
            self._rows.load(rows)
            self._rows.restore(metadata["table"])
        except Exception:
            self._rules, self._rows = before
            raise
        self._start = None

    def whole(self) -> tuple[Tensor, Tensor] | None:
        """The values of all rows: ids, int64 [n], and values, [n, dim]; None where there are no
        rows.
        """
        if self._rows is None:
            return self._start
        if not len(self._rows):
            return None
        chunks = list(chunks_of(self._rows, materialized=True))
        ids, values = (
            torch.from_numpy(np.concatenate([chunk[key] for chunk in chunks]))
            for key in ("ids", "values")
        )
        return ids, values

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_rows"] = None if self._rows is None else self.state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_rows"] is not None:
            self.load(*state["_rows"])


def chunks_of(
    rows: SparseTable, *, changed: bool = False, materialized: bool = False
) -> Iterator[Chunk]:
    """All rows, or those that changed, at least one chunk; materialized: as a lookup reads them."""
    cursor = 0
    while cursor >= 0:
        chunk, cursor = rows.scan(cursor, CHUNK_ROWS, changed, materialized)
        yield chunk


def _form(rules: Sequence[tuple[int, int, Rule]]) -> list[tuple[int, int, str, dict[str, bool]]]:
    return [(begin, end, rule.type, dict(rule.flags)) for begin, end, rule in rules]


def _rule(kind: str, hparams: Mapping[str, Any], flags: Mapping[str, bool]) -> Rule:
    return Rule(
        kind,
        {key: tuple(value) if isinstance(value, list) else value for key, value in hparams.items()},
        dict(flags),
    )


def rows_differ(one: RowSource, other: RowSource) -> str | None:
    """The difference, in words, between the rows in this process of two modules that are to share a
    table; None: there is none.
    """
    if one is other:
        return None
    mine, theirs = (each.whole() if isinstance(each, LocalRows) else None for each in (one, other))
    if mine is None or theirs is None:
        return None if mine is theirs else "the rows"
    return None if all(map(torch.equal, mine, theirs)) else "the rows"
