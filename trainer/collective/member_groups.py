"""Process groups of the live trainers of a job with servers, one after the other."""

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
class TrainerProcess:
    """The process of a live trainer.

    Attributes:
        trainer: its number.
        incarnation: random, new for each start of the process.
    """

    trainer: int
    incarnation: str


class MemberGroups:
    """Brings up process groups with this trainer as a member.

    Args:
        own: this trainer.
        clients: the servers.
        connection: timeouts.
        check: called while it waits; an exception that it raises ends the wait.

    Attributes:
        own: this trainer.
        members: of the present group, in the order of their numbers; empty without a group.
        groups: of the members.
    """

    def __init__(
        self,
        own: TrainerProcess,
        clients: Sequence[Client],
        connection: Connection,
        check: Callable[[], None],
    ) -> None:
        self.own, self._clients, self._check = own, clients, check
        self._connection = connection
        self.members: tuple[TrainerProcess, ...] = ()
        self.groups: ProcessGroups | None = None

    def bring_up(
        self, members: Sequence[TrainerProcess], topic: str, metadata: Mapping[str, str] = NOTHING
    ) -> None:
        """Brings up the group of these members, in place of the present one; the first member
        serves the store.

        Args:
            members: in the order of their numbers, this trainer among them.
            topic: of this group; the same on all, and never used before.
            metadata: must be the same on all.

        Raises:
            PServerError: a member is lost, has left, or has not joined.
        """
        self.close("the members have changed" if self.members else "")
        self.groups = self._met(members, topic, metadata)
        self.members = tuple(members)
        log.debug("a process group of %d trainers", len(members))

    def _met(
        self, members: Sequence[TrainerProcess], topic: str, metadata: Mapping[str, str]
    ) -> ProcessGroups:
        timeout = self._clients[0].heartbeat_timeout_seconds
        connection = replace(self._connection, heartbeat_timeout_seconds=timeout)
        host, rank = own_address(self._clients[0].endpoint), list(members).index(self.own)
        connection.check_collective(host)
        # no barrier: a trainer that joins meanwhile is not a member
        if rank == 0:
            store = connect_store(host, 0, 0, connection)
            self._clients[0].meetings.agree(topic, f"{host}:{store.port}")
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

    def _endpoint(self, first: TrainerProcess, topic: str, seconds: float) -> str:
        """The endpoint at which the first member serves the store."""
        what = f"trainer {first.trainer}'s endpoint"
        for _ in poll(log, lambda: f"waiting for {what}", seconds, 0.1):
            if endpoint := self._clients[0].meetings.agree(topic):
                return endpoint
            self._check()
        raise TimedOut(f"{what} was not received within {seconds:g} s")

    def place(self, trainer: int) -> int:
        """A trainer's place in the group.

        Raises:
            TrainerLost: it is not a member.
        """
        return place_of(trainer, self.members)

    def close(self, failure: str = "") -> None:
        """Releases the group."""
        groups, self.groups, self.members = self.groups, None, ()
        if groups is not None:
            groups.close(failure)


def place_of(trainer: int, members: Sequence[TrainerProcess]) -> int:
    """A trainer's place among the members.

    Raises:
        TrainerLost: it is not a member.
    """
    for place, member in enumerate(members):
        if member.trainer == trainer:
            return place
    raise TrainerLost(f"trainer {trainer} is not among the live trainers")
