"""Messages that the script's thread does not wait for: how a lane sends them, and where what they
bring lands.

[Note: one buffer there and back]  A message owns the memory that its gradients travel from, because
the script goes on writing to its own.  What comes back for a slice lands in that same memory: a
server answers when it has applied the message, so nobody needs the gradient any more.  (Where the
stream breaks in the middle of an answer, all frames are sent again, some with values in them; the
server has applied the step, so it answers again, and uses none of it.)  When the answer is whole,
the script's thread copies the values into the parameters as soon as it asks for them, and the
memory is that of the next message.  So a running backward never sees a parameter move, nobody ever
sees half of a message, and a lane holds as many copies of its parameters as it has messages under
way, and one in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from types import MappingProxyType

import torch

from pserver.client.channel import Channel
from pserver.table.gradient import RowGradient
from pserver.transport.array_assembler import row_parts
from pserver.wire_pb2 import Done, Kind
from trainer.communicator.lane import Hparams, Request, commit_of
from trainer.communicator.parameter_slices import ParameterSlices
from transpiler.plan.plan import Lane

Tensors = dict[str, torch.Tensor]  # by slice, where nothing else is said


class Buffers:
    """Main memory for messages, kept from one to the next: at most one buffer of a slice waits for
    its use.
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
        """Nobody reads or writes these any more."""
        with self._lock:
            self._spare.update(tensors)


class RequestPipeline:
    """The messages of one lane that are not waited for by the script: one at a time, over all
    servers.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices, buffers: Buffers) -> None:
        self.step = 0
        self._lane = lane
        self._slices = slices
        self._buffers = buffers
        self._channels: list[Channel] = []
        # what the values of the request under way may overwrite
        self._over: Mapping[str, torch.Tensor] = {}
        self._landed: Tensors = {}
        # one request at a time on the lane's channels; guards the two above
        self.turn = threading.Lock()

    def start(self, channels: list[Channel], step: int) -> None:
        """The channels, by server, and the last step that they have applied."""
        self._channels, self.step = channels, step

    def landing(self, name: str) -> torch.Tensor:
        """Where a slice's value goes: memory that nobody reads."""
        if name not in self._landed:
            self._landed[name] = (
                self._over[name] if name in self._over else self._buffers.take(name)
            )
        return self._landed[name]

    def exchange(
        self,
        gradients: Mapping[str, torch.Tensor],
        rows: Hparams,
        omit_values: bool,
        over: bool = False,
        tables: Mapping[str, RowGradient] = MappingProxyType({}),
    ) -> tuple[Done, Tensors]:
        """Sends one message to every server, ``thread_pool_size`` of them at a time, and waits for
        the answers.

        Args:
            omit_values: the answer is not to bring values.
            over: the values may take the gradients' memory.  See [Note: one buffer there and back].
            tables: gradients of rows.

        Returns:
            The first server's answer, and the values that came.
        """
        with self.turn:
            self.step += 1
            self._over, self._landed = gradients if over else {}, {}
            request = Request(self.step)
            divided = {
                name: gradient.divide(len(self._channels)) for name, gradient in tables.items()
            }
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
                for name, parts in divided.items():
                    channel.post(Kind.ROWS, self.step, row_parts(name, parts[server]))
                channel.commit(
                    self.step,
                    commit_of(
                        rows, self._slices.on(server) - set(gradients), omit_values=omit_values
                    ),
                )
            return request.wait(), self._landed

    def _wait_for_room(self, request: Request) -> None:
        while (
            len(under_way := [answer for answer in request.answers if not answer.done()])
            >= self._lane.thread_pool_size
        ):
            wait(under_way, return_when=FIRST_COMPLETED)

    def pull(self) -> Tensors:
        """Fetches the lane's parameters without sending anything."""
        with self.turn:
            self._over, self._landed = {}, {}
            request = Request(self.step)
            for server, channel in enumerate(self._channels):
                if self._slices.on(server):
                    request.answers.append(channel.begin())
                    channel.pull(self._slices.order(server), self.step)
            if request.answers:
                request.wait()
            return self._landed


class Stage:
    """The values of the last message that is complete, until the script's thread takes them."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._lock = threading.Lock()  # guards the three below
        self._values: Tensors = {}
        self._memory: Tensors = {}  # by slice, or by variable where several slices have one buffer
        self._tag = 0

    @property
    def empty(self) -> bool:
        """Whether nothing has come since the last :meth:`take`."""
        with self._lock:
            return not self._values

    def arrived(self, values: Tensors, memory: Tensors, tag: int = 0) -> None:
        """A message is complete; ``tag`` says which.  Earlier values that nobody took are out of
        date.

        Args:
            memory: that of the values, and what else is free when they have been taken.
        """
        with self._lock:
            late, self._values, self._memory, self._tag = self._memory, values, memory, tag
        self._buffers.give_back(late)

    def take(self, into: Callable[[str, torch.Tensor, int], None]) -> int | None:
        """Hands the last complete message over, slice by slice, with its tag; None if there was
        none since the last call.
        """
        with self._lock:
            values, memory, tag = self._values, self._memory, self._tag
            self._values, self._memory = {}, {}
        for name, value in values.items():
            into(name, value, tag)
        self._buffers.give_back(memory)
        return tag if values else None
