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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pserver.errors import TrainerLost
from trainer.collective.member_groups import Member, MemberGroups, place_of
from trainer.collective.process_groups import ProcessGroups
from trainer.environment.environment import Connection
from transpiler.files import bounded_json

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

CPU = torch.device("cpu")
DONE = "-"  # begins what a trainer tells whose call has worked

log = logging.getLogger(__name__)


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
        own = Member(trainer, secrets.token_hex(8))
        self._clients, self._barrier, self._absent = clients, barrier, absent
        self._groups = MemberGroups(own, clients, connection, self._check)

    def told(self, text: str) -> dict[int, str]:
        """The texts of all present trainers, by trainer.

        Raises:
            PServerError: what has ended the job.
        """
        said = json.dumps([self._groups.own.incarnation, text])
        found = {
            t: bounded_json.loads(each)
            for t, each in self._barrier("values of all trainers", said).items()
        }
        self.is_past = self._past()
        self.members = tuple(Member(t, found[t][0]) for t in sorted(found))
        return {trainer: texts[1] for trainer, texts in sorted(found.items())}

    def place(self, trainer: int) -> int:
        """A trainer's place in the group.

        Raises:
            TrainerLost: it is not there.
        """
        return place_of(trainer, self.members)

    def run(self, begin: Callable[[Any], dist.Work], what: str) -> None:
        """Waits for an operation of the group of :attr:`members`.

        Args:
            begin: begins it; gets the process group.
            what: names it in messages.

        Raises:
            PServerError: one of them is gone, so that it has failed here.
        """
        groups = self.groups()
        group = groups.group("values", range(len(self.members)), CPU)
        groups.wait(groups.begin(lambda: begin(group), what), what, CPU)

    def groups(self) -> ProcessGroups:
        """The groups of just :attr:`members`, for operations of one's own between :meth:`told` and
        :meth:`confirmed`.

        Raises:
            PServerError: one of them is gone.
        """
        if self._groups.members != self.members:
            named = " ".join(each.incarnation for each in self.members)
            self._groups.bring_up(self.members, f"the group of {named}")
        groups = self._groups.groups
        assert groups is not None, "it has come up"
        return groups

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
        self._groups.close(failure)

    def _check(self) -> None:
        """Raises the error that ended the job, or that a member is gone."""
        for client in self._clients:
            client.check()
        gone = sorted({each.trainer for each in self.members} & set(self._absent()))
        if gone:
            raise TrainerLost(f"trainer {', '.join(map(str, gone))} is gone")
