"""A server's part in traces: its own spans, and those that trainers leave for trainer 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from pserver.errors import Refused
from pserver.telemetry.trace import MOST_PARTS, PART_BYTES, Recording, Spans, clock_ns, parts_of
from pserver.wire_pb2 import TraceAction, TraceReply, TraceRequest

MOST_LEFT = 2**28  # bytes that trainers leave here at a time


class JobTrace:
    """The present trace of a job on one server.  Any thread may call it.

    Traces of a run of a job are numbered, and the trainers' counts agree, because each runs the
    same script.
    Data of another trace than the present one is neither taken nor given.

    Attributes:
        spans: what this server does, while a trace is under way.
    """

    def __init__(self) -> None:
        self.spans = Spans()
        self._lock = threading.Lock()  # guards all below
        self._run, self._number = "", 0
        self._own: list[bytes] = []  # this server's recording in parts, once it has ended
        self._left: dict[int, dict[int, bytes]] = {}  # by trainer and index: parts
        self._parts: dict[int, int] = {}  # by trainer: how many there are
        self._actions: Mapping[int, Callable[[int, int, TraceRequest], TraceReply]] = {
            TraceAction.TRACE_CLOCK: lambda *_: TraceReply(),
            TraceAction.TRACE_BEGIN: self._begin,
            TraceAction.TRACE_LEAVE: self._leave,
            TraceAction.TRACE_READ: self._read,
            TraceAction.TRACE_END: self._end,
        }

    def forget(self) -> None:
        """Forgets the trace: another job begins."""
        with self._lock:
            self.spans.end()
            self._restart("", 0)

    def _restart(self, run: str, number: int) -> None:
        self._run, self._number = run, number
        self._own, self._left, self._parts = [], {}, {}

    def answer(self, trainer: int, server: int, run: str, request: TraceRequest) -> TraceReply:
        """Answers a call.

        Args:
            trainer: the caller.
            server: this one's index.
            run: of the job.

        Raises:
            Refused: a part is too large, or does not belong to the present trace; or the action is
                unknown.
        """
        action = self._actions.get(request.action)
        if action is None:
            raise Refused(f"Trace: expected a known action, got {request.action}")
        with self._lock:
            if run != self._run:
                self.spans.end()
                self._restart(run, 0)
            reply = action(trainer, server, request)
        reply.clock_ns = clock_ns()
        return reply

    def _begin(self, trainer: int, server: int, request: TraceRequest) -> TraceReply:
        if request.number > self._number:
            self._restart(self._run, request.number)
            self.spans.begin()
        return TraceReply()

    def _leave(self, trainer: int, server: int, request: TraceRequest) -> TraceReply:
        if request.number != self._number:
            raise Refused(f"trace {request.number} is over here: this is trace {self._number}")
        if not (0 < request.parts <= MOST_PARTS and request.index < request.parts):
            raise Refused(
                f"expected a part of up to {MOST_PARTS}, got part {request.index} of "
                f"{request.parts}"
            )
        held = sum(len(part) for left in self._left.values() for part in left.values())
        if len(request.part) > PART_BYTES or held + len(request.part) > MOST_LEFT:
            raise Refused(
                f"expected up to {PART_BYTES} bytes in a part and {MOST_LEFT} in all, got "
                f"{len(request.part)} behind {held}"
            )
        self._left.setdefault(trainer, {})[request.index] = request.part
        self._parts[trainer] = request.parts
        return TraceReply()

    def _read(self, trainer: int, server: int, request: TraceRequest) -> TraceReply:
        left = self._left.get(request.trainer, {})
        parts = self._parts.get(request.trainer, 0)
        if request.number != self._number or not parts or len(left) < parts:
            return TraceReply()
        return _part([left[index] for index in range(parts)], request)

    def _end(self, trainer: int, server: int, request: TraceRequest) -> TraceReply:
        if trainer != 0 or request.number != self._number:
            raise Refused(f"trainer 0 ends the present trace, {self._number}")
        if not self._own:
            self.spans.end()
            spans, dropped = self.spans.drain()
            self._own = parts_of(Recording("server", server, spans, dropped).to_bytes())
        return _part(self._own, request)


def _part(parts: list[bytes], request: TraceRequest) -> TraceReply:
    if request.index >= len(parts):
        raise Refused(f"expected a part below {len(parts)}, got {request.index}")
    return TraceReply(parts=len(parts), part=parts[request.index])
