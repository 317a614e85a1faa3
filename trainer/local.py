"""The k-step lanes, geo and diloco: the script's own optimizer steps, and what it changed leaves every k steps."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from pserver.channel import Channel
from pserver.wire_pb2 import Done, Part
from trainer.lane import Rows
from trainer.slices import LiveSlices
from trainer.wire import Stage, Wire
from transpiler.plan import Lane


class Local:
    """See the module's docstring.

    [Note: geo]  Each slice has a copy y of what the trainer takes for the server's.  Every k steps delta = (x - y) / trainers
    leaves, and y moves by delta.  When the server's z, which has this and the others' deltas in it, comes back, x moves by what
    is new in it, z - y, and y = z.  Until then the script trains on.
    """

    def __init__(self, lane: Lane, slices: LiveSlices, trainers: int) -> None:
        self._lane = lane
        self._slices = slices
        self._trainers = trainers
        self._stage = Stage(slices)
        self._wire = Wire(lane, slices)
        self.turn = self._wire.turn
        self._known: dict[str, torch.Tensor] = {}  # y
        self._taken = 0  # steps since the last message
        self._rows: Rows = {}
        self._under_way: Future[Done] | None = None
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
        self._remember()

    def _remember(self) -> None:
        self._known = {name: self._slices.read(name).clone() for name in self._slices.names}

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Gradients stay here."""

    def close(self, rows: Rows, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        self._taken += 0 if overflow else 1
        self._rows = rows

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        if self._under_way is not None and self._under_way.done():
            self._settle()
        if self._taken >= self._lane.k_steps:
            self._leave()
        if self._lane.mode == "diloco":
            self._settle()
        return self._last

    def _leave(self) -> None:
        """What has changed since the last message leaves."""
        self._settle()
        self._taken = 0
        changed: dict[str, torch.Tensor] = {}
        for name in self._slices.names:
            now = self._slices.read(name)
            if self._lane.mode == "diloco":
                changed[name] = now.clone()  # the server takes the change itself: see [Note: what arrives] in pserver/entry.py
            else:
                changed[name] = (now - self._known[name]).div_(self._trainers)
                self._known[name].add_(changed[name])
        self._under_way = Future()
        threading.Thread(target=self._exchange, args=(changed, self._under_way), name="lane exchange", daemon=True).start()

    def _exchange(self, changed: dict[str, torch.Tensor], answer: Future[Done]) -> None:
        try:
            answer.set_result(self._wire.exchange(changed, self._rows, False, self._stage.arrived))
        except Exception as error:
            answer.set_exception(error)

    def _settle(self) -> None:
        """Waits for the message under way, and takes in what came back."""
        if self._under_way is None:
            return
        answer, self._under_way = self._under_way, None
        self._last = answer.result()
        self._stage.take(self._replace if self._lane.mode == "diloco" else self._move)
        self._slices.unload()

    def _move(self, name: str, value: torch.Tensor) -> None:
        known = self._known[name]
        self._slices.write(name, self._slices.read(name) + (value - known))
        known.copy_(value)

    def _replace(self, name: str, value: torch.Tensor) -> None:
        self._slices.write(name, value)
        self._known[name].copy_(value)

    def refresh(self) -> None:
        """See :class:`LaneSender`."""
        if self._under_way is not None and self._under_way.done():
            self._settle()

    def drain(self) -> None:
        """See :class:`LaneSender`."""
        if self._taken and self._lane.mode == "geo":
            self._leave()
        self._settle()

    def stop(self) -> None:
        """No thread lasts."""

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        return {"messages": self.step, "steps_queued": self._taken}
