"""A process group of the live trainers of a job with servers.

[Note: a group that outlives its members]  The trainers of a job join and leave, but a process group
has fixed members: when one dies its operations fail, on some of the others sooner than on the rest.
So each call that all trainers make has three steps::

    gather_texts   a barrier on server 0: the live trainers, and the text of each
    run            operations of a group of just these, brought up anew if they have changed
    confirmed      a barrier: if an operation has failed on a live trainer, all repeat the call

If a trainer dies in the middle, its part is lost, unless all others have the result already: then
the result counts.  Either way all of them continue with the same values.
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
from trainer.collective.member_groups import MemberGroups, TrainerProcess, place_of
from trainer.collective.process_groups import ProcessGroups
from trainer.environment.environment import Connection
from transpiler.files import bounded_json

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

CPU = torch.device("cpu")
DONE = "-"  # begins the text of a trainer whose call has worked

log = logging.getLogger(__name__)


class ElasticGroup:
    """One trainer's part in the collective calls of the live trainers; see [Note: a group that
    outlives its members].  The script's thread uses it.

    Args:
        trainer: this trainer's number.
        clients: of the servers.
        barrier: of server 0: takes a name and this trainer's text, and gives the texts of the live
            trainers; trainers that sent none are left out.
        absent: gives the trainers that are not live, as far as this one knows.
        connection: timeouts.
        past: tells whether the others had passed the last barrier before this trainer joined.

    Attributes:
        members: the live trainers at the last call of :meth:`gather_texts`.
        is_past: whether the others made this call before this trainer joined.
        result: the result that a trainer has reported to :meth:`confirmed`; "" if none has.
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
        self.members: tuple[TrainerProcess, ...] = ()
        self.is_past, self._past = False, past
        self.result = ""
        own = TrainerProcess(trainer, secrets.token_hex(8))
        self._clients, self._barrier, self._absent = clients, barrier, absent
        self._groups = MemberGroups(own, clients, connection, self._check)

    def gather_texts(self, text: str) -> dict[int, str]:
        """Exchanges texts: gives those of all live trainers, by trainer.

        Raises:
            PServerError: the job has failed.
        """
        said = json.dumps([self._groups.own.incarnation, text])
        found = {
            t: bounded_json.loads(each)
            for t, each in self._barrier("values of all trainers", said).items()
        }
        self.is_past = self._past()
        self.members = tuple(TrainerProcess(t, found[t][0]) for t in sorted(found))
        return {trainer: texts[1] for trainer, texts in sorted(found.items())}

    def place(self, trainer: int) -> int:
        """A trainer's place in the group.

        Raises:
            TrainerLost: it is not live.
        """
        return place_of(trainer, self.members)

    def run(self, begin: Callable[[Any], dist.Work], what: str) -> None:
        """Runs an operation of the group of :attr:`members`, and waits for it.

        Args:
            begin: begins the operation; gets the process group.
            what: the operation, for messages.

        Raises:
            PServerError: a member is lost, or has left, so the operation has failed here.
        """
        groups = self.groups()
        group = groups.group("values", range(len(self.members)), CPU)
        groups.wait(groups.begin(lambda: begin(group), what), what, CPU)

    def groups(self) -> ProcessGroups:
        """The process groups of just :attr:`members`, for the caller's own operations between
        :meth:`gather_texts` and :meth:`confirmed`.

        Raises:
            PServerError: a member is lost, or has left.
        """
        if self._groups.members != self.members:
            named = " ".join(each.incarnation for each in self.members)
            self._groups.bring_up(self.members, f"the group of {named}")
        groups = self._groups.groups
        assert groups is not None, "it has come up"
        return groups

    def confirmed(self, failure: str, result: str = "") -> bool:
        """Whether the operations since :meth:`gather_texts` have worked on all live trainers.
        Afterwards :attr:`result` is the result that one of them reports.

        Args:
            failure: why they have failed here; "" if they have worked.
            result: the result as text; "" to report none.

        Raises:
            PServerError: the job has failed.
        """
        said = failure or DONE + result
        found = self._barrier("values of all trainers, confirmed", said)
        failed = sorted(trainer for trainer, text in found.items() if not text.startswith(DONE))
        self.result = max((text[len(DONE) :] for text in found.values()), default="")
        if failed:
            first = found[failed[0]]
            log.warning("a call that all trainers make is repeated: %s", first)
            self.close(first)
        return not failed

    def close(self, failure: str = "") -> None:
        """Releases the group."""
        self._groups.close(failure)

    def _check(self) -> None:
        """Raises the error that ended the job, or one for a member that is lost or has left."""
        for client in self._clients:
            client.check()
        gone = sorted({each.trainer for each in self.members} & set(self._absent()))
        if gone:
            raise TrainerLost(f"trainer {', '.join(map(str, gone))} is gone")
