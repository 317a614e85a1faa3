"""The spans of one stream: what its trainer's requests take on the server."""

from __future__ import annotations

from pserver.onlookers import onlooker
from pserver.tracing.spans import Fact, Spans, now
from pserver.wire_pb2 import Frame, Kind

OF_STEPS = (Kind.GRADIENT, Kind.ROWS, Kind.ASSIGN, Kind.COMMIT)


class StreamTimes:
    """When a step began to arrive on a stream, and what answers took.

    One thread uses it, while a trace is under way.

    Args:
        spans: of the server.
        trainer, lane: whose stream it is.
    """

    def __init__(self, spans: Spans, trainer: int, lane: int) -> None:
        self.spans = spans
        self._facts: dict[str, Fact] = {"trainer": trainer, "lane": lane}
        self._step, self._since = 0, 0.0  # of what arrives
        self._answers = "answer"

    @onlooker("the trace")
    def got(self, header: Frame) -> None:
        """A frame arrives, or has arrived: a step's first one begins what its COMMIT ends."""
        if header.kind == Kind.PULL:
            self._answers = "pull"
        if header.kind not in OF_STEPS or not header.step:
            return
        if header.step != self._step:
            self._step, self._since = header.step, now()
        if header.kind == Kind.COMMIT:
            self._add("receive", self._since, header.step)
            self._step, self._answers = 0, "answer"

    @onlooker("the trace")
    def answered(self, since: float, step: int) -> None:
        """The answer to a step, or to a pull, has been on its way since then."""
        self._add(self._answers, since, step)

    def _add(self, name: str, since: float, step: int) -> None:
        self.spans.add(name, since, now(), **self._facts, step=step)
