"""The jobs of servers in one process, whose messages to one another arrive when a test delivers
them; and what they do and send, in words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pserver.errors import ServerLost
from pserver.job.job import Job
from pserver.job.program import InstalledProgram
from pserver.job_log.records import (
    Call,
    Consumed,
    Decided,
    Joined,
    Left,
    Loaded,
    LogSnapshot,
    Lost,
    Notice,
    Process,
    ProcessStep,
    Record,
    Staged,
    notices_of,
    records_of,
)
from pserver.membership.decisions import Decisions, Link
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import FollowRequest, Hello
from transpiler.plan.plan import Deployment

SAID = ("joined", "installed", "saved", "refused")  # events that commands tell

# ---- in words ----


def process(of: Process) -> str:
    """A trainer's number, and which process of that number it is: "1a"."""
    return f"{of.trainer}{of.incarnation}"


def step(of: ProcessStep) -> str:
    return f"{process(of.process)}/{of.step}"


def samples(ranges: Consumed) -> str:
    """Positions of epochs; the first epoch is not named."""
    found = [f"{a}-{b}" + (f" of epoch {epoch}" if epoch else "") for epoch, a, b in ranges]
    return ", ".join(found) or "none"


def notice(of: Notice) -> str:
    match of:
        case Staged():
            return f"staged {step(of.step)}{f', refused: {of.refused}' if of.refused else ''}"
        case Call():
            return f"ready for {of.kind} {of.number} of {process(of.process)}"
        case _:
            return f"silent {process(of.process)}: {of.text}"


def record(of: Record) -> str:
    match of.what:
        case Decided(_, steps, consumed, refused):
            used = [f", samples {samples(each)}" for each in consumed if each]
            refuses = [f", all refuse trainer {each}'s: {why}" for each, why in refused]
            said = f"decided {' '.join(map(step, steps))}{''.join([*used, *refuses])}"
        case Joined(who, steps):
            said = f"joined {process(who)}" + (f", after step {steps[0]}" if any(steps) else "")
        case Loaded():
            said = "other values are loaded"
        case Left(who, after):
            said = f"left {process(who)}" + (f", preempted after step {after}" if after else "")
        case Call(who, kind, number):
            said = f"{kind} {number} of {process(who)}"
        case Lost(who, text):
            said = f"lost {process(who)}: {text}"
    return f"record {of.number}: {said}"


def message(sender: int, data: bytes) -> str:
    """A message between servers."""
    if sender:
        return "; ".join(map(notice, notices_of(data)))
    if (standing := LogSnapshot.of(data)) is not None:
        return f"the log's state at record {standing.last}"
    numbers = [each.number for each in records_of(data)]
    if len(numbers) < 2:
        return f"record {numbers[0]}" if numbers else "no record"
    return f"records {numbers[0]} to {numbers[-1]}"


# ---- servers ----


class Server(Job):
    """A server's job.

    Args:
        says: called with each record that takes effect, and each event.
    """

    def __init__(self, says: Callable[[str], None], *args: Any, **kwargs: Any) -> None:
        self.says, self._told_lost = says, ""
        super().__init__(*args, **kwargs)
        add = self.lifecycle.events.add

        def added(kind: str, text: str) -> None:
            add(kind, text)
            if kind == "lost" and self._told_lost:  # a record has said why
                text = text.removeprefix(f"{self._told_lost}; ")
            if kind not in SAID:
                says(f"{kind}: {text}")

        self.lifecycle.events.add = added  # type: ignore[method-assign]

    def _begin_log(self, installed: InstalledProgram) -> None:
        recorded = installed.decisions.recorded

        def says(each: Record) -> None:
            recorded(each)
            self._told_lost = each.what.text if isinstance(each.what, Lost) else ""
            self.says(record(each))

        installed.decisions.recorded = says
        installed.leases._wait_seconds = 0.0  # who waits asks again
        super()._begin_log(installed)


class Network:
    """The link of server 1 to server 0, with the messages that are under way.

    Args:
        says: called with each message that is sent.

    Attributes:
        ends: of the link, by server.
    """

    def __init__(self, says: Callable[[str], None]) -> None:
        self._says = says
        self.ends: dict[int, Decisions] = {}
        self._under_way: dict[tuple[int, int], deque[Callable[[], None]]] = {}
        self._gone: set[int] = set()  # they receive nothing until they follow again

    def connect(self, server: int, end: Decisions) -> Link:
        """A server's end of its link."""
        self.ends[server] = end
        if server:
            last = end.last if end.resumes else None
            said = "follows" if last is None else f"follows again, from record {last}"
            self._send(server, 0, said, partial(self._follow, server, last))
        return _End(self, server, end)

    def _follow(self, server: int, last: int | None) -> None:
        self._gone.discard(server)
        self.ends[0].server_returned(server, partial(self.carry, 0, server), last)

    def carry(self, sender: int, receiver: int, data: bytes) -> None:
        """Takes a message."""

        def arrives() -> None:
            self.ends[receiver].received(sender, data)

        if receiver not in self._gone:
            self._send(sender, receiver, message(sender, data), arrives)

    def _send(self, sender: int, receiver: int, said: str, arrives: Callable[[], None]) -> None:
        self._says(f"{sender}->{receiver}: {said}")
        self._under_way.setdefault((sender, receiver), deque()).append(arrives)

    def deliver(self, sender: int, receiver: int, count: int) -> Iterator[Callable[[], None]]:
        """The first messages of those that are under way now; all of them with a count of 0."""
        queue = self._under_way.get((sender, receiver), deque())
        for _ in range(count or len(queue)):
            yield queue.popleft()

    def lose(self, server: int) -> None:
        """A server is gone, and with it what is under way from it and to it; the others notice."""
        del self.ends[server]
        for pair in [pair for pair in self._under_way if server in pair]:
            del self._under_way[pair]
        error = ServerLost(f"server {server} is gone")
        if server:
            self._gone.add(server)
            self.ends[0].server_lost(server, error)
        else:
            for follower in self.ends.values():
                follower.cut(error)


class _End:
    def __init__(self, network: Network, server: int, end: Decisions) -> None:
        self._network, self._server, self._end = network, server, end

    def send(self, data: bytes) -> None:
        if self._network.ends.get(self._server) is not self._end:
            return  # of a process that is gone
        self._network.carry(self._server, 0 if self._server else 1, data)

    def close(self) -> None:
        """Has nothing to end."""


@dataclass
class Links:
    """The methods that a server's job calls of its links."""

    network: Network
    server: int

    def connect(self, deployment: Deployment, decisions: Decisions, coordinator: str) -> Link:
        return self.network.connect(self.server, decisions)

    def follow(self, request: FollowRequest) -> str:
        raise NotImplementedError

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """No silence here."""
