"""The synced buffers of a model, which its forward changes: they travel with steps, and the values
for all trainers return with the answers.

See [Note: whose buffers] in pserver/lane/rounds.py.  A step's changes are found by comparing the
whole buffer with its value after the step before: buffers are small, and torch does not count the
writes of a batch norm.  Received values are written at ``step()``; between steps only into buffers
that have not been written since, so that a buffer that was swapped for an evaluation stays.
Persistent and other buffers are treated alike.

[Note: buffers on a GPU]  There the GPU compares: those of one dtype as one vector, which is new
after each step.  It is copied to pinned memory with what has changed in it, and whoever sends the
message waits for that: the lane's thread, or in sync mode and DiLoCo the script's, which waits for
the step there.  Received values go to the GPU in front of the work that takes them in, at
``step()`` alone: before a forward the host would have to wait, to know whether the script has
written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pserver.client.channel import Channel
from pserver.transport.arrays import Assignment
from pserver.transport.frames import DTYPES
from trainer.device_copies import PendingCopy, pinned_like
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


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A vector of buffers on its way to pinned memory.

    Attributes:
        sent: the slices that this trainer sends.
        changed: bool, on the GPU: which elements have changed since the last message.
        values, flags: the vector, and ``changed``, in pinned memory when the copies are made.
    """

    sent: Set[str]
    changed: Tensor
    values: Tensor
    flags: Tensor
    copies: Sequence[PendingCopy]


class _Vector:
    """The slices of one dtype on one GPU, as one vector there: see [Note: buffers on a GPU].

    The script's thread calls it, but for ``take``.

    Args:
        slices: of all buffers.
        names: of these slices.
        lock: of the buffers.

    Attributes:
        names: as given.
    """

    def __init__(self, slices: ParameterSlices, names: Sequence[str], lock: threading.Lock) -> None:
        self.names, self._slices = names, slices
        self._shapes = {name: slices.owner(name)[1].shape for name in names}
        ends = accumulate((torch.Size(each).numel() for each in self._shapes.values()), initial=0)
        self._places = {
            name: slice(begin, end)
            for name, (begin, end) in zip(names, pairwise(ends), strict=True)
        }
        self._known = self._read()  # never written to: copies of it may be under way
        self._lock = lock  # guards the two below
        self._leaving: _Leaving | None = None
        self._spare: tuple[Tensor, Tensor] | None = None

    def _read(self) -> Tensor:
        return torch.cat([self._slices.part(name).view(-1) for name in self.names])

    def note(self) -> None:
        """Notes the buffers as they are now."""
        self._known = self._read()

    def capture(self, sent: Set[str]) -> None:
        """Notes the buffers as they are now, and begins to copy them for the next message.

        Args:
            sent: the slices that this trainer sends, of these and others.
        """
        now = self._read()
        changed = now != self._known
        self._known = now
        sent = sent & self._places.keys()
        if not sent:
            return
        way = self._slices.device_copy(now)
        with self._lock:  # no message leaves without the step before
            if (before := self._leaving) is not None:
                changed |= before.changed
                sent, memory = sent | before.sent, (before.values, before.flags)
            else:
                memory, self._spare = self._spare or (pinned_like(now), pinned_like(changed)), None
            copies = way.to_host(now, memory[0]), way.to_host(changed, memory[1])
            self._leaving = _Leaving(sent, changed, *memory, copies)

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Waits for the copies, and gives what has changed since the last call, by slice."""
        with self._lock:
            leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        for copy in leaving.copies:
            copy.synchronize()
        for name, place in self._places.items():
            if name in leaving.sent and bool(leaving.flags[place].any()):
                yield name, leaving.values[place].view(self._shapes[name]).clone()
        with self._lock:
            self._spare = leaving.values, leaving.flags

    def is_written(self, name: str) -> bool:
        """Whether a slice differs from what was noted; waits for the GPU."""
        known = self._known[self._places[name]].view(self._shapes[name])
        return not torch.equal(self._slices.part(name), known)

    def land(self, names: Sequence[str], staged: Mapping[str, Tensor]) -> None:
        """Writes the received values of a variable into it, and notes it.

        Args:
            names: its slices.
        """
        self._known = self._known.clone()
        for name in names:  # all of them: see [Note: destinations]
            there = self._slices.part(name)
            if name in staged:
                there = self._slices.to_part(name, staged[name])
            self._known[self._places[name]].copy_(there.view(-1))
            self._slices.write_part(name, there)


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
        self._vectors: list[_Vector] = []  # of those on GPUs, which are not in _known
        self._vector_of: dict[str, _Vector] = {}
        self._lock = threading.Lock()  # guards the five below
        self._spare: dict[str, list[Tensor]] = {}  # pinned memory for received values
        self._outgoing: dict[str, Tensor] = {}
        self._arriving: dict[str, Tensor] = {}  # of the reply under way
        self._staged: dict[str, Tensor] = {}  # of complete replies
        self._landing: dict[str, Tensor] = {}  # of those, until they are written: see land

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
        by_form: dict[tuple[torch.device, str], list[str]] = {}
        for name in filter(self._slices.on_gpu, self._names):
            form = self._slices.part(name).device, self._slices.owner(name)[0].dtype
            by_form.setdefault(form, []).append(name)
        self._vectors = [_Vector(self._slices, each, self._lock) for each in by_form.values()]
        self._vector_of = {name: vector for vector in self._vectors for name in vector.names}
        self.pulled()

    def pulled(self) -> None:
        """Called when the servers' values have been received into this trainer's buffers."""
        with self._lock:
            self._staged, self._landing = {}, {}
        self._known = {
            name: self._slices.read(name).clone()
            for name in self._names
            if name not in self._vector_of
        }
        for vector in self._vectors:
            vector.note()

    def capture(self, lanes: Collection[int]) -> None:
        """Called when a step is closed in these lanes: notes the buffers as they are now.  Changes
        travel with the next message.
        """
        for name, known in self._known.items() if self.lane in lanes else ():
            now = self._slices.read(name)
            if torch.equal(now, known):
                continue
            known.copy_(now)
            if name in self._sent:
                with self._lock:
                    self._outgoing[name] = known.clone()
        for vector in self._vectors if self.lane in lanes else ():
            vector.capture(self._sent)

    def take_out(self) -> dict[str, Assignment]:
        """The values to send, by slice; they count as sent.  Those of a GPU are waited for."""
        with self._lock:
            outgoing, self._outgoing = self._outgoing, {}
        for vector in self._vectors:
            outgoing.update(vector.take())
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
            if name in self._arriving:
                return self._arriving[name]
            memory = spare.pop() if (spare := self._spare.get(name)) else None
        if name not in self._vector_of:
            memory = torch.empty(slice_.shape, dtype=DTYPES[placement.dtype])
        elif memory is None:
            memory = self._slices.blank(name)
        self._slices.wait_for([memory])  # earlier values, on their way to a GPU
        with self._lock:
            return self._arriving.setdefault(name, memory)

    def arrived(self) -> None:
        """Stages the values of a complete reply.  Servers also send the buffers that only the
        others receive: trainer 0's own, as they were some steps ago.
        """
        with self._lock:
            received = self._received & self._arriving.keys()
            values = {name: self._arriving[name] for name in received}
            if self._vector_of:
                self._keep({name: self._staged[name] for name in self._staged.keys() & received})
            self._staged.update(values)
            self._arriving = {}

    def _keep(self, values: Mapping[str, Tensor]) -> None:
        """Keeps the pinned memory of values that are out of use, under the lock."""
        for name in values.keys() & self._vector_of.keys():
            self._spare.setdefault(name, []).append(values[name])

    def land(self, between_steps: bool = False, waits: bool = True) -> None:
        """Writes the received values into the buffers; those of an interrupted call once more.

        Args:
            between_steps: skip buffers that have been written since the last step.
            waits: whether to ask GPUs whether they have; otherwise buffers there are skipped.
        """
        with self._lock:
            staged = self._landing = self._landing | self._staged
            self._staged = {}
        if not staged:
            return
        kept: dict[str, Tensor] = {}
        for variable in sorted({self._slices.variable(name) for name in staged}):
            names = self._slices.slices_of([variable])
            if (vector := self._vector_of.get(names[0])) is not None:
                if between_steps and (not waits or any(map(vector.is_written, names))):
                    kept.update({name: staged[name] for name in names if name in staged})
                else:
                    vector.land(names, staged)
                continue
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
            used = {name: each for name, each in staged.items() if name not in kept}
            replaced = {name: kept[name] for name in kept.keys() & self._staged.keys()}
            self._staged = kept | self._staged
            self._landing = {}
            self._keep(used)
            self._keep(replaced)
