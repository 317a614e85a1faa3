"""What trainers have sent and what the job's log says, taken down while a trial runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pserver.client.channel import Channel
from pserver.client.replies import Reply
from pserver.job.job import Job
from pserver.job.job_files import Saving
from pserver.job.program import InstalledProgram
from pserver.job_log.records import Decided, LogSnapshot, Loss, Lost, Process, Record
from pserver.leases.table import EpochRange
from pserver.membership.decisions import Decisions
from pserver.table.gradient import RowGradient
from pserver.table.table import SparseTable
from transpiler.ir.rules import Hparam

Place = tuple[str, int, int]  # a process's incarnation, a lane, a server


@dataclass(slots=True)
class Message:
    """What one server gets of one step.

    Attributes:
        gradients: by slice, as they were sent for the first time.
        rows: by table, likewise.
        committed, answered: how far the exchange has come.
        after: the last record that any server had when it was sent.
    """

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, RowGradient] = field(default_factory=dict)
    hparams: Mapping[int, Mapping[str, Hparam]] = field(default_factory=dict)
    leases: tuple[EpochRange, ...] = ()
    committed: bool = False
    answered: bool = False
    after: int = 0


@dataclass(slots=True)
class TableCalls:
    """What has happened to one server's part of a table, beside gradients.

    Attributes:
        updates: how many gradients it has taken.
        removals: ("shrink" or "expire", after how many gradients, the call's arguments).
        cut: how many of the removals came before its last cut.
    """

    updates: int = 0
    removals: list[tuple[str, int, tuple[Any, ...]]] = field(default_factory=list)
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The moment that a server has saved.

    Attributes:
        held: by the server.
        removals: by table, how many came before.
    """

    held: InstalledProgram
    removals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stood:
    """What a server says that has come back.

    Attributes:
        held: by it, from here on.
        last: the number of the last record before it serves.
        lost: by trainer, of decided steps, in this process and those before.
        said: a sentence.
    """

    held: InstalledProgram
    last: int
    lost: Mapping[int, Loss]
    said: str


class History:
    """Takes down a trial.  Any thread may call it.

    Attributes:
        messages: by place, then by step.
        records: by a server's end of the log, by number: what has taken effect there.
        tables: by a server's part of a table.
        cuts: by the directory in which a server saves one.
        stood: by the job of a server that has come back.
        decided_away: records of steps that server 0 has decided while it awaited a server.
    """

    def __init__(self) -> None:
        self.messages: dict[Place, dict[int, Message]] = {}
        self.records: dict[Decisions, dict[int, Record]] = {}
        self.tables: dict[SparseTable, TableCalls] = {}
        self.cuts: dict[str, Cut] = {}
        self.stood: dict[Job, Stood] = {}
        self.decided_away: list[Record] = []
        self._away: dict[tuple[Decisions, int], int] = {}  # the last record before it was
        self._last = 0  # the last record of any server: taken, or one at which it stands
        self._moved = time.monotonic()  # when something was sent, answered or decided last
        self._dead: set[Decisions] = set()
        self._places: dict[Channel, Place] = {}
        self._changed = threading.Condition()  # guards all of the above

    @property
    def quiet_seconds(self) -> float:
        """For how long nothing has been sent, answered or decided."""
        return time.monotonic() - self._moved

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
        message.committed, message.after = True, self._last
        self._moved = time.monotonic()

        def answered(reply: Future[Reply]) -> None:
            message.answered = not reply.cancelled() and reply.exception() is None
            self._moved = time.monotonic()

        channel._awaited.reply.add_done_callback(answered)

    # ---- what servers do ----

    def _took(self, decisions: Decisions, records: Iterable[Record]) -> None:
        with self._changed:
            if decisions in self._dead:
                return
            known = self.records.setdefault(decisions, {})
            for each in records:
                known.setdefault(each.number, each)
                self._last = max(self._last, each.number)
            self._moved = time.monotonic()
            self._changed.notify_all()

    def dies(self, decisions: Decisions) -> None:
        """A server is lost: what its threads do after that is no part of the history."""
        with self._changed:
            self._dead.add(decisions)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Waits until something is so, which follows from what is taken down here.

        Returns:
            Whether it is, in time.
        """
        with self._changed:
            return self._changed.wait_for(done, seconds)

    def wait_for_loss(
        self, process: Process, ends: Callable[[], Iterable[Decisions]], seconds: float
    ) -> bool:
        """Waits until servers have fenced a process.

        Args:
            ends: the ends of the log that the servers have now.

        Returns:
            Whether they have, in time.
        """

        def lost() -> bool:
            return all(
                any(
                    isinstance(each.what, Lost) and each.what.process == process
                    for each in self.records.get(end, {}).values()
                )
                or process in end._members.fenced  # before a server has come back
                for end in ends()
            )

        return self.wait_until(lost, seconds)

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
                (Decisions, "server_lost", self._server_lost),
                (Decisions, "server_returned", self._server_returned),
                (Job, "_stands", self._stands),
                (Saving, "cut", self._save),
                (SparseTable, "cut", self._cut),
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
        def push_rows(
            channel: Channel, step: int, gradients: Mapping[str, RowGradient], **named: Any
        ) -> None:
            for table, gradient in gradients.items():
                self._sent_rows(channel, step, table, gradient)
            right(channel, step, gradients, **named)

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

    def _server_lost(self, name: str, right: Any) -> Any:
        def server_lost(decisions: Decisions, server: int, error: Any) -> None:
            with decisions._job.lock:
                right(decisions, server, error)
                if server in decisions.away:
                    self._away[decisions, server] = decisions.last

        return server_lost

    def _server_returned(self, name: str, right: Any) -> Any:
        def server_returned(decisions: Decisions, server: int, *arguments: Any) -> None:
            with decisions._job.lock:
                before = self._away.pop((decisions, server), decisions.last)
                records = [each for each in self.log(decisions) if each.number > before]
                self.decided_away += [each for each in records if isinstance(each.what, Decided)]
                right(decisions, server, *arguments)

        return server_returned

    def _stands(self, name: str, right: Any) -> Any:
        def stands(job: Job, standing: LogSnapshot) -> None:
            with self._changed:  # the process before it may have written one that none has taken
                self._last = max(self._last, standing.last)
            right(job, standing)
            held, reload = job.program, job.reload
            assert held is not None and reload is not None, "it serves"
            said = [each.text for each in job.lifecycle.events.all() if each.kind == "reloaded"]
            with self._changed:
                self.stood[job] = Stood(held, standing.last, dict(reload.lost), said[-1])
                self._changed.notify_all()

        return stands

    def _save(self, name: str, right: Any) -> Any:
        def cut(saving: Saving, *arguments: Any) -> Any:
            found, held = right(saving, *arguments), saving._installed
            removals = {name: self._calls(each.rows).cut for name, each in held.tables.items()}
            with self._changed:
                self.cuts[saving._path] = Cut(held, removals)
            return found

        return cut

    def _cut(self, name: str, right: Any) -> Any:
        def cut(table: SparseTable, *arguments: Any) -> Any:
            calls = self._calls(table)
            calls.cut = len(calls.removals)
            return right(table, *arguments)

        return cut

    def _update(self, name: str, right: Any) -> Any:
        def update(table: SparseTable, *arguments: Any, **named: Any) -> Any:
            found = right(table, *arguments, **named)
            self._calls(table).updates += 1
            return found

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
