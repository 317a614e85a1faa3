"""What servers must hold: the decided steps applied in the order of the log, in one thread, by
torch's own optimizers and by the pure code of tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pserver.checkpoint.checkpoint import Reader
from pserver.dense.update import clip_coefficients, squared_norm
from pserver.job.program import InstalledProgram
from pserver.job_log.records import Decided, ProcessStep, Record
from pserver.table.gradient import RowGradient, total_of
from pserver.table.table import SparseTable
from pserver.table.tiered import open_table
from tests.checker.history import History, Message, TableCalls
from tests.checker.worlds import World
from transpiler.files import bounded_json
from transpiler.ir.rules import Hparam, Rule, make, set_hparams
from transpiler.ir.tables import Table
from transpiler.plan.plan import Placement, Plan, Slice
from transpiler.plan.planner import stored

Hparams = Mapping[int, Mapping[str, Hparam]]


class SliceReplica:
    """One slice, updated by plain torch.

    Attributes:
        passed: its values, update by update, from the first one on.
        updates: for each value but the first, which steps it has taken.
    """

    def __init__(self, plan: Plan, placement: Placement, part: Slice, value: torch.Tensor) -> None:
        self.lane, self.name = plan.lanes[placement.lane], part.name
        assert placement.group is not None, "servers update it"
        self.group, self.parameter = placement.group, placement.name
        self.value = value.clone()
        self.passed = [value.clone()]
        self.updates: list[tuple[ProcessStep, ...]] = []
        self._rule = self.lane.outer or plan.groups[placement.group]
        self._optimizer: torch.optim.Optimizer | None = None
        self._wide = value.double() if self.lane.outer else self.value

    def add(self, change: torch.Tensor) -> None:
        """A geo trainer's change."""
        self.value.add_(change.view(-1))

    def step(self, gradient: torch.Tensor, hparams: Mapping[str, Hparam]) -> None:
        """One step of the rule; of an outer one ``gradient`` is where trainers are."""
        if self.lane.outer is not None:
            self._wide.copy_(self.value)
            gradient, hparams = self._wide - gradient.view(-1).double(), self._rule.hparams
        self._made(hparams)
        self._wide.grad = gradient.view(-1)
        assert self._optimizer is not None
        self._optimizer.step()
        if self.lane.outer is not None:
            self.value.copy_(self._wide)

    def _made(self, hparams: Mapping[str, Hparam]) -> None:
        if self._optimizer is None:
            rule: Rule = replace(self._rule, hparams={**self._rule.hparams, **hparams})
            self._optimizer = make(rule, [self._wide])
        else:
            set_hparams(self._optimizer, hparams)

    def note(self, steps: tuple[ProcessStep, ...]) -> None:
        """An update is over."""
        self.passed.append(self.value.clone())
        self.updates.append(steps)

    def states(self) -> dict[str, torch.Tensor]:
        """Of the rule, by name."""
        if self._optimizer is None:
            return {}
        found = self._optimizer.state[self._wide]
        return {name: each for name, each in found.items() if torch.is_tensor(each)}


class TableReplica:
    """One server's part of a table, updated by the pure code.

    Args:
        calls: what has happened to the server's beside gradients.
    """

    def __init__(self, table: Table, plan: Plan, server: int, calls: TableCalls) -> None:
        self.lane, applied = plan.lanes[table.lane], stored(table, plan)
        shaped = replace(table, segments=tuple(segment for segment, _ in applied))
        self.rows = open_table(shaped, [rule for _, rule in applied], server, plan.servers)
        self._by_segment = [(segment.group, rule.hparams) for segment, rule in applied]
        self._removals = list(calls.removals)
        self._updates = self._removed = 0

    def take(self, gradient: RowGradient, hparams: Hparams, now: float) -> None:
        """One gradient, merged and clipped."""
        self.remove(self._updates)
        self._updates += 1
        ids, values = gradient.ids.numpy(), gradient.rows.numpy()
        statistics = None if gradient.statistics is None else gradient.statistics.numpy()
        if self.lane.kind.servers_add:
            self.rows.add(ids, values, statistics, now)
            return
        own: list[dict[str, Hparam]] = [{}]
        if self.lane.outer is None:
            own = [
                {name: hparams[group][name] for name in names} for group, names in self._by_segment
            ]
        else:
            values = np.negative(values)
        self.rows.update(ids, values, own, statistics, now)

    def remove(self, updates: int | None = None, most: int | None = None) -> None:
        """What was removed after so many gradients; None: after all.

        Args:
            most: so many removals, with those before; None: all.
        """
        while self._removals and (updates is None or self._removals[0][1] <= updates):
            if self._removed == most:
                break
            self._removed += 1
            name, _, arguments = self._removals.pop(0)
            getattr(self.rows, name)(*arguments)


@dataclass(slots=True)
class Merged:
    """What one server has of one update: by slice, and by table."""

    gradients: dict[str, torch.Tensor]
    rows: dict[str, RowGradient]


class ServerReplica:
    """One server's slices and tables.

    Args:
        server: which one.
        history: of the trial.
        held: what the server itself has: what was removed from its tables is removed here.
    """

    def __init__(self, world: World, server: int, history: History, held: InstalledProgram) -> None:
        self.server, self._history, self._plan = server, history, world.plan
        plan = world.plan
        self.slices: dict[str, SliceReplica] = {}
        for placement in plan.placements:
            whole = world.initial(placement).view(-1)
            for part in placement.slices:
                if part.server == server:
                    value = whole[part.begin : part.end]
                    self.slices[part.name] = SliceReplica(plan, placement, part, value)
        self.tables = self._tables(held)

    def _tables(self, held: InstalledProgram) -> dict[str, TableReplica]:
        known, found = self._history.tables, {}
        for table in self._plan.tables:
            calls = known.get(held.tables[table.name].rows, TableCalls())
            found[table.name] = TableReplica(table, self._plan, self.server, calls)
        return found

    def reload(self, held: InstalledProgram, save: Reader) -> None:
        """Another process of this server begins with what the save has, which this one is as of.

        Args:
            held: by that process.
        """
        for own in self.slices.values():
            own.passed, own.updates = [own.value.clone()], []
        self.tables = self._tables(held)
        for name, table in self.tables.items():  # whose rows lie as the files have them
            table.rows.restore(bounded_json.loads(save.meta["tables"][name]))
            for chunk in save.chunks(name):
                if chunk.keys() == {"ids", "values"}:  # as a server reads rows without states
                    table.rows.assign(chunk["ids"], chunk["values"])
                else:
                    table.rows.load(chunk)

    def message(self, lane: int, step: ProcessStep) -> Message:
        """What this server got of a step."""
        place = step.process.incarnation, lane, self.server
        return self._history.messages.get(place, {}).get(step.step, Message())

    def merged(self, lane: int, steps: Sequence[ProcessStep], averages: bool) -> Merged:
        """The sum of what some steps brought, or the mean, in the order of the trainers."""
        messages = [self.message(lane, step) for step in steps]
        share = 1.0 / len(messages) if averages else 1.0
        found = Merged({}, {})
        for name in self.slices:
            if parts := [each.gradients[name] for each in messages if name in each.gradients]:
                total = parts[0].clone()
                for part in parts[1:]:
                    total.add_(part)
                found.gradients[name] = total.mul_(share)
        for name in self.tables:
            if rows := [each.rows[name].clone() for each in messages if name in each.rows]:
                found.rows[name] = (
                    total_of(rows).mul_(share) if len(rows) > 1 else rows[0].mul_(share)
                )
        return found

    def norms(self, merged: Merged) -> dict[str, float]:
        """The squared norms of what this server has, by parameter and table."""
        found: dict[str, float] = {}
        for name, gradient in merged.gradients.items():
            parameter = self.slices[name].parameter
            found[parameter] = found.get(parameter, 0.0) + squared_norm(gradient)
        for name, rows in merged.rows.items():
            found[name] = squared_norm(rows.rows)
        return found

    def update(
        self, merged: Merged, hparams: Hparams, steps: tuple[ProcessStep, ...], time: float
    ) -> None:
        """Applies it."""
        for name, gradient in merged.gradients.items():
            replica = self.slices[name]
            if replica.lane.kind.servers_add:
                replica.add(gradient)
            else:
                replica.step(gradient, hparams[replica.group])
            replica.note(steps)
        for name, rows in merged.rows.items():
            self.tables[name].take(rows, hparams, time)


class JobReplica:
    """Servers of a job, by its log and by what trainers have sent.

    Args:
        world: of the trial.
        history: of the trial.
        held: what the servers themselves have: all of them, where servers clip.

    Attributes:
        servers: by their number.
        taken: the steps that they have, with the lane of each.
    """

    def __init__(
        self, world: World, history: History, held: Mapping[int, InstalledProgram]
    ) -> None:
        self._plan = world.plan
        self.servers = {s: ServerReplica(world, s, history, each) for s, each in held.items()}
        self.taken: list[tuple[int, ProcessStep]] = []

    def apply(self, records: Iterable[Record], removals: Mapping[str, int] | None = None) -> None:
        """Applies what was decided, in the order of the log.

        Args:
            removals: by table, so many; None: all.
        """
        for record in records:
            if isinstance(record.what, Decided):
                lane, steps = record.what.lane, record.what.steps
                self.taken += [(lane, step) for step in steps]
                self._decided(lane, steps, record.time)
        for server in self.servers.values():
            for name, table in server.tables.items():
                table.remove(most=None if removals is None else removals[name])

    def _decided(self, lane: int, steps: Sequence[ProcessStep], time: float) -> None:
        kind = self._plan.lanes[lane].kind
        updates = [tuple(sorted(steps))] if kind.waits_for_all else [(step,) for step in steps]
        for together in updates:
            servers = list(self.servers.values())
            merged = [s.merged(lane, together, kind.waits_for_all) for s in servers]
            hparams = servers[0].message(lane, together[0]).hparams
            if self._plan.clips_on_servers:
                self._clip(merged)
            for server, part in zip(servers, merged, strict=True):
                server.update(part, hparams, together, time)

    def _clip(self, merged: Sequence[Merged]) -> None:
        clip = self._plan.clip
        assert clip is not None, "it clips"
        if clip.kind == "value":
            for part in merged:
                for gradient in part.gradients.values():
                    gradient.clamp_(clip.low, clip.high)
                for rows in part.rows.values():
                    rows.rows.clamp_(clip.low, clip.high)
            return
        pairs = list(zip(self.servers.values(), merged, strict=True))
        factors = clip_coefficients(clip, [server.norms(part) for server, part in pairs])
        for server, part in pairs:
            for name, gradient in part.gradients.items():
                gradient.mul_(factors.get("", factors.get(server.slices[name].parameter, 1.0)))
            for name, rows in part.rows.items():
                rows.mul_(factors.get("", factors.get(name, 1.0)))


def cut_differences(replica: ServerReplica, save: Reader) -> Iterator[str]:
    """Where a server's save, of some moment, has other bytes than its replica of that moment."""
    tensors, what = save.tensors(), f"the save of server {replica.server}"
    for name, own in replica.slices.items():
        found = tensors.get(name)
        if found is None or not _same(found.view(-1), own.value):
            yield f"{what}: {name!r} is {_shown(found)}, not {_shown(own.value)}"
    for name, table in replica.tables.items():
        rows, others = _by_id(save.chunks(name)), _by_id([_rows(table.rows)])
        if rows != others:
            yield f"{what}: rows of {name!r} are {rows}, not {others}"


def _by_id(chunks: Iterable[Mapping[str, np.ndarray]]) -> dict[int, dict[str, bytes]]:
    """Rows with their states, by id."""
    found: dict[int, dict[str, bytes]] = {}
    for chunk in chunks:
        keys = [
            key for key in chunk if key not in ("ids", "removed") and not key.startswith("waiting")
        ]
        for place, id_ in enumerate(chunk["ids"].tolist()):
            found[id_] = {key: chunk[key][place].tobytes() for key in keys}
    return found


def differences(replica: ServerReplica, held: InstalledProgram) -> Iterator[str]:
    """Where a server holds other bytes than its replica; nothing: nowhere."""
    yield from _slice_differences(replica, held)
    for name, table in replica.tables.items():
        yield from _table_differences(
            f"server {replica.server}: {name!r}", table.rows, held.tables[name].rows
        )


def restored_differences(replica: ServerReplica, held: InstalledProgram) -> Iterator[str]:
    """The same of a server that has loaded a save: its rows may lie in another order."""
    yield from _slice_differences(replica, held)
    for name, table in replica.tables.items():
        rows, others = (_by_id([_rows(each)]) for each in (held.tables[name].rows, table.rows))
        if rows != others:
            yield f"server {replica.server}: restored rows of {name!r} are {rows}, not {others}"


def _slice_differences(replica: ServerReplica, held: InstalledProgram) -> Iterator[str]:
    for name, own in replica.slices.items():
        update = held.slices.updates[name]
        found = {"value": update.value.view(-1)}
        if update.updater is not None:
            found |= {key: each.view(-1) for key, each in update.updater.state().items()}
        expected = {"value": own.value} | {key: each.view(-1) for key, each in own.states().items()}
        for key in sorted(found.keys() | expected.keys()):
            if key not in found or key not in expected or not _same(found[key], expected[key]):
                what = f"server {replica.server}: {key} of slice {name!r}"
                yield f"{what} is {_shown(found.get(key))}, not {_shown(expected.get(key))}"


def _table_differences(what: str, expected: SparseTable, found: SparseTable) -> Iterator[str]:
    said, wanted = (_metadata(each) for each in (found, expected))
    if said != wanted:
        yield f"{what} says {said}, not {wanted}"
    rows, others = _rows(found), _rows(expected)
    for key in sorted(rows.keys() | others.keys()):
        if key not in rows or key not in others or rows[key].tobytes() != others[key].tobytes():
            yield f"{what}: {key} is {_shown(rows.get(key))}, not {_shown(others.get(key))}"


def _metadata(table: SparseTable) -> str:
    """Without what lookups count, which change nothing else."""
    found = dict(table.metadata())
    counts = found["counts"].items()
    found["counts"] = {name: n for name, n in counts if not name.startswith("lookups")}
    return json.dumps(found)


def _rows(table: SparseTable) -> dict[str, np.ndarray]:
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, 65536)
        chunks.append(chunk)
    return {key: np.concatenate([each[key] for each in chunks]) for key in chunks[0]}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


def _shown(array: Any) -> str:
    if array is None:
        return "missing"
    listed = array.tolist()
    return str(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
