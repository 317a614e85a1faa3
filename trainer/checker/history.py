"""What trainers have sent and what the job's log says, taken down while a trial runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pserver.client.channel import Channel
from pserver.client.replies import Reply
from pserver.job.decisions import Decisions
from pserver.job_log.records import Lost, Record
from pserver.leases.lease_table import EpochRange
from pserver.table.gradient import RowGradient
from pserver.table.sparse_table import SparseTable
from transpiler.ir.rules import Hparam

Place = tuple[str, int, int]  # a process's incarnation, a lane, a server


@dataclass(slots=True)
class Message:
    """What one server gets of one step.

    Attributes:
        gradients: by slice, as they were sent for the first time.
        rows: by table, likewise.
        committed, answered: how far the exchange has come.
    """

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, RowGradient] = field(default_factory=dict)
    hparams: Mapping[int, Mapping[str, Hparam]] = field(default_factory=dict)
    leases: tuple[EpochRange, ...] = ()
    committed: bool = False
    answered: bool = False


@dataclass(slots=True)
class TableCalls:
    """What has happened to one server's part of a table, beside gradients.

    Attributes:
        updates: how many gradients it has taken.
        removals: ("shrink" or "expire", after how many gradients, the call's arguments).
    """

    updates: int = 0
    removals: list[tuple[str, int, tuple[Any, ...]]] = field(default_factory=list)


class History:
    """Takes down a trial.  Any thread may call it.

    Attributes:
        messages: by place, then by step.
        records: by a server's end of the log, by number: what has taken effect there.
        tables: by a server's part of a table.
    """

    def __init__(self) -> None:
        self.messages: dict[Place, dict[int, Message]] = {}
        self.records: dict[Decisions, dict[int, Record]] = {}
        self.tables: dict[SparseTable, TableCalls] = {}
        self._places: dict[Channel, Place] = {}
        self._changed = threading.Condition()  # guards all of the above

    # ---- what trainers send ----

    def follow(self, incarnation: str, channels: Iterable[tuple[int, int, Channel]]) -> None:
        """Takes down what a process sends.

        Args:
            channels: each with its server and its lane.
        """
        with self._changed:
            for server, lane, channel in channels:
                self._places[channel] = incarnation, lane, server
                self.messages.setdefault((incarnation, lane, server), {})

    def _message(self, channel: Channel, step: int) -> Message | None:
        with self._changed:
            place = self._places.get(channel)
            return None if place is None else self.messages[place].setdefault(step, Message())

    def _sent(self, channel: Channel, step: int, gradients: list[tuple[str, torch.Tensor]]) -> None:
        if (message := self._message(channel, step)) is not None:
            message.gradients |= {name: each.clone() for name, each in gradients}

    def _sent_rows(self, channel: Channel, step: int, table: str, rows: RowGradient) -> None:
        if (message := self._message(channel, step)) is not None:
            message.rows[table] = rows.clone()

    def _committed(
        self, channel: Channel, step: int, hparams: Any, leases: Iterable[EpochRange]
    ) -> None:
        if (message := self._message(channel, step)) is None:
            return
        message.hparams, message.leases = dict(hparams), tuple(leases)
        message.committed = True

        def answered(reply: Future[Reply]) -> None:
            message.answered = not reply.cancelled() and reply.exception() is None

        channel._awaited.reply.add_done_callback(answered)

    # ---- what servers do ----

    def _took(self, decisions: Decisions, records: Iterable[Record]) -> None:
        with self._changed:
            known = self.records.setdefault(decisions, {})
            for each in records:
                known.setdefault(each.number, each)
            self._changed.notify_all()

    def wait_for_loss(self, incarnation: str, ends: Iterable[Decisions], seconds: float) -> bool:
        """Waits until servers have fenced a process.

        Returns:
            Whether they have, in time.
        """

        def lost() -> bool:
            return all(
                any(
                    isinstance(each.what, Lost) and each.what.process.incarnation == incarnation
                    for each in self.records.get(end, {}).values()
                )
                for end in ends
            )

        with self._changed:
            return self._changed.wait_for(lost, seconds)

    def log(self, end: Decisions) -> list[Record]:
        """What has taken effect at a server's end of the log, in order."""
        with self._changed:
            found = self.records.get(end, {})
            return [found[number] for number in sorted(found)]

    def _calls(self, table: SparseTable) -> TableCalls:
        with self._changed:
            return self.tables.setdefault(table, TableCalls())

    # ---- taking it down ----

    @contextmanager
    def taken_down(self) -> Iterator[History]:
        """While it lasts, the jobs of this process are taken down here."""
        with ExitStack() as stack:
            for owner, name, made in (
                (Channel, "push", self._push),
                (Channel, "push_rows", self._push_rows),
                (Channel, "commit", self._commit),
                (Decisions, "_take", self._take),
                *((SparseTable, name, self._update) for name in ("update", "add")),
                *((SparseTable, name, self._remove) for name in ("shrink", "expire")),
            ):
                stack.enter_context(_replaced(owner, name, made))
            yield self

    def _push(self, name: str, right: Any) -> Any:
        def push(channel: Channel, step: int, gradients: Any) -> None:
            listed = list(gradients)
            self._sent(channel, step, listed)
            right(channel, step, listed)

        return push

    def _push_rows(self, name: str, right: Any) -> Any:
        def push_rows(channel: Channel, step: int, table: str, gradient: RowGradient) -> None:
            self._sent_rows(channel, step, table, gradient)
            right(channel, step, table, gradient)

        return push_rows

    def _commit(self, name: str, right: Any) -> Any:
        def commit(channel: Channel, step: int, hparams: Any, *others: Any, **named: Any) -> None:
            self._committed(channel, step, hparams, named.get("leases", ()))
            right(channel, step, hparams, *others, **named)

        return commit

    def _take(self, name: str, right: Any) -> Any:
        def take(decisions: Decisions, records: Iterable[Record]) -> None:
            listed = list(records)
            right(decisions, listed)
            self._took(decisions, listed)

        return take

    def _update(self, name: str, right: Any) -> Any:
        def update(table: SparseTable, *arguments: Any, **named: Any) -> None:
            right(table, *arguments, **named)
            self._calls(table).updates += 1

        return update

    def _remove(self, name: str, right: Any) -> Any:
        def remove(table: SparseTable, *arguments: Any) -> Any:
            calls = self._calls(table)
            calls.removals.append((name, calls.updates, arguments))
            return right(table, *arguments)

        return remove


@contextmanager
def _replaced(owner: Any, name: str, made: Any) -> Iterator[None]:
    right = vars(owner)[name]
    setattr(owner, name, made(name, right))
    try:
        yield
    finally:
        setattr(owner, name, right)
