"""The k-step lanes, geo and diloco: the script's own optimizer steps, and what it changed leaves every k steps."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from pserver.channel import Channel
from pserver.wire_pb2 import Done, Part
from trainer.lane import Rows
from trainer.slices import LiveSlices
from trainer.wire import Stage, Wire
from transpiler.plan import Lane

Changes = dict[str, torch.Tensor]  # by slice


class Local:
    """See the module's docstring.

    [Note: geo]  Each slice has a copy y of what the trainer takes for the server's.  Every k steps delta = (x - y) / trainers
    leaves, and y moves by delta.  When the server's z comes back, which has this and the others' deltas in it, y becomes z plus
    those deltas that left after this one, and x moves by as much as y did.  Until then the script trains on; ``send_queue_size``
    deltas may be on their way.
    """

    def __init__(self, lane: Lane, slices: LiveSlices, trainers: int) -> None:
        self._lane = lane
        self._slices = slices
        self._trainers = trainers
        self._stage = Stage(slices)
        self._wire = Wire(lane, slices)
        self.turn = self._wire.turn
        self._messages: queue.SimpleQueue[tuple[Callable[[], Done], Future[Done]] | None] = queue.SimpleQueue()
        # One thread, so that messages keep their order; a daemon, so that a script that fails does not wait for an answer.
        self._sender = threading.Thread(target=self._send_in_order, name="lane exchange", daemon=True)
        self._known: dict[str, torch.Tensor] = {}  # y
        self._taken = 0  # steps since the last message
        self._left = 0  # messages that have left
        self._under_way: deque[tuple[int, Changes, Future[Done]]] = deque()
        self._rows: Rows = {}
        self._last = Done()

    @property
    def step(self) -> int:
        """Messages sent."""
        return self._wire.step

    def landing(self, part: Part) -> torch.Tensor:
        """See :class:`LaneSender`."""
        return self._stage.landing(part.name)

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._wire.start(channels, step)
        self._known = {name: self._slices.read(name).clone() for name in self._slices.names}
        if not self._sender.is_alive():
            self._sender.start()

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Gradients stay here."""

    def close(self, rows: Rows, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        self._taken += 0 if overflow else 1
        self._rows = rows

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        self.refresh()
        if self._taken >= self._lane.k_steps:
            self._leave()
        if self._lane.mode == "diloco":
            self._settle(0)
        return self._last

    def _leave(self) -> None:
        """What has changed since the last message leaves."""
        self._settle(self._lane.send_queue_size - 1)
        self._taken = 0
        self._left += 1
        changed: Changes = {}
        for name in self._slices.names:
            now = self._slices.read(name)
            if self._lane.mode == "diloco":
                changed[name] = now.clone()  # the server takes the change itself: see [Note: what arrives] in pserver/entry.py
            else:
                changed[name] = (now - self._known[name]).div_(self._trainers)
                self._known[name].add_(changed[name])
        arrived = partial(self._stage.arrived, self._left)
        answer: Future[Done] = Future()
        self._messages.put((partial(self._wire.exchange, changed, self._rows, False, arrived), answer))
        self._under_way.append((self._left, changed, answer))

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
        """Takes in the last answer; the messages that it answers, and those before, are no longer under way."""
        tag = self._stage.take(self._replace if self._lane.mode == "diloco" else self._move)
        self._slices.unload()
        while self._under_way and (self._under_way[0][0] <= (tag or 0)):
            self._under_way.popleft()

    def _move(self, name: str, value: torch.Tensor, tag: int) -> None:
        """See [Note: geo]."""
        for number, changed, _ in self._under_way:
            if number > tag:
                value.add_(changed[name])
        known = self._known[name]
        self._slices.write(name, self._slices.read(name) + (value - known))
        known.copy_(value)

    def _replace(self, name: str, value: torch.Tensor, tag: int) -> None:
        self._slices.write(name, value)
        self._known[name].copy_(value)

    def refresh(self) -> None:
        """See :class:`LaneSender`."""
        if self._under_way and self._under_way[0][2].done():
            self._last = self._under_way[0][2].result()
            self._take()

    def drain(self) -> None:
        """See :class:`LaneSender`."""
        if self._taken and self._lane.mode == "geo":
            self._leave()
        self._settle(0)

    def stop(self) -> None:
        """See :class:`LaneSender`."""
        self._messages.put(None)

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        return {"messages": self.step, "steps_queued": self._taken}
