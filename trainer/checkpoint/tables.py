"""The tables of a job in a checkpoint, with rows on servers or in this process.

A table's metadata in a checkpoint are its width and dtype, its rules by columns, and the metadata
that :class:`pserver.table.table.SparseTable` has besides its rows.  Rows travel in chunks,
so that no process holds a table.

[Note: states of rows that trainers step]  In a geo lane servers have values alone, and in a diloco
lane the states of the outer optimizer: each trainer has the states of the rows that it has trained,
as it has those of dense parameters.  A checkpoint has trainer 0's of both, and every trainer
continues with them.  They are a table of their own in the checkpoint, "NAME@trainer", which jobs in
other modes ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from pserver.table.table import SparseTable
from trainer.communicator.communicator import Communicator
from trainer.communicator.tables import Tables
from trainer.embedding.local_rows import LocalRows, chunks_of
from trainer.senders.kstep_lane import KStepSender
from trainer.senders.served_rows import Lookups
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan
from transpiler.plan.planner import rules_of, stored

Chunk = dict[str, np.ndarray]
Reader = Callable[[np.ndarray], np.ndarray]  # of int64 [n], each once: rows [n, dim]
STEPPED = "stepped"  # in a table's metadata: those of the rows that trainer 0 stepped


class TableStore(Protocol):
    """The rows of a job's tables, on servers or in this process."""

    def names(self) -> list[str]:
        """The names of the tables."""

    def chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        """A table's rows, with their states.

        Args:
            changed: only rows that changed since :meth:`mark_saved`.
            metadata: has the table's when the chunks have ended.
        """

    def materialized(self, name: str) -> Iterator[Chunk]:
        """A table's rows as lookups read them: "ids" and "values"."""

    def reader(self, name: str) -> Reader | None:
        """A function that reads rows of any ids, of a table whose steps change untouched rows;
        None: these have their initial values.
        """

    def mark_saved(self, name: str) -> None:
        """Marks all changes until now as saved."""

    def stepped(self) -> list[str]:
        """The tables whose rows this trainer steps by itself.

        See [Note: states of rows that trainers step].
        """

    def stepped_chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        """The rows of such a table as this trainer has them, as :meth:`chunks` gives the
        servers'.
        """

    def load_stepped(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        """Replaces these rows, with their states; the first lookup of each brings its values."""

    def described(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """A table's metadata in a checkpoint.

        Args:
            known: what a server knows of the table besides its rows.
        """

    def check(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Compares a table with the metadata of a saved one.

        Raises:
            ValueError: the rows would not fit.
        """

    def load(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        """Replaces a table's rows."""


class ServedTableStore:
    """The tables of a job with servers."""

    def __init__(self, lookups: Lookups, communicator: Communicator) -> None:
        self._lookups = lookups
        self._plan = communicator.plan
        self._lanes = communicator.lanes

    def names(self) -> list[str]:
        """See :class:`TableStore`, here and in the methods below."""
        return list(self._lookups.tables)

    def chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        for chunk, known in self._lookups.scan(name, changed):
            metadata.update(self.described(name, known))  # all servers have taken the same steps
            yield chunk

    def materialized(self, name: str) -> Iterator[Chunk]:
        return (
            chunk for chunk, _ in self._lookups.scan(name, materialized=True) if len(chunk["ids"])
        )

    def reader(self, name: str) -> Reader | None:
        table = self._plan.table(name)
        rules = rules_of(table, self._plan.groups)
        if name in self._stepped() or not any(each.hparams.get("weight_decay") for each in rules):
            return None
        return lambda ids: self._lookups.pull(name, torch.from_numpy(ids)).numpy()

    def mark_saved(self, name: str) -> None:
        self._lookups.mark_saved(name)
        if name in self._stepped():
            self._stepped()[name].mark_saved()

    def described(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        table = self._plan.table(name)
        return _metadata(table, _by_columns(table, self._plan), known)

    def _stepped(self) -> dict[str, SparseTable]:
        return {
            name: rows.own
            for lane in self._lanes
            if isinstance(lane, KStepSender)
            for name, rows in lane.tables.items()
        }

    def stepped(self) -> list[str]:
        return list(self._stepped())

    def stepped_chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        rows = self._stepped()[name]
        yield from chunks_of(rows, changed=changed)
        metadata[STEPPED] = rows.metadata()

    def load_stepped(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        rows = self._stepped()[name]
        rows.clear()
        for chunk in chunks:
            rows.load(chunk)
        rows.restore(metadata[STEPPED])

    def check(self, name: str, metadata: Mapping[str, Any]) -> None:
        table = self._plan.table(name)
        _check(table, metadata)
        mine = [
            [begin, end, rule.type, dict(rule.flags)]
            for begin, end, rule in _by_columns(table, self._plan)
        ]
        theirs = [[begin, end, kind, flags] for begin, end, kind, _, flags in metadata["rules"]]
        trained = metadata["table"].get("step", 0) or (
            name in self.stepped() and STEPPED in metadata
        )
        if mine != theirs and trained:
            raise ValueError(
                f"table {name!r}: expected rows that were trained by {mine}, got rows trained by "
                f"{theirs}"
            )

    def load(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        self._lookups.reset(name, metadata["table"])
        for chunk in chunks:
            self._lookups.load(name, chunk)


class LocalTableStore:
    """The tables of a process that trains alone."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def names(self) -> list[str]:
        """See :class:`TableStore`, here and in the methods below."""
        return self._tables.names

    def _rows(self, name: str) -> LocalRows:
        rows = self._tables.embedding(name).rows
        assert isinstance(rows, LocalRows), "nothing is served"
        return rows

    def chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        whole, known = self._rows(name).state(changed)
        metadata.update(self.described(name, known))
        yield whole

    def reader(self, name: str) -> Reader | None:
        rows = self._rows(name)
        return (lambda ids: rows.pull(torch.from_numpy(ids)).numpy()) if len(rows.rows) else None

    def mark_saved(self, name: str) -> None:
        self._rows(name).rows.mark_saved()

    def described(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        return _width(self._tables.embedding(name).settings.table(name)) | dict(known)

    def stepped(self) -> list[str]:
        return []

    def stepped_chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        raise NotImplementedError("all rows are this process's")

    def load_stepped(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        raise NotImplementedError("all rows are this process's")

    def check(self, name: str, metadata: Mapping[str, Any]) -> None:
        _check(self._tables.embedding(name).settings.table(name), metadata)

    def load(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        parts = list(chunks)
        if parts:
            self._rows(name).load(
                {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}, metadata
            )
        else:
            self._rows(name).begin_anew(metadata)

    def materialized(self, name: str) -> Iterator[Chunk]:
        ids, values = self._rows(name).whole() or (
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, 0),
        )
        if len(ids):
            yield {"ids": ids.numpy(), "values": values.numpy()}


def store_of(tables: Tables | None, communicator: Communicator | None) -> TableStore | None:
    """The rows of a job's tables; None where it has no tables."""
    if communicator is not None:
        return (
            None
            if communicator.lookups is None
            else ServedTableStore(communicator.lookups, communicator)
        )
    return None if tables is None else LocalTableStore(tables)


def _by_columns(table: Table, plan: Plan) -> list[tuple[int, int, Rule]]:
    return [(segment.begin, segment.end, rule) for segment, rule in stored(table, plan)]


def _width(table: Table) -> dict[str, Any]:
    return {"dim": table.dim, "dtype": table.dtype}


def _metadata(
    table: Table, rules: list[tuple[int, int, Rule]], known: Mapping[str, Any]
) -> dict[str, Any]:
    plain = [
        [begin, end, rule.type, dict(rule.hparams), dict(rule.flags)] for begin, end, rule in rules
    ]
    return _width(table) | {"rules": plain, "table": known}


def _check(table: Table, metadata: Mapping[str, Any]) -> None:
    for what, mine in _width(table).items():
        if metadata.get(what) != mine:
            raise ValueError(
                f"table {table.name!r}: {what}: expected {mine}, got a checkpoint with "
                f"{metadata.get(what)}"
            )
