"""Server 0's own state follows from its entries: in any job, from any moment on."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.job.meetings import Meetings
from pserver.job_log import own_state
from pserver.job_log.coordinator import Coordinator
from pserver.job_log.own_state import (
    OwnState,
    RememberedLeases,
    RememberedMeetings,
    fold,
    leases_entry,
)
from pserver.job_log.records import Call, ProcessStep, Staged
from pserver.job_log_pb2 import LeaseChange, LeaseJoin, OwnEntry, Process
from pserver.lane.leases import JobLeases
from pserver.leases.table import EpochRange, LeaseTable
from pserver.membership.decisions import process_of
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership, MemberState
from pserver.wire_pb2 import LeaseEpoch, LeaseRange, LeaseRequest, MeetRequest

TRAINERS, SERVERS, ROUNDS = 2, 2, [False, True]
EPOCH = LeaseEpoch(number=0, seed="0", samples=40, batch_size=2, unit="samples")
TRAINER = st.integers(0, TRAINERS - 1)
KEYS = st.sampled_from(["1: epoch", "2: epoch", "3: end", "automatic save 1"])
TEXTS = st.sampled_from(["", "a", "b" * 30, "c" * 50])


def parts() -> tuple[Coordinator, RememberedLeases, RememberedMeetings]:
    """Those of a process that knows nothing yet."""
    log = Coordinator(SERVERS, ROUNDS, lambda lane: ())
    return log, RememberedLeases(TRAINERS), RememberedMeetings()


def folded(entries: Iterable[bytes]) -> OwnState:
    state = OwnState(*parts())
    fold(state, map(OwnEntry.FromString, entries))
    return state


def plain(state: OwnState) -> list[bytes]:
    return [each.SerializeToString(deterministic=True) for each in state.entries()]


class OwnJob(RuleBasedStateMachine):
    """Trainers' actions of which server 0 alone has notes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(timeouts, "LONG_POLL_SECONDS", 0.0)
        self.patch.setattr(own_state, "PAST_BYTES", 90)
        self.patch.setattr(own_state, "PAST_TEXT", 50)
        self.patch.setattr(own_state, "MOST_PUT_OFF", 2)
        self.members, self.job = Membership(TRAINERS, 0.0), Lifecycle()
        self.job.begin()
        self.log = Coordinator(SERVERS, ROUNDS, lambda lane: ())
        self.leases = JobLeases(self.members, self.job, wait_seconds=0.0)
        self.meetings = Meetings(self.members, self.job)
        self.state = OwnState(self.log, self.leases.state, self.meetings.state)
        self.written: list[bytes] = []
        self.log.write = self.leases.write = self.meetings.write = self.write
        self.started = 0
        self.there: dict[int, Member] = {}
        self.asked = defaultdict[str, int](int)  # by session
        self.held = defaultdict[str, list[EpochRange]](list)  # likewise: leased, in no step
        self.decided = defaultdict[str, deque[list[EpochRange]]](deque)  # and not applied

    def write(self, entry: OwnEntry) -> None:
        self.state.follow(entry)
        self.written.append(entry.SerializeToString())

    # ---- trainers ----

    @initialize()
    def all_join(self) -> None:
        for trainer in range(TRAINERS):
            self.joins(trainer)

    def joins(self, trainer: int) -> None:
        self.started += 1
        member = Member(trainer, f"start {self.started}", "tcp", 0.0)
        with self.job.condition:
            self.members.add(member)
        self.log.join(process_of(member), (0, 0), float(self.started))
        self.there[trainer] = member

    @rule(trainer=TRAINER, lost=st.booleans(), kept=st.booleans(), admitted=st.booleans())
    def another_takes_its_place(self, trainer: int, lost: bool, kept: bool, admitted: bool) -> None:
        """When its steps are applied; otherwise whoever takes its place has to wait.  The other
        one asks for samples meanwhile, maybe while the place is kept.
        """
        before = self.there[trainer]
        while self.decided[before.session]:
            self.applies(trainer)
        if lost:
            self.log.lose(process_of(before), "silent", 1.0)
            self.members.fence(process_of(before), "silent")
        else:
            self.members.preempt(before, 7)
            self.log.leave(process_of(before), 1.0, 7)
            before.state = MemberState.LEFT
        self.asks(1 - trainer, 1, False)
        if kept:
            self.members.reserved[trainer] = 10.0
            self.asks(1 - trainer, 1, False)
        if admitted:
            with self.job.condition:
                self.leases.let_in(trainer, {})
        self.joins(trainer)

    @rule(trainer=TRAINER)
    def calls(self, trainer: int) -> None:
        process, number = process_of(self.there[trainer]), self.log.last + 1
        for server in range(SERVERS):
            self.log.call(server, Call(process, "save", number), 1.0)

    @rule()
    def values_are_loaded(self) -> None:
        self.log.load(2.0)

    # ---- samples and steps ----

    @precondition(lambda self: not self.asked)
    @rule()
    def a_table_is_restored(self) -> None:
        """That of a checkpoint, whose leases go back."""
        table = LeaseTable(TRAINERS)
        table.join(0, "before")
        with self.job.condition:
            self.leases.restore(table.plain())

    @rule(trainer=TRAINER, most=st.integers(1, 3), returns=st.booleans())
    def asks(self, trainer: int, most: int, returns: bool) -> None:
        member = self.there[trainer]
        held = self.held[member.session]
        unused = [held.pop()] if returns and held else []
        self.asked[member.session] += 1
        request = LeaseRequest(
            session=member.session,
            number=self.asked[member.session],
            epoch=EPOCH,
            most=most,
            unused=[LeaseRange(epoch=n, start=a, stop=b) for n, a, b in unused],
        )
        held.extend((0, a.start, a.stop) for a in self.leases.lease(member, request).ranges)

    @rule(trainer=TRAINER, rows=st.integers(0, 3), lane=st.integers(0, 1))
    def steps(self, trainer: int, rows: int, lane: int) -> None:
        """A step of the first lane names samples; it is decided, and not applied yet."""
        member = self.there[trainer]
        consumed = () if lane else tuple(self.held.pop(member.session, ()))
        step = ProcessStep(process_of(member), self.log.decided(process_of(member), lane) + 1)
        for server in range(SERVERS):
            refused = "outlier" if rows == 3 else ""
            staged = Staged(lane, step, rows + server, () if server else consumed, refused)
            self.log.staged(server, staged, 2.0)
        if consumed:
            member.watermark(0).taking += 1
            self.decided[member.session].append(list(consumed))

    @rule(trainer=TRAINER)
    def applies(self, trainer: int) -> None:
        member = self.there[trainer]
        if self.decided[member.session]:
            consumed = self.decided[member.session].popleft()
            member.watermark(0).applied += 1
            with self.job.condition:
                self.leases.decided(trainer, member.incarnation, consumed)

    # ---- meetings ----

    def meets(self, trainer: int, mode: wire.MeetMode, key: str, text: str) -> wire.MeetReply:
        request = MeetRequest(mode=mode, key=key, text=text)
        return self.meetings.meet(self.there[trainer], request)

    @rule(key=KEYS, texts=st.tuples(TEXTS, TEXTS), alone=st.booleans())
    def come_to_a_barrier(self, key: str, texts: tuple[str, str], alone: bool) -> None:
        for trainer in range(TRAINERS - alone):
            self.meets(trainer, wire.MEET_SAVE, key, texts[trainer])

    @rule(trainer=TRAINER, key=KEYS, later=KEYS)
    def reaches_one_that_another_completes(self, trainer: int, key: str, later: str) -> None:
        """The awaited trainers are fewer when they come to the later one: none has passed this."""
        self.meets(trainer, wire.MEET_ALL, key, "first")
        self.there[1 - trainer].finished = True
        self.meets(trainer, wire.MEET_ALL, later, "later")
        self.there[1 - trainer].finished = False

    @rule(key=KEYS)
    def a_save_is_put_off(self, key: str) -> None:
        with self.job.condition:
            self.meetings.put_off(key, "they wait for one another")

    @rule(texts=st.tuples(TEXTS, TEXTS))
    def meet_in_a_round(self, texts: tuple[str, str]) -> None:
        for trainer in range(TRAINERS):
            self.meets(trainer, wire.MEET_ROUND, "", texts[trainer])

    @rule(trainer=TRAINER, key=KEYS, text=TEXTS, sets=st.booleans())
    def keeps_a_text(self, trainer: int, key: str, text: str, sets: bool) -> None:
        self.meets(trainer, wire.MEET_SET if sets else wire.MEET_FIRST, key, text)

    # ---- the law ----

    def teardown(self) -> None:
        """fold(all) == fold(the snapshot at k) + what follows it, for every k."""
        try:
            whole = plain(folded(self.written))
            assert plain(self.state) == whole
            known = OwnState(*parts())
            for k, entry in enumerate(self.written):
                assert plain(folded([*plain(known), *self.written[k:]])) == whole
                known.apply(OwnEntry.FromString(entry))
        finally:
            self.patch.undo()


OwnJob.TestCase.settings = settings(stateful_step_count=40)
TestOwnJob = OwnJob.TestCase


@pytest.mark.parametrize(
    "entry", [OwnEntry(), OwnEntry(lease=LeaseChange()), OwnEntry(plan="again")], ids=str
)
def test_an_entry_of_another_version_is_an_error(entry: OwnEntry) -> None:
    """It is not passed over: the state would be another one."""
    with pytest.raises(ValueError, match="expected"):
        OwnState(*parts()).apply(entry)


def test_samples_of_a_step_that_is_not_applied_are_settled() -> None:
    """The process that applied it is gone; see [Note: between a record and its samples]."""
    job = OwnJob()
    job.all_join()
    for trainer in (0, 1):
        job.asks(trainer, 1, False)
        job.steps(trainer, 0, 0)
    job.applies(0)
    another = folded(job.written)
    another.settle()
    job.patch.undo()

    assert another.leases.table.accounts[0].decided == 4
    assert not [each for each in another.entries() if each.HasField("unheard")]


def test_a_whole_table_takes_the_place_of_the_one_before() -> None:
    """That of a checkpoint, in a job that has dealt nothing out."""
    state, table = OwnState(*parts()), LeaseTable(TRAINERS)
    join = LeaseJoin(process=Process(trainer=1, incarnation="a"))
    state.apply(OwnEntry(lease=LeaseChange(join=join)))
    table.join(0, "b")
    state.apply(leases_entry(table))

    assert state.leases.table.present == {0: "b"}
