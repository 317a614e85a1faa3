"""Promises about leases in a world of losses: each sample counts once."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import pytest

from pserver.leases.epoch import EpochLeases, Intervals, Lease
from pserver.leases.table import EpochRange, LeaseAsked, LeaseTable
from tests.support.lease_world import Trainer, World

SEEDS = 1000
CAUGHT_WITHIN = 500  # seeds


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
def test_each_sample_is_in_one_decided_step_or_counts_as_skipped(together: bool) -> None:
    """Epoch by epoch, over random schedules of kills, restarts, joins, leaves, requests that come
    twice, and restarts of the whole job from what it saved.
    """
    for seed in range(SEEDS):
        world = World(seed, LeaseTable, together)
        try:
            world.run()
            world.check()
        except Exception as error:
            error.add_note(f"seed {seed}, together={together}")
            raise


class Replaced(LeaseTable):
    """Another table takes its place before each request: one that has what it wrote as a whole, or
    one that has done again all that was done to it.
    """

    def __init__(self, trainers: int) -> None:
        super().__init__(trainers)
        self.follows = LeaseTable(trainers)

    @classmethod
    def of(cls, plain: Mapping[str, Any], trainers: int) -> Self:
        made = super().of(plain, trainers)
        made.follows = LeaseTable.of(plain, trainers)
        return made

    def lease(self, trainer: int, incarnation: str, asked: LeaseAsked) -> Lease:
        self._replace()
        said = json.loads(json.dumps(asked.plain()))
        reply = super().lease(trainer, incarnation, asked)
        self.follows.repeat("lease", [trainer, incarnation, said])
        return reply

    def decided(self, trainer: int, incarnation: str, ranges: Iterable[EpochRange]) -> None:
        super().decided(trainer, incarnation, ranges)
        self._repeat("decided", trainer, incarnation, list(ranges))

    def join(self, trainer: int, incarnation: str, again: bool = False) -> None:
        super().join(trainer, incarnation, again)
        self._repeat("join", trainer, incarnation, again)

    def remove(self, trainer: int, incarnation: str) -> None:
        super().remove(trainer, incarnation)
        self._repeat("remove", trainer, incarnation)

    def expect(self, trainer: int, consumed: Mapping[int, Sequence[EpochRange]]) -> None:
        super().expect(trainer, consumed)
        self._repeat("expect", trainer, list(consumed.items()))

    def _repeat(self, change: str, *arguments: Any) -> None:
        if "follows" in vars(self):
            self.follows.repeat(change, json.loads(json.dumps(arguments)))

    def _replace(self) -> None:
        whole = json.loads(json.dumps(self.whole()))
        assert json.loads(json.dumps(self.follows.whole())) == whole
        vars(self).update(vars(LeaseTable.of_whole(whole)))


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
def test_a_table_that_takes_the_place_of_another_goes_on_with_its_leases(together: bool) -> None:
    """From what that one has written: as a whole, or change by change."""
    for seed in range(SEEDS // 5):
        world, as_one = (World(seed, each, together) for each in (Replaced, LeaseTable))
        for each in (world, as_one):
            each.run()
        world.check()
        assert world.table.accounts == as_one.table.accounts, seed


def test_a_change_that_a_table_does_not_know_is_refused() -> None:
    """By name."""
    with pytest.raises(ValueError, match="expected a change of a lease table, got 'plain'"):
        LeaseTable(1).repeat("plain", [])


class WritesBeforeTheStep(World):
    """The server counts what a commit names as soon as it comes."""

    def step(self, trainer: Trainer) -> None:
        super().step(trainer)
        self.table.decided(trainer.number, trainer.incarnation, trainer.staged[-1])

    def decide(self, trainer: Trainer) -> None:
        for epoch, start, stop in trainer.staged.popleft():
            self.counted[epoch].update(range(start, stop))


class LosesAccumulation(World):
    """A step names its last batch only."""

    def step(self, trainer: Trainer) -> None:
        last = trainer.unstepped[-1:]
        trainer.staged.append([(trainer.epoch, a, b) for batch in last for a, b in batch])
        for batch in trainer.unstepped[:-1]:
            for a, b in batch:
                self.counted[trainer.epoch].update(range(a, b))
        trainer.unstepped = []


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

    def lease(self, trainer: int, incarnation: str, asked: object) -> Lease:
        number, _ = self._answered.get(trainer, (0, Lease()))
        if asked.number == number and asked.epoch is not None:  # type: ignore[attr-defined]
            self._answered[trainer] = number - 1, Lease()
        return super().lease(trainer, incarnation, asked)  # type: ignore[arg-type]


WORLDS = [WritesBeforeTheStep, LosesAccumulation]
EPOCHS = [Forgets, ReturnsTwice, EndsEarly]


def caught(world: type[World], table: type[LeaseTable], together: bool) -> bool:
    """Whether a schedule shows it."""
    for seed in range(CAUGHT_WITHIN):
        made = world(seed, table, together)
        try:
            made.run()
            made.check()
        except (AssertionError, ValueError):
            return True
    return False


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("world", WORLDS)
def test_schedules_find_a_step_that_names_other_samples(world: type[World], together: bool) -> None:
    """Progress that is written too early, or of one batch only, is found."""
    assert caught(world, LeaseTable, together)


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("leases", EPOCHS)
def test_schedules_find_an_epoch_that_deals_wrongly(
    leases: type[EpochLeases], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges that do not come back, or come back twice, and an early end, are found."""
    monkeypatch.setattr("pserver.leases.table.EpochLeases", leases)

    assert caught(World, LeaseTable, together)


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
def test_schedules_find_a_request_that_is_served_twice(together: bool) -> None:
    """A lost reply whose lease nobody has is found."""
    assert caught(World, GivesTheNextReply, together)
