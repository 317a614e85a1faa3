"""A job whose trainers are killed, started again, and join and leave, over a lease table: random
schedules, and an account of every sample that does not ask the table.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from pserver.leases.epoch import Epoch, Lease, Range
from pserver.leases.table import EpochRange, LeaseAsked, LeaseTable

LONGEST = 20_000  # events of a schedule


@dataclass
class Trainer:
    """A process: its script is a loop over epochs, with a step each ``every`` batches."""

    number: int
    incarnation: str
    every: int
    epoch: int = 0
    batches: deque[list[Range]] = field(default_factory=deque)  # leased, not given to the script
    unstepped: list[list[Range]] = field(default_factory=list)  # given since the last step
    staged: deque[list[EpochRange]] = field(default_factory=deque)  # steps that are not decided
    asked: LeaseAsked | None = None  # a request whose reply was lost
    requests: int = 0
    begun: bool = False  # of this epoch it has got something
    waits: bool = False
    done: bool = False


class World:
    """One schedule.

    Args:
        seed: of everything.
        table: makes the lease table.
        together: the trainers step together.
    """

    def __init__(self, seed: int, table: type[LeaseTable], together: bool) -> None:
        self.random = random.Random(seed)
        self._kind, self.together = table, together
        self.trainers = self.random.randint(1, 4)
        self.table = table(self.trainers)
        self.samples = self.random.randint(4 * self.trainers, 120)
        self.batch, self.epochs = self.random.randint(1, 7), self.random.randint(1, 3)
        self.drop_last = self.random.random() < 0.2 and self.samples >= self.batch * 4 * 4
        self.every = self.random.choice((1, 1, 2, 3))
        self.breaks = self.random.choice((0.0, 0.0, 0.02))
        self.there: dict[int, Trainer] = {}
        self.away: list[int] = list(range(self.trainers))
        self.counted: dict[int, Counter[int]] = {n: Counter() for n in range(self.epochs)}
        self.started = 0
        self.saved: tuple[str, str] | None = None

    # ---- the processes ----

    def join(self, number: int) -> None:
        self.started += 1
        self.away.remove(number)
        self.there[number] = Trainer(number, f"start {self.started}", self.every)
        self.table.expect(number, {})
        self.table.join(number, f"start {self.started}")

    def kill(self, trainer: Trainer) -> None:
        del self.there[trainer.number]
        self.away.append(trainer.number)
        self.table.remove(trainer.number, trainer.incarnation)

    def leave(self, trainer: Trainer) -> None:
        """Its steps are decided, then it leaves: terminated, or its script is at its end."""
        if not self.together:
            while trainer.staged:
                self.decide(trainer)
        self.kill(trainer)

    def save(self) -> None:
        counted = {n: dict(each) for n, each in self.counted.items()}
        self.saved = json.dumps(self.table.plain()), json.dumps(counted)

    def restart(self) -> None:
        """The whole job, from what it saved; with another number of trainers, maybe."""
        assert self.saved is not None
        plain, counted = map(json.loads, self.saved)
        self.trainers = self.trainers_again()
        self.table = self._kind.of(plain, self.trainers)
        self.counted = {
            int(n): Counter({int(p): c for p, c in each.items()}) for n, each in counted.items()
        }
        self.there, self.away = {}, list(range(self.trainers))
        for number in range(self.trainers):
            self.join(number)

    def trainers_again(self) -> int:
        """How many there are when the whole job starts again."""
        return self.trainers if self.random.random() < 0.5 else self.random.randint(1, 4)

    # ---- what a trainer does ----

    def ask(self, trainer: Trainer) -> None:
        asked = trainer.asked
        if asked is None:
            stripes = self.trainers if self.together else 0
            epoch = Epoch(trainer.epoch, "", "0", self.samples, self.batch, stripes, self.drop_last)
            idle = sum(b - a for batch in trainer.unstepped for a, b in batch)
            trainer.requests += 1
            most = 2**30 if self.together else self.random.randint(1, 9)
            unstepped = None if trainer.batches else idle
            asked = LeaseAsked(trainer.requests, epoch, most, unstepped)
        reply = self.table.lease(trainer.number, trainer.incarnation, asked)
        trainer.asked = asked if self.random.random() < 0.1 else None
        if trainer.asked is None:
            self.take(trainer, reply, asked.unstepped is not None)

    def take(self, trainer: Trainer, reply: Lease, idle: bool) -> None:
        trainer.waits = idle and not reply.ranges and not reply.over
        if reply.over and idle:
            self.end_pass(trainer)
        trainer.batches += reply.cut(self.batch)
        trainer.begun = trainer.begun or bool(reply.ranges)

    def end_pass(self, trainer: Trainer, unused: tuple[EpochRange, ...] = ()) -> None:
        """The loop is over; maybe a step follows it.  Then the next one begins."""
        if trainer.unstepped and self.random.random() < 0.5 and not self.together:
            self.step(trainer)
        skipped = tuple((trainer.epoch, a, b) for batch in trainer.unstepped for a, b in batch)
        trainer.requests += 1
        asked = LeaseAsked(
            trainer.requests, unused=unused, skipped=skipped, stopped=(trainer.epoch,)
        )
        for _ in range(self.random.randint(1, 2)):
            self.table.lease(trainer.number, trainer.incarnation, asked)
        trainer.unstepped, trainer.waits = [], False
        trainer.epoch, trainer.begun = trainer.epoch + 1, False
        trainer.done = trainer.epoch == self.epochs

    def train(self, trainer: Trainer) -> None:
        """A batch, and a step where it is time."""
        trainer.unstepped.append(trainer.batches.popleft())
        if len(trainer.unstepped) == trainer.every:
            self.step(trainer)

    def step(self, trainer: Trainer) -> None:
        trainer.staged.append(
            [(trainer.epoch, a, b) for batch in trainer.unstepped for a, b in batch]
        )
        trainer.unstepped = []

    def decide(self, trainer: Trainer) -> None:
        """A step's record stands: it counts, whatever becomes of its trainer."""
        ranges = trainer.staged.popleft()
        self.table.check(trainer.number, trainer.incarnation, ranges)
        self.table.decided(trainer.number, trainer.incarnation, ranges)
        for epoch, start, stop in ranges:
            self.counted[epoch].update(range(start, stop))

    # ---- a schedule ----

    def advance(self, trainer: Trainer, faults: bool) -> None:
        """Something that this trainer does next, if it can do anything."""
        if trainer.done:
            if self.accounted and not trainer.staged:
                self.leave(trainer)
            return
        if trainer.asked is not None or not trainer.batches:
            self.ask(trainer)
        elif faults and not self.together and self.random.random() < self.breaks:
            unused = tuple((trainer.epoch, a, b) for batch in trainer.batches for a, b in batch)
            trainer.batches.clear()
            self.end_pass(trainer, unused)
        elif not self.together and self.random.random() < 0.2:
            self.ask(trainer)
        elif not (self.together and trainer.staged):  # a sync step is decided before the next one
            self.train(trainer)

    def decide_next(self) -> None:
        if not self.together:
            staged = [each for each in self.there.values() if each.staged]
            if staged:
                self.decide(self.random.choice(staged))
            return
        # a round: each trainer that does not wait for a lease has staged its step
        part = [each for each in self.there.values() if not each.done or each.staged]
        ready = [each for each in part if each.staged]
        if ready and all(each.staged or each.waits for each in part):
            for each in ready:
                self.decide(each)

    def fault(self) -> None:
        kind = self.random.random()
        trainers = list(self.there.values())
        if kind < 0.35 and trainers:
            self.kill(self.random.choice(trainers))
        elif kind < 0.5 and trainers:
            self.leave(self.random.choice(trainers))
        elif kind < 0.8 and self.away:
            self.join(self.random.choice(self.away))
        elif kind < 0.92 and self.quiet:
            self.save()
        elif self.saved is not None and self.random.random() < 0.3:
            self.restart()

    @property
    def quiet(self) -> bool:
        """Whether no step is under way, as during a save."""
        return not any(each.staged for each in self.there.values())

    def run(self) -> None:
        """Faults, then peace until every script is at its end.

        Raises:
            AssertionError: it does not come to its end.
        """
        for number in list(self.away):
            self.join(number)
        rate = self.random.choice((0.0, 0.02, 0.1))
        for event in range(LONGEST):
            faults = event < 400
            if faults and self.random.random() < rate:
                self.fault()
            if self.away and not faults:
                if self.accounted and not self.there:
                    return
                for number in [] if self.accounted else list(self.away):
                    self.join(number)
            if self.random.random() < 0.3:
                self.decide_next()
            elif self.there:
                self.advance(self.random.choice(list(self.there.values())), faults)
        raise AssertionError("the schedule does not end")

    @property
    def accounted(self) -> bool:
        """Whether every epoch is over."""
        accounts = self.table.accounts
        return all(n in accounts and accounts[n].over for n in range(self.epochs))

    def check(self) -> None:
        """Each sample is in one decided step, or counts as skipped.

        Raises:
            AssertionError: one is in none, or in two.
        """
        for number, counted in self.counted.items():
            account = self.table.accounts[number]
            twice = [position for position, count in counted.items() if count > 1]

            assert not twice, f"epoch {number}: in two decided steps: {twice}"
            assert account.decided == len(counted), number
            missing = self.samples - len(counted)
            assert missing == account.skipped + account.left_out, (number, account)
            if self.every == 1 and not self.breaks:
                assert not account.skipped, (number, account)
            if not (self.together or self.drop_last):
                assert not account.left_out, (number, account)
