"""A sparse table as a server holds it: the pure table, the lock that every use of it takes, and the
clock for its times to live.

[Note: the table's lock]  An update, or the copy that a lookup takes, holds it: so a lookup waits
for one update at most, and sees no half of one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from pserver.errors import Refused
from pserver.table.gradient import RowGradient
from pserver.table.sparse_table import compile_kernels
from pserver.table.tiered_table import open_table
from pserver.transport.codec import DTYPES
from transpiler.ir.rules import Hparam
from transpiler.ir.tables import ShowClickEntry, Table
from transpiler.plan.plan import Plan
from transpiler.plan.table_planner import rules_of

CHUNK_ROWS = 65536  # that a save asks for at a time

Chunk = dict[str, np.ndarray]


class LockedTable:
    """See the module's docstring.

    Args:
        table, plan: of the job; server: which of its servers this is.
        scratch: where rows go that leave memory; None: where temporary files go.
        clock: wall time in seconds: a time to live goes on while a server is down.
    """

    def __init__(
        self,
        table: Table,
        plan: Plan,
        server: int,
        scratch: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = table
        rules = rules_of(table, plan.groups)
        # now, while trainers wait for the installation, and not in the first step
        compile_kernels(table, rules)
        self.rows = open_table(table, rules, server, plan.servers, scratch)
        self._read = [
            (segment.group, rule.hparams)
            for segment, rule in zip(table.segments, rules, strict=True)
        ]
        self.counts = isinstance(table.entry, ShowClickEntry)
        self.dtype = DTYPES[table.dtype]
        # the coefficient of the commit to multiply with, where norms clip on servers
        self.scaled: str | None = None
        self.clamp: tuple[float, float] | None = None
        if plan.clips_on_servers and plan.clip is not None:
            self.scaled = {"value": None, "norm": table.name, "global_norm": ""}[plan.clip.kind]
            self.clamp = (plan.clip.low, plan.clip.high) if plan.clip.kind == "value" else None
        self._adds = plan.lanes[table.lane].kind.servers_add
        self._clock = clock
        self._shrunk = ("", 0), 0  # the last call of shrink, and what came of it
        self._lock = threading.Lock()

    @property
    def groups(self) -> set[int]:
        """The parameter groups whose numbers its rows are updated with."""
        return set() if self._adds else {segment.group for segment in self.table.segments}

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids, [n, dim]; no row is made.

        Raises:
            Refused: an id is outside of the table's range.
        """
        out = torch.empty((len(ids), self.table.dim), dtype=self.dtype)
        with self._lock:
            self._refusing(lambda: self.rows.lookup(ids.numpy(), out.numpy(), self._clock()))
        return out

    def update(
        self,
        gradient: RowGradient,
        rows: Mapping[int, Mapping[str, Hparam]],
        scale: Mapping[str, float],
    ) -> None:
        """One step: by the rules of the table's segments; or, where trainers step by themselves,
        what they changed is added.

        Args:
            gradient: merged; may be overwritten.
            rows: the present numbers of every group.
            scale: the commit's clipping coefficients.
        """
        if self.clamp is not None:
            gradient.rows.clamp_(*self.clamp)
        if self.scaled is not None and scale:
            gradient.mul_(scale[self.scaled])
        ids, values = gradient.ids.numpy(), gradient.rows.numpy()
        statistics = None if gradient.statistics is None else gradient.statistics.numpy()
        with self._lock:
            if self._adds:
                self.rows.add(ids, values, statistics, self._clock())
            else:
                hparams = [
                    {name: rows[group][name] for name in names} for group, names in self._read
                ]
                self.rows.update(ids, values, hparams, statistics, self._clock())

    def check(self, gradient: RowGradient) -> None:
        """Returns if a gradient can be applied; nothing is changed.

        Raises:
            Refused: an id comes twice, or is outside of the table's range.
        """
        self._refusing(lambda: self.rows.check_ids(gradient.ids.numpy()))

    def _refusing(self, use: Callable[[], None]) -> None:
        try:
            use()
        except ValueError as error:
            raise Refused(str(error)) from error

    # ---- whole tables ----

    def scan(self, cursor: int, most: int, changed: bool, materialized: bool) -> tuple[Chunk, int]:
        """A chunk of rows, whole, and where the next begins; -1 after the last."""
        with self._lock:
            return self.rows.scan(cursor, most or CHUNK_ROWS, changed, materialized)

    def mark_saved(self) -> None:
        """What has changed until now is saved."""
        with self._lock:
            self.rows.mark_saved()

    def load(self, chunk: Chunk) -> None:
        """Takes the rows of a chunk that this server holds; of ids and values alone, rows from
        which nothing was learned yet.

        Raises:
            Refused: the chunk is of another table.
        """
        with self._lock:
            if chunk.keys() == {"ids", "values"}:
                self._refusing(lambda: self.rows.assign(chunk["ids"], chunk["values"]))
            else:
                self._refusing(lambda: self.rows.load(chunk))

    def metadata(self) -> str:
        """What is known besides the rows, as JSON."""
        with self._lock:
            return json.dumps(self.rows.metadata())

    def restore(self, metadata: str) -> None:
        """Begins anew: no rows, and these :meth:`metadata`.

        Raises:
            Refused: they are none, or a table's with other rules.
        """

        def restore() -> None:
            known = json.loads(metadata)
            self.rows.clear()
            self.rows.restore(known)

        with self._lock:
            self._refusing(restore)

    def shrink(self, days: float, threshold: float | None, call: tuple[str, int] = ("", 0)) -> int:
        """Days pass; rows that score too low, were not seen for too long or have outlived their
        time go.  Returns how many.

        Args:
            call: whose it is, and its number: one that comes again is only answered.  0: not
                numbered.
        """
        with self._lock:
            if not call[1] or self._shrunk[0] != call:
                now = self._clock()
                self._shrunk = (
                    call,
                    int(self.rows.shrink(now, days, threshold)) + int(self.rows.expire(now)),
                )
            return self._shrunk[1]

    def counters(self) -> dict[str, int]:
        """What was counted since the start."""
        with self._lock:
            return dict(self.rows.counters())

    @property
    def bytes_held(self) -> int:
        """Of rows and index."""
        return self.rows.bytes_held
