"""The async and half-async lanes: steps queue, and a thread of its own merges and sends them.

[Note: how far ahead]  ``send_queue_size`` bounds the steps that are on their way: the one that finds no slot waits.  But a
trainer that computes faster than messages come back would fill any queue and then train, no faster, on parameters that are as
many steps old.  So a step gives the messages before it ``SOFT_SECONDS`` to come back, as long as there are more than one message
would merge: where servers answer, a trainer is about one message ahead; where one is stopped for a while, the queue takes what
comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pserver.channel import Channel
from pserver.errors import PServerError
from pserver.wire_pb2 import Done, Part
from trainer.lane import Rows
from trainer.slices import LiveSlices
from trainer.wire import Stage, Wire
from transpiler.plan import Lane

log = logging.getLogger(__name__)

SOFT_SECONDS = 0.05
FETCH_SECONDS = 0.1  # between two fetches that nothing was sent for


@dataclass(slots=True)
class _Step:
    """A closed step in a queue."""

    gradients: dict[str, torch.Tensor]
    rows: Rows
    merged: int = 1  # steps in it


def merge(steps: list[_Step], rule: str) -> _Step:
    """Several steps of one trainer as one message: each gradient's sum or mean over them, and the last hyper-parameters."""
    total = steps[0]
    for later in steps[1:]:
        for name, gradient in later.gradients.items():
            if name in total.gradients:
                total.gradients[name].add_(gradient)
            else:
                total.gradients[name] = gradient
        total.rows = later.rows
    total.merged = len(steps)
    if rule == "mean" and len(steps) > 1:
        for gradient in total.gradients.values():
            gradient.mul_(1.0 / len(steps))
    return total


class Queued:
    """Async and half-async: closed steps queue, and one thread merges and sends them.

    With one slot, or where a step waits for a bound or a number of steps, ``finish`` waits for the step's own result.
    """

    def __init__(self, lane: Lane, slices: LiveSlices) -> None:
        self._lane = lane
        self._slices = slices
        self._stage = Stage(slices)
        self._wire = Wire(lane, slices)
        self.turn = self._wire.turn
        self._gradients: dict[str, torch.Tensor] = {}  # of the step under way
        self._changed = threading.Condition()  # guards the eight below
        self._queue: deque[_Step] = deque()
        self._unanswered = 0  # steps closed and not yet answered
        self._failure: PServerError | None = None
        self._stopping = False
        self._since_fetch = 0  # messages since parameters last came
        self._blocked_seconds = 0.0
        self._merged = 0
        self._last = Done()
        self._flushing = False
        self._waits = lane.send_queue_size == 1 or lane.staleness is not None or lane.mode == "half_async"
        self._direct = self._waits and not lane.independent_recv_thread  # nothing computes while values land
        self._threads: list[threading.Thread] = []

    @property
    def step(self) -> int:
        """Messages sent."""
        return self._wire.step

    def landing(self, part: Part) -> torch.Tensor:
        """See :class:`LaneSender`."""
        return self._slices.landing(part.name) if self._direct else self._stage.landing(part.name)

    def start(self, channels: list[Channel], step: int) -> None:
        """See :class:`LaneSender`."""
        self._wire.start(channels, step)
        targets = [self._send_queued, *([self._fetch] if self._lane.independent_recv_thread else [])]
        self._threads = [threading.Thread(target=target, name=f"lane {target.__name__}", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """See :class:`LaneSender`.  A gradient that outlives its step is copied: the script may go on writing to it."""
        self._gradients[name] = gradient if self._waits and self._lane.mode != "half_async" else gradient.clone()

    def close(self, rows: Rows, overflow: bool) -> None:
        """See :class:`LaneSender`.  An overflow's step is dropped; a full queue is waited for."""
        step, self._gradients = _Step(self._gradients, rows), {}
        if overflow:
            return
        with self._changed:
            if not self._waits:
                self._wait(lambda: self._unanswered < self._lane.send_queue_size)
            self._queue.append(step)
            self._unanswered += 1
            self._changed.notify_all()

    def finish(self) -> Done:
        """See :class:`LaneSender`."""
        with self._changed:
            if self._waits and not self._collecting():
                self._wait(lambda: not self._unanswered)
            elif not self._waits:  # see [Note: how far ahead]
                most = self._lane.max_merge_var_num
                self._changed.wait_for(lambda: self._unanswered <= most or self._failure is not None, SOFT_SECONDS)
            self._check()
        self.refresh()
        return self._last

    def _collecting(self) -> bool:
        """Half-async: whether more steps are to be merged before anything is sent."""
        return self._lane.mode == "half_async" and 0 < len(self._queue) < self._lane.max_merge_var_num and not self._flushing

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
        if self._direct or self._stage.take(lambda name, value, _: self._slices.write(name, value)) is not None:
            self._slices.unload()

    def drain(self) -> None:
        """See :class:`LaneSender`."""
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

    # ---- the sending thread --------------------------------------------------------------------------------------

    def _send_queued(self) -> None:
        try:
            while (steps := self._next()) is not None:
                message = merge(steps, self._lane.merge)
                quiet = self._quiet()
                self._last = self._wire.exchange(message.gradients, message.rows, quiet, self._stage.arrived)
                with self._changed:
                    self._since_fetch = self._since_fetch + 1 if quiet else 0
                    self._merged += message.merged
                    self._unanswered -= message.merged
                    self._changed.notify_all()
        except PServerError as error:
            self._fail(error)
        except Exception as error:
            log.exception("sending steps")
            self._fail(PServerError(f"sending steps: {type(error).__name__}: {error}"))

    def _quiet(self) -> bool:
        """Whether the next message's answer need not bring parameters."""
        if self._lane.independent_recv_thread:
            return True
        return self._since_fetch + 1 < self._lane.min_send_grad_num_before_recv

    def _next(self) -> list[_Step] | None:
        """The steps of the next message; None at the end."""
        with self._changed:
            while not self._queue or self._collecting():
                if self._stopping:
                    return None
                self._changed.wait()
            most, rounds = self._lane.max_merge_var_num, self._lane.send_wait_times
            while len(self._queue) < most and rounds and not self._waits and not self._stopping and not self._flushing:
                before = len(self._queue)
                self._changed.wait(0.01)
                rounds -= len(self._queue) == before
            return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    def _fail(self, error: PServerError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ---- the fetching thread -------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """``independent_recv_thread``: fetches after so many messages, and from time to time without any."""
        try:
            while not self._stopping:
                with self._changed:
                    self._changed.wait_for(self._enough_sent, timeout=FETCH_SECONDS)
                    self._since_fetch = 0
                if not self._stopping:
                    self._wire.pull(self._stage.arrived)
        except PServerError as error:
            self._fail(error)

    def _enough_sent(self) -> bool:
        return self._stopping or self._since_fetch >= self._lane.min_send_grad_num_before_recv
