"""The async and half-async lanes: steps queue, and a thread of its own merges and sends them.

[Note: how far ahead]  ``send_queue_size`` bounds the steps that are on their way: the one that
finds no slot waits.  But a trainer that computes faster than messages come back would fill any
queue and then train, no faster, on parameters that are as many steps old.  So before a step is
copied into the queue it gives the messages before it ``soft_wait_ms`` to come back, as long as
there are as many as one message would merge: where servers answer, a trainer is about one message
ahead, and this step is copied into the memory of the one before; where a server is stopped for a
while, the queue takes what comes, and each message in it is one more copy of the parameters.  A
lane of few bytes need not save them: its step is queued first, so that the sender finds it at once,
and then waits as long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pserver.client.channel import Channel
from pserver.errors import PServerError
from pserver.table.gradient import RowGradient
from pserver.wire_pb2 import Done, Part
from trainer.communicator.device_copy import PendingCopy, crosses
from trainer.communicator.lane import Hparams
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.request_pipeline import Buffers, RequestPipeline, Stage, Tensors
from transpiler.plan.plan import Lane

log = logging.getLogger(__name__)

SMALL_BYTES = 2**20  # of a lane's parameters: below, a copy more is no matter
FETCH_SECONDS = 0.1  # between two fetches that nothing was sent for


@dataclass(slots=True)
class _Message:
    """Closed steps of one trainer that leave together."""

    gradients: Tensors  # by slice; those that are to be cut when they leave, by variable
    tables: dict[str, RowGradient]
    rows: Hparams
    steps: int = 1
    own: bool = False  # whether the gradients are copies
    # copies from a GPU that may not have been made yet
    crossing: list[PendingCopy] = field(default_factory=list)

    def copy(self, slices: ParameterSlices, buffers: Buffers) -> None:
        """Copies the gradients; what they come from may be written to by whatever the script does
        next.
        """
        self.own = True
        for name, gradient in self.gradients.items():
            self.gradients[name] = buffers.take(name)
            if crosses(gradient):
                self.crossing.append(slices.crossing(gradient).out(gradient, self.gradients[name]))
            else:
                self.gradients[name].copy_(gradient)
        slices.join()

    def settle(self) -> None:
        """Waits until the gradients can be read."""
        for crossed in self.crossing:
            crossed.synchronize()
        self.crossing.clear()

    def add(self, later: _Message, buffers: Buffers) -> None:
        """One more step: its gradients are added, its hyper-parameters count."""
        self.settle()
        for name, gradient in later.gradients.items():
            if name in self.gradients:
                self.gradients[name].add_(gradient.to("cpu"))
            else:
                self.gradients[name] = buffers.take(name).copy_(gradient)
        for name, of_table in later.tables.items():
            self.tables[name] = (
                self.tables[name].add_(of_table) if name in self.tables else of_table
            )
        self.rows = later.rows
        self.steps += later.steps

    def merge(self, rule: str) -> None:
        """The sum over the steps, or their mean."""
        if rule == "mean" and self.steps > 1:
            for gradient in self.gradients.values():
                gradient.mul_(1.0 / self.steps)
            for of_table in self.tables.values():
                of_table.mul_(1.0 / self.steps)


class AsyncSender:
    """Async and half-async: closed steps queue, and one thread merges and sends them.

    With one slot, or where a step waits for a bound or a number of steps, ``finish`` waits for the
    step's own result.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices, soft_wait_ms: int = 0) -> None:
        self._lane = lane
        self._slices = slices
        self._buffers = Buffers(slices)
        self._stage = Stage(self._buffers)
        self._wire = RequestPipeline(lane, slices, self._buffers)
        self.turn = self._wire.turn
        self._gradients: Tensors = {}  # of the step under way: the script's own
        self._tables: dict[str, RowGradient] = {}  # likewise
        self._closed: _Message | None = None  # a step that has found no room yet
        self._changed = threading.Condition()  # guards the eight below
        self._queue: deque[_Message] = deque()
        self._unanswered = 0  # steps closed and not yet answered
        self._failure: PServerError | None = None
        self._stopping = False
        self._since_fetch = 0  # messages since parameters last came
        self._blocked_seconds = 0.0
        self._merged = 0
        self._last = Done()
        self._flushing = False
        self._waits = lane.send_queue_size == 1 or lane.staleness is not None or lane.kind.collects
        # nothing computes while values land
        self._direct = self._waits and not lane.independent_recv_thread
        # Whether a gradient outlives its step, after which the script writes on.
        self._copies = lane.max_merge_var_num > 1 if lane.kind.collects else not self._waits
        self._saves = slices.bytes >= SMALL_BYTES
        self._soft_seconds = soft_wait_ms / 1000
        self._threads: list[threading.Thread] = []

    @property
    def step(self) -> int:
        """Messages sent."""
        return self._wire.step

    def landing(self, part: Part) -> torch.Tensor:
        """See :class:`LaneSender`."""
        return self._slices.landing(part.name) if self._direct else self._wire.landing(part.name)

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._wire.start(channels, step)
        targets = [
            self._send_queued,
            *([self._fetch] if self._lane.independent_recv_thread else []),
        ]
        self._threads = [
            threading.Thread(target=target, name=f"lane {target.__name__}", daemon=True)
            for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """See :class:`LaneSender`."""
        self._gradients[name] = gradient

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """See :class:`LaneSender`."""
        self._tables[table] = gradient

    def close(self, rows: Hparams, overflow: bool) -> None:
        """See :class:`LaneSender`.

        An overflow's step is dropped; one that finds no room leaves in ``finish``.
        """
        step = _Message(self._gradients, self._tables, rows)
        self._gradients, self._tables = {}, {}
        if overflow:
            return
        self._closed = step
        with self._changed:
            room = self._waits or self._has_room()
        if room:
            self._enqueue()

    def _has_room(self) -> bool:
        """Whether a step may be queued now.  See [Note: how far ahead]."""
        most = (
            min(self._lane.max_merge_var_num, self._lane.send_queue_size)
            if self._saves
            else self._lane.send_queue_size
        )
        return self._unanswered < most or self._failure is not None

    def _enqueue(self) -> None:
        """The closed step, if there is one, joins the last message that has not left, or is a
        message of its own.
        """
        if self._closed is None:
            return
        step, self._closed = self._closed, None
        self.refresh()  # which gives back the memory that this step may be copied into
        with self._changed:
            joins = bool(self._queue) and self._queue[-1].steps < self._lane.max_merge_var_num
            if joins:
                self._queue[-1].add(step, self._buffers)
        if not joins and (self._copies or any(map(crosses, step.gradients.values()))):
            step.copy(self._slices, self._buffers)
        with self._changed:
            if not joins:
                self._queue.append(step)
            self._unanswered += 1
            self._changed.notify_all()

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        with self._changed:
            if self._closed is not None:
                self._wait(lambda: self._unanswered < self._lane.send_queue_size)
                self._changed.wait_for(self._has_room, self._soft_seconds)
        self._enqueue()
        with self._changed:
            if self._waits and not self._collecting():
                self._wait(lambda: not self._unanswered)
            elif not (self._waits or self._saves):
                most = self._lane.max_merge_var_num
                self._changed.wait_for(
                    lambda: self._unanswered <= most or self._failure is not None,
                    self._soft_seconds,
                )
            self._check()
        self.refresh()
        return self._last

    def _collecting(self) -> bool:
        """Whether more steps are to be merged before anything is sent."""
        if not self._lane.kind.collects or self._flushing or not self._queue:
            return False
        return self._queue[0].steps < self._lane.max_merge_var_num

    def _wait(self, done: Callable[[], bool]) -> None:
        """Waits under the condition; the time counts as blocked."""
        began = time.monotonic()
        while not done() and self._failure is None:
            self._changed.wait()
        self._blocked_seconds += time.monotonic() - began
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def refresh(self) -> None:
        """See :class:`LaneSender`."""
        if (
            self._direct
            or self._stage.take(lambda name, value, _: self._slices.write(name, value)) is not None
        ):
            self._slices.unload()

    def drain(self) -> None:
        """See :class:`LaneSender`."""
        self._enqueue()
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._wait(lambda: not self._unanswered)
            self._flushing = False
        self.refresh()

    def stop(self) -> None:
        """See :class:`LaneSender`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def metrics(self) -> dict[str, float]:
        """See :class:`LaneSender`."""
        with self._changed:
            return {
                "messages": self.step,
                "steps_merged": self._merged,
                "steps_queued": self._unanswered,
                "blocked_seconds": self._blocked_seconds,
            }

    # ---- the sending thread ----

    def _send_queued(self) -> None:
        try:
            while (message := self._next()) is not None:
                message.settle()
                message.merge(self._lane.merge)
                self._exchange(message, omit_values := self._omits_values())
                with self._changed:
                    self._since_fetch = self._since_fetch + 1 if omit_values else 0
                    self._merged += message.steps
                    self._unanswered -= message.steps
                    self._changed.notify_all()
        except PServerError as error:
            self._fail(error)
        except Exception as error:
            log.exception("sending steps")
            self._fail(PServerError(f"sending steps: {type(error).__name__}: {error}"))

    def _exchange(self, message: _Message, omit_values: bool) -> None:
        gradients = self._slices.cut(message.gradients)
        over = message.own and not omit_values
        self._last, values = self._wire.exchange(
            gradients, message.rows, omit_values, over, message.tables
        )
        beside = {
            name: value for name, value in values.items() if not over or name not in gradients
        }
        memory = {**(message.gradients if message.own else {}), **beside}
        if omit_values or self._direct:
            self._buffers.give_back(memory)
        else:
            self._stage.arrived(values, memory)

    def _omits_values(self) -> bool:
        """Whether the next message's answer need not bring parameters."""
        if self._lane.independent_recv_thread:
            return True
        return self._since_fetch + 1 < self._lane.min_send_grad_num_before_recv

    def _next(self) -> _Message | None:
        """The next message; None at the end."""
        with self._changed:
            while not self._queue or self._collecting():
                if self._stopping:
                    return None
                self._changed.wait()
            most, rounds = self._lane.max_merge_var_num, self._lane.send_wait_times
            while (
                (before := self._queue[0].steps) < most
                and rounds
                and not (self._waits or self._stopping or self._flushing)
            ):
                self._changed.wait(0.01)
                rounds -= self._queue[0].steps == before
            return self._queue.popleft()

    def _fail(self, error: PServerError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ---- the fetching thread ----

    def _fetch(self) -> None:
        """``independent_recv_thread``: fetches after so many messages, and from time to time
        without any.
        """
        try:
            while not self._stopping:
                with self._changed:
                    self._changed.wait_for(self._enough_sent, timeout=FETCH_SECONDS)
                    self._since_fetch = 0
                if not self._stopping:
                    self._stage.arrived(values := self._wire.pull(), values)
        except PServerError as error:
            self._fail(error)

    def _enough_sent(self) -> bool:
        return self._stopping or self._since_fetch >= self._lane.min_send_grad_num_before_recv
