"""The spans of one request of a channel: how long its parts took."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from pserver.onlookers import onlooker
from pserver.tracing.spans import SPANS, Fact, now

if TYPE_CHECKING:
    from pserver.client.replies import Reply


class RequestTimes:
    """When a request of one channel began, was complete, and when its answer came.

    A step becomes three spans, one behind the other::

        push    from its first gradient until its commit leaves
        wait    until the first new value arrives, or the answer without values
        pull    until all have arrived

    Any other request is one span, of the name that is given.

    Args:
        track: of the channel: "to server 0, lane 1".
        facts: the server, and the lane, where it is one's.

    Attributes:
        name: of a request that is no step.
    """

    def __init__(self, track: str, facts: dict[str, Fact]) -> None:
        self.name = "request"
        self._track, self._facts = track, facts
        self._began = now()
        self._committed = self._arrived = 0.0

    @onlooker("the trace")
    def committed(self, step: int) -> None:
        """The request is a step, and its commit leaves."""
        self._facts = {**self._facts, "step": step}
        self._committed = now()

    @onlooker("the trace")
    def arrives(self) -> None:
        """A value arrives."""
        self._arrived = self._arrived or now()

    @onlooker("the trace")
    def answered(self, reply: Future[Reply]) -> None:
        """The request is over."""
        ended, add = now(), SPANS.add
        if not SPANS.on:
            return
        if not self._committed:
            add(self.name, self._began, ended, self._track, **self._facts)
            return
        arrived = max(self._arrived, self._committed) if self._arrived else ended
        add("push", self._began, self._committed, self._track, **self._facts)
        add("wait", self._committed, arrived, self._track, **self._facts)
        if arrived < ended:
            add("pull", arrived, ended, self._track, **self._facts)
