"""The coordinator of a job's log: what is decided, what is dropped, and what is ignored."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pserver.job_log.coordinator import Coordinator
from pserver.job_log.records import (
    Call,
    Decided,
    Joined,
    Left,
    Loaded,
    LogSnapshot,
    Lost,
    Process,
    ProcessSnapshot,
    ProcessStep,
    Record,
    Staged,
    What,
    records_bytes,
    records_of,
    resumes,
)
from pserver.job_log_pb2 import OwnEntry

SERVERS, TRAINERS, ROUNDS = 2, 2, [True, False]
STEPS = st.integers(1, 3)
NEXT = st.sampled_from([1, 1, 2, 0])  # from the last one
NTH = st.sampled_from([0, 0, 1, 1, 2])
ONE_SERVER = st.integers(0, SERVERS - 1)
SOME_SERVERS = st.sampled_from([(0,), (1,), (1, 1), (0, 1), (1, 0)])
NOTICES = st.lists(st.tuples(SOME_SERVERS, st.integers(0, 1), NTH, NEXT), min_size=3, max_size=12)


class Log(RuleBasedStateMachine):
    """Servers' notices in any order and more than once, and the records that follow from them:
    every step counts everywhere or nowhere.  The second lane's steps are updates of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.awaited, self.now = set(range(TRAINERS)), 0.0
        self.records: list[Record] = []
        self.present: dict[int, Process] = {}
        self.begun: dict[Process, tuple[int, ...]] = {}
        self.lost: dict[Process, str] = {}
        self.left: dict[Process, int | None] = {}
        self.loaded = 0
        self.decided = Counter[tuple[Process, int]]()  # by lane, the last step
        self.rows = Counter[tuple[Process, int, int]]()  # by lane and server
        self.called = defaultdict[Process, dict[str, int]](dict)
        self.forgets()
        self.coordinator = self.made()
        self.writes()

    def made(self) -> Coordinator:
        return Coordinator(SERVERS, ROUNDS, lambda lane: self.awaited)

    def forgets(self) -> None:
        """Sends again what is staged, which is in no record."""
        self.staged: list[dict[ProcessStep, dict[int, int]]] = [{} for _ in ROUNDS]
        self.refused: dict[tuple[int, ProcessStep], str] = {}
        self.ready = defaultdict[Call, set[int]](set)

    def writes(self) -> None:
        """The file begins anew with all that is known."""
        self.written = [each.SerializeToString() for each in self.coordinator.entries()]
        self.coordinator.write = lambda entry: self.written.append(entry.SerializeToString())

    def follow(self, records: list[Record], *whats: What) -> None:
        """These, and no others, are the next records."""
        assert [each.what for each in records] == list(whats)
        for each in records:
            assert each.number == len(self.records) + 1
            assert each.time == max([self.now, *(before.time for before in self.records[-1:])])
            self.records.append(each)

    def decide(self, lane: int, *steps: ProcessStep) -> Decided:
        for each in steps:
            self.decided[each.process, lane] = each.step
            for server, rows in self.staged[lane].pop(each).items():
                self.rows[each.process, lane, server] += rows
        found = {each.process.trainer: self.refused.get((lane, each), "") for each in steps}
        refused = tuple((trainer, why) for trainer, why in found.items() if why)
        return Decided(lane, steps, tuple(consumed(lane, each.step) for each in steps), refused)

    def round(self) -> list[What]:
        """The round that is complete, if one is: of all that is staged."""
        steps = sorted(self.staged[0])
        everywhere = all(len(self.staged[0][each]) == SERVERS for each in steps)
        needed = self.awaited <= {each.process.trainer for each in steps}
        return [self.decide(0, *steps)] if steps and everywhere and needed else []

    # ---- notices ----

    def nth(self, number: int) -> Process:
        """One of the last that have joined; maybe it has gone since."""
        return list(self.begun)[-1 - number % len(self.begun)]

    @rule(notices=NOTICES, now=st.integers(0, 9))
    def servers_have_staged(self, notices: list[tuple[list[int], int, int, int]], now: int) -> None:
        """The clock may go back; records do not."""
        self.now = float(now)
        for servers, lane, nth, after in notices:
            process = self.nth(nth)
            step = ProcessStep(process, self.decided[process, lane] + after)
            for server in servers:
                self.has_staged(server, lane, step, now + server)

    def has_staged(self, server: int, lane: int, step: ProcessStep, rows: int) -> None:
        samples = consumed(lane, step.step) if server == 0 else ()
        # this server, and not the other ones
        refuses = "" if (step.step + server) % 4 else f"found on {server}"
        notice = Staged(lane, step, rows, samples, refuses)
        records = self.coordinator.staged(server, notice, self.now)
        expected: list[What] = []
        if step.process not in self.lost and step.step > self.decided[step.process, lane]:
            servers = self.staged[lane].setdefault(step, {})
            servers[server] = rows
            if refuses:
                self.refused.setdefault((lane, step), refuses)
            if lane == 0:
                expected = self.round()
            elif len(servers) == SERVERS:
                expected = [self.decide(1, step)]
        self.follow(records, *expected)

    @rule(awaited=st.sets(st.integers(0, TRAINERS - 1)))
    def others_are_awaited(self, awaited: set[int]) -> None:
        self.awaited = awaited
        self.follow(self.coordinator.complete(0, self.now), *self.round())

    @rule(servers=SOME_SERVERS, nth=NTH, kind=st.sampled_from(["save", "shrink"]), after=NEXT)
    def servers_are_ready(self, servers: list[int], nth: int, kind: str, after: int) -> None:
        process = self.nth(nth)
        call = Call(process, kind, self.called[process].get(kind, 0) + after)
        for server in servers:
            records = self.coordinator.call(server, call, self.now)
            is_new = call.number > self.called[process].get(kind, 0)
            if process not in self.lost and is_new:
                self.ready[call].add(server)
            if process in self.lost or not is_new or len(self.ready[call]) < SERVERS:
                self.follow(records)
            else:
                self.called[process][kind] = call.number
                self.drop(lambda each: (each.process, each.kind) == (process, kind))
                self.follow(records, call)

    def drop(self, which: Callable[[Call], bool]) -> None:
        for each in filter(which, list(self.ready)):
            del self.ready[each]

    @rule(server=ONE_SERVER)
    def a_server_is_lost(self, server: int) -> None:
        """It is ready for nothing, and has staged nothing, until it says so again."""
        self.coordinator.server_lost(server)
        for of in (*self.staged[0].values(), *self.staged[1].values()):
            of.pop(server, None)
        for ready in self.ready.values():
            ready.discard(server)

    # ---- trainers ----

    @initialize()
    def all_join(self) -> None:
        for trainer in range(TRAINERS):
            self.a_trainer_joins(trainer, (0, 0))

    @rule(trainer=st.integers(0, TRAINERS - 1), steps=st.tuples(STEPS, STEPS))
    def a_trainer_joins(self, trainer: int, steps: tuple[int, int]) -> None:
        """A new process."""
        self.joins(Process(trainer, f"start {len(self.begun)}"), steps)

    @rule(nth=NTH)
    def a_trainer_joins_again(self, nth: int) -> None:
        self.joins(self.nth(nth), (1, 1))

    def joins(self, process: Process, steps: tuple[int, int]) -> None:
        present = self.present.get(process.trainer)
        if process in self.lost or process in self.left or present not in (None, process):
            said = "was lost" if process in self.lost else "has already joined"
            said = "has left" if process in self.left else said
            with pytest.raises(ValueError, match=said):
                self.coordinator.join(process, steps, self.now)
            return
        records = self.coordinator.join(process, steps, self.now)
        self.follow(records, *([] if present else [Joined(process, steps)]))
        if not present:
            self.present[process.trainer], self.begun[process] = process, steps
            self.decided.update({(process, lane): step for lane, step in enumerate(steps)})

    @rule(nth=NTH, text=st.sampled_from(["silent", "slow"]))
    def a_trainer_is_lost(self, nth: int, text: str) -> None:
        """Drops what it has staged; what is decided counts.  One that has left is not lost."""
        process = self.nth(nth)
        records = self.coordinator.lose(process, text, self.now)
        if process in self.lost or process in self.left:
            self.follow(records)
            return
        self.follow(records, Lost(process, text))
        self.lost[process] = text
        self.goes(process)
        self.drop(lambda each: each.process == process)
        for staged in self.staged:
            for step in [each for each in staged if each.process == process]:
                del staged[step]

    @rule(nth=NTH, preempted_after=st.none() | STEPS)
    def a_trainer_leaves(self, nth: int, preempted_after: int | None) -> None:
        process = self.nth(nth)
        records = self.coordinator.leave(process, self.now, preempted_after)
        if process in self.lost or process in self.left:
            self.follow(records)
            return
        self.follow(records, Left(process, preempted_after))
        self.left[process] = preempted_after
        self.goes(process)

    def goes(self, process: Process) -> None:
        if self.present.get(process.trainer) == process:
            del self.present[process.trainer]

    @rule()
    def values_are_loaded(self) -> None:
        """Any number of loads between two other records are one."""
        last = [each.what for each in self.records[-1:]]
        self.follow(self.coordinator.load(self.now), *([] if last == [Loaded()] else [Loaded()]))
        self.loaded = len(self.records)

    # ---- another one in its place: see [Note: a coordinator that comes back] ----

    @rule()
    def another_coordinator_takes_its_place(self) -> None:
        before, self.coordinator = self.coordinator, self.made()
        for entry in self.written:
            self.coordinator.apply(OwnEntry.FromString(entry))
        assert self.coordinator.entries() == before.entries()
        self.forgets()
        self.writes()

    # ---- what always holds ----

    @invariant()
    def a_server_that_comes_back_gets_all(self) -> None:
        last = len(self.records)
        assert self.coordinator.last == last
        assert self.coordinator.since(last + 1) is self.coordinator.since(-1) is None
        assert self.coordinator.since(last // 2) == self.records[last // 2 :]
        data = records_bytes(self.records, resumes=True)
        assert records_of(data) == self.records and resumes(data)
        for server in range(SERVERS):
            snapshot = self.coordinator.snapshot(server)
            assert snapshot == LogSnapshot(last, self.processes(server), self.loaded)
            assert LogSnapshot.of(snapshot.to_bytes()) == snapshot
            there = {each.process for each in snapshot.processes if each.present}
            assert there == set(self.present.values())

    def processes(self, server: int) -> tuple[ProcessSnapshot, ...]:
        lanes = range(len(ROUNDS))
        return tuple(
            ProcessSnapshot(
                each,
                self.begun.get(each, ()),
                tuple(self.decided[each, lane] for lane in lanes),
                tuple(self.rows[each, lane, server] for lane in lanes),
                self.lost.get(each, ""),
                each in self.left,
                self.left.get(each),
                self.called[each],
            )
            for each in {**self.begun, **self.lost}
        )


def consumed(lane: int, step: int) -> tuple[tuple[int, int, int], ...]:
    """The samples of a step."""
    return ((lane, step, step + 1), (2, 0, 2))


Log.TestCase.settings = settings(stateful_step_count=50)
TestLog = Log.TestCase


def test_one_server_decides_at_once() -> None:
    """Without another message; where no step consumes samples, no record says so."""
    step = ProcessStep(Process(0, "a"), 1)
    coordinator = Coordinator(1, [False], lambda lane: ())

    (record,) = coordinator.staged(0, Staged(0, step), 1.0)
    assert record.what == Decided(0, (step,)) and not resumes(records_bytes([record]))


def test_what_a_lost_server_has_staged_and_is_ready_for_does_not_count() -> None:
    """Until it says so again."""
    coordinator, process = Log().coordinator, Process(0, "a")
    step, call = Staged(1, ProcessStep(process, 1)), Call(process, "save", 1)
    coordinator.staged(1, step, 1.0)
    coordinator.call(1, call, 1.0)
    coordinator.server_lost(1)

    assert not coordinator.staged(0, step, 1.0) + coordinator.call(0, call, 1.0)
    assert coordinator.staged(1, step, 1.0) and coordinator.call(1, call, 1.0)


def test_a_lane_that_the_plan_does_not_have_is_refused() -> None:
    """A server of another job."""
    with pytest.raises(ValueError, match="expected a lane below 2, got 2"):
        Log().coordinator.staged(0, Staged(2, ProcessStep(Process(0, "a"), 1)), 1.0)
