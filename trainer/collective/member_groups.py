"""Process groups of those trainers of a job with servers that are there, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pserver.config import split_endpoint
from pserver.errors import TimedOut, TrainerLost
from pserver.polling import poll
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, own_address, rendezvous
from trainer.environment.environment import Connection

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

NOTHING: Mapping[str, str] = MappingProxyType({})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A process that is there.

    Attributes:
        trainer: its number.
        incarnation: random, new for each start of the process.
    """

    trainer: int
    incarnation: str


class MemberGroups:
    """Brings process groups up, of which this trainer is a member.

    Args:
        own: this trainer.
        clients: the servers.
        connection: timeouts.
        check: called while it waits; raises what should end the wait.

    Attributes:
        own: this trainer.
        members: of the present group, in the order of their numbers; none: there is no group.
        groups: of these.
    """

    def __init__(
        self,
        own: Member,
        clients: Sequence[Client],
        connection: Connection,
        check: Callable[[], None],
    ) -> None:
        self.own, self._clients, self._check = own, clients, check
        self._connection = connection
        self.members: tuple[Member, ...] = ()
        self.groups: ProcessGroups | None = None

    def bring_up(
        self, members: Sequence[Member], topic: str, metadata: Mapping[str, str] = NOTHING
    ) -> None:
        """Brings the group of these members up, in the place of the present one; the first of them
        serves the store.

        Args:
            members: in the order of their numbers, this trainer among them.
            topic: of this group; the same on all, and never used before.
            metadata: must be the same on all.

        Raises:
            PServerError: one of them is gone, or has not come.
        """
        self.close("the trainers are others now" if self.members else "")
        self.groups = self._met(members, topic, metadata)
        self.members = tuple(members)
        log.info("a process group of %d trainers", len(members))

    def _met(
        self, members: Sequence[Member], topic: str, metadata: Mapping[str, str]
    ) -> ProcessGroups:
        timeout = self._clients[0].heartbeat_timeout_seconds
        connection = replace(self._connection, heartbeat_timeout_seconds=timeout)
        host, rank = own_address(self._clients[0].endpoint), list(members).index(self.own)
        connection.check_collective(host)
        # no barrier: one that comes meanwhile has no part in it
        if rank == 0:
            store = connect_store(host, 0, 0, connection)
            self._clients[0].agree(topic, f"{host}:{store.port}")
        else:
            endpoint = self._endpoint(members[0], topic, connection.start_timeout_seconds)
            store = connect_store(
                *split_endpoint(endpoint), rank, connection, meanwhile=self._check
            )
        peers = rendezvous(
            store,
            rank,
            [f"as trainer {member.trainer}" for member in members],
            connection,
            metadata=metadata,
            host=host,
            meanwhile=self._check,
            ends_process=False,
        )
        return ProcessGroups(peers, self._check)

    def _endpoint(self, first: Member, topic: str, seconds: float) -> str:
        """Where the first of the members serves the store."""
        what = f"trainer {first.trainer}'s endpoint"
        for _ in poll(log, lambda: f"waiting for {what}", seconds, 0.1):
            if endpoint := self._clients[0].agree(topic, ""):
                return endpoint
            self._check()
        raise TimedOut(f"{what} was not told within {seconds:g} s")

    def place(self, trainer: int) -> int:
        """A trainer's place in the group.

        Raises:
            TrainerLost: it is not there.
        """
        return place_of(trainer, self.members)

    def close(self, failure: str = "") -> None:
        """Lets the group go."""
        groups, self.groups, self.members = self.groups, None, ()
        if groups is not None:
            groups.close(failure)


def place_of(trainer: int, members: Sequence[Member]) -> int:
    """A trainer's place among members.

    Raises:
        TrainerLost: it is not there.
    """
    for place, member in enumerate(members):
        if member.trainer == trainer:
            return place
    raise TrainerLost(f"trainer {trainer} is not there any more")
