"""Messages that the script's thread does not wait for: how a lane sends them, and where the values
that they bring arrive.

[Note: one buffer there and back]  A message owns the memory that its gradients travel from, because
the script goes on writing to its own.  What comes back for a slice arrives in that same memory: a
server replies when it has applied the message, and then no one reads the gradient again.  (Where
the stream breaks in the middle of a reply, all frames are sent again, some with values in them; the
server has applied the step, so it replies again, and uses none of it.)  When the reply is whole,
the script's thread copies the values into the parameters as soon as it asks for them.  The memory
is kept until the next values land, to see by it what the script writes into its parameters; then it
is that of the next message.  So a running backward never sees a parameter move, the script never
sees half of a message, and a lane holds as many copies of its parameters as it has messages under
way, one in between, and one of what landed last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pserver.client.channel import Channel, Hparams
from pserver.client.replies import Reply, first_of
from pserver.leases.table import EpochRange
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.push_checks import PushChecks
from trainer.communicator.travelling_buffers import TravellingBuffers
from transpiler.plan.plan import Lane

Tensors = dict[str, torch.Tensor]  # by slice, unless a comment names another key


class Buffers:
    """Main memory for the messages of a lane, kept from one to the next: at most one spare buffer
    of each slice.  Any thread may call it.
    """

    def __init__(self, slices: ParameterSlices) -> None:
        self._slices = slices
        self._lock = threading.Lock()  # guards the one below
        self._spare: Tensors = {}

    def take(self, name: str) -> torch.Tensor:
        """A buffer of the shape and dtype of a slice, or of a whole variable, with anything in
        it.
        """
        with self._lock:
            spare = self._spare.pop(name, None)
        return self._slices.blank(name) if spare is None else spare

    def give_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes buffers that are out of use."""
        with self._lock:
            self._spare.update(tensors)


@dataclass(frozen=True, slots=True)
class Pulled:
    """Slices as the servers have them.

    Attributes:
        values: by slice.
        message: the last message that they have applied.
        versions: of their lane, by server, with the updates that had begun.
    """

    values: Tensors
    message: int
    versions: Mapping[int, int]


def checksums_of(channels: Sequence[Channel], asked: Mapping[int, list[str]]) -> dict[str, int]:
    """The servers' checksums of slices, by slice.

    Args:
        asked: the slices, by server.
    """
    replies = [channels[server].checksums(names) for server, names in asked.items()]
    if replies:
        first_of(replies)
    return {name: found for each in replies for name, found in each.result().checksums.items()}


class RequestPipeline:
    """The messages of one lane that the script does not wait for: one at a time, to all servers.

    The lane's sending and fetching threads call it; the channels' threads ask for destinations.

    Attributes:
        step: messages sent.
        versions: of the servers' lane, in their last replies, by server.
        checks: what is looked at in each step.
        turn: held during a request; also taken by other requests on the lane's channels.
    """

    def __init__(
        self,
        lane: Lane,
        slices: ParameterSlices,
        buffers: Buffers,
        model_buffers: TravellingBuffers,
    ) -> None:
        self.step = 0
        self.versions: dict[int, int] = {}
        self._lane = lane
        self._slices = slices
        self._buffers = buffers
        self._model_buffers = model_buffers
        self.checks = PushChecks(lane, slices)
        self._steps = 0  # of the script that messages have brought
        self._channels: list[Channel] = []
        # what the values of the request under way may overwrite
        self._reusable: Mapping[str, torch.Tensor] = {}
        self._values: Tensors = {}  # where they arrive
        # one request at a time on the lane's channels; guards the two above
        self.turn = threading.Lock()

    def start(self, channels: list[Channel], step: int) -> None:
        """The channels, by server, and the last step that they have applied."""
        self._channels, self.step = channels, step
        self.checks.start(len(channels))

    def destination(self, name: str) -> torch.Tensor:
        """Where a slice's value goes: memory that no other thread reads."""
        if name not in self._values:
            self._values[name] = (
                self._reusable[name] if name in self._reusable else self._buffers.take(name)
            )
        return self._values[name]

    def exchange(
        self,
        gradients: Mapping[str, torch.Tensor],
        hparams: Hparams,
        omit_values: bool,
        reuse: bool = False,
        tables: Mapping[str, RowGradient] = MappingProxyType({}),
        steps: int = 1,
        last: bool = False,
        assignments: Mapping[str, Assignment] = MappingProxyType({}),
        leaves: Callable[[int], None] = lambda number: None,
        changes: Mapping[str, torch.Tensor] = MappingProxyType({}),
        leases: tuple[EpochRange, ...] = (),
    ) -> tuple[Reply, Tensors]:
        """Sends one message to every server, to ``thread_pool_size`` of them at a time, and waits
        for the replies: none of them comes before all servers have the message.

        Args:
            gradients: by slice.
            omit_values: the replies are not to bring parameters.
            reuse: the values may take the gradients' memory.  See [Note: one buffer there and
                back].
            tables: gradients of rows.
            steps: of the script that the message brings.
            last: this trainer leaves after the message.
            assignments: what the script has written, by slice.
            leaves: called with the message's number before it leaves.
            changes: what is new in the gradients, by slice, where they are whole parameters.
            leases: the positions of epochs that its steps have consumed.

        Returns:
            The first server's reply, and the values that came, by slice.
        """
        with self.turn:
            self.step += 1
            leaves(self.step)
            self._reusable, self._values = gradients if reuse else {}, {}
            replies, leaving_for = list[Future[Reply]](), list[Future[None]]()
            divided = {name: rows.divide(len(self._channels)) for name, rows in tables.items()}
            encoded = self._encoded(gradients, changes)
            self.checks.look_at_rows(tables.items())
            found = self.checks.take_out(steps)
            leaving = self._model_buffers.take_out()
            for server, channel in enumerate(self._channels):
                self._wait_for_room(leaving_for)
                replies.append(channel.begin())
                leaving_for.append(channel.sent)
                channel.assign(self.step, self._slices.here(server, assignments))
                names = self._model_buffers.assign(channel, server, self.step, leaving)
                channel.push(self.step, self._of_server(server, encoded))
                for name, parts in divided.items():
                    channel.push_rows(self.step, name, parts[server])
                channel.commit(
                    self.step,
                    hparams,
                    self._slices.on(server) - set(gradients),
                    omit_values=omit_values,
                    nonfinite=found.nonfinite,
                    norms=found.norms,
                    last=last,
                    buffers=names,
                    leases=leases if server == 0 else (),
                    steps=steps,
                )
            first, self._steps = self._steps + 1, self._steps + steps
            reply = self.checks.hear(first_of(replies), first, self._steps)
            self.versions = {index: each.result().version for index, each in enumerate(replies)}
            self._model_buffers.arrived()
            return reply, self._values

    def _encoded(
        self, gradients: Mapping[str, torch.Tensor], changes: Mapping[str, torch.Tensor]
    ) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """Gradients as they travel, by slice; looks at each."""
        return {
            name: self.checks.look(
                name, list(self._slices.encoded(name, gradient)), changes.get(name)
            )
            for name, gradient in gradients.items()
        }

    def _of_server(
        self, server: int, encoded: Mapping[str, Iterable[tuple[str, torch.Tensor]]]
    ) -> list[tuple[str, torch.Tensor]]:
        """What of encoded gradients goes to a server, in the order of the plan."""
        return [part for name in self._slices.order(server) for part in encoded.get(name, ())]

    def _wait_for_room(self, leaving_for: list[Future[None]]) -> None:
        while (
            len(leaving := [sent for sent in leaving_for if not sent.done()])
            >= self._lane.thread_pool_size
        ):
            wait(leaving, return_when=FIRST_COMPLETED)

    def pull(self, names: Collection[str] | None = None) -> Pulled:
        """Fetches slices, without sending anything.

        Args:
            names: None: the lane's parameters.
        """
        with self.turn:
            self._reusable, self._values = {}, {}
            asked = self._slices.by_server(self._slices.names if names is None else names)
            replies = {
                server: self._channels[server].pull(here, self.step)
                for server, here in asked.items()
            }
            if replies:
                first_of(list(replies.values()))
            versions = {server: reply.result().version for server, reply in replies.items()}
            return Pulled(self._values, self.step, versions)

    def checksums(self, names: Collection[str]) -> dict[str, int]:
        """Fetches the checksums of slices."""
        with self.turn:
            return checksums_of(self._channels, self._slices.by_server(names))


class StagedValues:
    """The values of the last complete message, until the script's thread takes them.

    The lane's threads put, the script's thread takes.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._lock = threading.Lock()  # guards the four below
        self._taking = False
        self._values: Tensors = {}
        self._memory: Tensors = {}  # by slice, or by variable where several slices have one buffer
        self._message = 0

    @property
    def empty(self) -> bool:
        """Whether nothing has come since the last :meth:`take`."""
        with self._lock:
            return not self._values

    @property
    def idle(self) -> bool:
        """Whether nothing has come since the last :meth:`take`, and that one is over."""
        with self._lock:
            return not self._values and not self._taking

    def put(self, values: Tensors, memory: Tensors, message: int = 0) -> None:
        """Stages the values of a complete message.  Earlier values that were not taken are out
        of date.

        Args:
            memory: that of the values, and what else is free when they have been taken.
            message: its number; it may have no values, where a lane has rows alone.
        """
        with self._lock:
            outdated, self._values, self._memory = self._memory, values, memory
            self._message = message
        self._buffers.give_back(outdated)

    def take(self, write: Callable[[str, torch.Tensor, int], None]) -> int | None:
        """Calls ``write(slice, value, message)`` for every staged value; their memory is given
        back.

        Returns:
            The message's number; None if there was none since the last call.
        """
        values, memory, message = self._take_out(taking=True)
        try:
            for name, value in values.items():
                write(name, value, message)
        finally:
            with self._lock:
                self._taking = False
        self._buffers.give_back(memory)
        return message or None

    def take_out(self) -> tuple[Tensors, Tensors, int]:
        """The staged values, which are the caller's from now on: values, memory, and message as of
        :meth:`put`; none are empty.
        """
        return self._take_out(taking=False)

    def _take_out(self, taking: bool) -> tuple[Tensors, Tensors, int]:
        with self._lock:
            values, memory, message = self._values, self._memory, self._message
            self._values, self._memory, self._message = {}, {}, 0
            self._taking = taking
        return values, memory, message
