"""The sync lane: every trainer's step is one step."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch

from pserver.client.channel import Channel
from pserver.dense.merge import clip_coefficients
from pserver.table.gradient import RowGradient
from pserver.wire_pb2 import Done, Kind, Part
from trainer.communicator.device_copy import PendingCopy, crosses
from trainer.communicator.lane import Hparams, Request, commit_of, post_rows
from trainer.communicator.parameter_slices import ParameterSlices
from transpiler.ir.rules import Clip


class SyncSender:
    """Sync.

    Gradients leave as they come; new parameters land in the parameters' own memory while the script
    waits.
    """

    def __init__(self, slices: ParameterSlices, clip: Clip | None) -> None:
        self.turn = threading.Lock()
        self._step = 0
        self._slices = slices
        # whose norms span servers
        self._clip = clip if clip is not None and clip.kind != "value" else None
        self._channels: list[Channel] = []
        self._answers: list[Future[Done]] = []  # of the step under way
        self._sent: set[str] = set()
        self._buffers: dict[str, torch.Tensor] = {}  # gradients of a GPU, kept from step to step
        # those that are on their way into them
        self._crossing: deque[tuple[str, PendingCopy]] = deque()

    @property
    def step(self) -> int:
        """See :class:`LaneSender`."""
        return self._step

    def landing(self, part: Part) -> torch.Tensor:
        """See :class:`LaneSender`."""
        return self._slices.landing(part.name)

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._channels, self._step = channels, step

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """See :class:`LaneSender`."""
        if not self._answers:
            self._answers = [channel.begin() for channel in self._channels]
        self._sent.add(name)
        if crosses(gradient):
            if name not in self._buffers:
                self._buffers[name] = self._slices.blank(name)
            self._crossing.append(
                (name, self._slices.crossing(gradient).out(gradient, self._buffers[name]))
            )
            self._post_crossed(everything=False)
        else:
            self._post(name, gradient)

    def _post(self, name: str, gradient: torch.Tensor) -> None:
        self._channels[self._slices.server(name)].post(
            Kind.GRADIENT, self.step + 1, self._slices.encoded(name, gradient)
        )

    def _post_crossed(self, everything: bool) -> None:
        """Sends the gradients that have come from a GPU; or waits for those that have not."""
        while self._crossing and (everything or self._crossing[0][1].query()):
            name, crossed = self._crossing.popleft()
            crossed.synchronize()
            self._post(name, self._buffers[name])

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """See :class:`LaneSender`."""
        if not self._answers:
            self._answers = [channel.begin() for channel in self._channels]
        post_rows(self._channels, self.step + 1, table, gradient)

    def close(self, rows: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`."""
        if not self._answers:
            self._answers = [channel.begin() for channel in self._channels]
        self._post_crossed(everything=True)
        self._step += 1
        for server, channel in enumerate(self._channels):
            channel.commit(
                self.step, commit_of(rows, self._slices.on(server) - self._sent, overflow)
            )
        self._sent = set()

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        answers, self._answers = self._answers, []
        if self._clip is not None:
            self._scale(self._clip, answers)
        done = Request(self.step, answers).wait()
        self._slices.unload()
        return done

    def _scale(self, clip: Clip, answers: list[Future[Done]]) -> None:
        """Where norms clip on servers: their parts of the squared norms make the coefficient that
        they multiply with.
        """
        for channel, answer in zip(self._channels, answers, strict=True):
            both: list[Future[Any]] = [channel.norms, answer]
            # a server without gradients, or after an overflow elsewhere, says DONE alone
            wait(both, return_when=FIRST_COMPLETED)
        coefficients = clip_coefficients(
            clip,
            [channel.norms.result() if channel.norms.done() else {} for channel in self._channels],
        )
        for channel in self._channels:
            if channel.norms.done():
                channel.scale(self.step, coefficients)

    def refresh(self) -> None:
        """Nothing arrives between steps."""

    def drain(self) -> None:
        """Nothing is under way between steps."""

    def stop(self) -> None:
        """No threads."""

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        return {"messages": self.step}
