"""The links of a job's coordinator, server 0, to the servers that follow it: the end that accepts.

A follower, as the coordinator sees it::

    (none) --Follow--> KNOWN --its stream--> LINKED --BYE--> (none)
                         |                     |--heartbeat timeout--> LOST
                         `--Follow of another incarnation: the later counts; LOST, and KNOWN anew

Its streams are served by threads of their transports.  The server's clock calls :meth:`tick`.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pserver.config import HEARTBEAT_TIMEOUT_SECONDS
from pserver.errors import (
    FingerprintMismatch,
    PServerError,
    Refused,
    ServerLost,
    UnknownSession,
    Unreachable,
)
from pserver.job_log.link import LinkEnd
from pserver.running_clock import RUNNING
from pserver.transport.stream import SequencedStream
from pserver.undone import or_undone
from pserver.wire_pb2 import FollowRequest, Hello, Kind

log = logging.getLogger(__name__)


def _nothing(server_index: int, last: int | None) -> None:
    """Does nothing: the default for ``joined``."""


@dataclass(slots=True, eq=False)
class _Follower:
    """One process of a following server; a later one of the same index takes its place.

    Attributes:
        end: of its link.
        incarnation: as it says in Follow; "" before one has asked.
        session: for its HELLO; "" before one has asked.
        linked: a stream of it was there.
        listens: messages to it are kept until it has heard them.
        last: where it follows again: the number of the last record that it has.
    """

    end: LinkEnd
    incarnation: str = ""
    session: str = ""
    linked: bool = False
    listens: bool = True
    last: int | None = None


class CoordinatorLinks:
    """Server 0's links to the other servers of its job.  Any thread may call it.

    Example::

        links = CoordinatorLinks(log.staged, job.lose_server)
        links.expect(plan.fingerprint(), servers=3)
        links.broadcast(record)

    Args:
        received: called with a server's index and each of its messages, once and in order for each
            server, in a thread for each.
        lost: called with a server's index, once for each of its processes that is silent for the
            heartbeat timeout, or whose place another one takes.  What was sent to it and not heard
            is dropped.  Nothing of that process is received afterwards.  It waits for ``received``:
            a caller of :meth:`tick` or :meth:`follow` holds no lock that ``received`` takes.
        joined: called with a server's index when a process of it has opened its first stream,
            before its first message; where it follows again, with the number of the last record
            that it has, otherwise with None.  From then on messages are sent to it; to the first
            process of each server also earlier ones.
        heartbeat_timeout_seconds: silence of a server after which it is lost.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        received: Callable[[int, bytes], None],
        lost: Callable[[int, PServerError], None],
        *,
        joined: Callable[[int, int | None], None] = _nothing,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        clock: Callable[[], float] = RUNNING,
    ) -> None:
        self._received, self._lost, self._joined = received, lost, joined
        self._timeout, self._clock = heartbeat_timeout_seconds, clock
        self._lock = threading.Lock()  # guards the two below; nothing blocks under it
        self._fingerprint = ""
        self._followers: dict[int, _Follower] = {}

    # ---- the job ----

    def expect(self, fingerprint: str, servers: int, again: bool = False) -> None:
        """From now on servers 1 to ``servers - 1`` of the plan with this fingerprint may follow;
        links of another job end.

        Args:
            again: they have followed another process of server 0, and nothing is sent to them
                before they follow this one.
        """
        self.close()
        with self._lock:
            self._fingerprint = fingerprint
            self._followers = {index: self._new(index) for index in range(1, servers)}
            for follower in self._followers.values():
                follower.listens = not again

    def close(self) -> None:
        """Ends all links; no server may follow until :meth:`expect`.  Harmless when called
        twice.
        """
        with self._lock:
            self._fingerprint = ""
            followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.end.say_bye()
            follower.end.end()

    def _new(self, index: int) -> _Follower:
        def received(message: bytes) -> None:
            self._received(index, message)

        return _Follower(LinkEnd(Kind.RECORD, received, self._clock))

    def _free(self, index: int) -> _Follower:
        """Frees the place of a server for another process of it.  The caller holds the lock."""
        free = self._followers[index] = self._new(index)
        free.listens = False
        return free

    # ---- the coordinator's messages ----

    def send(self, server_index: int, message: bytes) -> None:
        """Sends a message to one server, where it arrives once and in order.  It does not wait for
        that server: before it follows, and while its stream is broken, messages are kept.  To a
        server that is lost nothing is sent until another process of it has joined.

        After :meth:`close` it does nothing.

        Raises:
            ValueError: the plan has no such server that follows; or the message has more than 2 MB.
        """
        with self._lock:
            follower = self._followers.get(server_index)
            count = len(self._followers)
            heeded = follower is not None and follower.listens
        if follower is not None:
            if heeded:
                follower.end.send(message)
        elif count:
            raise ValueError(f"expected a server from 1 to {count}, got {server_index}")

    def broadcast(self, message: bytes) -> None:
        """Sends a message to every other server of the job; see :meth:`send`."""
        with self._lock:
            followers = [each for each in self._followers.values() if each.listens]
        for follower in followers:
            follower.end.send(message)

    # ---- followers ----

    def follow(self, request: FollowRequest) -> str:
        """The session of a server that wants to follow; "" while there is no job to follow.

        Raises:
            FingerprintMismatch: it runs another program.
            Refused: the plan has no such server that follows.
        """
        with self._lock:
            if not self._followers:
                return ""
            self._check(request.fingerprint, request.server_index)
            if not request.incarnation:
                raise Refused(f"server {request.server_index} does not say which start it is")
            follower = self._followers[request.server_index]
            if follower.incarnation == request.incarnation:
                return follower.session
            linked = follower.linked
            later = self._free(request.server_index) if linked else follower
            later.incarnation, later.session = request.incarnation, secrets.token_hex(16)
            later.last = request.last if request.HasField("last") else None
            session = later.session
        if linked:
            self._lose(request.server_index, follower, "another process has taken its place")
        return session

    def _check(self, fingerprint: str, index: int) -> None:
        if fingerprint != self._fingerprint:
            raise FingerprintMismatch(
                f"server {index} runs another program: expected the fingerprint "
                f"{self._fingerprint!r}, got {fingerprint!r}"
            )
        if index not in self._followers:
            raise Refused(
                f"expected a server from 1 to {len(self._followers)} to follow, got {index}"
            )

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        """Serves one stream of a follower, after its HELLO, until it ends.

        Raises:
            Unreachable: it broke, or a later one has taken its place.
            PServerError: the error that the peer is to be sent.
        """
        follower, index = self._linked(stream, hello), hello.server_index
        end = follower.end
        try:
            end.attach(stream, hello.stream or 1)
            while (header := end.next_frame(stream)) is not None:
                if header.kind == Kind.BYE:
                    self._left(index, follower)
                    return
                if header.kind not in (Kind.STAGED, Kind.PROBE):
                    raise Refused(f"expected STAGED, PROBE or BYE, got kind {header.kind}")
                end.receive(stream, header)
                if header.kind == Kind.PROBE:
                    end.probe()
            raise Unreachable("it ended without BYE")
        except Unreachable:
            with self._lock:
                gone = self._followers.get(index) is not follower
            if not gone:  # otherwise that was said already
                raise
        finally:
            end.detach(stream)

    def _linked(self, stream: SequencedStream, hello: Hello) -> _Follower:
        """The follower that a stream belongs to."""
        index = hello.server_index
        with self._lock:
            self._check(hello.fingerprint, index)
            follower = self._followers[index]
            if not follower.session or not secrets.compare_digest(
                follower.session.encode(), hello.session.encode()
            ):
                raise UnknownSession(f"this session of server {index} is not known here")
            follower.end.last_heard = self._clock()
            before, first = follower.listens, not follower.linked
            follower.linked = follower.listens = True

        def unlinked() -> None:
            follower.linked, follower.listens = False, before

        if first:
            log.debug("server %d follows, over %s", index, stream.transport)
            with or_undone(unlinked):  # ``joined`` is called again for its next stream
                self._joined(index, follower.last)
        return follower

    def _left(self, index: int, follower: _Follower) -> None:
        """Frees the place of a follower that has sent BYE."""
        with self._lock:
            if self._followers.get(index) is follower:
                self._free(index)

    def tick(self) -> None:
        """Loses the servers that have been silent for longer than the heartbeat timeout.

        The server's clock thread calls it a few times a second.
        """
        with self._lock:
            silent = [
                (index, follower)
                for index, follower in self._followers.items()
                if follower.linked and self._clock() - follower.end.last_heard > self._timeout
            ]
            for index, _ in silent:
                self._free(index)
        for index, follower in silent:
            self._lose(index, follower, f"it has not been heard for {self._timeout:g} s")

    def _lose(self, index: int, follower: _Follower, why: str) -> None:
        follower.end.end()
        follower.end.wait_handed_out()
        log.warning("server %d follows no more: %s", index, why)
        self._lost(index, ServerLost(f"server {index}: {why}"))
