"""The barriers of a job, on server 0: its trainers wait for one another there, and exchange texts.

[Note: barriers of the past]  A trainer that joins late runs the script from its first line.  So it
reaches barriers that the others have passed.  It does not wait there, and no trainer waits for it;
it receives the others' texts, so that its script decides as theirs did.  The memory for that is
bounded: at a forgotten barrier it receives only its own text.

[Note: a save that is put off]  Trainers meet in an automatic save at a barrier of the save's own
name.  Where it would stand for ever (see [Note: rings] in membership/waits.py) it is put off: the
trainers that wait there are notified, and so are those that arrive later, so that all of them skip
this save.  No trainer has passed it then, and a barrier that a trainer has passed is never put off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job.averaged_steps import AveragedSteps
from pserver.job.kept_texts import KeptTexts
from pserver.job.meeting_rounds import MeetingRounds
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import (
    BARRIER,
    Member,
    Membership,
    TrainerWait,
    roll,
    wait_until_done,
)
from pserver.membership.waits import WaitKind

# saves whose names are kept; at the barrier of an earlier one a trainer waits in vain once more
MOST_PUT_OFF = 256
MOST_NAMES = 2**16  # of barriers, and of topics
KEPT_BYTES = 2**22  # of texts of barriers that are over
KEPT_TEXT = 2**16  # characters of one barrier that are kept: tensors are too long


class Barriers:
    """The barriers of one job.  Any thread may call it.

    Args:
        members: the job's trainers.
        job: for its lock and its end.
        stepped: whether a step of the job was applied, ever.
        averaged: counts what lost trainers have in averages only, or on servers only.
        texts: bounds the trainers' texts.

    Attributes:
        passed: whether all trainers have passed one, ever.
        meetings: of the same trainers.
        write: called with each that all have passed, as JSON can hold it, before any trainer
            receives it: an entry for :meth:`restore_entry`.  None: nothing is written down.
    """

    def __init__(
        self,
        members: Membership,
        job: Lifecycle,
        stepped: Callable[[], bool] = lambda: True,
        averaged: AveragedSteps | None = None,
        texts: KeptTexts | None = None,
    ) -> None:
        self._members, self._job, self._stepped = members, job, stepped
        self._texts = texts or KeptTexts()
        self.meetings = MeetingRounds(members, job, averaged, self._texts)
        self.write: Callable[..., None] | None = None
        self._written: set[str] = set()  # names
        # by name: the trainers that have reached it, each with what it told the others
        self._arrived: dict[str, dict[int, str]] = {}
        self._over: dict[str, dict[int, str]] = {}  # what was told at those that all have passed
        self._kept = 0  # characters of these
        self._put_off: dict[str, str] = {}  # saves, with why
        self._passed: set[str] = set()  # names, of those that are not forgotten
        self.passed = False

    def call(self, member: Member, request: wire.BarrierRequest) -> wire.BarrierReply:
        """Answers a trainer's call with :meth:`meet`, for a second, or with :meth:`past`; one for a
        gathering with :meth:`MeetingRounds.join`.

        Raises:
            Refused: there are too many barriers, or their texts take too much memory; see
                also :meth:`MeetingRounds.join`.
        """
        texts: dict[int, str] | None = None
        if request.gathers:
            return self.meetings.join(member, request)
        if request.past:
            texts = self.past(member, request.name, request.text)
        else:
            seconds = timeouts.LONG_POLL_SECONDS
            texts = self.meet(member, request.name, seconds, request.text, request.apart)
        with self._job.condition:
            said, why = roll(self._members), self._put_off.get(request.name, "")
        return wire.BarrierReply(passed=texts is not None, texts=texts, roll=said, put_off=why)

    def meet(
        self,
        member: Member,
        name: str,
        timeout_seconds: float,
        text: str = "",
        apart: bool = False,
    ) -> dict[int, str] | None:
        """Waits until every trainer that has not left has reached the barrier of this name.

        Args:
            text: what this trainer tells the others there.
            apart: trainers that wait at another barrier come to this one, too.

        Returns:
            The trainers' texts, by trainer; None if ``timeout_seconds`` were over before, or if it
            is put off.

        Raises:
            Refused: there are too many barriers, or their texts take too much memory.
            PServerError: what ended the job meanwhile.
        """
        with self._job.condition:
            if name in self._put_off:
                return None
            if name in self._passed:  # also by a trainer that joined later: it was not awaited
                return _told(self._arrived[name])
            check_room("barriers", name, self._arrived)
            if member.trainer not in self._arrived.get(name, {}):
                self._texts.add(member.trainer, name, text)
            arrived = self._arrived.setdefault(name, {})
            arrived.setdefault(member.trainer, text)
            if apart:
                self._job.wake_all()  # trainers that wait for samples join a save
            self._job.changed.notify()
            end = time.monotonic() + timeout_seconds

            def missing() -> list[int]:
                if name in self._passed or name in self._put_off:
                    return []
                return [trainer for trainer in self._awaited() if trainer not in arrived]

            kind = WaitKind.SAVE if apart else WaitKind.BARRIER
            what = name if apart else f"barrier {name!r}"
            wait = TrainerWait(
                member,
                BARRIER,
                f"barrier {name!r}",
                lambda: not missing() or time.monotonic() >= end,
                apart,
                end,
                missing,
            )
            with self._members.waits.held(member.trainer, kind, what, missing) as held:
                wait_until_done(self._job, self._members, wait, missing)
                held.over = not missing()
            if missing() or name in self._put_off:
                return None
            if self._job.failure is not None and name not in self._passed:
                raise self._job.failure  # whoever has failed is not awaited, but was not here
            self.passed = True
            self._passed.add(name)
            if self.write is not None and name not in self._written:
                self._written.add(name)
                self.write("barrier", name, list(arrived.items()))
            self._forget_before(name)
            return _told(arrived)

    def put_off(self, name: str, why: str) -> bool:
        """Puts a save off: its barrier releases all trainers, and takes no other.  The caller holds
        the job's lock.

        Returns:
            Whether it is put off now; False: a trainer has passed its barrier already, or none
            waits there.
        """
        arrived = self._arrived.get(name)
        if arrived is None or name in self._passed:
            return False
        self._put_off[name] = why
        if len(self._put_off) > MOST_PUT_OFF:
            del self._put_off[next(iter(self._put_off))]
        if self.write is not None:
            self.write("put off", name, why)
        self._drop(name)
        self._job.wake_all()
        return True

    # ---- see [Note: a coordinator that comes back] in pserver/job_log/coordinator.py ----

    def entries(self) -> list[list[Any]]:
        """The entries for :meth:`restore_entry` of its replacement: the barriers that all have
        passed.
        """
        passed = [(name, self._arrived[name]) for name in self._arrived if name in self._written]
        known = [*self._over.items(), *passed]
        put_off = [["put off", name, why] for name, why in self._put_off.items()]
        return [["barrier", name, list(told.items())] for name, told in known] + put_off

    def restore_entry(self, kind: str, name: str, told: Any) -> None:
        """Restores another process's entries."""
        if kind == "put off":
            self._put_off[name] = told
            return
        self.passed = True
        self._written.add(name)
        self._passed.add(name)
        self._arrived[name] = {trainer: text for trainer, text in told}
        for trainer, text in told:
            self._texts.add(trainer, name, text, checked=False)

    def past(self, member: Member, name: str, text: str) -> dict[int, str]:
        """The texts of a barrier that all but this trainer have passed.  See [Note: barriers of
        the past].
        """
        with self._job.condition:
            told = self._over.get(name) or self._arrived.get(name) or {member.trainer: text}
            return _told(told)

    def _awaited(self) -> list[int]:
        """The trainers that a barrier needs.  Before the first step, when a job is read from files,
        it does not need those that have joined late and do not know the others' position.
        """
        awaited = self._members.awaited()
        if self._stepped():
            return awaited
        late = {m.trainer for m in self._members.joined() if m.late and not m.placed}
        return [trainer for trainer in awaited if trainer not in late]

    def _forget_before(self, name: str) -> None:
        """Forgets barriers before the one of this name, which all trainers have reached: their
        texts would take memory until the job ends.
        """
        awaited = set(self._members.awaited())
        for earlier in list(self._arrived):
            if earlier == name:
                break
            if earlier in self._passed or self._arrived[earlier].keys() >= awaited:
                self._written.discard(earlier)
                self._passed.discard(earlier)
                self._keep(earlier, self._drop(earlier))

    def _drop(self, name: str) -> dict[int, str]:
        told = self._arrived.pop(name)
        for trainer, text in told.items():
            self._texts.remove(trainer, name, text)
        return told

    def _keep(self, name: str, told: dict[int, str]) -> None:
        self._forget_kept(name)
        size = _size(name, told)
        if size > KEPT_TEXT:
            return
        self._over[name] = told
        self._kept += size
        while self._kept > KEPT_BYTES:
            self._forget_kept(next(iter(self._over)))

    def _forget_kept(self, name: str) -> None:
        if (told := self._over.pop(name, None)) is not None:
            self._kept -= _size(name, told)


def _size(name: str, told: Mapping[int, str]) -> int:
    return len(name) + sum(map(len, told.values()))


def _told(texts: Mapping[int, str]) -> dict[int, str]:
    """The trainers' texts, without those that gave none."""
    return {trainer: text for trainer, text in texts.items() if text}


def check_room(what: str, name: str, known: Mapping[str, object]) -> None:
    """Returns if there is room for one more name.

    Raises:
        Refused: there are too many.
    """
    if name not in known and len(known) >= MOST_NAMES:
        raise Refused(f"expected at most {MOST_NAMES} {what} in a job, got another, {name!r}")
