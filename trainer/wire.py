"""Messages that the script's thread does not wait for: how a lane sends them, and where what they bring lands.

[Note: the stage]  What arrives while the script computes lands in a back buffer.  When a message is complete, back and front
change places under a lock, and the script's thread copies the front into the parameters when it asks for it: so a running
backward never sees a parameter move, and nobody ever sees half of a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait

import torch

from pserver.channel import Channel
from pserver.wire_pb2 import Done, Kind
from trainer.lane import Request, Rows, commit_of
from trainer.slices import LiveSlices
from transpiler.plan import Lane


class Wire:
    """The messages of one lane that are not waited for by the script: one at a time, over all servers."""

    def __init__(self, lane: Lane, slices: LiveSlices) -> None:
        self.step = 0
        self._lane = lane
        self._slices = slices
        self._channels: list[Channel] = []
        self.turn = threading.Lock()  # one request at a time on the lane's channels

    def start(self, channels: list[Channel], step: int) -> None:
        """The channels, by server, and the last step that they have applied."""
        self._channels, self.step = channels, step

    def exchange(self, gradients: Mapping[str, torch.Tensor], rows: Rows, quiet: bool, arrived: Callable[[], None]) -> Done:
        """Sends one message to every server, ``thread_pool_size`` of them at a time, and waits for the answers."""
        with self.turn:
            self.step += 1
            request = Request(self.step)
            for server, channel in enumerate(self._channels):
                self._wait_for_room(request)
                here = [
                    part
                    for name in self._slices.order(server)
                    if name in gradients
                    for part in self._slices.encoded(name, gradients[name])
                ]
                request.answers.append(channel.begin())
                channel.post(Kind.GRADIENT, self.step, here)
                channel.commit(self.step, commit_of(rows, self._slices.on(server) - set(gradients), quiet=quiet))
            done = request.wait()
            if not quiet:
                arrived()
            return done

    def _wait_for_room(self, request: Request) -> None:
        while len(under_way := [answer for answer in request.answers if not answer.done()]) >= self._lane.thread_pool_size:
            wait(under_way, return_when=FIRST_COMPLETED)

    def pull(self, arrived: Callable[[], None]) -> None:
        """Fetches the lane's parameters without sending anything."""
        with self.turn:
            request = Request(self.step)
            for server, channel in enumerate(self._channels):
                if self._slices.on(server):
                    request.answers.append(channel.begin())
                    channel.pull(self._slices.order(server), self.step)
            if request.answers:
                request.wait()
                arrived()


class Stage:
    """See [Note: the stage]."""

    def __init__(self, slices: LiveSlices) -> None:
        self._slices = slices
        self._lock = threading.Lock()  # guards the front, and the exchange of both
        self._back: dict[str, torch.Tensor] = {}
        self._front: dict[str, torch.Tensor] = {}
        self._fresh = False
        self._tag = 0

    def landing(self, name: str) -> torch.Tensor:
        """Where a slice's value goes: a buffer that nobody reads."""
        if name not in self._back:
            self._back[name] = self._slices.blank(name)
        return self._back[name]

    def arrived(self, tag: int = 0) -> None:
        """A message is complete; ``tag`` says which."""
        with self._lock:
            self._back, self._front = self._front, self._back
            self._fresh = True
            self._tag = tag

    def take(self, into: Callable[[str, torch.Tensor, int], None]) -> int | None:
        """Hands the last complete message over, slice by slice, with its tag; None if there was none since the last call."""
        with self._lock:
            if not self._fresh:
                return None
            for name, value in self._front.items():
                into(name, value, self._tag)
            self._fresh = False
            return self._tag
