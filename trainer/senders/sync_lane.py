"""The sync lane: the steps of all trainers make one update."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

import torch

from pserver.client.channel import Channel, Hparams
from pserver.client.replies import Reply, first_of
from pserver.dense.update import clip_coefficients
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment, checksum
from pserver.transport.frames import ALONE_BYTES
from trainer.device_copies import PendingCopy, is_on_gpu
from trainer.senders.buffers import SyncedBuffers
from trainer.senders.gradient_validation import GradientValidation
from trainer.senders.live_trainers import LiveTrainers
from trainer.senders.parameters import ParameterSlices
from trainer.senders.pipeline import ConsumedSamples, checksums_of
from trainer.senders.writes import ExternalWrites, ReceivedCopies, Suspects
from transpiler.ir.rules import Clip
from transpiler.plan.plan import Lane

LOOK_SECONDS = 0.25  # between two calls of ``meanwhile``


class LoadedTables(Protocol):
    """The rows that a script has loaded into tables since the last step."""

    def send(self, lane: int) -> None:
        """Sends the rows of a lane's tables to the servers, on the leader."""

    def close(self, lane: int) -> Mapping[str, int]:
        """Sends the rows, on the leader, before a lane's step is closed; gives this trainer's
        checksums, by table.
        """

    def forget(self, lane: int) -> None:
        """Drops the rows: the servers have them, or others in their place."""


class SyncSender:
    """The sender of a sync lane; see :class:`~trainer.senders.pipeline.LaneSender`.

    Gradients are sent as they arrive.  New values are received into the parameters' own memory
    while the script waits.

    Args:
        lane, slices: of this sender.
        clip: the plan's clipping, if servers clip.
        live: the live trainers.
        buffers: the model's buffers, which travel with the lane's steps.

    Attributes:
        writes: finds the external writes.
    """

    def __init__(
        self,
        lane: Lane,
        slices: ParameterSlices,
        clip: Clip | None,
        live: LiveTrainers,
        buffers: SyncedBuffers,
    ) -> None:
        self._model_buffers = buffers
        self._checks = GradientValidation(lane, slices)
        self._as_they_are = not (self._checks.measures or slices.compresses)
        self._live = live
        self._received = ReceivedCopies(slices)
        self.writes = ExternalWrites(slices, self._received, live.own, keeps_copies=True)
        self._assignments: dict[str, Assignment] = {}  # of the step under way
        self._loads: LoadedTables | None = None
        self._index = 0  # of the lane
        self.turn = threading.Lock()
        self.consumed = ConsumedSamples()
        self.meanwhile: Callable[[], None] = lambda: None
        self.torn = False
        self._step = 0
        self._slices = slices
        # clipping by norms, which span servers
        self._clip = clip if clip is not None and clip.kind != "value" else None
        self._channels: list[Channel] = []
        self._replies: list[Future[Reply]] = []  # of the step under way, by server
        self._answered: list[Future[Reply]] = []  # of the last one that was finished
        self._scaled = False  # whether the step under way has its coefficients
        self._sent: set[str] = set()
        self._buffers: dict[str, torch.Tensor] = {}  # gradients of a GPU, kept from step to step
        # copies into the buffers that may not have been made yet
        self._copies: deque[tuple[str, PendingCopy]] = deque()

    @property
    def step(self) -> int:
        """The number of steps closed."""
        return self._step

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._channels, self._step = channels, step
        if self._loads is not None:
            self._loads.forget(self._index)
        self.writes.start()

    def begin(self) -> None:
        """See :class:`~trainer.senders.pipeline.LaneSender`."""
        if (suspects := self.writes.look(waits=False)) is not None:
            self._settle(suspects)

    def _settle(self, suspects: Suspects) -> None:
        """Makes suspected variables' differences from the servers' values a part of the step."""
        found = self._differing(suspects.compared) if suspects.compared else {}
        self._assignments.update(found)
        self.writes.settle(suspects, found)

    def _differing(self, variables: Sequence[str]) -> dict[str, Assignment]:
        """The whole slices that differ from the last received values, which the servers have until
        the next step.

        If gradients of the step have been sent, the servers cannot be asked before it is closed:
        all slices are given, and the servers leave out those that equal theirs.
        """
        kept = [variable for variable in variables if self._received.holds([variable])]
        names = self._slices.slices_of([name for name in variables if name not in kept])
        if names and not self._replies:
            theirs = checksums_of(self._channels, self._slices.by_server(names))
            names = [name for name in names if checksum(self._slices.read(name)) != theirs[name]]
        names += self._received.differences(kept)
        return {name: Assignment(self._slices.read(name)) for name in names}

    def send(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sends gradients, by slice; from a GPU, when their copies have been made."""
        self._open()
        self._sent.update(gradients)
        # by server: those that share frames; others leave before the next is encoded
        small: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, gradient in gradients.items():
            if is_on_gpu(gradient):
                if name not in self._buffers:
                    self._buffers[name] = self._slices.blank(name)
                copy = self._slices.device_copy(gradient).to_host(gradient, self._buffers[name])
                self._copies.append((name, copy))
                while self._copies and self._copies[0][1].query():
                    self._push_first_copied()
            elif gradient.nbytes >= ALONE_BYTES or not self._as_they_are:
                self._push(name, gradient)
            else:
                small.setdefault(self._slices.servers[name], []).append((name, gradient))
        for server, own in small.items():
            self._channels[server].push(self._step + 1, own)

    def _open(self) -> None:
        """Begins the request to each server, with the first part of a step."""
        if not self._replies:
            self._scaled = False
            self._replies = [channel.begin(self._destination) for channel in self._channels]

    def _destination(self, name: str, blank: object) -> torch.Tensor:
        """The destination of a received value: the parameter's own memory, or a buffer beside
        it.
        """
        synced = name in self._model_buffers.names
        return (self._model_buffers if synced else self._slices).destination(name)

    def _push(self, name: str, gradient: torch.Tensor) -> None:
        channel = self._channels[self._slices.servers[name]]
        parts = list(self._slices.encoded(name, gradient))
        channel.push(self._step + 1, self._checks.look(name, parts))

    def _push_copied(self) -> None:
        """Sends the gradients that devices copy, each when its copy is made."""
        while self._copies:
            self._push_first_copied()

    def _push_first_copied(self) -> None:
        """Waits for the first copy from a GPU, and sends the gradient."""
        name, copy = self._copies.popleft()
        copy.synchronize()
        self._push(name, self._buffers[name])

    def send_rows(self, gradients: Mapping[str, RowGradient]) -> None:
        """Sends tables' gradients to every server.

        A server counts the steps of a table, so it also receives steps that touch none of its rows.
        """
        self._open()
        self._checks.look_at_rows(gradients.items())
        servers = len(self._channels)
        divided = {name: gradient.divide(servers) for name, gradient in gradients.items()}
        for server, channel in enumerate(self._channels):
            own = {name: parts[server] for name, parts in divided.items()}
            channel.push_rows(self._step + 1, own, last=server == servers - 1)

    def withdraw(self) -> None:
        """See :class:`LaneSender`."""
        for channel in self._channels:
            channel.withdraw()
        self._replies, self._sent = [], set()
        self._copies.clear()
        self._checks.take_out()
        self._slices.end_encoding(sent=False)

    def close(self, hparams: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`.  The leader sends its assignments, and every trainer the
        checksums of its own.  If trainers may leave, every trainer sends its assignments, as it may
        become the leader.
        """
        self._push_copied()  # beside the work that the flags of writes are behind
        if (suspects := self.writes.complete()) is not None:
            self._settle(suspects)
        self._open()
        self._step += 1
        consumed = self.consumed.close()
        norms = self._checks.take_out()
        self._slices.end_encoding()
        assignments, self._assignments = self._assignments, {}
        leaving = self._model_buffers.take_out()
        tables = {} if self._loads is None else self._loads.close(self._index)
        for server, channel in enumerate(self._channels):
            here = self._slices.here(server, assignments)
            if self._live.is_leader or self._live.may_leave:
                channel.assign(self.step, here)
            buffers = self._model_buffers.assign(channel, server, self.step, leaving)
            absent = self._slices.on(server) - self._sent
            written = {name: checksum(each.values) for name, each in here.items()}
            written.update(tables)
            channel.commit(
                self.step,
                hparams,
                absent,
                overflow,
                written=written,
                norms=norms,
                buffers=buffers,
                leases=consumed if server == 0 else (),
            )
        self._sent = set()

    def finish(self) -> Reply:
        """Waits for every server's reply."""
        replies = self._answered = self._replies or self._answered
        if self._clip is not None and not self._scaled:
            self._scale(self._clip, replies)
        while wait(replies, LOOK_SECONDS, FIRST_EXCEPTION).not_done:
            if any(reply.done() and reply.exception() for reply in replies):
                break
            self.meanwhile()
        reply = self._checks.record(first_of(replies), self.step, self.step)
        self._slices.flush_buffers()
        self._model_buffers.arrived()
        if self._loads is not None:
            self._loads.forget(self._index)
        self.writes.end_step()
        self._replies = []
        return reply

    def _scale(self, clip: Clip, replies: list[Future[Reply]]) -> None:
        """Computes the coefficient that every server multiplies with, from the servers' partial
        squared norms, where servers clip by norms.

        Raises:
            PServerError: a server has ended this trainer's step before it sent its norms.  The
                other servers' norms would give another coefficient, and some servers may not know
                yet that this trainer's step does not count.
        """
        for channel, reply in zip(self._channels, replies, strict=True):
            both: list[Future[Any]] = [channel.norms, reply]
            # a server without gradients, or after an overflow elsewhere, replies without norms
            wait(both, return_when=FIRST_COMPLETED)
            if not channel.norms.done():
                reply.result()
        coefficients = clip_coefficients(
            clip,
            [channel.norms.result() if channel.norms.done() else {} for channel in self._channels],
        )
        self.torn = True
        for channel in self._channels:
            if channel.norms.done():
                channel.scale(self.step, coefficients)
        self._scaled, self.torn = True, False

    def follow(self, loads: LoadedTables, index: int) -> None:
        """Makes steps send the rows that the script has loaded into the tables of this lane.

        Args:
            index: of the lane.
        """
        self._loads, self._index = loads, index

    def refresh(self) -> None:
        """Does nothing: no values are received between steps."""

    def drain(self) -> None:
        """Sends the rows that the script has loaded; no step is under way between steps."""
        if self._loads is not None:
            self._loads.send(self._index)

    def leave(self) -> None:
        """See :class:`LaneSender`."""
        self.drain()

    def note_values(self) -> None:
        """See :class:`LaneSender`."""
        self.writes.start()

    def suspected(self) -> set[str]:
        """See :class:`LaneSender`."""
        return self.writes.suspected()

    def stop(self) -> None:
        """Does nothing: there are no threads."""

    def rest(self) -> None:
        """Does nothing: there are no threads."""

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        return {"messages": self.step, **self._checks.metrics()}
