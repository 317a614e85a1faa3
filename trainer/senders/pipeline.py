"""Messages that the script's thread does not wait for: sending them, and receiving the values of
the replies.

[Note: one buffer there and back]  A message owns the memory of its gradients, because the script
continues to write to its own.  The value of a slice is received into that same memory: a server
replies when it has applied the message, and then the gradient is not read again.  (If the stream
breaks in the middle of a reply, all frames are sent again, some with values in them; the server has
applied the step, so it replies again, and uses none of them.)  When the reply is complete, the
script's thread copies the values into the parameters as soon as it asks for them.  The memory is
kept until the next values are received, to find the script's external writes by it; then the next
message uses it.  So a running backward never sees a parameter move, the script never sees half of a
message, and a lane holds as many copies of its parameters as it has messages under way, one in
between, and one of the last received values.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from pserver.client.channel import Channel, Hparams
from pserver.client.replies import Reply, first_of
from pserver.leases.table import EpochRange
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment
from trainer.senders.buffers import SyncedBuffers
from trainer.senders.change_feed import ChangeFeed, put_all
from trainer.senders.gradient_validation import GradientValidation
from trainer.senders.parameters import ParameterSlices
from transpiler.plan.plan import Lane

# ---- consumed samples ----
#
# The samples that a trainer's script has trained on, until a message reports them to server 0.


class ConsumedSamples:
    """Positions of epochs, on their way from the loader to a step's commit.

    Batches that were given to the script since its last step belong to the next one, so that
    accumulated gradients count with all of their samples.  The script's thread uses it.
    """

    def __init__(self) -> None:
        self._given: list[EpochRange] = []
        self._stepped: list[EpochRange] = []

    def give(self, ranges: Iterable[EpochRange]) -> None:
        """Notes that the script gets a batch of these positions."""
        self._given += ranges

    def step(self) -> None:
        """Notes a closed step of the script: it has consumed all positions that were given."""
        self._stepped += self._given
        self._given = []

    def claim(self) -> tuple[EpochRange, ...]:
        """Takes the positions for the next message: all that steps have consumed and no message has
        reported.
        """
        taken, self._stepped = tuple(self._stepped), []
        return taken

    def close(self) -> tuple[EpochRange, ...]:
        """Takes the positions for a step that is closed and is a message of its own."""
        self.step()
        return self.claim()

    def waiting(self, epoch: int) -> int:
        """The number of positions of an epoch that were given and are in no message."""
        held = [*self._given, *self._stepped]
        return sum(stop - start for number, start, stop in held if number == epoch)

    def drop(self, epoch: int) -> tuple[EpochRange, ...]:
        """Drops the positions of an epoch that were given and are in no step, and returns them."""
        dropped = tuple(each for each in self._given if each[0] == epoch)
        self._given = [each for each in self._given if each[0] != epoch]
        return dropped


# ---- interfaces of lanes ----
#
# One lane of a plan, on a trainer's side: how its steps are sent, and when received values change
# the parameters.
#
# ::
#
#   sync_lane.py    sync: gradients leave one by one; the script waits for every trainer's step
#   async_lane.py   async, half-async: closed steps queue; a thread merges and sends them
#   kstep_lane.py   geo, diloco: the script's optimizer steps; every k steps changes are sent
#
# A step goes through four calls of the script's thread: ``begin``, ``send`` (each gradient),
# ``close`` (the step is complete), ``finish`` (waits as the mode requires, and takes in received
# values).  Only ``finish``, ``refresh``, ``drain`` and ``leave`` change parameters, and none of
# them replaces an external write.
#
# [Note: an interrupted step]  Ctrl-C may end any of the four, and the script may go on.  A step
# that was not closed has changed nothing, and is withdrawn.  One that was closed counts: ``finish``
# is called once more, and goes on where it was.  What can be neither withdrawn nor repeated notes
# that in ``torn`` first, and its end afterwards: no other step can follow.


class LaneSender(Protocol):
    """The interface of a lane to the communicator, in the script's thread."""

    # held during a request on the lane's channels that the script does not wait for
    turn: threading.Lock
    consumed: ConsumedSamples  # its messages report them to server 0
    # called regularly while the script waits in the lane
    meanwhile: Callable[[], None]
    torn: bool  # whether something has begun that can be neither withdrawn nor repeated

    @property
    def step(self) -> int:
        """The number of messages sent."""

    def start(self, channels: list[Channel], step: int) -> None:
        """Takes the channels, by server; all variables have the servers' values.

        Args:
            step: the last step that the servers have applied.
        """

    def begin(self) -> None:
        """Makes external writes a part of the step, where servers step: called before anything of
        the step is sent, and once more before a step is closed whose gradients have been sent
        during backward.

        Raises:
            ValueError: a parameter's shape or dtype differs from the job's.
        """

    def send(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Takes gradients, by slice; with ``runtime_split_send_recv`` by variable."""

    def send_rows(self, gradients: Mapping[str, RowGradient]) -> None:
        """Takes gradients, by table; the caller does not write to their tensors again."""

    def withdraw(self) -> None:
        """Withdraws what has been sent of a step that was interrupted before it was closed."""

    def close(self, hparams: Hparams, overflow: bool) -> None:
        """Completes the step."""

    def finish(self) -> Reply:
        """Waits as the lane requires, and takes in the received values; once more where it was
        interrupted.
        """

    def refresh(self) -> None:
        """Takes in received values, if any; called before a forward pass."""

    def drain(self) -> None:
        """Waits until everything has been sent and answered, and takes in the values."""

    def leave(self) -> None:
        """Drains the lane at the end of the job, and also sends what is kept on the trainer until
        then.
        """

    def note_values(self) -> None:
        """Notes that the servers' values have been received into all variables, outside of
        steps.
        """

    def suspected(self) -> set[str]:
        """The variables that may have been written since the last step, where the next one brings
        that to the servers; some of them have not.
        """

    def stop(self) -> None:
        """Tells the lane's threads to end."""

    def rest(self) -> None:
        """Waits until the threads have ended, a few seconds at most; the connections are closed.

        If a thread frees a tensor while the interpreter ends, the process ends by SIGABRT: see
        [Note: gloo at exit].
        """

    def metrics(self) -> dict[str, float]:
        """Counters, by name."""


log = logging.getLogger(__name__)


# ---- pending assignments ----
#
# Assignments on their way to the servers: a reply to an earlier message lacks them.


@dataclass(slots=True)
class SendTime:
    """The time at which a message left, as a message number.

    Attributes:
        number: the message's number; None before it leaves.
    """

    number: int | None = None


class PendingAssignments:
    """The external writes that a lane's servers may not have yet.

    The script's thread calls it; the lane's thread calls :meth:`left` when a message leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the numbers of send times
        self._under_way: list[tuple[SendTime, Mapping[str, Assignment]]] = []

    def add(self, assignments: Mapping[str, Assignment]) -> SendTime:
        """Takes the assignments of one message, by slice."""
        send_time = SendTime()
        self._under_way.append((send_time, assignments))
        return send_time

    def left(self, send_time: SendTime | None, number: int) -> None:
        """Notes that the message of this number is the next to leave.  Without assignments it has
        no send_time.
        """
        if send_time is not None:
            with self._lock:
                send_time.number = number

    def write(self, values: Mapping[str, Tensor], message: int) -> None:
        """Writes the assignments that were sent after a message into the values of its reply;
        earlier assignments are in the values.

        Args:
            values: by slice.
        """
        with self._lock:
            self._under_way = [
                (send_time, assignments)
                for send_time, assignments in self._under_way
                if send_time.number is None or send_time.number > message
            ]
        for _, assignments in self._under_way:
            for name, assignment in assignments.items():
                if name in values:
                    assignment.write(values[name])


# ---- request pipeline ----


Tensors = dict[str, torch.Tensor]  # by slice, unless a comment names another key


class Buffers:
    """Main memory for the messages of a lane, kept from one to the next: at most one spare buffer
    of each slice.  Any thread may call it.
    """

    def __init__(self, slices: ParameterSlices) -> None:
        self._slices = slices
        self._lock = threading.Lock()  # guards _spare
        self._spare: Tensors = {}

    def acquire(self, name: str) -> torch.Tensor:
        """An uninitialized buffer of the shape and dtype of a slice, or of a whole variable."""
        with self._lock:
            spare = self._spare.pop(name, None)
        return self._slices.blank(name) if spare is None else spare

    def give_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes back buffers that are out of use."""
        with self._lock:
            self._spare.update(tensors)


@dataclass(frozen=True, slots=True)
class Pulled:
    """Slices as the servers have them.

    Attributes:
        values: by slice.
        message: the last message that the servers have applied.
        versions: of their lane, by server, including updates that had begun.
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
    """Sends the messages of one lane that the script does not wait for: one at a time, to all
    servers.

    The lane's sending and fetching threads call it; the channels' threads ask for destinations.

    Args:
        lane, slices: of the messages.
        buffers: the memory of values that are not received in place.
        model_buffers: the synced buffers, which travel with the messages.
        in_place: whether messages' values are received into the parameters themselves.

    Attributes:
        step: the number of messages sent.
        versions: of the servers' lane, in their last replies, by server.
        checks: the checks of each step.
        turn: held during a request; also taken by other requests on the lane's channels.
    """

    def __init__(
        self,
        lane: Lane,
        slices: ParameterSlices,
        buffers: Buffers,
        model_buffers: SyncedBuffers,
        in_place: bool,
    ) -> None:
        self.step = 0
        self.versions: dict[int, int] = {}
        self._lane = lane
        self._slices = slices
        self._buffers = buffers
        self._model_buffers, self._in_place = model_buffers, in_place
        self.checks = GradientValidation(lane, slices)
        self._steps = 0  # of the script, in all messages
        self._channels: list[Channel] = []
        # the memory that the values of the request under way may overwrite
        self._reusable: Mapping[str, torch.Tensor] = {}
        self._values: Tensors = {}  # the received values
        # one request at a time on the lane's channels; guards the two above
        self.turn = threading.Lock()

    def start(self, channels: list[Channel], step: int) -> None:
        """Sets the channels, by server, and the last step that the servers have applied."""
        self._channels, self.step = channels, step

    def _destination(self, name: str, blank: object) -> torch.Tensor:
        """The destination of a value in the reply to a message."""
        if name in self._model_buffers.names:
            return self._model_buffers.destination(name)
        return (self._in_parameters if self._in_place else self._beside)(name, blank)

    def _in_parameters(self, name: str, blank: object) -> torch.Tensor:
        """The destination of a slice's value: the parameter, while nothing computes."""
        return self._slices.destination(name)

    def _beside(self, name: str, blank: object) -> torch.Tensor:
        """The destination of a slice's value: memory that no other thread reads."""
        if name not in self._values:
            self._values[name] = (
                self._reusable[name] if name in self._reusable else self._buffers.acquire(name)
            )
            self._slices.wait_for([self._values[name]])  # the last values, on their way to a GPU
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
        changes: Mapping[str, torch.Tensor] = MappingProxyType({}),
        leases: tuple[EpochRange, ...] = (),
        feeds: Mapping[str, ChangeFeed] = MappingProxyType({}),
    ) -> tuple[Reply, Tensors]:
        """Sends one message to every server, to ``thread_pool_size`` of them at a time, and waits
        for the replies: no server replies before all servers have the message.

        Args:
            gradients: by slice.
            omit_values: whether the replies omit parameters.
            reuse: whether the values may take the gradients' memory.  See [Note: one buffer there
                and back].
            tables: gradients of rows.
            steps: the number of the script's steps in the message.
            last: whether this trainer leaves after the message.
            assignments: the external writes, by slice.
            changes: what has changed, by slice, if whole parameters are sent in place of gradients.
            leases: the positions of epochs that the message's steps have consumed.
            feeds: by table, what the replies tell of changes by other trainers.

        Returns:
            The first server's reply, and the values that were not received in place, by slice.
        """
        with self.turn:
            self.step += 1
            self._reusable, self._values = gradients if reuse else {}, {}
            replies, leaving_for = list[Future[Reply]](), list[Future[None]]()
            divided = {name: rows.divide(len(self._channels)) for name, rows in tables.items()}
            encoded = self._encoded(gradients, changes)
            self.checks.look_at_rows(tables.items())
            norms = self.checks.take_out(steps)
            leaving = self._model_buffers.take_out()
            for server, channel in enumerate(self._channels):
                self._wait_for_room(leaving_for)
                replies.append(channel.begin(self._destination))
                leaving_for.append(channel.sent)
                channel.assign(self.step, self._slices.here(server, assignments))
                names = self._model_buffers.assign(channel, server, self.step, leaving)
                channel.push(self.step, self._of_server(server, encoded))
                channel.push_rows(self.step, {n: parts[server] for n, parts in divided.items()})
                channel.commit(
                    self.step,
                    hparams,
                    self._slices.on(server) - set(gradients),
                    omit_values=omit_values,
                    norms=norms,
                    last=last,
                    buffers=names,
                    leases=leases if server == 0 else (),
                    steps=steps,
                    changes_after={name: feed.position(server) for name, feed in feeds.items()},
                )
            first, self._steps = self._steps + 1, self._steps + steps
            reply = self.checks.record(first_of(replies), first, self._steps)
            self.versions = {index: each.result().version for index, each in enumerate(replies)}
            if feeds:
                for server, each in enumerate(replies):
                    put_all(feeds, server, each.result().changes, reply.refused)
            self._model_buffers.arrived()
            return reply, self._values

    def _encoded(
        self, gradients: Mapping[str, torch.Tensor], changes: Mapping[str, torch.Tensor]
    ) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """Encodes gradients, by slice, and checks each."""
        if not (self.checks.measures or self._slices.compresses):
            return {name: [(name, gradient)] for name, gradient in gradients.items()}
        found = {
            name: self.checks.look(
                name, list(self._slices.encoded(name, gradient)), changes.get(name)
            )
            for name, gradient in gradients.items()
        }
        self._slices.end_encoding()
        return found

    def _of_server(
        self, server: int, encoded: Mapping[str, Iterable[tuple[str, torch.Tensor]]]
    ) -> list[tuple[str, torch.Tensor]]:
        """A server's part of encoded gradients, in the order of the plan."""
        return [part for name in self._slices.order(server) for part in encoded.get(name, ())]

    def _wait_for_room(self, leaving_for: list[Future[None]]) -> None:
        while (
            len(leaving := [sent for sent in leaving_for if not sent.done()])
            >= self._lane.thread_pool_size
        ):
            wait(leaving, return_when=FIRST_COMPLETED)

    def pull(self, names: Collection[str] | None = None, in_place: bool = False) -> Pulled:
        """Fetches slices, without sending anything.

        Args:
            names: of the slices; None: the lane's parameters.
            in_place: whether the values are received into the parameters themselves.
        """
        with self.turn:
            self._reusable, self._values = {}, {}
            asked = self._slices.by_server(self._slices.names if names is None else names)
            destination = self._in_parameters if in_place else self._beside
            replies = {
                server: self._channels[server].pull(here, destination, self.step)
                for server, here in asked.items()
            }
            if replies:
                first_of(list(replies.values()))
            versions = {server: reply.result().version for server, reply in replies.items()}
            return Pulled(self._values, self.step, versions)

    def ask_changes(self, feeds: Mapping[str, ChangeFeed]) -> None:
        """Fetches what other trainers have changed of rows, by table."""
        with self.turn:
            replies = [
                channel.changes({name: feed.position(server) for name, feed in feeds.items()})
                for server, channel in enumerate(self._channels)
            ]
            first_of(replies)
            for server, each in enumerate(replies):
                put_all(feeds, server, each.result().changes, refused=False)

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
        """Whether nothing is staged: all values were taken or dropped."""
        with self._lock:
            return not self._values

    @property
    def idle(self) -> bool:
        """Whether nothing is staged, and none are in use in :meth:`taken`."""
        with self._lock:
            return not self._values and not self._taking

    def put(self, values: Tensors, memory: Tensors, message: int = 0) -> None:
        """Stages the values of a complete message.  Earlier values that were not taken are out
        of date.

        Args:
            memory: the memory of the values, and other memory that is free when they have been
                taken.
            message: the message's number.  A lane that has only rows stages no values.
        """
        with self._lock:
            outdated, self._values, self._memory = self._memory, values, memory
            self._message = message
        self._buffers.give_back(outdated)

    @contextmanager
    def taken(self) -> Iterator[tuple[Tensors, int]]:
        """Takes the staged values, by slice, and the message's number, for use inside; then their
        memory is given back.  The number is 0 if there was no message since the last time.
        """
        values, memory, message = self._take_out(taking=True)
        try:
            yield values, message
        finally:
            with self._lock:
                self._taking = False
        self._buffers.give_back(memory)

    def take_out(self) -> tuple[Tensors, Tensors, int]:
        """Takes the staged values, memory and message, as given to :meth:`put`; they are the
        caller's from now on.  All are empty if nothing is staged.
        """
        return self._take_out(taking=False)

    def _take_out(self, taking: bool) -> tuple[Tensors, Tensors, int]:
        with self._lock:
            values, memory, message = self._values, self._memory, self._message
            self._values, self._memory, self._message = {}, {}, 0
            self._taking = taking
        return values, memory, message
