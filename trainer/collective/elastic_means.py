"""Means of dense gradients over the live trainers of a job with servers.

[Note: averages that outlive a trainer]  A process group has fixed members.  When one of them is
lost or leaves, or another one joins, the trainers meet on server 0 (see [Note: rounds] in
pserver/job/meetings.py), a group of the live trainers comes up, and from their votes each of
them knows what to do with the average under way: see [Note: which average counts] in vote.py.
A trainer keeps its own gradients until the average counts, so that it can be repeated.

A trainer itself notices the reason for a meeting round: an operation fails, or server 0 reports
that trainers have joined or gone.  It then joins the round from wherever it waits:
:meth:`DenseSteps.attend`.  While no trainer joins or goes, a step costs no message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pserver.errors import PServerError, TrainerLost
from pserver.running_clock import RUNNING
from trainer.collective.gradient_means import GradientMeans, GroupSums
from trainer.collective.member_groups import MemberGroups, TrainerProcess
from trainer.collective.object_bytes import from_bytes, to_bytes
from trainer.collective.vote import HELD, NONE, SEALED, Verdict, Vote, verdict_of
from transpiler.strategy.exchange import GradientExchange

if TYPE_CHECKING:
    from pserver.client.replies import MeetingRound  # which brings the transports

CPU = torch.device("cpu")
PATIENCE = 2.0  # seconds that a wait may still take when trainers have joined or gone
TRIES = 3  # to bring up the same group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LivePeers:
    """Access to the other trainers, by way of the servers.

    Attributes:
        meet: joins a meeting round; takes this trainer's text, the number of its last round,
            whether it takes no further step, and the numbers of averages that it knows as applied
            and as overflowed.
        changes: gives how often trainers have joined and gone.
        check: raises the error that ended the job.
        step: gives the last settled step of those that need all trainers; 0 if there is none.
        waiting: marks, inside it, that this trainer waits for others.
        late: whether the others trained already when this one joined.
        drain: waits until the servers have everything that this trainer has sent.
    """

    meet: Callable[[str, int, bool, int, int], MeetingRound]
    changes: Callable[[], int]
    check: Callable[[], None]
    step: Callable[[], int]
    waiting: Callable[[], AbstractContextManager[None]]
    late: bool
    drain: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Work:
    """This trainer's input to the average under way.

    Attributes:
        parameters: in the same order everywhere.
        gradients: of those of them that have one.
        overflow: whether a gradient of its step is not finite.
    """

    parameters: Sequence[Tensor]
    gradients: Mapping[Tensor, Tensor]
    overflow: bool


class DenseSteps:
    """One trainer's part in the means.  The script's thread calls it.

    See [Note: averages that outlive a trainer].

    Args:
        peers: the other trainers.
        groups: makes process groups of the trainers.
        exchange: how gradients travel.
        give: gives the values and optimizer states that a new process needs, as
            :func:`~trainer.collective.object_bytes.to_bytes` can hold them.
        take: takes them.

    Attributes:
        exchange: how gradients travel.
        arrived: whether it has taken values of another trainer.

    Raises:
        PServerError: some trainers have not joined.
        ValueError: the trainers do not divide into rows.
    """

    def __init__(
        self,
        peers: LivePeers,
        groups: Callable[[Callable[[], None]], MemberGroups],
        exchange: GradientExchange,
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        self.exchange = exchange
        self._peers, self._groups = peers, groups(self._check)
        self._give, self._take = give, take
        self._sums: GroupSums | None = None
        self.arrived = False
        self._number = self._seen = 0  # the last round's number, and the changes until then
        self._group = 0  # the number of the round after which the group came up
        self._wanted, self._waiting, self._noticed = True, False, 0.0
        self._failures, self._tried = 0, tuple[TrainerProcess, ...]()
        self._new, self._ends, self._over = True, False, False
        self._count = self._applied = 0  # of averages; those without an overflow
        self._work: Work | None = None
        self._result: GradientMeans | None = None  # of _work
        self._sealed = self._decided = False
        self._last: GradientMeans | None = None  # the last average that counts
        self._meet()

    # ---- steps ----

    def average(
        self,
        parameters: Sequence[Tensor],
        gradients: Mapping[Tensor, Tensor],
        overflow: bool,
        by_servers: bool,
    ) -> GradientMeans:
        """The mean over the live trainers.

        Args:
            parameters: in the same order everywhere.
            gradients: by parameter, for those that have one; they are not changed.
            overflow: whether a gradient of this trainer's step is not finite.
            by_servers: whether servers decide the step; :meth:`settle` then follows.

        Raises:
            TrainerLost: another trainer takes no further step.
            PServerError: the job has failed.
        """
        self._work = Work(parameters, gradients, overflow)
        with self._peers.waiting():
            result = self._made()
        return result if by_servers else self._settled(result)

    def settle(self, committed: int) -> GradientMeans:
        """Gives the mean that counts, after the servers have decided the step.

        Args:
            committed: the number of trainers in the step.

        Raises:
            PServerError: as :meth:`average`.
        """
        result = self._result
        assert result is not None, "after an average"
        if not self._sealed and committed != result.trainers:
            log.warning(
                "%d trainers were in the average, and %d are in the step: it is repeated",
                *(result.trainers, committed),
            )
            self._decided, self._result = True, None
            self._wanted = self._wanted or committed != len(self._groups.members)
            with self._peers.waiting():
                result = self._made()
        return self._settled(result)

    def _settled(self, result: GradientMeans) -> GradientMeans:
        self._count, self._last = self._count + 1, result
        self._applied += not result.overflow
        self._work = self._result = None
        self._sealed = self._decided = False
        self._wanted = self._wanted or self._waiting  # waiting trainers can join now
        return result

    def _made(self) -> GradientMeans:
        """Makes the average, meeting as often as needed, and returns the result."""
        work = self._work
        assert work is not None, "an average is under way"
        while self._result is None:
            if self._called:
                self._meet()
                continue
            assert self._sums is not None, "after a meeting round"
            try:
                self._noticed = 0.0
                made = self._sums.average(
                    work.parameters, work.gradients, work.overflow, arrives=True
                )
            except PServerError as error:
                self._break(error)
                continue
            self._result, self._sealed = made, self._decided
        return self._result

    def attend(self) -> None:
        """Joins a meeting round, if one is needed; called wherever this trainer waits.

        Raises:
            PServerError: as :meth:`average`.
        """
        if not (self._called or self._waiting):
            return
        self._meet()
        if self._work is not None:
            self._made()

    def finish(self) -> None:
        """Announces that this trainer takes no further step, and waits until all do: another
        trainer may need the result of the last average.

        Raises:
            PServerError: the job has failed.
        """
        if self._groups.groups is not None:
            self._groups.groups.finish()
        self._ends = True
        while not self._over:
            self._wanted = True
            self._meet()

    def values(self) -> bytes:
        """A copy of this trainer's values, as a new process would get them."""
        return to_bytes(self._give())

    def load(self, values: bytes) -> None:
        """Takes the values that :meth:`values` gave."""
        self._take(from_bytes(values))

    def close(self, failure: str = "") -> None:
        """Leaves the others."""
        if self._sums is not None:
            self._sums.close()
        self._groups.close(failure)

    # ---- meeting rounds ----

    @property
    def _called(self) -> bool:
        return self._wanted or self._peers.changes() > self._seen

    def _check(self) -> None:
        """Called while a group waits; an error ends the wait."""
        self._peers.check()
        if not self._called:
            return
        self._noticed = self._noticed or RUNNING()
        if RUNNING() - self._noticed > PATIENCE:
            raise TrainerLost("trainers have joined or gone")

    def _break(self, error: PServerError) -> None:
        """Gives up the group, which has failed.

        Raises:
            PServerError: the job has failed, or no group comes up.
        """
        self._peers.check()
        self._failures += 1
        if self._failures > TRIES:
            raise error
        log.warning("the trainers meet again: %s", error)
        self._group, self._wanted = 0, True
        self._groups.close(str(error))

    def _meet(self) -> None:
        """Meets the others: exchanges votes, and carries out the verdict."""
        with self._peers.waiting():
            done = False
            while not done:
                text = self._vote().text()
                met = self._peers.meet(
                    text, self._number, self._ends, self._applied, self._count - self._applied
                )
                self._number, self._seen = met.number, met.changes
                told = {t: Vote.of(each) for t, each in met.texts.items()}
                verdict = verdict_of(told)
                if verdict.problem and (self._work is not None or not verdict.members):
                    raise TrainerLost(verdict.problem)
                self._over, self._wanted = verdict.over, False
                self._waiting = bool(verdict.waiting)
                try:
                    done = self._groups.own in verdict.members
                    if done:
                        self._follow(verdict)
                except PServerError as error:
                    done = False
                    self._break(error)

    def _vote(self) -> Vote:
        result = NONE if self._result is None else SEALED if self._sealed else HELD
        return Vote(
            self._groups.own.incarnation,
            self._count,
            self._peers.step(),
            result,
            self._decided,
            self._work is not None and self._result is None,
            self._ends,
            self._new,
            self._peers.late and self._new,
            self._group,
        )

    def _follow(self, verdict: Verdict) -> None:
        """Carries out the verdict of a round, together with the other members."""
        if verdict.over:
            return
        if verdict.members != self._tried:
            self._failures, self._tried = 0, verdict.members
        if verdict.members != self._groups.members or not verdict.same_group:
            self._bring_up(verdict)
        own = self._groups.own.trainer
        if verdict.result_from is not None:
            plain = self._told(verdict.result_from, lambda: self._certain().plain())
            if own in verdict.takers:
                assert self._work is not None, "it is in an average"
                self._result = GradientMeans.of(plain, self._work.parameters)
                self._sealed = True
        if verdict.values_from is not None:
            if own not in verdict.arrived:
                self._peers.drain()
            given = self._told(
                verdict.values_from, lambda: [self._count, self._applied, self._give()]
            )
            if own in verdict.arrived:
                self._count, self._applied, values = given
                self._take(values)
                self.arrived = True
        self._new = False
        if verdict.again:
            self._result, self._sealed = None, False
        self._decided = self._work is not None and verdict.decided

    def _bring_up(self, verdict: Verdict) -> None:
        """Brings up the group of the members."""
        if self._sums is not None:
            self._sums.close()
        self._noticed, first = 0.0, self._sums is None
        self._groups.bring_up(
            verdict.members,
            f"averages after round {self._number}",
            {"how gradients travel": repr(self.exchange)},
        )
        alone = len(verdict.members) == 1
        self._sums = GroupSums(None if alone else self._groups.groups, self.exchange, first)
        self._group = self._number

    def _certain(self) -> GradientMeans:
        """This trainer's certain or counted means, for trainers that lack them."""
        found = self._result if self._sealed else self._last
        assert found is not None, "it has counted one, or has one that is certain"
        return found

    def _told(self, root: int, make: Callable[[], Any]) -> Any:
        """Broadcasts an object of one member, and returns it."""
        data = to_bytes(make()) if self._groups.own.trainer == root else b""
        size = torch.tensor([len(data)])
        self._broadcast(size, root)
        travels = torch.empty(int(size), dtype=torch.uint8)
        if data:
            travels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(travels, root)
        return from_bytes(bytes(travels.numpy()))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        groups, what = self._groups.groups, "what one trainer tells the others"
        assert groups is not None, "there are others"
        group = groups.group("told", range(groups.size), CPU)
        options = dist.BroadcastOptions()
        options.rootRank = self._groups.place(root)
        groups.wait(groups.begin(lambda: group.broadcast([tensor], options), what), what, CPU)
