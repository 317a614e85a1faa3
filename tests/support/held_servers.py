"""A server's program with tables, without its threads and connections; for tests of its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pserver.lane.leases import JobLeases
from pserver.lane.tables import LockedTable
from pserver.membership.decisions import Quiesce
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Membership
from pserver.table.gradient import RowGradient
from pserver.table.ids import owners
from transpiler.ir.rules import Rule
from transpiler.ir.tables import CountFilterEntry, Segment, Table
from transpiler.plan.plan import Lane, Plan

DIM = 3
# of the ids that are looked up, those of server 0
OWN = np.flatnonzero(owners(np.arange(2000), 2) == 0)


class Slices:
    """Stands for the dense slices of a server."""

    def __init__(self, value: float) -> None:
        self.held = {"w.block0": torch.full((2,), value)}

    def shapes(self) -> Any:
        return [(name, held.shape, held.dtype) for name, held in self.held.items()]

    def copy(self, name: str, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.held[name])

    def load(self, tensors: Any) -> None:
        self.held = dict(tensors)


def plan(lr: float = 0.1, memory_bytes: int | None = None) -> Plan:
    tables = (
        Table("emb", DIM, (Segment(0, DIM, 0),), memory_bytes=memory_bytes),
        Table("b/waits", DIM, (Segment(0, DIM, 0),), entry=CountFilterEntry(2)),
    )
    return Plan((Lane("async"),), 1, 2, (Rule("adagrad", {"lr": lr}),), (), tables=tables)


def server(of: Plan, scratch: Path, value: float = 0.0) -> Any:
    """Server 0 of 2, without its threads and connections."""
    tables = {table.name: LockedTable(table, of, 0, scratch) for table in of.tables}
    lanes = [SimpleNamespace(version=4)]
    return SimpleNamespace(
        plan=of,
        quiesce=Quiesce(Lifecycle()),
        leases=JobLeases(Membership(1, 0.0), Lifecycle()),
        lost={},
        lanes=lanes,
        slices=Slices(value),
        tables=tables,
        discard_snapshots=lambda: None,
        record_values=lambda: None,
        restore_table=lambda name, metadata: tables[name].restore(metadata),
        load_rows=lambda name, chunk: tables[name].load(chunk),
        log_place={"record": 0},
        last_save=None,
    )


MEMBERS: Any = SimpleNamespace(watermarks=lambda: {"0": 7}, load_watermarks=lambda saved: None)


def train(installed: Any, steps: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        for held in installed.tables.values():
            ids = torch.from_numpy(OWN[np.unique(random.integers(0, len(OWN), 200))])
            rows = torch.from_numpy(random.standard_normal((len(ids), DIM)).astype(np.float32))
            held.update(RowGradient(ids, rows), {0: {"lr": 0.1}}, {})


def read(installed: Any) -> torch.Tensor:
    return torch.cat([held.lookup(torch.arange(2000), 0) for held in installed.tables.values()])
