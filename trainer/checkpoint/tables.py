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

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from pserver.table.ids import unique
from pserver.table.index import Index
from pserver.table.table import SparseTable
from pserver.table.updater import SegmentRules
from trainer.checkpoint.arrays import RowForm, TableRows
from trainer.communicator.communicator import Communicator
from trainer.communicator.tables import Tables
from trainer.embedding.local_rows import CHUNK_ROWS, LocalRows, chunks_of
from trainer.row_optimizers import group_rule
from trainer.senders.kstep_lane import KStepSender
from trainer.senders.served_rows import Lookups
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.ir.schema import DTYPES
from transpiler.ir.tables import ShowClickEntry, Table
from transpiler.plan.plan import Plan
from transpiler.plan.planner import rules_of, stored

if TYPE_CHECKING:
    from trainer.senders.kstep_rows import GeoRows

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

    def stored(self, name: str) -> tuple[Table, list[Rule]]:
        """A table, and the rules of its segments whose states its rows have."""

    def begin_anew(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Drops all rows of a table, and takes the metadata of a :class:`SparseTable` with these
        rules.
        """

    def put(self, name: str, chunk: Chunk) -> None:
        """Loads the rows of a chunk of such a table in the place of those of its ids; other rows
        stay.
        """


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
            self._stepped()[name].own.mark_saved()

    def described(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        table = self._plan.table(name)
        return _metadata(table, _by_columns(table, self._plan), known)

    def _stepped(self) -> dict[str, GeoRows]:
        return {
            name: rows
            for lane in self._lanes
            if isinstance(lane, KStepSender)
            for name, rows in lane.tables.items()
        }

    def stepped(self) -> list[str]:
        return list(self._stepped())

    def stepped_chunks(self, name: str, changed: bool, metadata: dict[str, Any]) -> Iterator[Chunk]:
        rows = self._stepped()[name].own
        yield from chunks_of(rows, changed=changed)
        metadata[STEPPED] = rows.metadata()

    def load_stepped(self, name: str, chunks: Iterable[Chunk], metadata: Mapping[str, Any]) -> None:
        self._stepped()[name].restore(chunks, metadata[STEPPED])

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

    def stored(self, name: str) -> tuple[Table, list[Rule]]:
        found = stored(self._plan.table(name), self._plan)
        segments = tuple(segment for segment, _ in found)
        return replace(self._plan.table(name), segments=segments), [rule for _, rule in found]

    def begin_anew(self, name: str, metadata: Mapping[str, Any]) -> None:
        self._lookups.reset(name, metadata)

    def put(self, name: str, chunk: Chunk) -> None:
        self._lookups.load(name, chunk)


class LocalTableStore:
    """The tables of a process that trains alone.

    Args:
        optimizers: the script's, whose rules tables without an optimizer of their own follow.
    """

    def __init__(self, tables: Tables, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._tables, self._optimizers = tables, optimizers

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

    def _rules(self, name: str) -> list[tuple[int, int, Rule]]:
        module = self._tables.embedding(name)

        def rule() -> Rule:
            return next(
                group_rule(optimizer, group, module.whose())
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                if any(parameter is module.proxy for parameter in group["params"])
            )

        return module.rules(rule)

    def stored(self, name: str) -> tuple[Table, list[Rule]]:
        rules = self._rules(name)
        segments = [(begin, end, number) for number, (begin, end, _) in enumerate(rules)]
        table = self._tables.embedding(name).settings.table(name, segments)
        return table, [rule for _, _, rule in rules]

    def begin_anew(self, name: str, metadata: Mapping[str, Any]) -> None:
        self._rows(name).begin_anew({"rules": _plain_rules(self._rules(name)), "table": metadata})

    def put(self, name: str, chunk: Chunk) -> None:
        self._rows(name).put(chunk, self._rules(name))

    def materialized(self, name: str) -> Iterator[Chunk]:
        ids, values = self._rows(name).whole() or (
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, 0),
        )
        if len(ids):
            yield {"ids": ids.numpy(), "values": values.numpy()}


def store_of(
    tables: Tables | None,
    communicator: Communicator | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> TableStore | None:
    """The rows of a job's tables; None where it has no tables."""
    if communicator is not None:
        return (
            None
            if communicator.lookups is None
            else ServedTableStore(communicator.lookups, communicator)
        )
    return None if tables is None else LocalTableStore(tables, optimizers)


def _by_columns(table: Table, plan: Plan) -> list[tuple[int, int, Rule]]:
    return [(segment.begin, segment.end, rule) for segment, rule in stored(table, plan)]


def _width(table: Table) -> dict[str, Any]:
    return {"dim": table.dim, "dtype": table.dtype}


def _metadata(
    table: Table, rules: list[tuple[int, int, Rule]], known: Mapping[str, Any]
) -> dict[str, Any]:
    return _width(table) | {"rules": _plain_rules(rules), "table": known}


def _plain_rules(rules: Iterable[tuple[int, int, Rule]]) -> list[list[Any]]:
    return [
        [begin, end, rule.type, dict(rule.hparams), dict(rule.flags)] for begin, end, rule in rules
    ]


def _check(table: Table, metadata: Mapping[str, Any]) -> None:
    for what, mine in _width(table).items():
        if metadata.get(what) != mine:
            raise ValueError(
                f"table {table.name!r}: {what}: expected {mine}, got a checkpoint with "
                f"{metadata.get(what)}"
            )


# ---- rows of another system ----


class RowImport:
    """Puts rows that another system trained into a table.

    Args:
        store: of the job's tables.
        name: of the table.
        given: see :class:`~trainer.checkpoint.arrays.TableRows`.
        steps: the number of steps that have made the rows' states; None: they have none, or none
            that depends on it.

    Raises:
        TypeError: the chunks are of another type.

    Example::

        rows = RowImport(store, "emb", [{"ids": ids, "values": values}])
        rows.check()
        rows.load()
    """

    def __init__(self, store: TableStore, name: str, given: Any, steps: int | None = None) -> None:
        self._store, self._name, self._steps = store, name, steps
        self._table, self._rules = store.stored(name)
        self.rows = TableRows(form_of(self._table, self._rules), given)

    def check(self) -> None:
        """Reads all chunks, and changes nothing; does nothing with chunks that can be read once.

        Raises:
            ValueError, OSError: a chunk does not fit, or cannot be read.
        """
        if not self.rows.once:
            for _ in self._chunks():
                pass

    def load(self) -> int:
        """Loads the rows: all rows of the table begin anew if the number of steps is given,
        otherwise those of the given ids.

        Returns:
            The number of rows.

        Raises:
            ValueError, OSError: as :meth:`check`; the rows of earlier chunks are loaded then.
            PServerError: a server is lost, or has no room for the rows.
        """
        if self._steps is not None:
            begun = [True] * len(self._rules)
            known = self._empty().metadata() | {"step": self._steps, "begun": begun}
            self._store.begin_anew(self._name, known | {"now": time.time()})
        for chunk in self._chunks():
            for begin in range(0, len(chunk["ids"]), CHUNK_ROWS):
                part = {key: array[begin : begin + CHUNK_ROWS] for key, array in chunk.items()}
                for whole in self._records(part):
                    self._store.put(self._name, whole)
        return self.rows.count

    def _chunks(self) -> Iterator[Chunk]:
        for chunk in self.rows.chunks(KnownIds().add):
            self._check_states(bool(self.rows.stated))
            yield chunk

    def _check_states(self, stated: bool) -> None:
        form, name = self.rows.form, f"table {self._name!r}"
        if not stated and self._steps is not None:
            raise ValueError(f"{name}: steps: expected chunks with states, got none")
        if stated and self._name in self._store.stepped():
            raise ValueError(
                f"{name}: expected no states, as in this mode each trainer steps its rows by "
                "itself: load ids and values"
            )
        if stated and form.stepped and self._steps is None:
            raise ValueError(
                f"{name}: expected steps=, the number of steps that have made these states: a step "
                f"of {form.rule} depends on it"
            )

    def _empty(self) -> SparseTable:
        return SparseTable(self._table, self._rules)

    def _records(self, given: Chunk) -> Iterator[Chunk]:
        """The whole records of rows, of which only a part is given: the rest is that of new
        rows.
        """
        rows = self._empty()
        rows.restore(rows.metadata() | {"now": time.time()})
        rows.assign(given["ids"], given["values"])
        order = np.argsort(given["ids"])
        for chunk in chunks_of(rows):
            places = order[np.searchsorted(given["ids"], chunk["ids"], sorter=order)]
            for key in given.keys() - {"ids", "values"}:
                chunk[key] = np.ascontiguousarray(given[key][places])
            for key in ("step", "order"):  # of the table that takes the rows, as it is then
                chunk.pop(key, None)
            yield chunk


class KnownIds:
    """The ids that have come so far."""

    def __init__(self) -> None:
        self._index = Index()

    def add(self, ids: np.ndarray) -> int | None:
        """Adds ids, int64 [n]; returns one that comes twice, or has come before, or None."""
        found, inverse = unique(ids)
        if len(found) < len(ids):
            return int(found[np.argmax(np.bincount(inverse) > 1)])
        slots, missing = self._index.locate(ids)
        if missing < len(ids):
            return int(ids[np.argmax(slots >= 0)])
        self._index.insert(ids, 0, 0)
        return None


def form_of(table: Table, rules: Sequence[Rule]) -> RowForm:
    """The form of rows of a table with these rules."""
    specs = [ROW_RULES[rule.type].complete(rule) for rule in rules]
    return RowForm(
        table.name,
        table.dim,
        table.rows,
        DTYPES[table.computes_in],
        dict(SegmentRules(table, rules).states),
        isinstance(table.entry, ShowClickEntry),
        ", ".join(dict.fromkeys(rule.type for rule in rules)),
        # corrections of averages, and a rate that decays
        any("betas" in known or known.get("lr_decay") for known in specs),
    )
