"""The k-step lanes, geo and diloco: the script's own optimizer steps, and every k steps the changes
of the parameters are sent.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from pserver.client.channel import Channel, Hparams
from pserver.client.replies import Reply
from pserver.finite import is_finite
from pserver.leases.table import EpochRange
from pserver.table.gradient import RowGradient
from trainer.device_copies import PendingCopy
from trainer.senders.buffers import SyncedBuffers
from trainer.senders.live_trainers import LiveTrainers
from trainer.senders.parameters import ParameterSlices
from trainer.senders.pipeline import (
    Buffers,
    ConsumedSamples,
    RequestPipeline,
    StagedValues,
    Tensors,
)
from trainer.senders.writes import WritesBetween
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from trainer.senders.change_feed import ChangeFeed
    from trainer.senders.kstep_rows import GeoRows

log = logging.getLogger(__name__)

ROUNDED = 4  # at most so many messages for the differences that rounding has left


class KStepSender:
    """The base class of the two k-step senders: gradients stay on the trainer, and steps are
    counted.

    Args:
        lane, slices: of this sender.
        hparams: the plan's, by group, which messages carry before a step has been closed.
        buffers: of the model.

    Attributes:
        writes: finds the external writes since the script's last step.
        tables: the rows that this trainer steps, by table.
    """

    def __init__(
        self, lane: Lane, slices: ParameterSlices, hparams: Hparams, buffers: SyncedBuffers
    ) -> None:
        self._lane = lane
        self._slices = slices
        self._buffers = Buffers(slices)
        in_place = lane.kind.outer_optimizer  # the script waits for the values
        self._pipeline = RequestPipeline(lane, slices, self._buffers, buffers, in_place)
        self.turn = self._pipeline.turn
        self.consumed = ConsumedSamples()
        self.meanwhile: Callable[[], None] = lambda: None
        self.torn = False
        self._taken = 0  # steps since the last message
        self._hparams = hparams
        self._last = Reply()
        self.writes = WritesBetween(slices.live)
        self.tables: dict[str, GeoRows] = {}
        self._gradients: dict[str, RowGradient] = {}  # of their rows, in the step under way

    @property
    def step(self) -> int:
        """The number of messages sent."""
        return self._pipeline.step

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`.  Steps that have not been exchanged are dropped."""
        self._pipeline.start(channels, step)
        self._taken = 0
        self.writes.note()

    def begin(self) -> None:
        """Does nothing: external writes are a part of the changes."""

    def send(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Does nothing: gradients stay here."""

    def send_rows(self, gradients: Mapping[str, RowGradient]) -> None:
        """Keeps the gradients of rows for :meth:`close`."""
        self._gradients.update(gradients)

    def withdraw(self) -> None:
        """See :class:`LaneSender`."""
        self._gradients = {}

    def close(self, hparams: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        self._taken += 0 if overflow else 1
        if not overflow:
            self.consumed.step()
        self._hparams = hparams
        gradients, self._gradients = self._gradients, {}
        for name, gradient in gradients.items() if not overflow else ():
            self.tables[name].step(gradient, hparams)

    def note_values(self) -> None:
        """See :class:`LaneSender`: what they have replaced is no change of this trainer's."""
        self.writes.note()

    def suspected(self) -> set[str]:
        """See :class:`LaneSender`: none, as a message brings them."""
        return set()

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        return {
            "messages": self.step,
            "steps_queued": self._taken,
            **self._pipeline.checks.metrics(),
        }


def drain_for_others(lanes: Iterable[object], drain: Callable[[], None]) -> None:
    """Drains the lanes before all values are replaced: changes need not be exchanged.

    Args:
        drain: drains all lanes.
    """
    for lane in lanes:
        if isinstance(lane, GeoSender):
            lane.drop_changes()
    drain()


def window_of(lanes: Iterable[object]) -> int:
    """The number of steps that the script has closed since the end of the last exchange of all
    trainers: a trainer that joins begins there.
    """
    return max((lane.window for lane in lanes if isinstance(lane, DiLoCoSender)), default=0)


def warn_unserved(
    lanes: Iterable[object],
    tensors: Mapping[str, torch.Tensor],
    served: Mapping[str, torch.Tensor],
) -> None:
    """Warns of parameters with external writes since the last step whose values on the servers
    differ.

    Args:
        tensors: the live tensors by name; ``served``: the servers' values.
    """
    written = [
        name
        for lane in lanes
        if isinstance(lane, KStepSender)
        for name in lane.writes.names()
        if not torch.equal(tensors[name].detach().cpu(), served[name])
    ]
    if written:
        log.warning(
            "%s: written since the last step.  In the k-step modes fleet.save and fleet.export "
            "have what the servers hold, not that; the model's state_dict() has it",
            ", ".join(sorted(written)),
        )


class DiLoCoSender(KStepSender):
    """The sender of a diloco lane: every k steps the parameters themselves are sent, and the
    servers' replace them while the script waits.

    The server knows the value that every trainer started from, and takes the change: see [Note:
    what arrives] in pserver/dense/update.py.  If servers look for outliers, a copy of that value is
    kept here, too: the change is measured.

    For rows of tables the change itself is sent: the server need not know which rows a trainer has
    looked up.  See [Note: diloco, row by row] in kstep_rows.py.

    [Note: diloco on a GPU]  The script waits for the servers when a window ends, so it waits for
    the GPU there: for the parameters, which all begin to be copied to pinned memory before it waits
    for the first.  The servers' values are received into the same memory, and go to the GPU in
    front of the next forward.  Changes are computed there.  The script waits for nothing else.

    Attributes:
        window: steps closed since the end of the last exchange.
    """

    window = 0

    _known: Mapping[str, torch.Tensor] = MappingProxyType({})

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        super().start(channels, step)
        self.window = 0
        self._note_known()

    def close(self, hparams: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        super().close(hparams, overflow)
        self.window += 0 if overflow else 1

    def note_values(self) -> None:
        """See :class:`LaneSender`."""
        super().note_values()
        self._note_known()

    def _note_known(self) -> None:
        if self._lane.outlier_push != "off":
            self._known = {name: self._slices.part(name).clone() for name in self._slices.names}

    def finish(self) -> Reply:
        """See :class:`LaneSender`."""
        if self._taken >= self._lane.k_steps:
            self._exchange(last=False)
        self.writes.note()
        return self._last

    def _exchange(self, last: bool) -> None:
        self.torn = True
        steps, self._taken = self._taken, 0
        own, changes = self._values()
        for rows in self.tables.values():
            rows.note_moved()
        tables = {name: rows.end_window() for name, rows in self.tables.items()}
        self._last, _ = self._pipeline.exchange(
            own,
            self._hparams,
            False,
            False,
            tables,
            steps,
            last,
            changes=changes,
            leases=self.consumed.claim(),
        )
        self.window = 0
        self._slices.flush_buffers()
        for rows in self.tables.values():
            rows.restart()
        self._note_known()
        self.torn = False

    def _values(self) -> tuple[Tensors, Tensors]:
        """The parameters, and their changes where these are measured, in main memory."""
        own, changes, copies = Tensors(), Tensors(), list[PendingCopy]()
        for name in self._slices.names:
            own[name] = part = self._slices.part(name)
            if name in self._known:
                changes[name] = part - self._known[name].to(part.device)
            if self._slices.on_gpu(name):
                way = self._slices.device_copy(part)
                own[name] = self._slices.beside(name)
                copies.append(way.to_host(part, own[name]))
                if name in self._known:
                    change, changes[name] = changes[name], self._slices.blank(name)
                    copies.append(way.to_host(change, changes[name]))
        for copy in copies:
            copy.synchronize()
        return own, changes

    def refresh(self) -> None:
        """Does nothing: no values are received between steps."""

    def drain(self) -> None:
        """Does nothing: no message is under way between steps."""

    def leave(self) -> None:
        """Exchanges the steps since the last exchange.  A trainer without such steps sends nothing,
        and no other waits for it.
        """
        if self._taken:
            self._exchange(last=True)

    def stop(self) -> None:
        """Does nothing: there are no threads."""

    def rest(self) -> None:
        """Does nothing: there are no threads."""


class GeoSender(KStepSender):
    """The sender of a geo lane: every k steps the changes are added on the servers, while training
    continues.

    [Note: geo]  Each slice x has a copy y: the server's value as far as this trainer knows it.
    Every k steps delta = (x - y) / trainers is sent, and y moves by delta.  When the server's z is
    received, which includes this and the others' deltas, y becomes z plus the deltas that were sent
    after this one, and x moves by as much as y did.  Until then the script trains on;
    ``send_queue_size`` deltas may be on their way.

    A sum of floats rounds, so y + (x - y) may not be x.  A job's only trainer therefore sends the
    rest of the difference when it drains: then the servers hold its values, to the bit.

    Servers refuse values that are not finite, and their values replace them: after the first such
    message, wherever x would not be finite, it becomes z.  After a message that is refused as an
    outlier, the whole x becomes y, with the rows of tables: the trainer's computations on its own
    values since then are dropped, except changes already sent.

    The values of a reply are received into the memory of its delta, unless an earlier reply is
    still staged, or is being taken in: that reply has to be moved by this delta first.

    [Note: geo on a GPU]  There y and the deltas are beside x, and the device computes with them in
    the order of the script's own work.  A delta is copied to pinned memory, and the lane's thread
    waits for that before it sends; z is copied to the device in front of the work that takes it
    in.  So the script's thread waits for no device until it drains.  It would have to at the entry
    of a forward, to know of an external write that no counter shows: there no values are taken in.
    """

    def __init__(
        self,
        lane: Lane,
        slices: ParameterSlices,
        live: LiveTrainers,
        hparams: Hparams,
        buffers: SyncedBuffers,
    ) -> None:
        super().__init__(lane, slices, hparams, buffers)
        self._live = live
        self._staged = StagedValues(self._buffers)
        self._messages: queue.SimpleQueue[tuple[Callable[[], Reply], Future[Reply]] | None] = (
            queue.SimpleQueue()
        )
        # One thread, so that messages keep their order; a daemon, so that a script that fails does
        # not wait for a reply.
        self._thread = threading.Thread(
            target=self._send_in_order, name="lane exchange", daemon=True
        )
        self._known: Tensors = {}  # y, where x is
        self._left = 0  # messages sent
        self._refused = False  # whether the servers have ever refused one
        # the numbers of messages refused as outliers, until x has become y
        self._outliers: deque[int] = deque()
        self._under_way: deque[tuple[int, Tensors, Future[Reply]]] = deque()

    def wait_for_replies(self) -> None:
        """Waits until every sent message is answered; takes no values in."""
        for _, _, reply in self._under_way:
            reply.result()
        self._tell_tables()

    def _tell_tables(self) -> None:
        """Makes the tables take what the replies so far tell."""
        for rows in self.tables.values():
            rows.take_replies()

    def drop_changes(self) -> None:
        """Prepares for this trainer's values to replace the servers': sends the steps that were
        taken, and drops other changes and received values.
        """
        if self._taken:
            self._send_changes()
        self.note_values()

    def note_values(self) -> None:
        """See :class:`LaneSender`.  Replies that are under way are of the values before."""
        super().note_values()
        self.wait_for_replies()
        self._buffers.give_back(self._staged.take_out()[1])
        self._under_way.clear()
        self._note_known()

    def _note_known(self) -> None:
        self._known = {name: self._slices.part(name).clone() for name in self._slices.names}

    def _both(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The x and the y of a slice; y follows x to another device."""
        x = self._slices.part(name)
        self._known[name] = self._known[name].to(x.device)
        return x, self._known[name]

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        super().start(channels, step)
        self._note_known()
        if not self._thread.is_alive():
            self._thread.start()

    def finish(self) -> Reply:
        """See :class:`LaneSender`."""
        self._take_arrived()
        if self._taken >= self._lane.k_steps:
            self._drain_to(self._lane.send_queue_size - 1)
            self._send_changes()
        self.writes.note()
        return self._last

    def _send_changes(self) -> None:
        """Sends the changes since the last message."""
        self.torn = True
        # the number of trainers once: a heartbeat may change it in the middle
        trainers, steps, self._taken = self._live.count, self._taken, 0
        self._left += 1
        deltas, changed, copies = Tensors(), Tensors(), list[PendingCopy]()
        for name in self._slices.names:
            x, known = self._both(name)
            sent, there = self._buffers.acquire(name), self._slices.on_gpu(name)
            delta = torch.sub(x, known, out=None if there else sent).div_(trainers)
            known.add_(delta)
            if there:
                copies.append(self._slices.device_copy(delta).to_host(delta, sent))
            deltas[name], changed[name] = delta, sent
        reply: Future[Reply] = Future()
        tables = {name: rows.end_window(trainers, reply) for name, rows in self.tables.items()}
        leases = self.consumed.claim()
        exchange = partial(
            self._exchange, self._left, changed, copies, self._hparams, tables, steps, leases
        )
        self._messages.put((exchange, reply))
        self._under_way.append((self._left, deltas, reply))
        self.torn = False

    def _exchange(
        self,
        number: int,
        changed: Tensors,
        copies: Iterable[PendingCopy],
        hparams: Hparams,
        tables: Mapping[str, RowGradient],
        steps: int,
        leases: tuple[EpochRange, ...],
    ) -> Reply:
        for copy in copies:
            copy.synchronize()
        reply, values = self._pipeline.exchange(
            changed,
            hparams,
            False,
            self._staged.idle,
            tables,
            steps,
            leases=leases,
            feeds=self._feeds,
        )
        self._refused |= reply.refused
        if reply.refused and reply.outliers:
            self._outliers.append(number)
        self._staged.put(values, values, number)
        return reply

    @property
    def _feeds(self) -> dict[str, ChangeFeed]:
        """The feeds of changes by other trainers, by table."""
        return {name: rows.feed for name, rows in self.tables.items() if rows.feed is not None}

    def _send_in_order(self) -> None:
        while (message := self._messages.get()) is not None:
            exchange, reply = message
            try:
                reply.set_result(exchange())
            except Exception as error:
                reply.set_exception(error)

    def _drain_to(self, limit: int) -> None:
        """Waits until at most ``limit`` messages are under way, and takes in received values."""
        while len(self._under_way) > limit:
            self._last = self._under_way[0][2].result()
            self._take()

    def _take(self) -> None:
        """Takes in the last reply; its message, and those before, are no longer under way."""
        self.torn = True
        with self._staged.taken() as (values, last):
            for name, value in values.items():
                self._move(name, value, last)
        self._slices.flush_buffers()
        self._tell_tables()
        while self._outliers and self._outliers[0] <= last:
            self._outliers.popleft()
        while self._under_way and self._under_way[0][0] <= last:
            self._under_way.popleft()
        self.torn = False

    def _move(self, name: str, value: torch.Tensor, message: int) -> None:
        """Takes in one slice of a reply; see [Note: geo]."""
        value = self._slices.to_part(name, value)
        served = value.clone() if self._refused else None
        for number, deltas, _ in self._under_way:
            if number > message:
                delta = deltas[name].to(value.device)
                value.add_(delta if served is None else delta.nan_to_num(0.0, 0.0, 0.0))
        x, known = self._both(name)
        moved = known.sub_(value).neg_().add_(x)
        if self._outliers and self._outliers[0] <= message:
            moved = value
        elif served is not None:
            moved = torch.where(moved.isfinite(), moved, served)
        self._slices.write_part(name, moved)
        known.copy_(value)

    def _take_arrived(self) -> None:
        if self._under_way and self._under_way[0][2].done():
            self._last = self._under_way[0][2].result()
            self._take()

    def refresh(self) -> None:
        """See :class:`LaneSender`.  Received values do not replace the script's external writes;
        a GPU has none of them here, as the script would wait for it.
        """
        if not (self._under_way and self._under_way[0][2].done()):
            return
        if not (any(map(self._slices.on_gpu, self._slices.names)) or self.writes.names()):
            self._take_arrived()
            self.writes.note()

    def drain(self) -> None:
        """See :class:`LaneSender`.  Received values do not replace the script's external writes,
        unless this is the only live trainer: then the servers' values are its own.
        """
        held = self._live.count > 1 and bool(self.writes.names())
        moved = [rows.note_moved() for rows in self.tables.values()]
        if self._taken or any(moved):
            self.wait_for_replies()
            self._send_changes()
        if held:
            self.wait_for_replies()
        else:
            self._drain_whole()
            self.writes.note()
        if feeds := self._feeds:
            self._pipeline.ask_changes(feeds)
        self._tell_tables()

    def _drain_whole(self) -> None:
        self._drain_to(0)
        for _ in range(ROUNDED if self._live.count == 1 else 0):
            own = map(self._both, self._slices.names)
            if all(torch.equal(x, y) or not is_finite(x.to("cpu")) for x, y in own):
                break
            self._send_changes()
            self._drain_to(0)

    def leave(self) -> None:
        """Sends all changes, including external writes, and replaces the trainer's values by the
        servers'.
        """
        if self.writes.names() and not self._taken:
            self._send_changes()
        self.writes.note()
        self.drain()
        values = self._pipeline.pull().values
        for name, value in values.items():
            self._slices.write(name, value)
        self._slices.flush_buffers()
        self._buffers.give_back(values)
        for rows in self.tables.values():
            rows.end_feed()

    def stop(self) -> None:
        """See :class:`LaneSender`."""
        self._messages.put(None)

    def rest(self) -> None:
        """See :class:`LaneSender`."""
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
