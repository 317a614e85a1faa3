"""The synced buffers of a model, which its forward changes: they travel with steps, and the values
for all trainers return with the answers.

See [Note: whose buffers] in pserver/lane/rounds.py.  A step's changes are found by comparing the
whole buffer with its value after the step before: buffers are small, and torch does not count the
writes of a batch norm.  Received values are written at ``step()``; between steps only into buffers
that have not been written since, so that a buffer that was swapped for an evaluation stays.
Persistent and other buffers are treated alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence, Set

import torch
from torch import Tensor

from pserver.client.channel import Channel
from pserver.transport.arrays import Assignment
from pserver.transport.frames import DTYPES
from trainer.senders.live_trainers import LiveTrainers
from trainer.senders.parameters import ParameterSlices
from transpiler.plan.plan import Placement, Plan

log = logging.getLogger(__name__)


def travelling(plan: Plan, tensors: Mapping[str, Tensor]) -> list[Placement]:
    """The synced buffers; none if each trainer keeps its own buffers, or there is one trainer.

    Args:
        tensors: the live tensor of every placed variable, by name.
    """
    if plan.trainers == 1 or not plan.lanes or plan.lanes[0].buffers == "own":
        return []
    return [
        placement
        for placement in plan.placements
        if placement.group is None
        and placement.name not in plan.averaged
        and not isinstance(tensors[placement.name], torch.nn.Parameter)
    ]


class SyncedBuffers:
    """Sends changed buffers with a lane's messages, and keeps received values until the script's
    thread takes them in.

    The script's thread calls ``capture`` and ``land``; the lane's thread calls ``take_out`` and
    ``arrived``; the channels' threads ask for destinations.

    Args:
        placements: the synced buffers; may be empty.
        tensors: all live tensors by variable name.
        whose: the lane's ``buffers``.
        live: the live trainers.
        lane: the lane that they travel with.

    Attributes:
        placements, lane: as given.
        names: of the slices.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        tensors: Mapping[str, Tensor],
        whose: str,
        live: LiveTrainers,
        lane: int = 0,
    ) -> None:
        self.placements, self.lane = list(placements), lane
        self._slices = ParameterSlices(list(placements), tensors)
        self._variables = [placement.name for placement in placements]
        self._names = self._slices.slices_of(self._variables)
        self._averaged = {name for name in self._names if self._averages(name, whose)}
        self.names, self._live = frozenset(self._names), live
        self._known: dict[str, Tensor] = {}  # as they were after the last step, by slice
        self._lock = threading.Lock()  # guards the three below
        self._outgoing: dict[str, Tensor] = {}
        self._arriving: dict[str, Tensor] = {}  # of the reply under way
        self._staged: dict[str, Tensor] = {}  # of complete replies

    @property
    def _sent(self) -> Set[str]:
        return self.names if self._live.is_leader else self._averaged

    @property
    def _received(self) -> Set[str]:
        return self._averaged if self._live.is_leader else self.names

    @property
    def receives(self) -> bool:
        """Whether answers bring buffers."""
        return bool(self._received)

    def _averages(self, name: str, whose: str) -> bool:
        dtype = DTYPES[self._slices.owner(name)[0].dtype]
        return whose == "mean" and (dtype.is_floating_point or dtype.is_complex)

    def on(self, server: int) -> list[str]:
        """The slices on a server that this trainer receives."""
        return [name for name in self._slices.held(server) if name in self._received]

    # ---- sending ----

    def start(self) -> None:
        """Starts anew after the servers' values have been received into the buffers."""
        with self._lock:
            self._outgoing, self._arriving = {}, {}
        self.pulled()

    def pulled(self) -> None:
        """Called when the servers' values have been received into this trainer's buffers."""
        with self._lock:
            self._staged = {}
        self._known = {name: self._slices.read(name).clone() for name in self._names}

    def capture(self, lanes: Collection[int]) -> None:
        """Called when a step is closed in these lanes: notes the buffers as they are now.  Changes
        travel with the next message.
        """
        for name in self._names if self.lane in lanes else ():
            now = self._slices.read(name)
            if torch.equal(now, self._known[name]):
                continue
            self._known[name].copy_(now)
            if name in self._sent:
                with self._lock:
                    self._outgoing[name] = self._known[name].clone()

    def take_out(self) -> dict[str, Assignment]:
        """The values to send, by slice; they count as sent."""
        with self._lock:
            outgoing, self._outgoing = self._outgoing, {}
        return {name: Assignment(value) for name, value in outgoing.items()}

    def assign(
        self, channel: Channel, server: int, step: int, leaving: Mapping[str, Assignment]
    ) -> list[str]:
        """Queues a server's part; returns its slices, which the step's end names."""
        found = self._slices.here(server, leaving)
        channel.assign(step, found)
        return sorted(found)

    # ---- receiving ----

    def destination(self, name: str) -> Tensor:
        """The destination of a slice's value: memory that no other thread reads."""
        placement, slice_ = self._slices.owner(name)
        with self._lock:
            if name not in self._arriving:
                self._arriving[name] = torch.empty(slice_.shape, dtype=DTYPES[placement.dtype])
            return self._arriving[name]

    def arrived(self) -> None:
        """Stages the values of a complete reply.  Servers also send the buffers that only the
        others receive: trainer 0's own, as they were some steps ago.
        """
        with self._lock:
            received = self._received & self._arriving.keys()
            self._staged.update({name: self._arriving[name] for name in received})
            self._arriving = {}

    def land(self, between_steps: bool = False) -> None:
        """Writes the received values into the buffers.

        Args:
            between_steps: skip buffers that have been written since the last step.
        """
        with self._lock:
            staged, self._staged = self._staged, {}
        if not staged:
            return
        kept: dict[str, Tensor] = {}
        for variable in sorted({self._slices.variable(name) for name in staged}):
            names = self._slices.slices_of([variable])
            now = {name: self._slices.read(name) for name in names}
            if between_steps and any(not torch.equal(now[n], self._known[n]) for n in names):
                kept.update({name: staged[name] for name in names if name in staged})
                continue
            for name in names:
                self._known[name].copy_(staged.get(name, now[name]))
            for name in names:  # all of them: see [Note: destinations]
                self._slices.write(name, self._known[name])
        self._slices.flush_buffers()
        with self._lock:
            self._staged = kept | self._staged
