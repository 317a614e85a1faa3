"""Servers that coordinate a job or follow in it, without the job: both ends of a link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any, cast

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.job_log.follower import FollowerLink
from pserver.job_log.leader import CoordinatorLinks
from pserver.membership.decisions import Links
from pserver.security import tokens
from pserver.security.access import OPEN, Access
from pserver.security.keys import Keys
from pserver.security.tokens import Secret
from pserver.transport.registry import TRANSPORTS
from tests.checker.trial import TwinServer
from tests.support.cluster_keys import key_folder
from tests.support.load import patiently, scaled

SECONDS = 10.0  # the deadline of every wait here
PLAN = "a plan"


class Coordinator:
    """A server with links to two others, of the transports that there are.

    Attributes:
        links: its links.
        received: what came, with the index of its server.
        joined: the indices of servers, as they came.
        lasts: of each the last record that it has; None: it does not follow again.
        lost: the indices of servers, with an error.
    """

    def __init__(self, **config: Any) -> None:
        self.received: Queue[tuple[int, bytes]] = Queue()
        self.joined: Queue[int] = Queue()
        self.lasts: list[int | None] = []
        self.lost: Queue[tuple[int, PServerError]] = Queue()
        self.server = TwinServer(
            ServerConfig(**{"heartbeat_timeout_seconds": scaled(SECONDS), **config})
        )
        self.links = self._made()

    def new_links(self) -> CoordinatorLinks:
        """As another process of this server has them."""
        links = self._made()
        self.server.job.links = cast(Links, links)  # without the job's log
        return links

    def _made(self) -> CoordinatorLinks:
        return CoordinatorLinks(
            lambda index, message: self.received.put((index, message)),
            lambda index, error: self.lost.put((index, error)),
            joined=self._joins,
            heartbeat_timeout_seconds=self.server.config.heartbeat_timeout_seconds,
        )

    def __enter__(self) -> Coordinator:
        self.server.start()
        self.server.job.links = cast(Links, self.links)  # without the job's log
        self.links.expect(PLAN, 3)
        return self

    def __exit__(self, *_: object) -> None:
        self.links.close()
        self.server.stop()

    def _joins(self, index: int, last: int | None) -> None:
        self.lasts.append(last)
        self.joined.put(index)

    def hear(self, count: int) -> list[tuple[int, bytes]]:
        """The next messages."""
        return [
            patiently(lambda left: self.received.get(timeout=left), SECONDS) for _ in range(count)
        ]


class Follower:
    """A link to a coordinator.

    Attributes:
        link: the link.
        received: what came.
        lost: what ended it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        index: int = 1,
        *,
        plan: str = PLAN,
        access: Access = OPEN,
        transports: Sequence[str] = ("inprocess",),
        endpoint: str = "",
        last: int | None = None,
        returns: bool = False,
        **timeouts: float,
    ) -> None:
        self.received: Queue[bytes] = Queue()
        self.lost: Queue[PServerError] = Queue()
        self.link = FollowerLink(
            endpoint or coordinator.server.endpoint,
            index,
            plan,
            access,
            self.received.put,
            self.lost.put,
            last=last,
            returns=returns,
            transports=transports,
            **{
                "heartbeat_timeout_seconds": scaled(SECONDS),
                "start_timeout_seconds": scaled(SECONDS),
                **timeouts,
            },
        )

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        for thread in self.link._threads:
            if thread.ident is not None:
                thread.join(scaled(SECONDS))

    def hear(self, count: int) -> list[bytes]:
        """The next messages."""
        return [
            patiently(lambda left: self.received.get(timeout=left), SECONDS) for _ in range(count)
        ]


def access_of(kind: str, folder: Path) -> tuple[dict[str, str], Access]:
    """The settings of a coordinator that is "open", asks for a "secret" or for "keys", and what a
    following server of the same job has.
    """
    if kind == "open":
        return {}, OPEN
    if kind == "secret":
        secret = Secret.make()
        path = folder / "operator.token"
        tokens.write(path, secret)
        return {"token_file": str(path)}, Access(secret)
    keys = str(key_folder() / "a")
    return {"keys": keys}, Access(keys=Keys(keys, ("server",)))


EVERY_TRANSPORT = tuple(TRANSPORTS)
