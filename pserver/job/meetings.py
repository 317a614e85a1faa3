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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job.averaged_steps import AveragedSteps, Averages
from pserver.job_log.own_state import (
    RememberedMeetings,
    Round,
    TextBudget,
    passed_entry,
    text_entry,
)
from pserver.job_log_pb2 import OwnEntry, PutOffSave
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

MOST_NAMES = 2**16  # of barriers, and of topics
MOST_POSITION = 2**20  # characters of a position
ROUND_KEY = "a round"


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
        state: what meetings have led to, as it follows from entries.
        write: called with each change, before any trainer receives it: an entry that the state has
            applied.  None: nothing is written down.
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
        self._averaged, self.state = averaged, RememberedMeetings(texts)
        self.write: Callable[[OwnEntry], None] | None = None
        self._arrived: dict[str, Arrival] = {}  # by session, for the next round
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

    def _change(self, entry: OwnEntry) -> None:
        """Changes the state by an entry, and writes it."""
        self.state.apply(entry)
        if self.write is not None:
            self.write(entry)

    # ---- barriers ----

    def _meet_all(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        key, saves, put_off = request.key, request.mode == wire.MEET_SAVE, self.state.put_off
        if key in put_off:
            return wire.MeetReply(problem=put_off[key])
        barrier = self.state.barriers.get(key)
        if barrier is None or not barrier.passed:
            check_room("barriers", key, self.state.barriers)
            barrier = self.state.arrive(member.trainer, key, request.text)
            if saves:
                self._job.wake_all()  # trainers that wait for samples join a save
            self._job.changed.notify()

            def missing() -> list[int]:
                if barrier.passed or key in put_off:
                    return []
                return [trainer for trainer in self._awaited() if trainer not in barrier.texts]

            kind, what = WaitKind.BARRIER, f"barrier {key!r}"
            if saves:
                kind, what = WaitKind.SAVE, key
            if not self._wait(member, kind, what, missing, BARRIER):
                return wire.MeetReply()
            if key in put_off:
                return wire.MeetReply(problem=put_off[key])
            if not barrier.passed:
                self._pass(key)
        return wire.MeetReply(over=True, texts=_given(barrier.texts))

    def _pass(self, key: str) -> None:
        """Passes a barrier, which all trainers have reached.  Barriers before it are past then:
        their texts would take memory until the job ends.
        """
        if self._job.failure is not None:
            raise self._job.failure  # whoever has failed is not awaited, but was not here
        awaited, barriers = set(self._members.awaited()), self.state.barriers
        earlier = list(takewhile(lambda each: each != key, barriers))
        for each in earlier:
            if not barriers[each].passed and barriers[each].texts.keys() >= awaited:
                self._change(passed_entry(each, barriers[each].texts))
        past = [each for each in earlier if barriers[each].passed]
        self._change(passed_entry(key, barriers[key].texts, past))

    def _awaited(self) -> list[int]:
        """The trainers that a barrier needs.  Before the first step, when a job is read from files,
        it does not need those that have joined late and do not know the others' position.
        """
        awaited = self._members.awaited()
        if self._stepped():
            return awaited
        late = {m.trainer for m in self._members.joined() if m.late and not m.placed}
        return [trainer for trainer in awaited if trainer not in late]

    def _pass_by(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        """See [Note: barriers of the past]."""
        key = request.key
        known = self.state.barriers.get(key)
        texts = self.state.past.get(key) or (None if known is None else known.texts)
        return wire.MeetReply(over=True, texts=_given(texts or {member.trainer: request.text}))

    def put_off(self, key: str, why: str) -> bool:
        """Puts a save off: its barrier releases all trainers, and takes no other.

        Returns:
            Whether it is put off now; False: a trainer has passed its barrier already, or none
            waits there.
        """
        barrier = self.state.barriers.get(key)
        if barrier is None or barrier.passed:
            return False
        self._change(OwnEntry(put_off=PutOffSave(key=key, why=why)))
        self._job.wake_all()
        return True

    # ---- rounds ----

    def _meet_round(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        averages = Averages(request.averages, request.overflows)

        def was_in() -> bool:
            last = self.state.round
            return last.number > request.number and process_of(member) in last.processes

        if not was_in():
            self._leave_round(member.session)
            self.state.texts.check(member.trainer, ROUND_KEY, request.text)
            self.state.texts.add(member.trainer, ROUND_KEY, request.text)
            self._arrived[member.session] = Arrival(member, request.text, request.ends, averages)
            self._job.condition.notify_all()

            def missing() -> list[int]:
                return [] if was_in() else self._missing_in_round()

            what = "a meeting round of all trainers"
            if not self._wait(member, WaitKind.ROUND, what, missing, ROUND):
                return wire.MeetReply()
            if not was_in():
                self._close_round()
        last = self.state.round
        return wire.MeetReply(
            over=True, texts=dict(last.texts), number=last.number, changes=last.changes
        )

    def _leave_round(self, session: str) -> None:
        if (before := self._arrived.pop(session, None)) is not None:
            self.state.texts.remove(before.member.trainer, ROUND_KEY, before.text)

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
        number, changes = self.state.round.number + 1, self._members.changes
        for session in list(self._arrived):
            self._leave_round(session)
        if self._averaged is not None:
            self._averaged.gathered({p: (each.member, each.averages) for p, each in there.items()})
        self._change(Round(number, changes, frozenset(there), texts).entry())
        self._job.condition.notify_all()

    # ---- the store ----

    def _keep_text(self, member: Member, request: wire.MeetRequest) -> wire.MeetReply:
        """Keeps a text, if it is the first under its key, or replaces one of this trainer's own."""
        key, text = request.key, request.text
        known = self.state.store.get(key)
        replaces = (
            known is not None
            and request.mode == wire.MEET_SET
            and known[0] == member.trainer
            and known[1] != text
        )
        if text and (known is None or replaces):
            check_room("topics", key, self.state.store)
            self.state.texts.check(member.trainer, key, text)
            self._change(text_entry(key, member.trainer, text))
            known = self.state.store[key]
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
