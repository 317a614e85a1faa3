"""The lease table of a job on server 0, under the job's lock.

A process is in the table from its first request on.  One that has left the job, or is lost, has no
leases any more, once no step of it is being applied: such a step will count.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from pserver import job_log_pb2 as message
from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused, TrainerLost
from pserver.job_log.own_state import RememberedLeases, leases_entry
from pserver.job_log.records import Process, write_consumed, write_process
from pserver.lane.step import Step
from pserver.leases.epoch import Account, Lease
from pserver.leases.table import EpochRange, LeaseTable
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
        state: the table, as it follows from entries.
        write: called with each change, before any trainer receives it: an entry that the state has
            applied.  None: nothing is written down.
    """

    def __init__(
        self, members: Membership, job: Lifecycle, wait_seconds: float = timeouts.LONG_POLL_SECONDS
    ) -> None:
        self._members, self._job, self._wait_seconds = members, job, wait_seconds
        self.state = RememberedLeases(members.expected)
        self.catches_up = False
        self.write: Callable[[message.OwnEntry], None] | None = None
        self._asking: dict[int, Member] = {}  # by number, the last process that has asked
        self._told = job.waits.event()  # of trainers that wait for a lease
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
            self._replace(member)
            number = request.epoch.number
            if not (request.HasField("epoch") and request.HasField("unstepped")):
                return _reply(self._dealt_now(member, request), number)
            held = self._members.waits.held(
                member.trainer,
                WaitKind.SAMPLES,
                f"samples of pass {number}",
                lambda: self.state.table.waits_for(number),
            )
            with held as wait:
                reply = self._wait(member, request, wait)
                wait.over = bool(reply.ranges or reply.over)
            return _reply(reply, number)

    def _dealt_now(self, member: Member, request: wire.LeaseRequest, again: bool = False) -> Lease:
        """The samples that a trainer gets now.

        Args:
            again: it has asked for the same before, without result.
        """
        self._follow_members()
        reply = self._answer(member, request)
        if reply.ranges or reply.over or not again:
            self._changed()  # one that only asks again wakes no other
        return reply

    def _wait(self, member: Member, request: wire.LeaseRequest, held: HeldWait) -> Lease:
        """The answer to a trainer that has nothing left; it waits for others' steps.  Where others
        wait for it in a save, it receives an empty answer at once, so that it joins them.
        """
        end, waits = time.monotonic() + self._wait_seconds, self._members.waits
        reply = self._dealt_now(member, request)
        while not (reply.ranges or reply.over) and time.monotonic() < end:
            if (save := waits.save_for(member.trainer)) > held.told:
                held.told = save
                break
            goes_on = partial(self._goes_on, member, self._changes, held)
            self._job.wait(self._told, goes_on, end)
            reply = self._dealt_now(member, request, again=True)
        return reply

    def _answer(self, member: Member, request: wire.LeaseRequest) -> Lease:
        if member.fenced or self._members.by_trainer.get(member.trainer) is not member:
            raise TrainerLost(member.fenced or f"another process is trainer {member.trainer} now")
        process = Process(member.trainer, member.incarnation)
        join, lease = message.OwnEntry(), message.OwnEntry()
        write_process(lease.lease.lease.process, process)
        lease.lease.lease.request.CopyFrom(request)
        lease.lease.lease.request.ClearField("session")  # a secret
        try:
            if self.state.table.present.get(process.trainer) != process.incarnation:
                write_process(join.lease.join.process, process)
                join.lease.join.again = self.catches_up and bool(member.late)
                self._change(join)
            return self._change(lease)
        except ValueError as error:
            raise Refused(f"leases: {error}") from error

    def _change(self, entry: message.OwnEntry) -> Lease:
        """Changes the table by an entry, and writes it.

        Returns:
            The answer to a request.

        Raises:
            ValueError: the table cannot have this change.
        """
        reply = self.state.apply(entry)
        if self.write is not None:
            self.write(entry)
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
        admitted = self.state.table.admits(trainer, consumed)
        if admitted:
            entry = message.OwnEntry()
            entry.lease.expect.trainer = trainer
            for each, ranges in consumed.items():
                write_consumed(entry.lease.expect.consumed[each], ranges)
            self._change(entry)
        return admitted

    def _follow_members(self) -> None:
        """Removes the leases of trainers that are not live; awaits those whose place is kept."""
        for trainer, incarnation in self.state.table.present.items():
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
                self._set_gone(trainer, trainer not in self.state.table.present)

    def _set_gone(self, trainer: int, gone: bool) -> None:
        """Sets whether a process of this number is expected."""
        if gone == (trainer in self.state.table.absent):
            return
        entry = message.OwnEntry()
        if gone:
            entry.lease.give_up = trainer
        else:
            entry.lease.wait_for = trainer
        self._change(entry)

    def remove(self, trainer: int, incarnation: str) -> None:
        """Removes a process that has left or is lost: its leased samples that no decided step has
        consumed are dealt out again.
        """
        with self._job.condition:
            entry = message.OwnEntry()
            write_process(entry.lease.remove, Process(trainer, incarnation))
            self._change(entry)
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
            self.state.table.check(trainer, incarnation, ranges)
        except ValueError as error:
            raise Refused(f"leases: {error}") from error

    def decided(self, trainer: int, incarnation: str, ranges: Sequence[EpochRange]) -> None:
        """Counts the samples that a decided step of a trainer has consumed."""
        if ranges:
            # what the entry does; without its message, as a step waits for this
            self.state.table.decided(trainer, incarnation, ranges)
            if self.write is not None:
                entry = message.OwnEntry()
                write_process(entry.lease.decided.process, Process(trainer, incarnation))
                write_consumed(entry.lease.decided.consumed, ranges)
                self.write(entry)
            self._changed()
        else:
            self._told.notify()  # a step of a trainer that has gone may have been awaited

    # ---- accounts, and persistence ----

    @property
    def accounts(self) -> dict[int, Account]:
        """The progress of the samples, by epoch."""
        with self._job.condition:
            self._follow_members()
            return self.state.table.accounts

    def plain(self) -> dict[str, Any]:
        """The table for a checkpoint; the caller holds the job's lock, or steps are paused."""
        return self.state.table.plain()

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Restores a checkpoint's table; a job that has dealt out leases keeps its own.

        Raises:
            ValueError: it is not a lease table.
        """
        with self._job.condition:
            if self.state.table.dealt or not plain:
                return
            try:
                entry = leases_entry(LeaseTable.of(plain, self._members.expected))
            except (KeyError, TypeError, IndexError) as error:
                raise ValueError(f"a lease table cannot be read: {error!r}") from error
            self._change(entry)

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


def _reply(lease: Lease, epoch: int) -> wire.LeaseReply:
    return wire.LeaseReply(
        ranges=[wire.LeaseRange(epoch=epoch, start=a, stop=b) for a, b in lease.ranges],
        batches=lease.batches,
        over=lease.over,
        left=lease.left,
        stripes=lease.stripes,
    )
