"""The meeting place of a job's trainers, on server 0: they wait for one another there, and leave
texts for one another.

Every call has a *mode*, and in most modes a *key*::

    mode    key            awaits                  repeats texts to      forgets them
    ALL     "3: epoch"     trainers that have      who calls again, and  when all have come to a
                           not left                who joins later       later one: see PAST
    PAST    of an ALL      none                    likewise              for newer ones' room
    SAVE    "automatic     as ALL; trainers come   likewise              as ALL; put-off ones as
            save 1.4"      from other waits, too                         newer ones are put off
    ROUND   none: counted  live trainers; kept     the processes that    with the next round
                           places, unless all end  were in it
    FIRST   a topic        none                    all                   with the job
    SET     "rendezvous"   none                    all                   when it is replaced
    ASK     none: a        the first trainer that  who asks with the     with the next answer
            number         knows the position      number
    ANSWER  likewise       none

ALL is for barriers, joint calls, values that scripts exchange, and saves that they ask for; PAST
for the same calls of a trainer that has joined after them; ROUND for trainers that average
gradients; FIRST for agreements, such as the lengths of passes and the ends of data; SET for the
address of the trainers' own rendezvous; ASK and ANSWER for the position of the job's script.

Trainers of a job without servers meet over their own store, with a membership of their own: see
``Peers.meet`` in trainer/collective/rendezvous.py.

[Note: barriers of the past]  A trainer that joins late runs the script from its first line.  So it
reaches barriers that the others have passed.  It does not wait there, and no trainer waits for it;
it receives the others' texts, so that its script decides as theirs did.  The memory for that is
bounded: at a forgotten barrier it receives only its own text.

[Note: a save that is put off]  Trainers meet in an automatic save at a barrier of the save's own
name.  Where it would stand for ever (see [Note: rings] in membership/waits.py) it is put off: the
trainers that wait there are notified, and so are those that arrive later, so that all of them skip
this save.  No trainer has passed it then, and a barrier that a trainer has passed is never put off.

[Note: rounds]  Trainers that average gradients among themselves do so in a group of certain
processes, so it ends when one of them is lost, and when another one joins.  Then all live trainers
meet, and from their texts each of them draws the same conclusions.  They come from wherever they
wait: from a step that needs the others, from a barrier, from the end of the job.

A barrier would need a name that all know, and a process that has just joined knows none.  So the
server counts: a round is over when all awaited trainers have arrived, and a trainer that arrives
after that is in the next one.  A trainer sends the number of its last one, so that a repeated
request is answered by the same one.

[Note: where the others are]  A trainer that joins a running job has the job's values, and its
script begins with the first line.  So it asks for the others' position: the states of their
schedulers, their passes over the data, the joint calls that they have made.  Trainers report it
only when one asks.  The server passes the question on, in the answers to heartbeats, to the first
trainer that knows it; that one answers before it closes its next step, or from another thread while
its script waits in a step, at a barrier or at the job's end.

Where steps need all trainers, the answer has to describe the script just before the first step that
needs the asking trainer.  An answer about a step without a record does: the question came after the
joining, and from then on every record includes the new trainer.  An answer about a decided step is
refused, and given anew.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job.averaged_steps import AveragedSteps, Averages
from pserver.job_log.records import Process, read_process, write_process
from pserver.job_log_pb2 import KeptText, OwnEntry, PassedBarrier, PutOffSave
from pserver.membership.decisions import process_of
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import (
    BARRIER,
    ROUND,
    Member,
    Membership,
    MemberState,
    TrainerWait,
    roll,
    wait_until_done,
)
from pserver.membership.waits import WaitKind

# saves whose names are kept; at the barrier of an earlier one a trainer waits in vain once more
MOST_PUT_OFF = 256
MOST_NAMES = 2**16  # of barriers, and of topics
PAST_BYTES = 2**22  # of the texts of barriers that are over
PAST_TEXT = 2**16  # characters of one such barrier: tensors are too long
MOST_POSITION = 2**20  # characters of a position
MOST_OF_ONE = 2**25  # bytes of one trainer's texts: eight of the longest
OVERHEAD = 200  # bytes of a text besides its characters
ROUND_KEY = "a round"


# ---- pure parts ----


class TextBudget:
    """The memory that texts take, by trainer.  The caller holds the job's lock.

    Args:
        left: gives the bytes that the server may still take (``--max-memory``).
        most: bytes of one trainer.

    Example:
        >>> texts = TextBudget()
        >>> texts.add(0, "1: epoch", "so far")
        >>> texts.bytes_held
        214
    """

    def __init__(self, left: Callable[[], int] | None = None, most: int = MOST_OF_ONE) -> None:
        self._left, self._most = left, most
        self._held: Counter[int] = Counter()

    @property
    def bytes_held(self) -> int:
        """The bytes of all trainers' texts."""
        return self._held.total()

    def add(self, trainer: int, key: str, text: str, checked: bool = True) -> None:
        """Adds a trainer's text under a key.

        Args:
            checked: it may be refused; otherwise another process has taken it already.

        Raises:
            Refused: it is too much.
        """
        size = _size(key, text)
        if checked:
            self._check(trainer, key, size)
        self._held[trainer] += size

    def remove(self, trainer: int, key: str, text: str) -> None:
        """Removes a text."""
        self._held[trainer] -= _size(key, text)

    def _check(self, trainer: int, key: str, size: int) -> None:
        held = self._held[trainer]
        if held + size > self._most:
            raise Refused(
                f"expected at most {self._most / 1e6:.1f} MB of texts that trainer {trainer} "
                "leaves at barriers and topics for the others, got "
                f"{(held + size) / 1e6:.1f} MB with {key!r}: wait at a barrier with all "
                "trainers before the next text, and send less there"
            )
        left = size if self._left is None else self._left()
        if size > left:
            raise Refused(
                f"expected a text for {max(left, 0) / 1e6:.1f} MB or less at {key!r}, got one for "
                f"{size / 1e6:.1f} MB: this server has no more memory (--max-memory)"
            )


def _size(key: str, text: str) -> int:
    return OVERHEAD + len(key.encode()) + len(text.encode())


class PastTexts:
    """The texts of barriers that are over, the newest of them, within :data:`PAST_BYTES`."""

    def __init__(self) -> None:
        self._texts: dict[str, dict[int, str]] = {}
        self.characters = 0

    def get(self, key: str) -> dict[int, str] | None:
        """The texts at a barrier, by trainer; None: they are forgotten."""
        return self._texts.get(key)

    def items(self) -> Iterable[tuple[str, dict[int, str]]]:
        """All of them, the oldest first."""
        return self._texts.items()

    def keep(self, key: str, texts: dict[int, str]) -> None:
        """Keeps the texts of a barrier; forgets older ones that they leave no room for."""
        self._forget(key)
        if _characters(key, texts) > PAST_TEXT:
            return
        self._texts[key] = texts
        self.characters += _characters(key, texts)
        while self.characters > PAST_BYTES:
            self._forget(next(iter(self._texts)))

    def _forget(self, key: str) -> None:
        if (texts := self._texts.pop(key, None)) is not None:
            self.characters -= _characters(key, texts)


def _characters(key: str, texts: Mapping[int, str]) -> int:
    return len(key) + sum(map(len, texts.values()))


@dataclass(slots=True, eq=False)
class Barrier:
    """A barrier.

    Attributes:
        texts: of the trainers that have arrived.
        passed: all have; it stays so for a trainer that joins later.
    """

    texts: dict[int, str] = field(default_factory=dict)
    passed: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A trainer that has arrived for a round.

    Attributes:
        member: which one.
        text: for the others.
        ends: it takes no further step.
        averages: how many there were, as far as it knows.
    """

    member: Member
    text: str
    ends: bool
    averages: Averages


@dataclass(frozen=True, slots=True)
class Round:
    """A completed round.

    Attributes:
        number: from 1.
        changes: of the members, until then.
        processes: that were in it.
        texts: theirs, by trainer.
    """

    number: int = 0
    changes: int = 0
    processes: frozenset[Process] = frozenset()
    texts: Mapping[int, str] = field(default_factory=dict)


# ---- the meeting place ----


class Meetings:
    """The meeting place of one job.  Any thread may call :meth:`meet`, the others under the job's
    lock.

    Args:
        members: the job's trainers.
        job: for its lock and its end.
        stepped: whether a step of the job was applied, ever.
        undecided: whether a trainer's step of the lane that needs all of them has no record.
        averaged: counts what lost trainers have in averages only, or on servers only.
        texts: bounds the trainers' texts.

    Attributes:
        passed: whether all trainers have passed a barrier, ever.
        write: called with each change, before any trainer receives it: an entry for
            :meth:`restore_entry`.  None: nothing is written down.
    """

    def __init__(
        self,
        members: Membership,
        job: Lifecycle,
        stepped: Callable[[], bool] = lambda: True,
        undecided: Callable[[Member, int], bool] = lambda member, step: True,
        averaged: AveragedSteps | None = None,
        texts: TextBudget | None = None,
    ) -> None:
        self._members, self._job, self._stepped, self._undecided = members, job, stepped, undecided
        self._averaged, self._texts = averaged, texts or TextBudget()
        self.passed = False
        self.write: Callable[[OwnEntry], None] | None = None
        self._barriers: dict[str, Barrier] = {}  # in the order of the first arrivals
        self._past = PastTexts()
        self._put_off: dict[str, str] = {}  # saves, with the reasons
        self._arrived: dict[str, Arrival] = {}  # by session, for the next round
        self._round = Round()  # the last one: a trainer of a later one knows of this one
        self._store: dict[str, tuple[int, str]] = {}  # by key: the trainer that has set it; text
        self._asked = self._answered = 0  # numbers of questions
        self._answer = wire.MeetReply()
        self._modes: Mapping[int, Callable[[Member, wire.MeetRequest], wire.MeetReply]] = {
            wire.MEET_ALL: self._meet_all,
            wire.MEET_PAST: self._pass_by,
            wire.MEET_SAVE: self._meet_all,
            wire.MEET_ROUND: self._meet_round,
            wire.MEET_FIRST: self._keep_text,
            wire.MEET_SET: self._keep_text,
            wire.MEET_ASK: self._ask,
            wire.MEET_ANSWER: self._take_answer,
        }

    def meet(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        """Answers a trainer's call; see the table above.  It waits for a second at most.

        Raises:
            Refused: the mode is unknown; or there are too many keys, or the trainers' texts take
                too much memory; or an answer is to no question.
            PServerError: what ended the job meanwhile.
        """
        if (call := self._modes.get(request.mode)) is None:
            raise Refused(f"expected a meeting of mode 0 to {max(self._modes)}, got {request.mode}")
        with self._job.condition:
            reply = call(member, request)
            reply.roll.CopyFrom(roll(self._members))
            return reply

    def _wait(
        self,
        member: Member,
        kind: WaitKind,
        what: str,
        missing: Callable[[], list[int]],
        place: str = "",
    ) -> bool:
        """Waits until no trainer is missing, for a second at most.

        Args:
            place: of the wait, for who looks for deadlocks; "": it can be in none.

        Returns:
            Whether none is.
        """
        end = time.monotonic() + timeouts.LONG_POLL_SECONDS

        def done() -> bool:
            return not missing() or time.monotonic() >= end

        with self._members.waits.held(member.trainer, kind, what, missing) as held:
            if place:
                apart = kind is WaitKind.SAVE
                wait = TrainerWait(member, place, what, done, apart, end, missing)
                wait_until_done(self._job, self._members, wait, missing)
            else:
                self._job.wait(self._job.changed, done, end)
            held.over = not missing()
        return held.over

    def _written(self, entry: OwnEntry) -> None:
        if self.write is not None:
            self.write(entry)

    # ---- barriers ----

    def _meet_all(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        key, saves = request.key, request.mode == wire.MEET_SAVE
        if key in self._put_off:
            return wire.MeetReply(problem=self._put_off[key])
        barrier = self._barriers.get(key)
        if barrier is None or not barrier.passed:
            barrier = self._arrive(member.trainer, key, request.text)
            if saves:
                self._job.wake_all()  # trainers that wait for samples join a save
            self._job.changed.notify()

            def missing() -> list[int]:
                if barrier.passed or key in self._put_off:
                    return []
                return [trainer for trainer in self._awaited() if trainer not in barrier.texts]

            kind, what = WaitKind.BARRIER, f"barrier {key!r}"
            if saves:
                kind, what = WaitKind.SAVE, key
            if not self._wait(member, kind, what, missing, BARRIER):
                return wire.MeetReply()
            if key in self._put_off:
                return wire.MeetReply(problem=self._put_off[key])
            if not barrier.passed:
                self._pass(key, barrier)
        return wire.MeetReply(over=True, texts=_given(barrier.texts))

    def _arrive(self, trainer: int, key: str, text: str) -> Barrier:
        check_room("barriers", key, self._barriers)
        barrier = self._barriers.get(key)
        if barrier is None or trainer not in barrier.texts:
            self._texts.add(trainer, key, text)
        barrier = self._barriers.setdefault(key, Barrier())
        barrier.texts.setdefault(trainer, text)
        return barrier

    def _pass(self, key: str, barrier: Barrier) -> None:
        if self._job.failure is not None:
            raise self._job.failure  # whoever has failed is not awaited, but was not here
        self.passed = barrier.passed = True
        self._written(OwnEntry(barrier=PassedBarrier(key=key, texts=barrier.texts)))
        self._forget_before(key)

    def _awaited(self) -> list[int]:
        """The trainers that a barrier needs.  Before the first step, when a job is read from files,
        it does not need those that have joined late and do not know the others' position.
        """
        awaited = self._members.awaited()
        if self._stepped():
            return awaited
        late = {m.trainer for m in self._members.joined() if m.late and not m.placed}
        return [trainer for trainer in awaited if trainer not in late]

    def _forget_before(self, key: str) -> None:
        """Forgets barriers before this one, which all trainers have reached: their texts would
        take memory until the job ends.
        """
        awaited = set(self._members.awaited())
        for earlier in list(self._barriers):
            if earlier == key:
                break
            if self._barriers[earlier].passed or self._barriers[earlier].texts.keys() >= awaited:
                self._past.keep(earlier, self._drop(earlier))

    def _drop(self, key: str) -> dict[int, str]:
        texts = self._barriers.pop(key).texts
        for trainer, text in texts.items():
            self._texts.remove(trainer, key, text)
        return texts

    def _pass_by(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        """See [Note: barriers of the past]."""
        key = request.key
        known = self._barriers.get(key)
        texts = self._past.get(key) or (None if known is None else known.texts)
        return wire.MeetReply(over=True, texts=_given(texts or {member.trainer: request.text}))

    def put_off(self, key: str, why: str) -> bool:
        """Puts a save off: its barrier releases all trainers, and takes no other.

        Returns:
            Whether it is put off now; False: a trainer has passed its barrier already, or none
            waits there.
        """
        barrier = self._barriers.get(key)
        if barrier is None or barrier.passed:
            return False
        self._put_off[key] = why
        if len(self._put_off) > MOST_PUT_OFF:
            del self._put_off[next(iter(self._put_off))]
        self._written(OwnEntry(put_off=PutOffSave(key=key, why=why)))
        self._drop(key)
        self._job.wake_all()
        return True

    # ---- rounds ----

    def _meet_round(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        averages = Averages(request.averages, request.overflows)

        def was_in() -> bool:
            last = self._round
            return last.number > request.number and process_of(member) in last.processes

        if not was_in():
            self._leave_round(member.session)
            self._texts.add(member.trainer, ROUND_KEY, request.text)
            self._arrived[member.session] = Arrival(member, request.text, request.ends, averages)
            self._job.condition.notify_all()

            def missing() -> list[int]:
                return [] if was_in() else self._missing_in_round()

            what = "a meeting round of all trainers"
            if not self._wait(member, WaitKind.ROUND, what, missing, ROUND):
                return wire.MeetReply()
            if not was_in():
                self._close_round()
        last = self._round
        return wire.MeetReply(
            over=True, texts=dict(last.texts), number=last.number, changes=last.changes
        )

    def _leave_round(self, session: str) -> None:
        if (before := self._arrived.pop(session, None)) is not None:
            self._texts.remove(before.member.trainer, ROUND_KEY, before.text)

    def _there(self) -> list[Arrival]:
        """The trainers that have arrived, and are still live."""
        joined = MemberState.JOINED
        return [each for each in self._arrived.values() if each.member.state is joined]

    def _missing_in_round(self) -> list[int]:
        """The trainers that are awaited, and have not arrived."""
        there = self._there()
        needed = set(self._members.awaited())
        if not all(each.ends for each in there):
            needed |= self._members.reserved.keys() | self._members.arriving.keys()
        return sorted(needed - {each.member.trainer for each in there})

    def _close_round(self) -> None:
        if self._job.failure is not None:
            raise self._job.failure  # whoever has failed is not awaited, but was not here
        there = {process_of(each.member): each for each in self._there()}
        texts = {each.member.trainer: each.text for each in there.values()}
        self._round = Round(self._round.number + 1, self._members.changes, frozenset(there), texts)
        for session in list(self._arrived):
            self._leave_round(session)
        if self._averaged is not None:
            self._averaged.gathered({p: (each.member, each.averages) for p, each in there.items()})
        self._written(self._round_entry())
        self._job.condition.notify_all()

    # ---- the store ----

    def _keep_text(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        """Keeps a text, if it is the first under its key, or replaces one of this trainer's own."""
        key, text = request.key, request.text
        known = self._store.get(key)
        replaces = (
            known is not None
            and request.mode == wire.MEET_SET
            and known[0] == member.trainer
            and known[1] != text
        )
        if text and (known is None or replaces):
            check_room("topics", key, self._store)
            self._texts.add(member.trainer, key, text)
            if known is not None:
                self._texts.remove(known[0], key, known[1])
            known = self._store[key] = (member.trainer, text)
            self._written(_text_entry(key, *known))
        texts = {} if known is None else dict([known])
        return wire.MeetReply(over=bool(texts), texts=texts)

    # ---- the script's position ----

    def asks(self, member: Member) -> int:
        """The number of the question that this trainer is to answer; 0: none."""
        open_ = self._asked > self._answered
        return self._asked if open_ and member.trainer == self._who_knows() else 0

    def _who_knows(self) -> int | None:
        """The first trainer among those that know their position."""
        return self._members.first_of(lambda member: not member.late or member.placed)

    def _ask(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        self._check_asked(request.number)
        number = request.number
        if not number:
            if self._asked == self._answered:
                self._asked += 1
            number = self._asked

        def missing() -> list[int]:
            first = self._who_knows()
            return [] if self._answered >= number or first is None else [first]

        if not self._wait(member, WaitKind.POSITION, "where the others are", missing):
            return wire.MeetReply(number=number)
        member.placed = True
        self._job.condition.notify_all()  # barriers wait for it from here on
        reply = wire.MeetReply(problem="no live trainer knows the position")
        if self._answered >= number:
            reply.CopyFrom(self._answer)
        reply.over, reply.number = True, number
        return reply

    def _take_answer(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        self._check_asked(request.number)
        if len(request.text) > MOST_POSITION:
            raise Refused(
                f"expected a position of up to {MOST_POSITION} characters, got {len(request.text)}"
            )
        if request.number > self._answered:
            if request.step and not self._undecided(member, request.step):
                return wire.MeetReply(number=request.number)
            self._answered = request.number
            texts = {member.trainer: request.text}
            self._answer = wire.MeetReply(texts=texts, problem=request.problem[:MOST_POSITION])
            self._job.condition.notify_all()
        return wire.MeetReply(number=request.number, over=True)

    def _check_asked(self, number: int) -> None:
        if number > self._asked:
            raise Refused(f"expected a question up to {self._asked}, got {number}")

    # ---- see [Note: a coordinator that comes back] in pserver/job_log/coordinator.py ----

    def entries(self) -> list[OwnEntry]:
        """The entries for :meth:`restore_entry` of its replacement: the barriers that all have
        passed, the saves that are put off, the last round, and the store.
        """
        passed = [(key, each.texts) for key, each in self._barriers.items() if each.passed]
        known = [*self._past.items(), *passed]
        return [
            *(OwnEntry(barrier=PassedBarrier(key=key, texts=texts)) for key, texts in known),
            *(OwnEntry(put_off=PutOffSave(key=key, why=why)) for key, why in self._put_off.items()),
            self._round_entry(),
            *(_text_entry(key, *known) for key, known in self._store.items()),
        ]

    def _round_entry(self) -> OwnEntry:
        last = self._round
        entry = OwnEntry()
        entry.round.number, entry.round.changes = last.number, last.changes
        for process in sorted(last.processes):
            write_process(entry.round.processes.add(), process)
        entry.round.texts.update(last.texts)
        return entry

    def restore_entry(self, entry: OwnEntry) -> None:
        """Restores another process's entries."""
        match entry.WhichOneof("what"):
            case "barrier":
                passed = entry.barrier
                self.passed = True
                self._barriers[passed.key] = Barrier(dict(passed.texts), passed=True)
                for trainer, text in passed.texts.items():
                    self._texts.add(trainer, passed.key, text, checked=False)
            case "put_off":
                self._put_off[entry.put_off.key] = entry.put_off.why
            case "round":
                last = entry.round
                processes = frozenset(map(read_process, last.processes))
                self._round = Round(last.number, last.changes, processes, dict(last.texts))
            case _:
                kept = entry.text
                if (known := self._store.get(kept.key)) is not None:
                    self._texts.remove(known[0], kept.key, known[1])
                self._store[kept.key] = kept.trainer, kept.text
                self._texts.add(kept.trainer, kept.key, kept.text, checked=False)


def _text_entry(key: str, trainer: int, text: str) -> OwnEntry:
    return OwnEntry(text=KeptText(key=key, trainer=trainer, text=text))


def _given(texts: Mapping[int, str]) -> dict[int, str]:
    """The trainers' texts, without those that gave none."""
    return {trainer: text for trainer, text in texts.items() if text}


def check_room(what: str, key: str, known: Mapping[str, object]) -> None:
    """Returns if there is room for one more key.

    Raises:
        Refused: there are too many.
    """
    if key not in known and len(known) >= MOST_NAMES:
        raise Refused(f"expected at most {MOST_NAMES} {what} in a job, got another, {key!r}")
