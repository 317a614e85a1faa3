"""A process group of those trainers of a job with servers that are there.

[Note: a group that outlives its members]  The trainers of a job come and go, and a process group
cannot: when a member dies its operations fail, on some of the others sooner than on the rest.  So
each call that all trainers make goes through three steps::

    told        a barrier on server 0: who is there, and what each one tells
    run         operations of a group of just these, brought up anew where they are others
    confirmed   a barrier: has it worked for everyone that is left?  If not, all do it again

A trainer that dies in the middle takes its part away with it, unless all others have the result
already: then it counts.  Either way all of them go on with the same values.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pserver.config import split_endpoint
from pserver.errors import TimedOut, TrainerLost
from pserver.polling import poll
from trainer.collective.own_address import own_address
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, rendezvous
from trainer.environment.connection import Connection

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

CPU = torch.device("cpu")
DONE = "-"  # begins what a trainer tells whose call has worked

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


class ElasticGroup:
    """One trainer's part in what the trainers that are there do together; see [Note: a group that
    outlives its members].  The script's thread uses it.

    Args:
        trainer: which one this is.
        clients: the servers.
        barrier: of server 0: takes a name and this trainer's text, and gives what the trainers tell
            that are there; those that tell nothing are left out.
        absent: gives the trainers that are gone, as far as this one has heard.
        connection: timeouts.
        past: whether the others had passed the last barrier before this trainer came.

    Attributes:
        members: the trainers that were there at the last call of :meth:`told`.
        is_past: they have made this call before this trainer came.
    """

    def __init__(
        self,
        trainer: int,
        clients: Sequence[Client],
        barrier: Callable[[str, str], dict[int, str]],
        absent: Callable[[], Collection[int]],
        connection: Connection,
        past: Callable[[], bool] = lambda: False,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.is_past, self._past = False, past
        self.result = ""
        self._own = Member(trainer, secrets.token_hex(8))
        self._clients, self._barrier, self._absent = clients, barrier, absent
        self._connection = connection
        self._grouped: tuple[Member, ...] = ()
        self._groups: ProcessGroups | None = None

    def told(self, text: str) -> dict[int, str]:
        """What each trainer that is there tells, by trainer.

        Raises:
            PServerError: what has ended the job.
        """
        said = json.dumps([self._own.incarnation, text])
        found = {
            t: json.loads(each) for t, each in self._barrier("values of all trainers", said).items()
        }
        self.is_past = self._past()
        self.members = tuple(Member(t, found[t][0]) for t in sorted(found))
        return {trainer: texts[1] for trainer, texts in sorted(found.items())}

    def place(self, trainer: int) -> int:
        """A trainer's place in the group.

        Raises:
            TrainerLost: it is not there.
        """
        for place, member in enumerate(self.members):
            if member.trainer == trainer:
                return place
        raise TrainerLost(f"trainer {trainer} is not there any more")

    def run(self, begin: Callable[[Any], dist.Work], what: str) -> None:
        """Waits for an operation of the group of :attr:`members`.

        Args:
            begin: begins it; gets the process group.
            what: names it in messages.

        Raises:
            PServerError: one of them is gone, so that it has failed here.
        """
        if self._groups is None or self._grouped != self.members:
            self._regroup()
        assert self._groups is not None, "it has come up"
        group = self._groups.group("values", range(len(self.members)), CPU)
        self._groups.wait(self._groups.begin(lambda: begin(group), what), what, CPU)

    def confirmed(self, failure: str, result: str = "") -> bool:
        """Whether what ran since :meth:`told` has worked for all that are left.  Afterwards
        :attr:`result` is what one of them says that it has made.

        Args:
            failure: why it has not, here; "": it has.
            result: what it has made; "": that is not told.

        Raises:
            PServerError: what has ended the job.
        """
        said = failure or DONE + result
        found = self._barrier("values of all trainers, confirmed", said)
        failed = sorted(trainer for trainer, text in found.items() if not text.startswith(DONE))
        self.result = max((text[len(DONE) :] for text in found.values()), default="")
        if failed:
            first = found[failed[0]]
            log.warning("a call that all trainers make is made again: %s", first)
            self.close(first)
        return not failed

    def close(self, failure: str = "") -> None:
        """Lets the group go."""
        groups, self._groups, self._grouped = self._groups, None, ()
        if groups is not None:
            groups.close(failure)

    def _regroup(self) -> None:
        """Brings the group of :attr:`members` up; the first of them serves the store."""
        self.close("the trainers are others now" if self._groups is not None else "")
        rank, size = self.place(self._own.trainer), len(self.members)
        timeout = self._clients[0].heartbeat_timeout_seconds
        connection = replace(self._connection, heartbeat_timeout_seconds=timeout)
        host = own_address(self._clients[0].endpoint)
        connection.check_collective(host)
        store = connect_store(host, 0, 0, connection) if rank == 0 else None
        # no barrier: one that comes meanwhile has no part in it
        topic = f"the group of {' '.join(each.incarnation for each in self.members)}"
        if store is not None:
            self._clients[0].agree(topic, f"{host}:{store.port}")
        else:
            endpoint = self._endpoint(topic, connection.start_timeout_seconds)
            store = connect_store(
                *split_endpoint(endpoint), rank, connection, meanwhile=self._check
            )
        peers = rendezvous(
            store,
            rank,
            [f"as trainer {member.trainer}" for member in self.members],
            connection,
            host=host,
            meanwhile=self._check,
            ends_process=False,
        )
        log.info("a process group of %d trainers", size)
        self._groups, self._grouped = ProcessGroups(peers, self._check), self.members

    def _endpoint(self, topic: str, seconds: float) -> str:
        """Where the first of the members serves the store."""
        first = self.members[0].trainer
        for _ in poll(log, lambda: f"waiting for trainer {first}'s endpoint", seconds, 0.1):
            if endpoint := self._clients[0].agree(topic, ""):
                return endpoint
            self._check()
        raise TimedOut(f"trainer {first} has told no endpoint within {seconds:g} s")

    def _check(self) -> None:
        """Raises what has ended the job, or that a member is gone."""
        for client in self._clients:
            client.check()
        gone = sorted({each.trainer for each in self.members} & set(self._absent()))
        if gone:
            raise TrainerLost(f"trainer {', '.join(map(str, gone))} is gone")
