"""The lease table of a job on server 0, under the job's lock.

A process is in the table from its first request on.  One that has left the job, or is lost, has no
leases any more, once no step of it is being applied: such a step will count.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused, TrainerLost
from pserver.job_log.records import Process
from pserver.job_log_pb2 import LeaseChange, LeaseState, OwnEntry
from pserver.lane.step import Step
from pserver.leases.epoch import Account, Epoch, Lease
from pserver.leases.table import EpochRange, LeaseAsked, LeaseTable
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership, MemberState
from pserver.membership.waits import HeldWait, WaitKind
from transpiler.files import bounded_json

log = logging.getLogger(__name__)


class JobLeases:
    """The leases of a job's samples.  Any thread may call it; :meth:`check` and
    :meth:`decided` under the job's lock.

    Args:
        members: the job's trainers.
        job: for its lock and its end.
        wait_seconds: the longest that a request for a lease waits.

    Attributes:
        catches_up: a late trainer is awaited from a later step on than the one at which it was
            admitted: it gives up what it has missed when it asks for the first time.
        write: called with each change, before any trainer receives it: an entry for
            :meth:`restore_entry`.  None: nothing is written down.
    """

    def __init__(
        self, members: Membership, job: Lifecycle, wait_seconds: float = timeouts.LONG_POLL_SECONDS
    ) -> None:
        self._members, self._job, self._wait_seconds = members, job, wait_seconds
        self._table = LeaseTable(members.expected)
        self.catches_up = False
        self.write: Callable[[OwnEntry], None] | None = None
        self._asking: dict[int, Member] = {}  # by number, the last process that has asked
        self._told = job.waits.event()  # of trainers that wait for a lease
        self._dealt = False  # a lease, ever
        self._changes = 0

    def lease(self, member: Member, request: wire.LeaseRequest) -> wire.LeaseReply:
        """Answers a request; where there is nothing now, waits up to a second for others' steps.

        Raises:
            Refused: this trainer cannot make it now.
            PServerError: what has ended the job.
        """
        with self._job.condition:
            self._job.check_running()
            if not request.number:
                return self._kept(request.restored)
            asked = _asked(request)
            self._replace(member)
            if asked.epoch is None or asked.unstepped is None:
                return _reply(self._dealt_now(member, asked), request.epoch.number)
            number = asked.epoch.number
            held = self._members.waits.held(
                member.trainer,
                WaitKind.SAMPLES,
                f"samples of pass {number}",
                lambda: self._table.waits_for(number),
            )
            with held as wait:
                reply = self._wait(member, asked, wait)
                wait.over = bool(reply.ranges or reply.over)
            return _reply(reply, number)

    def _dealt_now(self, member: Member, asked: LeaseAsked, again: bool = False) -> Lease:
        """The samples that a trainer gets now.

        Args:
            again: it has asked for the same before, without result.
        """
        self._follow_members()
        reply = self._answer(member, asked)
        if reply.ranges or reply.over or not again:
            self._changed()  # one that only asks again wakes no other
        return reply

    def _wait(self, member: Member, asked: LeaseAsked, held: HeldWait) -> Lease:
        """The answer to a trainer that has nothing left; it waits for others' steps.  Where others
        wait for it in a save, it receives an empty answer at once, so that it joins them.
        """
        end, waits = time.monotonic() + self._wait_seconds, self._members.waits
        reply = self._dealt_now(member, asked)
        while not (reply.ranges or reply.over) and time.monotonic() < end:
            if (save := waits.save_for(member.trainer)) > held.told:
                held.told = save
                break
            goes_on = partial(self._goes_on, member, self._changes, held)
            self._job.wait(self._told, goes_on, end)
            reply = self._dealt_now(member, asked, again=True)
        return reply

    def _answer(self, member: Member, asked: LeaseAsked) -> Lease:
        if member.fenced or self._members.by_trainer.get(member.trainer) is not member:
            raise TrainerLost(member.fenced or f"another process is trainer {member.trainer} now")
        try:
            again = self.catches_up and bool(member.late)
            if self._table.present.get(member.trainer) != member.incarnation:
                self._table.join(member.trainer, member.incarnation, again)
                self._wrote("join", member.trainer, member.incarnation, again)
            reply = self._table.lease(member.trainer, member.incarnation, asked)
            self._dealt = True
            if self.write is not None:
                self._wrote("lease", member.trainer, member.incarnation, asked.plain())
        except ValueError as error:
            raise Refused(f"leases: {error}") from error
        return reply

    def _changed(self) -> None:
        self._changes += 1
        self._told.notify()

    def _goes_on(self, member: Member, since: int, held: HeldWait) -> bool:
        """Whether there may be something for a waiting trainer: samples, or a save."""
        self._follow_members()
        return self._changes != since or self._members.waits.save_for(member.trainer) > held.told

    def _replace(self, member: Member) -> None:
        """Enters a process that asks; an earlier one of its number has no leases any more."""
        before = self._asking.get(member.trainer)
        if before is not None and before is not member:
            self._job.wait(self._told, lambda: not _is_applied(before))
        self._asking[member.trainer] = member

    def let_in(self, trainer: int, unapplied: Mapping[int, Step]) -> bool:
        """Prepares the admission of a process while others train.  The caller holds the job's lock.

        Args:
            unapplied: by trainer, the step that is decided and not applied.

        Returns:
            Whether it can be: otherwise it could not step together with the others yet.
        """
        self._follow_members()
        consumed = {each: step.leases for each, step in unapplied.items()}
        admitted = self._table.admits(trainer, consumed)
        if admitted:
            self._table.expect(trainer, consumed)
            self._wrote("expect", trainer, list(consumed.items()))
        return admitted

    def _follow_members(self) -> None:
        """Removes the leases of trainers that are not live; awaits those whose place is kept."""
        for trainer, incarnation in self._table.present.items():
            member = self._asking.get(trainer) or self._members.by_trainer.get(trainer)
            process = Process(trainer, incarnation)
            if member is None or (member.trainer, member.incarnation) != astuple(process):
                there = self._members.away.get(trainer) == process
            else:
                there = self._members.by_trainer.get(trainer) is member and not member.finished
                there = (there and member.state is MemberState.JOINED) or _is_applied(member)
            if not there:
                self.remove(trainer, incarnation)
        for trainer in self._members.absent:
            if trainer in self._members.reserved or trainer in self._members.arriving:
                self._set_gone(trainer, False)
            else:
                self._set_gone(trainer, trainer not in self._table.present)

    def _set_gone(self, trainer: int, gone: bool) -> None:
        """Sets whether a process of this number is expected."""
        if gone != (trainer in self._table.absent):
            change = "give_up" if gone else "wait_for"
            getattr(self._table, change)(trainer)
            self._wrote(change, trainer)

    def remove(self, trainer: int, incarnation: str) -> None:
        """Removes a process that has left or is lost: its leased samples that no decided step has
        consumed are dealt out again.
        """
        with self._job.condition:
            self._table.remove(trainer, incarnation)
            self._wrote("remove", trainer, incarnation)
            self._changed()

    # ---- steps ----

    def check(self, trainer: int, incarnation: str, ranges: Sequence[EpochRange]) -> None:
        """Returns if a trainer has leased what its step consumed.

        Raises:
            Refused: it has not.
        """
        if not ranges:
            return
        try:
            self._table.check(trainer, incarnation, ranges)
        except ValueError as error:
            raise Refused(f"leases: {error}") from error

    def decided(self, trainer: int, incarnation: str, ranges: Sequence[EpochRange]) -> None:
        """Counts the samples that a decided step of a trainer has consumed."""
        if ranges:
            self._table.decided(trainer, incarnation, ranges)
            self._wrote("decided", trainer, incarnation, ranges)
            self._changed()
        else:
            self._told.notify()  # a step of a trainer that has gone may have been awaited

    # ---- accounts, and persistence ----

    @property
    def accounts(self) -> dict[int, Account]:
        """The progress of the samples, by epoch."""
        with self._job.condition:
            self._follow_members()
            return self._table.accounts

    def plain(self) -> dict[str, Any]:
        """The table for a checkpoint; the caller holds the job's lock, or steps are paused."""
        return self._table.plain()

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Restores a checkpoint's table; a job that has dealt out leases keeps its own.

        Raises:
            ValueError: it is not a lease table.
        """
        with self._job.condition:
            if self._dealt or not plain:
                return
            try:
                self._table = LeaseTable.of(plain, self._members.expected)
                if self.write is not None:
                    self.write(*self.entries())
            except (KeyError, TypeError, IndexError) as error:
                raise ValueError(f"a lease table cannot be read: {error!r}") from error

    # ---- see [Note: a coordinator that comes back] in pserver/job_log/coordinator.py ----

    def entries(self) -> list[OwnEntry]:
        """The entries of its state, for :meth:`restore_entry` of its replacement."""
        table = json.dumps(self._table.whole())
        return [OwnEntry(leases=LeaseState(dealt=self._dealt, table=table))]

    def restore_entry(self, entry: OwnEntry) -> None:
        """Takes what another process has written: its :meth:`entries`, then each change.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        if entry.HasField("leases"):
            self._dealt = entry.leases.dealt
            self._table = LeaseTable.of_whole(bounded_json.loads(entry.leases.table))
        else:
            change = entry.lease.change
            self._dealt = self._dealt or change == "lease"
            self._table.repeat(change, bounded_json.loads(entry.lease.arguments))

    @staticmethod
    def decided_by(change: LeaseChange) -> Process:
        """The process whose step a change "decided" is about."""
        trainer, incarnation, _ = bounded_json.loads(change.arguments)
        return Process(trainer, incarnation)

    def _wrote(self, change: str, *arguments: Any) -> None:
        if self.write is not None:
            said = LeaseChange(change=change, arguments=json.dumps(arguments))
            self.write(OwnEntry(lease=said))

    def _kept(self, restored: str) -> wire.LeaseReply:
        """Gives the present lease table for a checkpoint; where a checkpoint's table is given,
        restores that first.
        """
        if restored:
            try:
                self.restore(bounded_json.loads(restored))
            except ValueError as error:
                raise Refused(f"leases: {error}") from error
        return wire.LeaseReply(table=json.dumps(self.plain()))


def _is_applied(member: Member) -> bool:
    """Whether a step of a process that names samples is being applied: it counts."""
    lane = member.watermark(0)
    return lane.taking > lane.applied


def _asked(request: wire.LeaseRequest) -> LeaseAsked:
    epoch = request.epoch if request.HasField("epoch") else None
    return LeaseAsked(
        request.number,
        None if epoch is None else epoch_of(epoch),
        max(1, request.most),
        request.unstepped if request.HasField("unstepped") else None,
        ranges_of(request.unused),
        ranges_of(request.skipped),
        tuple(request.stopped),
        tuple((each.epoch, each.segment, each.length) for each in request.ended),
    )


def epoch_of(message: wire.LeaseEpoch) -> Epoch:
    """An epoch, as it travels."""
    return Epoch(
        message.number,
        message.loader,
        message.seed,
        message.samples,
        message.batch_size,
        message.stripes,
        message.drop_last,
        message.unit,
        message.whole,
        message.positions,
        message.segments,
        message.begun,
        message.uneven,
    )


def ranges_of(messages: Iterable[wire.LeaseRange]) -> tuple[EpochRange, ...]:
    """Ranges of positions, as they travel."""
    return tuple((each.epoch, each.start, each.stop) for each in messages)


def _reply(lease: Lease, epoch: int) -> wire.LeaseReply:
    return wire.LeaseReply(
        ranges=[wire.LeaseRange(epoch=epoch, start=a, stop=b) for a, b in lease.ranges],
        batches=lease.batches,
        over=lease.over,
        left=lease.left,
        stripes=lease.stripes,
    )
