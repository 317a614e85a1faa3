"""The async and half-async lanes: closed steps queue, and the lane's thread merges and sends them.

[Note: how far ahead]  ``send_queue_size`` bounds the steps that are on their way: a step that finds
no slot waits.  But a trainer that computes faster than replies arrive would fill any queue and then
train, no faster, on parameters that are as many steps old.  So before a step is copied into the
queue, it waits up to ``soft_wait_ms`` for the earlier messages to be answered, if as many steps are
unanswered as one message would merge.  While servers reply, a trainer is about one message ahead,
and this step is copied into the memory of the one before.  While a server is stopped, the queue
fills, and each message in it is one more copy of the parameters.  A lane of few bytes need not save
memory: its step is queued first, so that the sender finds it at once, and then waits as long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pserver.client.channel import Channel, Hparams
from pserver.client.replies import Reply
from pserver.errors import PServerError
from pserver.leases.table import EpochRange
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment, checksum
from trainer.device_copies import PendingCopy, is_on_gpu
from trainer.senders.buffers import SyncedBuffers
from trainer.senders.parameters import ParameterSlices
from trainer.senders.pipeline import (
    Buffers,
    ConsumedSamples,
    PendingAssignments,
    RequestPipeline,
    SendTime,
    StagedValues,
    Tensors,
)
from trainer.senders.writes import ExternalWrites, PendingLook, ReceivedCopies, difference
from transpiler.plan.plan import Lane

log = logging.getLogger(__name__)

# ---- merged steps ----
#
# Closed steps of an async lane that are sent in one message.


@dataclass(slots=True)
class MergedSteps:
    """One or more closed steps of one trainer, which are sent in one message.

    Attributes:
        gradients: by slice; by variable where the sending thread cuts them.
        tables: gradients of rows, by table.
        hparams: of the last step.
        steps: the number of steps.
        assignments: the external writes before them, by slice.
        send_time: of the message that carries the assignments; None without assignments.
        alone: whether later steps stay out of this message.
        owned: whether the gradients are copies, in buffers of the lane.
        copies: copies from a GPU that may not be complete.
        leases: the positions of epochs that the steps have consumed.
        looks: of these steps for external writes: their devices may not have compared yet.
        settled: whether the assignments have what those looks have found.
    """

    gradients: Tensors
    tables: dict[str, RowGradient]
    hparams: Hparams
    steps: int = 1
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    send_time: SendTime | None = None
    alone: bool = False
    owned: bool = False
    copies: list[PendingCopy] = field(default_factory=list)
    leases: tuple[EpochRange, ...] = ()
    looks: tuple[PendingLook, ...] = ()
    settled: bool = False

    @property
    def found(self) -> bool:
        """Whether a look has found an external write; waits for the devices."""
        return any(look.found() for look in self.looks)

    def copy(self, slices: ParameterSlices, buffers: Buffers) -> None:
        """Copies the gradients: the script may write to its own as soon as the step is closed."""
        self.owned = True
        for name, gradient in self.gradients.items():
            self.gradients[name] = buffers.acquire(name)
            if is_on_gpu(gradient):
                way = slices.device_copy(gradient)
                self.copies.append(way.to_host(gradient, self.gradients[name]))
            else:
                self.gradients[name].copy_(gradient)
        slices.join()

    def takes(self, later: MergedSteps, lane: Lane) -> bool:
        """Whether one more step may join this message.  Assignments begin a new message, and so
        does a step that may get some, behind those of another.
        """
        alone = self.alone or later.assignments or self.settled or self.assignments and later.looks
        return self.steps < lane.max_merge_var_num and not alone

    def wait_for_copies(self) -> None:
        """Waits until the gradients can be read."""
        for copy in self.copies:
            copy.synchronize()
        self.copies.clear()

    def add(self, later: MergedSteps, buffers: Buffers) -> None:
        """Adds one more step's gradients, and takes over its hyper-parameters."""
        self.wait_for_copies()
        for name, gradient in later.gradients.items():
            if name in self.gradients:
                self.gradients[name].add_(gradient.to("cpu"))
            else:
                self.gradients[name] = buffers.acquire(name).copy_(gradient)
        for name, of_table in later.tables.items():
            self.tables[name] = (
                self.tables[name].add_(of_table) if name in self.tables else of_table
            )
        self.hparams = later.hparams
        self.steps += later.steps
        self.leases += later.leases
        self.looks += later.looks

    def merge(self, rule: str) -> None:
        """Turns the sum over the steps into their mean, if the rule is "mean"."""
        if rule == "mean" and self.steps > 1:
            for gradient in self.gradients.values():
                gradient.mul_(1.0 / self.steps)
            for of_table in self.tables.values():
                of_table.mul_(1.0 / self.steps)


# ---- async sender ----


SMALL_BYTES = 2**20  # of a lane's parameters: below, one more copy does not matter
LOOK_SECONDS = 0.25  # between two calls of ``meanwhile``
FETCH_SECONDS = 0.1  # between two fetches if nothing is sent


class AsyncSender:
    """The sender of an async or half-async lane; see
    :class:`~trainer.senders.pipeline.LaneSender`.

    With one slot, with bounded staleness and in half-async mode ``finish`` waits for the result of
    its own step; in half-async mode only at the step that completes a message.  The script's thread
    closes steps; a thread of the lane sends them; with ``independent_recv_thread`` another thread
    fetches parameters.

    Args:
        lane, slices: of this sender.
        soft_wait_ms: see [Note: how far ahead].
        buffers: the model's buffers, which travel with the lane's messages.
        trainer: this trainer's number, for messages.

    Attributes:
        writes: finds the external writes.
    """

    def __init__(
        self,
        lane: Lane,
        slices: ParameterSlices,
        soft_wait_ms: int,
        buffers: SyncedBuffers,
        trainer: int,
    ) -> None:
        self._lane, self._slices = lane, slices
        self._assignments: dict[str, Assignment] = {}  # of the step under way
        self._pending = PendingAssignments()
        self._buffers = Buffers(slices)
        self._staged = StagedValues(self._buffers)
        self._waits = lane.send_queue_size == 1 or lane.staleness is not None or lane.kind.collects
        # values are received into the parameters themselves, as nothing computes meanwhile
        self._in_place = self._waits and not lane.independent_recv_thread
        self._pipeline = RequestPipeline(lane, slices, self._buffers, buffers, self._in_place)
        self.turn = self._pipeline.turn
        self.consumed = ConsumedSamples()
        self.meanwhile: Callable[[], None] = lambda: None
        self.torn = False
        self._gradients: Tensors = {}  # of the step under way: the script's own
        self._tables: dict[str, RowGradient] = {}  # likewise
        self._closed: MergedSteps | None = None  # a step that does not fit into the queue yet
        # Guards the nine below.  It is taken by itself: in the condition's method Ctrl-C could
        # come when the lock is taken, and before anyone is to release it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[MergedSteps] = deque()
        self._unanswered = 0  # steps closed and not yet answered
        self._failure: PServerError | None = None
        self._stopping, self._flushing = False, False
        self._since_fetch = 0  # messages since parameters were last received
        self._received_whole = 0  # how often the script's thread has received all values at once
        self._blocked_seconds, self._merged = 0.0, 0
        self._last = Reply()
        self._received = ReceivedCopies(slices)
        # values that were written where devices had found no external write, with their memory
        self._unsettled: list[tuple[Tensors, Tensors]] = []
        self._looked: MergedSteps | None = None  # the message whose last look nobody has waited for
        self._keeps_copies = False  # of all received values: the script writes to parameters
        self.writes = ExternalWrites(slices, self._received, trainer, self._in_place)
        # whether a gradient outlives its step, after which the script writes to it again
        self._copies = lane.max_merge_var_num > 1 if lane.kind.collects else not self._waits
        self._saves = slices.bytes >= SMALL_BYTES
        self._soft_seconds = soft_wait_ms / 1000
        self._threads: list[threading.Thread] = []

    @property
    def step(self) -> int:
        """The number of messages sent."""
        return self._pipeline.step

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._settle()
        self._pipeline.start(channels, step)
        self._assignments, self._pending = {}, PendingAssignments()
        if not self._in_place:
            self._received.copy(self._slices.trained)
        self.note_values()
        if self._threads:
            return
        fetches = [self._fetch] if self._lane.independent_recv_thread else []
        targets = [self._send_queued, *fetches]
        self._threads = [
            threading.Thread(target=target, name=f"lane {target.__name__}", daemon=True)
            for target in targets
        ]
        for thread in self._threads:
            thread.start()

    # ---- external writes ----

    def begin(self) -> None:
        """See :class:`LaneSender`."""
        self._settle()
        if (suspects := self.writes.look(waits=self._in_place)) is not None:
            found = self._differing(suspects.compared) if suspects.compared else {}
            self._assign(found)
            self.writes.settle(suspects, found)

    def _differing(self, variables: Sequence[str]) -> dict[str, Assignment]:
        """The differences of variables from their last received values, by slice."""
        trained = [variable for variable in variables if variable in self._slices.updated]
        if not self._received.holds(trained):
            self._take_from_servers(trained)
        found = self._received.differences(trained)
        if held := self._slices.slices_of(set(variables).difference(trained)):
            found.update(self._differing_held(held))
        return found

    def _differing_held(self, names: Collection[str]) -> dict[str, Assignment]:
        """The differences from the servers' values, of slices that servers only hold."""
        theirs = self._pipeline.checksums(names)
        unlike = [name for name in names if checksum(self._slices.read(name)) != theirs[name]]
        pulled = self._pipeline.pull(unlike).values if unlike else {}
        written = {name: difference(self._slices.read(name), pulled[name]) for name in pulled}
        return {name: each for name, each in written.items() if each is not None}

    def _take_from_servers(self, variables: Collection[str]) -> None:
        """Takes the servers' values as the last received values, as no copy has been kept; keeps
        copies from now on.
        """
        self._keeps_copies = True
        self._drain()
        known = self._pipeline.versions
        pulled = self._pipeline.pull()
        if any(known.get(server, 0) != now for server, now in pulled.versions.items()):
            log.warning(
                "the first write into parameters of this lane (%s): other trainers have stepped "
                "since the last values came, so this trainer's values replace theirs in all of "
                "these parameters; from now on only what was written is assigned",
                ", ".join(sorted(variables)),
            )
        self._received.copy(self._slices.trained)
        self._received.note({n: pulled.values[n] for n in self._slices.slices_of(variables)})

    def _assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Adds assignments to the step under way, by slice."""
        if self._lane.kind.collects and assignments:
            self._drain()  # sends the earlier steps
        self._received.assign(assignments)
        for name, assignment in assignments.items():
            earlier = self._assignments.get(name)
            self._assignments[name] = (
                assignment if earlier is None else earlier.followed_by(assignment)
            )

    @contextmanager
    def _receiving(self, everything: bool, pulled: bool = False) -> Iterator[None]:
        """Protects external writes from values that are received inside, without a step.

        Args:
            everything: see :meth:`ExternalWrites.hold_back`.
            pulled: whether values are received into the parameters themselves.
        """
        self._settle()
        compared = self.writes.hold_back(everything)
        self.writes.held_back(compared, self._differing(compared) if compared else {})
        yield
        self.writes.note_free(copies=pulled or self._in_place)

    def note_values(self) -> None:
        """See :class:`LaneSender`."""
        self._settle()
        self._outdate_fetched()
        self.writes.start(self._keeps_copies)

    def suspected(self) -> set[str]:
        """See :class:`LaneSender`."""
        self._settle()
        return self.writes.suspected()

    # ---- steps ----

    def send(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """See :class:`LaneSender`."""
        self._gradients.update(gradients)

    def send_rows(self, gradients: Mapping[str, RowGradient]) -> None:
        """See :class:`LaneSender`."""
        self._tables.update(gradients)

    def withdraw(self) -> None:
        """See :class:`LaneSender`."""
        self._gradients, self._tables = {}, {}

    def close(self, hparams: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`.

        A step with an overflow is dropped, except the external writes in it.  A step that does not
        fit into the queue is queued by ``finish``.
        """
        step = MergedSteps(self._gradients, self._tables, hparams, assignments=self._assignments)
        self._gradients, self._tables, self._assignments = {}, {}, {}
        if overflow and not step.assignments:
            return
        if overflow:
            step.gradients, step.tables, step.alone = {}, {}, True
        if step.assignments:
            step.send_time = self._pending.add(step.assignments)
        step.leases, step.looks = self.consumed.close(), self.writes.looks
        self._closed = step
        with self._lock:
            room = self._waits or self._has_room()
        if room:
            self._enqueue()

    def _has_room(self) -> bool:
        """Whether a step may be queued now.  See [Note: how far ahead]."""
        limit = (
            min(self._lane.max_merge_var_num, self._lane.send_queue_size)
            if self._saves
            else self._lane.send_queue_size
        )
        return self._unanswered < limit or self._failure is not None

    def _enqueue(self) -> None:
        """Merges the closed step, if there is one, into the last queued message, or queues it as a
        message of its own.
        """
        if self._closed is None:
            return
        self.torn = True
        step, self._closed = self._closed, None
        self._take_in()  # gives back the memory that this step may be copied into
        message = step
        with self._lock:
            joins = bool(self._queue) and self._queue[-1].takes(step, self._lane)
            if joins:
                message = self._queue[-1]
                message.add(step, self._buffers)
        if not joins and (self._copies or any(map(is_on_gpu, step.gradients.values()))):
            step.copy(self._slices, self._buffers)
        with self._lock:
            if not joins:
                self._queue.append(step)
            self._looked = message if step.looks else None
            self._unanswered += 1
            self._changed.notify_all()
        self.torn = False

    def finish(self) -> Reply:
        """See :class:`LaneSender`."""
        with self._lock:
            if self._closed is not None:
                self._wait(lambda: self._unanswered < self._lane.send_queue_size)
                self._changed.wait_for(self._has_room, self._soft_seconds)
        self._enqueue()
        with self._lock:
            if self._waits and not self._collecting():
                self._wait(lambda: not self._unanswered)
            elif not (self._waits or self._saves):
                limit = self._lane.max_merge_var_num
                self._changed.wait_for(
                    lambda: self._unanswered <= limit or self._failure is not None,
                    self._soft_seconds,
                )
            self._check()
        self._take_in()
        self.writes.end_step(self._keeps_copies)
        return self._last

    def _collecting(self) -> bool:
        """Whether more steps will be merged before the message is sent."""
        if not self._lane.kind.collects or self._flushing or not self._queue:
            return False
        return self._queue[0].steps < self._lane.max_merge_var_num and not self._queue[0].alone

    def _wait(self, done: Callable[[], bool]) -> None:
        """Waits under the condition; the time counts as blocked."""
        began = time.monotonic()
        while not done() and self._failure is None:
            if not self._changed.wait(LOOK_SECONDS):
                with _released(self._changed):
                    self.meanwhile()
        self._blocked_seconds += time.monotonic() - began
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def refresh(self) -> None:
        """See :class:`LaneSender`."""
        if self._staged.empty:
            self._take_in()
        elif not self._in_place and self.writes.defer():
            self._take_in()
            self.writes.note_free(copies=False)
        else:
            with self._receiving(everything=False):
                self._take_in()

    def _take_in(self) -> None:
        """Takes in received values."""
        torn, self.torn = self.torn, True
        if not self._in_place:
            values, memory, message = self._staged.take_out()
            self._pending.write(values, message)
            flags = self.writes.flags if values else {}
            if flags:
                self._unsettled.append((values, memory))
            else:
                self._replace(values, memory)
            held = self._slices.held_back_slices()
            free = {name: value for name, value in values.items() if name not in held}
            self._slices.write_from(free, flags)
        self._slices.flush_buffers()
        self.torn = torn

    def _settle(self) -> None:
        """Waits for the devices that look for external writes, and notes the values that have been
        received meanwhile.  A message that waits gets the writes before its steps.
        """
        if not self.writes.looks:
            return
        self.writes.resolve()
        unsettled, self._unsettled = self._unsettled, []
        for values, memory in unsettled:
            self._replace(values, memory)
        message, self._looked = self._looked, None
        if message is None or not message.found:
            return
        written: dict[str, Assignment] = {}
        if (found := self.writes.complete()) is not None:
            written = self._differing(found.compared)
            self._received.assign(written)
            self.writes.settle(found, written)
        with self._lock:
            if written:
                message.assignments = written
                message.send_time = self._pending.add(written)
            message.settled = True
            self._changed.notify_all()

    def _replace(self, values: Tensors, memory: Tensors) -> None:
        free = self._received.replace(values, memory)
        self._slices.wait_for(free.values())
        self._buffers.give_back(free)

    def drain(self) -> None:
        """See :class:`LaneSender`."""
        with self._receiving(everything=True):
            self._drain()

    def _drain(self) -> None:
        self._enqueue()
        with self._lock:
            self._flushing = True
            self._changed.notify_all()
            try:
                self._wait(lambda: not self._unanswered)
            finally:
                self._flushing = False
        self._take_in()

    def pull(self) -> None:
        """Receives the servers' values, when the lane has been drained."""
        with self._receiving(everything=True, pulled=True):
            self._pull_in_place()

    def pull_beneath(self) -> None:
        """Receives the servers' values, when the lane has been drained, but for the elements that
        the script has written since the last step.
        """
        self._settle()
        compared = self.writes.hold_back(everything=True)
        written = self._differing(compared) if compared else {}
        self.writes.held_back(compared, {})
        self._pull_in_place()
        for name, assignment in written.items():
            assignment.write(value := self._slices.read(name).clone())
            self._slices.write(name, value)
        self._slices.flush_buffers()

    def _pull_in_place(self) -> None:
        self._pipeline.pull(in_place=True)
        self._slices.flush_buffers()
        self._outdate_fetched()

    def _outdate_fetched(self) -> None:
        """Drops what has been fetched beside the script, and what is on its way: the script's
        thread has received values that are newer.
        """
        with self._lock:
            self._received_whole += 1
            _, memory, _ = self._staged.take_out()
        self._buffers.give_back(memory)

    def leave(self) -> None:
        """See :class:`LaneSender`."""
        self.drain()

    def stop(self) -> None:
        """See :class:`LaneSender`."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()

    def rest(self) -> None:
        """See :class:`LaneSender`."""
        for thread in self._threads:
            thread.join(timeout=2.0)

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        with self._lock:
            return {
                "messages": self.step,
                "steps_merged": self._merged,
                "steps_queued": self._unanswered,
                "blocked_seconds": self._blocked_seconds,
                **self._pipeline.checks.metrics(),
            }

    # ---- the sending thread ----

    def _send_queued(self) -> None:
        try:
            while (message := self._next()) is not None:
                message.wait_for_copies()
                if message.looks and message.found:
                    with self._lock:  # the script's thread settles it, at the latest in its end
                        self._changed.wait_for(lambda: message.settled or self._stopping)
                message.merge(self._lane.merge)
                self._exchange(message, omit_values := self._omits_values())
                with self._lock:
                    self._since_fetch = self._since_fetch + 1 if omit_values else 0
                    self._merged += message.steps
                    self._unanswered -= message.steps
                    self._changed.notify_all()
        except PServerError as error:
            self._fail(error)
        except Exception as error:
            log.exception("sending steps")
            self._fail(PServerError(f"sending steps: {type(error).__name__}: {error}"))

    def _exchange(self, message: MergedSteps, omit_values: bool) -> None:
        gradients = self._slices.cut(message.gradients)
        reuse = message.owned and not omit_values
        self._pending.left(message.send_time, self._pipeline.step + 1)
        self._last, values = self._pipeline.exchange(
            gradients,
            message.hparams,
            omit_values,
            reuse,
            message.tables,
            message.steps,
            assignments=message.assignments,
            leases=message.leases,
        )
        beside = {
            name: value for name, value in values.items() if not reuse or name not in gradients
        }
        memory = {**(message.gradients if message.owned else {}), **beside}
        if omit_values or self._in_place:
            self._buffers.give_back(memory)
        else:
            self._staged.put(values, memory, self._pipeline.step)

    def _omits_values(self) -> bool:
        """Whether the reply to the next message may omit parameters."""
        if self._lane.independent_recv_thread:
            return True
        return self._since_fetch + 1 < self._lane.min_send_grad_num_before_recv

    def _next(self) -> MergedSteps | None:
        """The next message; None at the end."""
        with self._lock:
            while not self._queue or self._collecting():
                if self._stopping:
                    return None
                self._changed.wait()
            limit, rounds = self._lane.max_merge_var_num, self._lane.send_wait_times
            while (
                (before := self._queue[0].steps) < limit
                and rounds
                and not (self._waits or self._stopping or self._flushing)
            ):
                self._changed.wait(0.01)
                rounds -= self._queue[0].steps == before
            return self._queue.popleft()

    def _fail(self, error: PServerError) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ---- the fetching thread ----

    def _fetch(self) -> None:
        """Fetches parameters, with ``independent_recv_thread``: after
        ``min_send_grad_num_before_recv`` messages, and regularly without messages.
        """
        try:
            while not self._stopping:
                with self._lock:
                    self._changed.wait_for(self._enough_sent, timeout=FETCH_SECONDS)
                    self._since_fetch, before = 0, self._received_whole
                if not self._stopping:
                    pulled = self._pipeline.pull()
                    with self._lock:
                        if before == self._received_whole:
                            self._staged.put(pulled.values, pulled.values, pulled.message)
        except PServerError as error:
            self._fail(error)

    def _enough_sent(self) -> bool:
        return self._stopping or self._since_fetch >= self._lane.min_send_grad_num_before_recv


@contextmanager
def _released(condition: threading.Condition) -> Iterator[None]:
    """Releases the condition inside the block."""
    condition.release()
    try:
        yield
    finally:
        condition.acquire()
