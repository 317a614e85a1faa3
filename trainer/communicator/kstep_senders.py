"""The k-step lanes, geo and diloco: the script's own optimizer steps, and what it changed leaves
every k steps.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch

from pserver.client.channel import Channel
from pserver.table.gradient import RowGradient
from pserver.wire_pb2 import Done, Part
from trainer.communicator.lane import Hparams
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.request_pipeline import Buffers, RequestPipeline, Stage, Tensors
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from trainer.communicator.geo_rows import GeoRows


class KStepSender:
    """What the two have in common: gradients stay here, and steps are counted."""

    def __init__(self, lane: Lane, slices: ParameterSlices) -> None:
        self._lane = lane
        self._slices = slices
        self._buffers = Buffers(slices)
        self._wire = RequestPipeline(lane, slices, self._buffers)
        self.turn = self._wire.turn
        self._taken = 0  # steps since the last message
        self._rows: Hparams = {}
        self._last = Done()

    @property
    def step(self) -> int:
        """Messages sent."""
        return self._wire.step

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._wire.start(channels, step)

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Gradients stay here."""

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """See :class:`LaneSender`; no plan has tables where this is not done better."""
        raise AssertionError("a plan refuses tables in such a lane")

    def close(self, rows: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        self._taken += 0 if overflow else 1
        self._rows = rows

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        return {"messages": self.step, "steps_queued": self._taken}


class DiLoCoSender(KStepSender):
    """Diloco: every k steps the parameters themselves leave, and the servers' land over them while
    the script waits.

    The server knows where everybody started, and takes the change: see [Note: what arrives] in
    pserver/dense/slice_update.py.
    """

    def landing(self, part: Part) -> torch.Tensor:
        """See :class:`LaneSender`."""
        return self._slices.landing(part.name)

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        if self._taken >= self._lane.k_steps:
            self._taken = 0
            self._last, _ = self._wire.exchange(
                {name: self._slices.read(name) for name in self._slices.names}, self._rows, False
            )
            self._slices.unload()
        return self._last

    def refresh(self) -> None:
        """Nothing arrives between steps."""

    def drain(self) -> None:
        """Nothing is under way between steps."""

    def stop(self) -> None:
        """No threads."""


class GeoSender(KStepSender):
    """Geo: every k steps what changed is added on the servers, while training goes on.

    [Note: geo]  Each slice has a copy y of what the trainer takes for the server's.  Every k steps
    delta = (x - y) / trainers leaves, and y moves by delta.  When the server's z comes back, which
    has this and the others' deltas in it, y becomes z plus those deltas that left after this one,
    and x moves by as much as y did.  Until then the script trains on; ``send_queue_size`` deltas
    may be on their way.

    A delta's memory is where its answer lands, unless an earlier answer waits to be taken in, which
    still has to be moved by it.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices, trainers: int) -> None:
        super().__init__(lane, slices)
        self._trainers = trainers
        self._stage = Stage(self._buffers)
        self._messages: queue.SimpleQueue[tuple[Callable[[], Done], Future[Done]] | None] = (
            queue.SimpleQueue()
        )
        # One thread, so that messages keep their order; a daemon, so that a script that fails does
        # not wait for an answer.
        self._sender = threading.Thread(
            target=self._send_in_order, name="lane exchange", daemon=True
        )
        self._known: Tensors = {}  # y
        self.tables: dict[str, GeoRows] = {}  # that this trainer steps
        self._gradients: dict[str, RowGradient] = {}  # of their rows, in the step under way
        self._left = 0  # messages that have left
        self._under_way: deque[tuple[int, Tensors, Future[Done]]] = deque()

    def landing(self, part: Part) -> torch.Tensor:
        """See :class:`LaneSender`."""
        return self._wire.landing(part.name)

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """Gradients of rows stay here, too."""
        self._gradients[table] = gradient

    def close(self, rows: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        super().close(rows, overflow)
        gradients, self._gradients = self._gradients, {}
        for name, gradient in gradients.items() if not overflow else ():
            self.tables[name].step(gradient, rows)

    def answered(self) -> None:
        """Returns when every message that has left is answered; takes nothing in."""
        for _, _, answer in self._under_way:
            answer.result()

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        super().start(channels, step)
        self._known = {name: self._slices.read(name).clone() for name in self._slices.names}
        if not self._sender.is_alive():
            self._sender.start()

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        self.refresh()
        if self._taken >= self._lane.k_steps:
            self._leave()
        return self._last

    def _leave(self) -> None:
        """What has changed since the last message leaves."""
        self._settle(self._lane.send_queue_size - 1)
        self._taken = 0
        self._left += 1
        changed: Tensors = {}
        for name in self._slices.names:
            delta = torch.sub(
                self._slices.read(name), self._known[name], out=self._buffers.take(name)
            ).div_(self._trainers)
            self._known[name].add_(delta)
            changed[name] = delta
        answer: Future[Done] = Future()
        tables = {name: rows.leave() for name, rows in self.tables.items()}
        self._messages.put(
            (partial(self._exchange, self._left, changed, self._rows, tables), answer)
        )
        self._under_way.append((self._left, changed, answer))

    def _exchange(
        self, number: int, changed: Tensors, rows: Hparams, tables: Mapping[str, RowGradient]
    ) -> Done:
        done, values = self._wire.exchange(changed, rows, False, self._stage.empty, tables)
        self._stage.arrived(values, values, number)
        return done

    def _send_in_order(self) -> None:
        while (message := self._messages.get()) is not None:
            exchange, answer = message
            try:
                answer.set_result(exchange())
            except Exception as error:
                answer.set_exception(error)

    def _settle(self, most: int) -> None:
        """Waits until at most so many messages are under way, and takes in what has come back."""
        while len(self._under_way) > most:
            self._last = self._under_way[0][2].result()
            self._take()

    def _take(self) -> None:
        """Takes in the last answer; the messages that it answers, and those before, are no longer
        under way.
        """
        tag = self._stage.take(self._move)
        self._slices.unload()
        while self._under_way and (self._under_way[0][0] <= (tag or 0)):
            self._under_way.popleft()

    def _move(self, name: str, value: torch.Tensor, tag: int) -> None:
        """See [Note: geo]."""
        for number, changed, _ in self._under_way:
            if number > tag:
                value.add_(changed[name])
        known = self._known[name]
        now = self._slices.read(name)
        self._slices.write(name, known.sub_(value).neg_().add_(now))
        known.copy_(value)

    def refresh(self) -> None:
        """See :class:`LaneSender`."""
        if self._under_way and self._under_way[0][2].done():
            self._last = self._under_way[0][2].result()
            self._take()

    def drain(self) -> None:
        """See :class:`LaneSender`."""
        if self._taken:
            self._leave()
        self._settle(0)

    def stop(self) -> None:
        """See :class:`LaneSender`."""
        self._messages.put(None)
