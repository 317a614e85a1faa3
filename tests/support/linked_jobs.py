"""The jobs of two servers in one process, whose log travels in queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pserver.errors import ServerLost
from pserver.membership.decisions import Decisions, Link
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import FollowRequest, Hello
from transpiler.plan.plan import Deployment


class Wire:
    """Carries what servers say to each other, in order, in a thread; it stands for
    :mod:`pserver.job_log`.
    """

    def __init__(self) -> None:
        self._ends: dict[int, Decisions] = {}
        self._kept: dict[int, list[bytes]] = {1: []}  # for servers that were not there yet
        self._follows: Decisions | None = None  # server 1's end, while server 0 is not there
        self.deaf = False  # server 1 hears nothing of server 0
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def of(self, server: int) -> Links:
        """The links of one start of a server."""
        return Links(self, server)

    def call(self, call: Callable[[], None]) -> None:
        """Later, after what was said before."""
        self._calls.put(call)

    def begin(self, server: int, end: Decisions) -> None:
        """A server's end is there."""

        def begins() -> None:
            self._ends[server] = end
            follower = end if server else self._follows
            if 0 in self._ends and follower is not None:
                last = follower.last if follower.resumes else None
                self._ends[0].server_returned(1, lambda data: follower.received(0, data), last)
                self._follows = None
            elif server:
                self._follows = end
            for data in self._kept.pop(server, []):
                end.received(1 - server, data)

        self.call(begins)

    def carry(self, sender: int, end: Decisions, server: int, data: bytes) -> None:
        """A message of one end to a server."""

        def arrives() -> None:
            if self._ends.get(sender) is not end:
                return  # of a process that is gone
            if server and self.deaf:
                return
            if server in self._kept:
                self._kept[server].append(data)
            elif server in self._ends:
                self._ends[server].received(sender, data)

        self.call(arrives)

    def lose(self, server: int) -> None:
        """The other server notices that one is lost."""

        def lost() -> None:
            del self._ends[server]
            error = ServerLost(f"server {server} is gone")
            if server:
                self._ends[0].server_lost(server, error)
            else:
                self.deaf, self._kept[0] = False, []
                self._ends[1].cut(error)

        self.call(lost)

    def end(self) -> None:
        """Nothing is delivered any more."""
        self._calls.put(None)
        self._thread.join()

    def _deliver(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class Links:
    """What a job asks of the links of its server."""

    def __init__(self, wire: Wire, server: int) -> None:
        self._wire, self._server = wire, server

    def connect(self, deployment: Deployment, decisions: Decisions, coordinator: str) -> Link:
        """Of two servers."""
        wire, own = self._wire, self._server
        wire.begin(own, decisions)
        return _End(lambda data: wire.carry(own, decisions, 0 if own else 1, data))

    def follow(self, request: FollowRequest) -> str:
        """Not asked here."""
        raise NotImplementedError

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        """Not asked here."""
        raise NotImplementedError

    def tick(self) -> None:
        """No silence here."""


class _End:
    def __init__(self, say: Callable[[bytes], None]) -> None:
        self.send = say

    def close(self) -> None:
        """Has nothing to end."""
