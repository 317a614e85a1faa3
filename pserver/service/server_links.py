"""A server's link to the other servers of its job: server 0 accepts, the others dial."""

from __future__ import annotations

from functools import partial

from pserver.config import ServerConfig
from pserver.errors import UnknownSession
from pserver.job.decisions import Decisions, Link
from pserver.link.coordinator_links import CoordinatorLinks
from pserver.link.follower_link import FollowerLink
from pserver.security.access import Access
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import FollowRequest, Hello
from transpiler.plan.plan import Deployment


class Followers:
    """The coordinator's end for one job: what it says goes to all other servers."""

    def __init__(self, links: CoordinatorLinks) -> None:
        self._links = links

    def send(self, data: bytes) -> None:
        """To all of them; returns at once."""
        self._links.broadcast(data)

    def close(self) -> None:
        """The job is over."""
        self._links.close()


class ServerLinks:
    """Connects the servers of each job that this one has.  Any thread may call it.

    Args:
        config: for the timeouts.
        access: what this server proves to another, and asks of it.
    """

    def __init__(self, config: ServerConfig, access: Access) -> None:
        self._config, self._access = config, access
        self._links: CoordinatorLinks | None = None

    def connect(self, deployment: Deployment, decisions: Decisions, coordinator: str) -> Link:
        """Server 0 expects the others from here on; another one dials server 0.

        Args:
            deployment: of a job of several servers.
            decisions: gets what comes, and is told where a link has ended.
            coordinator: server 0's control endpoint.
        """
        config, plan, index = self._config, deployment.plan, deployment.server_index
        assert index is not None, "a server's deployment"
        timeout = config.heartbeat_timeout_seconds
        if index == 0:

            def joined(server: int, last: int | None) -> None:
                decisions.server_returned(server, partial(links.send, server), last)

            links = self._links = CoordinatorLinks(
                decisions.received,
                decisions.server_lost,
                joined=joined,
                heartbeat_timeout_seconds=timeout,
            )
            links.expect(plan.fingerprint(), plan.servers, bool(decisions.away))
            return Followers(links)
        return FollowerLink(
            coordinator,
            index,
            plan.fingerprint(),
            self._access,
            partial(decisions.received, 0),
            decisions.cut,
            last=decisions.last if decisions.resumes else None,
            returns=decisions.awaits,
            heartbeat_timeout_seconds=timeout,
            start_timeout_seconds=config.start_timeout_seconds,
        )

    def follow(self, request: FollowRequest) -> str:
        """The session of a server that wants to follow; "" while there is no job to follow.

        Raises:
            FingerprintMismatch: it runs another program.
            Refused: the plan has no such server that follows.
        """
        return "" if self._links is None else self._links.follow(request)

    def serve(self, stream: SequencedStream, hello: Hello) -> None:
        """Serves a following server's stream until it ends.

        Raises:
            UnknownSession: this server coordinates no job.
            PServerError: the error that the peer is to be sent.
        """
        if self._links is None:
            raise UnknownSession("this server coordinates no job now")
        self._links.serve(stream, hello)

    def tick(self) -> None:
        """The server's clock calls it a few times a second."""
        if self._links is not None:
            self._links.tick()
