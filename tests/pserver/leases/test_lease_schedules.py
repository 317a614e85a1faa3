"""Promises about leases in a world of losses: each sample counts once."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pserver.job_log.own_state import RememberedLeases
from pserver.leases.epoch import WIDTH, Epoch, EpochLeases, Intervals, Lease, LeasedBatches, Range
from pserver.leases.table import EpochRange, LeaseAsked, LeaseTable
from tests.support.lease_changes import entry_of

TRAINERS, EPOCHS, MOST = 4, 2, 2**32 - 1
KINDS = ["samples", "samples, sync", "memory", "iterable", "iterable, sync", "files"]
JOBS = {
    "kind": st.sampled_from(KINDS),
    "trainers": st.integers(1, TRAINERS),
    "batch": st.integers(1, 3),
    "size": st.integers(12, 30),
    "files": st.lists(st.sampled_from([0, 1, 5, 9]), min_size=1, max_size=4),
    "every": st.integers(1, 2),  # batches of a step
    "drop_last": st.booleans(),
    "return_at_last": st.booleans(),  # lost trainers do
    "catches_up": st.booleans(),  # who is expected need not be there when the others step
}
NTH = st.integers(0, TRAINERS - 1)


@dataclass
class Trainer:
    """A process: its script is a loop over epochs."""

    number: int
    incarnation: str
    batches: LeasedBatches  # leased, not given to the script
    epoch: int = 0
    unstepped: list[EpochRange] = field(default_factory=list)  # given since the last step
    given: int = 0  # batches since the last step
    staged: deque[list[EpochRange]] = field(default_factory=deque)  # steps that are not decided
    ends: list[tuple[int, int, int]] = field(default_factory=list)  # met, and not reported
    asked: LeaseAsked | None = None  # a request whose reply was lost
    reply: Lease | None = None  # that one
    requests: int = 0
    idle: bool = False  # it has said that it has nothing left, and has got nothing since

    @property
    def done(self) -> bool:
        return self.epoch == EPOCHS

    def asks(self, **asked: Any) -> LeaseAsked:
        """Its next request."""
        self.requests += 1
        asked, self.ends = asked | {"ended": tuple(self.ends)}, []
        return LeaseAsked(self.requests, **asked)


class Leases(RuleBasedStateMachine):
    """Trainers that lease, step, are lost and come back, and whole jobs that begin again; and an
    account of every position that does not ask the table.
    """

    made = LeaseTable
    table: LeaseTable | None = None

    # ---- the job ----

    @initialize(**JOBS)
    def begins(self, **job: Any) -> None:
        vars(self).update(job)
        self.data, _, mode = self.kind.partition(", ")
        self.together, plain = mode == "sync", self.data == "samples"
        self.batch, self.drop_last = self.batch if plain else 1, self.drop_last and plain
        self.started, self.broke, self.saved = 0, False, None
        self.decided = defaultdict[int, Counter[int]](Counter)  # by epoch
        self.opened: dict[int, Epoch] = {}
        self.starts(self.made(self.trainers), self.made(self.trainers))

    def starts(self, table: LeaseTable, follower: LeaseTable) -> None:
        """Every trainer joins."""
        self.table, self.follower = table, RememberedLeases(self.trainers)
        self.follower.table = follower
        self.there: dict[int, Trainer] = {}
        self.applying: dict[int, list[EpochRange]] = {}  # a round that is decided
        self.away = dict.fromkeys(range(self.trainers), "at first")  # or expected, kept, gone
        for number in range(self.trainers):
            self.comes(number)

    def change(self, name: str, *arguments: Any) -> Any:
        """A change of the table, which its follower repeats from its entry."""
        self.follower.apply(entry_of(name, *arguments))
        return getattr(self.table, name)(*arguments)

    @property
    def stripes(self) -> int:
        return self.trainers if self.together or self.data == "memory" else 0

    def epoch(self, number: int) -> Epoch:
        """A pass, as a script begins it."""
        epoch, stripes = Epoch(number, "", "0", self.size, self.batch), self.stripes
        match self.data:
            case "files":
                return replace(epoch, samples=0, segments=len(self.files))
            case "iterable":
                unknown = replace(epoch, samples=0, unit="batches", whole=True)
                return replace(unknown, stripes=stripes, segments=stripes or 1)
            case "memory":
                positions = -(-self.size // stripes) * stripes
                return replace(epoch, stripes=stripes, positions=positions, uneven=True)
        return replace(epoch, stripes=stripes, drop_last=self.drop_last)

    def lengths(self, number: int) -> list[int]:
        """The positions of each segment; of data whose end is known those of all."""
        epoch = self.opened.get(number, self.epoch(number))
        if self.data == "files":
            return self.files
        if self.data == "iterable":
            return [self.size // epoch.segments] * epoch.segments
        rest = self.size % (epoch.batch_size * max(1, epoch.stripes)) if epoch.drop_last else 0
        return [(epoch.positions or self.size) - rest]

    def existing(self, number: int, ranges: Iterable[Range]) -> list[Range]:
        """Positions that have data."""
        ends = [at * WIDTH + each for at, each in enumerate(self.lengths(number))]
        return [(a, min(b, ends[a // WIDTH])) for a, b in ranges if a < ends[a // WIDTH]]

    def holds(self, trainer: Trainer, idle: bool = True) -> list[EpochRange]:
        """All that a trainer has leased and that has data.

        Args:
            idle: also what is in no step of a trainer that has nothing left.
        """
        lost = trainer.reply.ranges if trainer.reply else ()
        rest = self.existing(trainer.epoch, [*trainer.batches.ranges, *lost])
        steps = [*trainer.staged, self.applying.get(trainer.number, [])]
        steps += [trainer.unstepped] if idle or not trainer.idle else []
        return [each for step in steps for each in step] + named(trainer.epoch, rest)

    # ---- what a trainer does ----

    def asks(self, trainer: Trainer, most: int = MOST, lost: bool = False) -> None:
        """Its next request, or the last one again where its reply was lost."""
        number, before = trainer.epoch, trainer.reply
        if (asked := trainer.asked) is None:
            unstepped = None if trainer.batches else sum(b - a for _, a, b in trainer.unstepped)
            most = MOST if self.stripes else most
            asked = trainer.asks(epoch=self.epoch(number), most=most, unstepped=unstepped)
        trainer.idle, was_over = asked.unstepped is not None, self.is_over(number)
        reply = self.change("lease", trainer.number, trainer.incarnation, asked)
        self.opened.setdefault(number, self.epoch(number))
        trainer.asked, trainer.reply = asked, reply
        trainer.idle = trainer.idle and not reply.ranges
        if before and (before.ranges or before.over):
            assert reply == before
        if self.is_over(number) and not was_over:  # not before all steps are decided
            held = [self.holds(each, idle=False) for each in self.there.values()]
            assert number not in {epoch for ranges in held for epoch, _, _ in ranges}
        assert self.is_over(number) or self.broke or not reply.over
        assert reply.batches <= asked.most and bool(reply.batches) == bool(reply.ranges)
        if not lost:
            trainer.asked = trainer.reply = None
            self.takes(trainer, reply)

    def takes(self, trainer: Trainer, reply: Lease) -> None:
        """Positions, of which those behind an end have no data; or the end."""
        if reply.over and trainer.idle:
            self.ends_pass(trainer)
        number, unknown = trainer.epoch, self.data in ("files", "iterable")
        trainer.batches.add(reply)
        for segment in {a // WIDTH for a, _ in reply.ranges} if unknown else ():
            if self.existing(number, reply.ranges) != list(reply.ranges):
                run = (0, self.size) if self.together else (segment, self.lengths(number)[segment])
                trainer.ends.append((number, *run))
        if unknown:
            trainer.batches.keep(lambda ranges: self.existing(number, ranges))

    def ends_pass(self, trainer: Trainer, unused: tuple[EpochRange, ...] = ()) -> None:
        """The loop is over; the next one begins."""
        skipped = tuple(trainer.unstepped)
        asked = trainer.asks(unused=unused, skipped=skipped, stopped=(trainer.epoch,))
        for _ in range(2):  # the first reply is lost
            self.change("lease", trainer.number, trainer.incarnation, asked)
        trainer.unstepped, trainer.given, trainer.idle = [], 0, False
        trainer.epoch += 1

    def goes_on(self, trainer: Trainer, most: int = MOST) -> None:
        """Does what its script does next: a request, or a batch, and a step where it is time."""
        if trainer.done or (self.together and trainer.staged):
            return
        if trainer.asked is not None or not trainer.batches:
            self.asks(trainer, most)
            return
        trainer.unstepped += named(trainer.epoch, trainer.batches.pop())
        trainer.given += 1
        if trainer.given == self.every:
            self.steps(trainer)

    def steps(self, trainer: Trainer) -> None:
        trainer.staged.append(trainer.unstepped)
        trainer.unstepped, trainer.given = [], 0

    # ---- what becomes of steps ----

    def decides(self, *trainers: Trainer) -> None:
        """Records of steps: these count, whatever becomes of their trainers."""
        for each in trainers:
            self.table.check(each.number, each.incarnation, each.staged[0])
            self.applying[each.number] = each.staged.popleft()

    def applies(self) -> None:
        for number, step in self.applying.items():
            self.change("decided", number, self.there[number].incarnation, step)
            for epoch, start, stop in step:
                self.decided[epoch].update(range(start, stop))
        self.applying = {}

    def round(self, without_expected: bool = False) -> None:
        """The trainers that step together do, if all have staged their step."""
        part = [each for each in self.there.values() if not each.done]
        needed = set(self.away.values()) - {"gone", "expected" if without_expected else ""}
        if not needed and all(each.staged for each in part):
            self.decides(*part)

    # ---- rules ----

    def nth(self, number: int) -> Trainer:
        return list(self.there.values())[number % len(self.there)]

    @precondition(lambda self: self.there)
    @rule(nth=NTH, times=st.integers(1, 5), most=st.integers(1, 9))
    def a_trainer_goes_on(self, nth: int, times: int, most: int) -> None:
        for _ in range(times):
            self.goes_on(self.nth(nth), most)

    @precondition(lambda self: self.there)
    @rule(nth=NTH, most=st.integers(1, 9), lost=st.booleans())
    def a_trainer_asks(self, nth: int, most: int, lost: bool) -> None:
        """Ahead of its need, too; maybe its reply is lost."""
        trainer = self.nth(nth)
        if not trainer.done and not (self.together and trainer.staged):
            self.asks(trainer, most, lost)

    @precondition(lambda self: self.there)
    @rule(nth=NTH, without=st.booleans(), applied=st.booleans())
    def a_step_is_decided(self, nth: int, without: bool, applied: bool) -> None:
        """A record that, where trainers step together, may not be applied at once."""
        self.applies()
        if self.together:
            self.round(without and self.catches_up)
        elif self.nth(nth).staged:
            self.decides(self.nth(nth))
        if applied or not self.together:
            self.applies()

    @precondition(lambda self: self.there and not self.together)
    @rule(nth=NTH, steps=st.booleans())
    def a_script_breaks_off(self, nth: int, steps: bool) -> None:
        trainer = self.nth(nth)
        if trainer.done or trainer.asked is not None or trainer.epoch not in self.opened:
            return
        if trainer.unstepped and steps:
            self.steps(trainer)
        unused = named(trainer.epoch, trainer.batches.ranges)
        trainer.batches, self.broke = LeasedBatches(self.batch), True
        self.ends_pass(trainer, tuple(unused))

    @precondition(lambda self: self.there)
    @rule(nth=NTH, kept=st.booleans())
    def a_trainer_is_lost(self, nth: int, kept: bool) -> None:
        """Maybe its place is kept."""
        self.applies()  # such a step counts
        trainer = self.nth(nth)
        del self.there[trainer.number]
        self.change("remove", trainer.number, trainer.incarnation)
        if kept:
            self.change("wait_for", trainer.number)
        self.away[trainer.number] = "kept" if kept else "gone"

    @precondition(lambda self: self.away)
    @rule(nth=NTH)
    def a_trainer_comes(self, nth: int) -> None:
        self.comes(list(self.away)[nth % len(self.away)])

    def comes(self, number: int) -> None:
        """A process is expected, or joins where it is."""
        if self.away[number] in ("kept", "gone"):
            if self.table.admits(number, self.applying):
                self.change("expect", number, self.applying)
                self.away[number] = "expected"
            return
        self.started += 1
        trainer = Trainer(number, f"start {self.started}", LeasedBatches(self.batch))
        late = self.away.pop(number) == "expected"
        self.change("join", number, trainer.incarnation, self.catches_up and late)
        self.there[number] = trainer

    @precondition(lambda self: self.away)
    @rule(nth=NTH)
    def a_trainer_does_not_come(self, nth: int) -> None:
        self.does_not_come(list(self.away)[nth % len(self.away)])

    def does_not_come(self, number: int) -> None:
        self.change("give_up", number)
        self.away[number] = "gone"

    @rule()
    def the_job_is_saved(self) -> None:
        self.applies()
        self.saved = as_json(self.table.plain()), deepcopy((self.decided, self.opened))

    @precondition(lambda self: self.saved)
    @rule(trainers=JOBS["trainers"], batch=JOBS["batch"])
    def the_job_begins_again(self, trainers: int, batch: int) -> None:
        """With another number of trainers, and batches of another size."""
        plain, model = self.saved
        self.decided, self.opened = deepcopy(model)
        if not self.together and self.data == "samples":
            self.batch = batch
        if self.kind != "iterable, sync":
            self.trainers = trainers
        self.starts(*(self.made.of(plain, self.trainers) for _ in range(2)))

    @rule()
    def another_table_takes_its_place(self) -> None:
        whole = as_json(self.table.whole())
        self.table = self.made.of_whole(whole)
        assert as_json(self.table.whole()) == whole

    @precondition(lambda self: self.there)
    @rule(nth=NTH, which=st.integers(0, 10))
    def a_wrong_request_changes_nothing(self, nth: int, which: int) -> None:
        trainer, before = self.nth(nth), self.table.whole()
        if all(each["epoch"]["number"] != trainer.epoch for each in before["epochs"]):
            return  # of one that is closed anything may come back
        with pytest.raises(ValueError):
            self.wrong(trainer, which)
        assert self.table.whole() == before

    def wrong(self, trainer: Trainer, which: int) -> None:
        number, me = trainer.epoch, (trainer.number, trainer.incarnation)
        held = {p for n, a, b in self.holds(trainer) if n == number for p in range(a, b)}
        place = min(set(range(self.lengths(number)[0])) - held)  # fails where it holds all
        free, last = (number, place, place + 1), max(self.decided[number], default=99 * WIDTH)
        runs = self.stripes if self.together else 1
        asked = [
            {"number": trainer.requests + 2},
            {"epoch": replace(self.epoch(number), seed="1")},
            {"epoch": replace(self.epoch(number), stripes=TRAINERS + 1)},
            {"unused": (free,)},
            {"skipped": (free,)},
            {"ended": ((number, last // WIDTH // runs, last % WIDTH * runs),)},  # too early
        ]
        if which < len(asked):
            self.table.lease(*me, LeaseAsked(**({"number": trainer.requests + 1} | asked[which])))
            return
        calls: list[Callable[[], Any]] = [
            lambda: self.table.check(*me, [free]),
            lambda: self.table.decided(*me, [free]),
            lambda: self.table.check(trainer.number, "another", []),
            lambda: self.table.decided(trainer.number, "another", []),
            lambda: self.table.lease(trainer.number, "another", LeaseAsked(1)),
        ]
        calls[which - len(asked)]()

    # ---- what always holds ----

    @invariant()
    def a_follower_has_the_same(self) -> None:
        if self.table is not None:
            assert self.follower.table.whole() == self.table.whole()

    @invariant()
    def each_position_is_in_one_place(self) -> None:
        if self.table is None:
            return
        for plain in self.table.plain()["epochs"]:
            number = plain["epoch"]["number"]
            account, leased = self.table.accounts[number], [each for _, each in plain["leased"]]
            places = [plain["free"], *(own for _, own, _ in plain["own"]), *leased]
            ranges = [each for place in places for each in self.existing(number, place)]
            every = [p for a, b in ranges for p in range(a, b)]
            every += self.decided[number].elements()
            missing = sum(self.lengths(number)) - len(every) - account.skipped
            assert len(every) == len(set(every))
            assert account.decided == len(self.decided[number])
            assert account.over or 0 <= missing <= account.left_out
        for trainer in self.there.values():
            self.table.check(trainer.number, trainer.incarnation, self.holds(trainer))

    def is_over(self, number: int) -> bool:
        return number in self.table.accounts and self.table.accounts[number].over

    def teardown(self) -> None:
        """In peace every script comes to its end, and each position is in one decided step or
        counts as skipped.
        """
        if self.table is None or sys.exc_info()[0]:
            return
        over = False
        for _ in range(40 * self.size):
            self.applies()
            for number in [] if over else list(self.away):
                # what scripts that broke off have left is for one that returns
                if self.return_at_last or self.broke or not self.there:
                    self.comes(number)
                else:
                    self.does_not_come(number)
            for trainer in self.there.values():
                self.goes_on(trainer)
                if trainer.staged and not self.together:
                    self.decides(trainer)
            if self.together:
                self.round()
            over = all(map(self.is_over, range(EPOCHS)))
            if over and all(each.done and not each.staged for each in self.there.values()):
                break
        else:
            raise AssertionError("it has no end")
        self.applies()
        for number in range(EPOCHS):
            self.check(number)

    def check(self, number: int) -> None:
        account, counted = self.table.accounts[number], self.decided[number]
        assert account.over and not account.leased
        assert account.decided == len(counted) == counted.total()
        if account.samples:  # a trainer has met the end
            assert account.samples == account.decided + account.skipped + account.left_out
        if self.every == 1 and not self.broke:
            assert not account.skipped
        if not (self.together or self.drop_last):
            assert not account.left_out


def as_json(whole: Any) -> Any:
    return json.loads(json.dumps(whole))


def named(epoch: int, ranges: Iterable[Range]) -> list[EpochRange]:
    return [(epoch, start, stop) for start, stop in ranges]


Leases.TestCase.settings = settings(stateful_step_count=50)
TestLeases = Leases.TestCase


# ---- what schedules find ----


class WritesBeforeTheStep(Leases):
    """The server counts what a commit names as soon as it comes."""

    def steps(self, trainer: Trainer) -> None:
        super().steps(trainer)
        super().change("decided", trainer.number, trainer.incarnation, trainer.staged[-1])

    def change(self, name: str, *arguments: Any) -> Any:
        return None if name == "decided" else super().change(name, *arguments)


class LosesAccumulation(Leases):
    """A step names its last batch only."""

    def steps(self, trainer: Trainer) -> None:
        *before, last = trainer.unstepped
        for epoch, start, stop in before:
            self.decided[epoch].update(range(start, stop))
        trainer.unstepped = [last]
        super().steps(trainer)


class Forgets(EpochLeases):
    """What a lost trainer had leased is never dealt again."""

    def take_back(self, trainer: int) -> None:
        self._leased.pop(trainer, None)
        self._idle.pop(trainer, None)


class ReturnsTwice(EpochLeases):
    """What a lost trainer had leased is dealt to two others."""

    def take_back(self, trainer: int) -> None:
        leased = list(self._leased.get(trainer, Intervals()))
        super().take_back(trainer)
        if leased and not self.over:
            first = self._leased.setdefault(trainer + 100, Intervals())
            for start, stop in leased:
                first.add(start, stop)
            super().take_back(trainer + 100)


class EndsEarly(EpochLeases):
    """An epoch is over as soon as nothing is left to deal."""

    def settle(self, awaited: Collection[int]) -> None:
        super().settle(awaited)
        self.over = self.over or not self._left


class GivesTheNextReply(LeaseTable):
    """A request that comes twice is answered with another lease."""

    def lease(self, trainer: int, incarnation: str, asked: LeaseAsked) -> Lease:
        number, _ = self._answered.get(trainer, (0, Lease()))
        if asked.number == number and asked.epoch is not None:
            self._answered[trainer] = number - 1, Lease()
        return super().lease(trainer, incarnation, asked)


class OfAnotherTable(Leases):
    """Schedules of a table whose replies are not repeated."""

    made = GivesTheNextReply


SCHEDULES = [WritesBeforeTheStep, LosesAccumulation, OfAnotherTable]


def fail(schedules: type[Leases]) -> None:
    """Returns if a schedule shows that something is wrong."""
    found = settings(
        Leases.TestCase.settings,
        max_examples=500,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(schedules, settings=found)


@pytest.mark.parametrize("schedules", SCHEDULES)
def test_schedules_find_progress_that_is_written_wrongly(schedules: type[Leases]) -> None:
    """Too early, or of one batch only; and a lost reply whose lease nobody has."""
    fail(schedules)


@pytest.mark.parametrize("leases", [Forgets, ReturnsTwice, EndsEarly])
def test_schedules_find_an_epoch_that_deals_wrongly(
    leases: type[EpochLeases], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges that do not come back, or come back twice, and an early end, are found."""
    monkeypatch.setattr("pserver.leases.table.EpochLeases", leases)

    fail(Leases)


def job_of(kind: str, **other: Any) -> Leases:
    """A job of two lives that step together."""
    job = Leases()
    usual = {"batch": 1, "files": [0], "every": 1, "drop_last": False, "catches_up": False}
    job.begins(kind=kind, **(usual | {"return_at_last": False} | other))
    return job


def test_a_trainer_that_was_given_up_has_a_part_when_the_job_begins_again() -> None:
    """Otherwise the others' steps wait for it, and it waits for the end of the pass."""
    job = job_of("samples, sync", trainers=1, size=12)
    job.a_trainer_asks(lost=False, most=1, nth=0)
    job.the_job_is_saved()
    job.the_job_begins_again(batch=1, trainers=2)
    job.a_trainer_is_lost(kept=False, nth=0)
    job.a_trainer_asks(lost=False, most=1, nth=0)
    job.the_job_is_saved()
    job.the_job_begins_again(batch=1, trainers=2)
    job.teardown()


def test_stripes_of_unknown_length_are_even_when_the_job_begins_again() -> None:
    """Trainer 1 has stepped without trainer 0: who has more batches left gives up what it has
    missed, or its last step waits for one that has none.
    """
    job = job_of("iterable, sync", trainers=2, size=12)
    job.a_trainer_is_lost(kept=False, nth=0)
    job.a_trainer_goes_on(nth=0, times=2, most=1)
    job.a_step_is_decided(nth=0, without=False, applied=True)
    job.the_job_is_saved()
    job.the_job_begins_again(batch=1, trainers=2)
    job.teardown()
    assert [job.decided[0].total(), job.table.accounts[0].left_out] == [11, 1]
