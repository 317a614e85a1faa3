"""A job whose trainers are killed, started again, and join and leave, with the code that trainers
run: scripts that iterate over what leases give them of each kind of data, in random schedules
without threads, sockets or servers.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Generator, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from pserver import wire_pb2 as wire
from pserver.lane.leases import JobLeases
from pserver.leases.epoch import Account, Epoch
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership, MemberState
from tests.support.memory_passes import memory_pass
from tests.support.scripts import Desk, Script, Step, Waits, items_of
from trainer.data.batches import Columns
from trainer.data.lines import Parsed
from trainer.data.pieces import Piece
from trainer.samplers.counted_reader import CountedReader
from trainer.samplers.file_samples import (
    CountedFiles,
    FilePieces,
    epoch_of_pieces,
    epoch_of_samples,
)
from trainer.samplers.leased_part import LeasedPart
from trainer.samplers.sample_lists import BatchLists, SampleLists
from trainer.samplers.sample_pass import Pass

LONGEST = 20_000  # events of a schedule
KINDS = ("samples", "batches", "iterable", "files", "memory")


class ScriptWorld:
    """One schedule, over data of one kind.

    Args:
        seed: of everything.
        together: the trainers step together.
        kind: one of ``KINDS``.
    """

    def __init__(self, seed: int, together: bool, kind: str) -> None:
        self.random, self.together, self.kind = random.Random(seed), together, kind
        self.trainers = self.random.randint(1, 4)
        self.samples = self.random.randint(4 * self.trainers, 120)
        self.batch, self.epochs = self.random.randint(1, 7), self.random.randint(1, 3)
        self.drop_last = self.random.random() < 0.2 and self.samples >= self.batch * 4 * 4
        self.every = self.random.choice((1, 1, 2, 3))
        self.breaks = self.random.choice((0.0, 0.0, 0.02))
        self.there: dict[int, Script] = {}
        self.away: list[int] = list(range(self.trainers))
        self.counted: dict[int, Counter[int]] = {n: Counter() for n in range(self.epochs)}
        self.started = 0
        self.saved: tuple[str, str] | None = None
        self.applying: list[tuple[Member, Step]] = []
        self.serve()
        draw = random.Random(seed)
        self.lengths = [self.samples]  # of files, in samples; of other data all
        if kind == "files":
            self.lengths = [draw.choice((0, 1, 5, 17, 40)) for _ in range(draw.randint(1, 7))]
            if together:  # fewer samples than trainers, or than drop_last needs, are an error
                self.lengths.append(self.samples)
        if kind == "memory":  # batches of which no trainer has more than it has samples
            self.lengths = [draw.randint(20, 40) for _ in range(draw.randint(4, 7))]
            self.batch, self.drop_last = max(4, self.batch), False
        self.lists = self._lists(draw)

    def _lists(self, draw: random.Random) -> list[list[int]]:
        """What a batch sampler of the script's gives."""
        left, found = list(range(self.samples)), []
        while left:
            size = draw.randint(1, 5)
            found.append(left[:size])
            left = left[size:]
        return found

    # ---- the processes ----

    def serve(self) -> None:
        """A server begins, without members."""
        self.members = Membership(self.trainers, 0.0)
        job = Lifecycle()
        self.lock = job.condition
        self.server = JobLeases(self.members, job, wait_seconds=0.0)
        self.table = self.server.state.table

    def asks(self, member: Member, request: wire.LeaseRequest) -> wire.LeaseReply:
        """A process's request reaches the server, which may get it twice."""
        for _ in range(self.random.choice((1, 1, 1, 2))):
            found = self.server.lease(member, request)
        return found

    def join(self, number: int) -> None:
        self.started += 1
        self.away.remove(number)
        member = Member(number, f"start {self.started}", "tcp", 0.0)
        self.members.add(member)
        self.there[number] = Script(number, member.incarnation, member, Desk(self, member))

    def kill(self, trainer: Script) -> None:
        """What has no record does not count."""
        del self.there[trainer.number]
        self.away.append(trainer.number)
        trainer.member.state = MemberState.LOST
        if trainer.arrived is not None:
            trainer.member.watermark(0).taking -= 1

    def leave(self, trainer: Script) -> None:
        if not self.together:
            while self.under_way(trainer):
                self.move_on(trainer)
        self.kill(trainer)
        if not self.together:
            trainer.member.state = MemberState.LEFT

    def save(self) -> None:
        counted = {n: dict(each) for n, each in self.counted.items()}
        self.saved = json.dumps(self.table.plain()), json.dumps(counted)

    def restart(self) -> None:
        """The whole job, from what it saved; with another number of trainers, maybe."""
        assert self.saved is not None
        plain, counted = map(json.loads, self.saved)
        self.trainers = self.trainers_again()
        self.serve()
        self.server.restore(plain)
        self.table = self.server.state.table
        self.counted = {
            int(n): Counter({int(p): c for p, c in each.items()}) for n, each in counted.items()
        }
        self.applying, self.there, self.away = [], {}, list(range(self.trainers))
        for number in range(self.trainers):
            self.join(number)

    @property
    def quiet(self) -> bool:
        """Whether no step is under way, as during a save."""
        return not any(map(self.under_way, self.there.values())) and not self.applying

    def trainers_again(self) -> int:
        """The number of trainers when the whole job starts again."""
        # data whose end nobody knows is divided among as many as before: others are refused
        fixed = self.kind == "iterable" and self.together
        if fixed or self.random.random() < 0.5:
            return self.trainers
        return self.random.randint(1, 4)

    def begin(self, script: Script) -> Pass[LeasedPart]:
        """A pass, as the script's process makes it."""
        leases, number, stripes = script.desk, script.epoch, script.desk.stripes
        epoch = Epoch(number, "", "", self.samples, self.batch, stripes, self.drop_last)
        if self.kind == "samples":
            order = random.Random(number).sample(range(self.samples), self.samples)
            return Pass(SampleLists(epoch, order), LeasedPart(leases, epoch))
        if self.kind == "batches":
            lists = BatchLists(Epoch(number, "", "", 0, 1), self.lists)
            return Pass(lists, LeasedPart(leases, lists.epoch(stripes)))
        if self.kind == "iterable":
            fresh: Any = nullcontext
            plain = Epoch(number, "", "", 0, 1)
            reader = CountedReader(plain, range(self.samples), fresh, lambda *_: None)
            return Pass(reader, LeasedPart(leases, reader.epoch(stripes)))
        pieces = [Piece(f"{piece // 2}", piece) for piece in range(len(self.lengths))]
        files, batching = [piece.begin // 2 for piece in pieces], (self.batch, self.drop_last)
        if self.kind == "memory":
            shuffled, all_files = self.random.random() < 0.5, (pieces, files, self.lengths)
            return memory_pass(script, all_files, self.batch, self.trainers, shuffled, self._parses)
        if stripes:
            epoch = epoch_of_samples(number, "", pieces, self.lengths, batching, stripes)
            counted = CountedFiles(epoch, pieces, files, self.lengths, self._parses)
            return Pass(counted, LeasedPart(leases, epoch))
        epoch = epoch_of_pieces(number, "", pieces, self.batch, self.drop_last)
        return Pass(FilePieces(epoch, pieces, self._parses), LeasedPart(leases, epoch))

    def _parses(self, pieces: Iterable[Piece]) -> Generator[Parsed]:
        """A piece more than is asked for is parsed."""
        ahead: deque[Piece] = deque()
        for piece in pieces:
            ahead.append(piece)
            if len(ahead) > 1:
                yield self._parsed(ahead.popleft().begin)
        for piece in ahead:
            yield self._parsed(piece.begin)

    def _parsed(self, file: int) -> Parsed:
        first, length = sum(self.lengths[:file]), self.lengths[file]
        blocks: list[Columns] = [
            {"n": np.arange(first + at, first + min(at + 6, length))} for at in range(0, length, 6)
        ]
        return Parsed(blocks)

    # ---- what a script does ----

    def advance(self, script: Script, faults: bool) -> None:
        """Something that this trainer does next, if it can do anything."""
        mine = [each for each, _ in self.applying if each.trainer == script.number]
        if any(each is not script.member for each in mine):
            return  # the server lets it wait: a step of the process before it is being applied
        if script.done:
            if self.accounted and not self.under_way(script):
                self.leave(script)
            return
        if self.together and self.under_way(script):  # a sync step is decided before the next one
            return
        if script.waits and self.random.random() < 0.7:
            return
        if script.mine is None:
            script.mine = self.begin(script)
        breaks = self.random.random() < self.breaks
        if breaks and faults and script.draws is not None and not self.together:
            script.mine.dealer.close()
            self.end(script)
            return
        try:
            self.train_on(script, script.mine)
        except Waits:
            script.waits = True

    def train_on(self, script: Script, mine: Pass[LeasedPart]) -> None:
        """A batch, and a step where it is time; or the end of the pass."""
        if script.draws is None:
            if not mine.dealer.more():
                mine.dealer.close()
                self.end(script)
                return
            script.waits, script.draws = False, iter(mine)
        for item in script.draws:
            mine.dealer.give()
            script.items += items_of(item)
            script.batches += 1
            if script.batches == self.every:
                self.stage(script)
            return
        script.draws = None

    def stage(self, script: Script) -> None:
        """A step is closed, and its message leaves."""
        script.staged.append((list(script.desk.communicator.consumed.close()), script.items))
        script.items, script.batches = [], 0

    def end(self, script: Script) -> None:
        """The loop is over; maybe a step follows it.  Then the next one begins."""
        if script.batches and self.random.random() < 0.5 and not self.together:
            self.stage(script)
        script.desk.skip(script.epoch)
        script.mine, script.draws, script.items, script.batches = None, None, [], 0
        script.epoch, script.waits = script.epoch + 1, False
        script.done = script.epoch == self.epochs

    # ---- what becomes of steps ----

    def under_way(self, script: Script) -> bool:
        """Whether a step of a process is not applied."""
        mine = any(member is script.member for member, _ in self.applying)
        return bool(script.staged or script.arrived or mine)

    def move_on(self, script: Script) -> None:
        """The oldest step of a process goes on its way."""
        applying = [each for each in self.applying if each[0] is script.member]
        if applying:
            self.apply(*applying[0])
        elif script.arrived is not None:
            self.stand(script)
        elif script.staged:
            self.arrive(script)

    def arrive(self, script: Script) -> None:
        """A step is at the server, whole."""
        ranges, items = script.staged.popleft()
        with self.lock:
            self.server.check(script.number, script.incarnation, ranges)
        script.member.watermark(0).taking += 1
        script.arrived = ranges, items

    def stand(self, script: Script) -> None:
        """A step's record stands: it counts, whatever becomes of its trainer."""
        assert script.arrived is not None, "it has arrived"
        self.applying.append((script.member, script.arrived))
        script.arrived = None

    def apply(self, member: Member, step: Step) -> None:
        """A step is applied."""
        self.applying.remove((member, step))
        member.watermark(0).apply(1, False)
        ranges, items = step
        with self.lock:
            self.server.decided(member.trainer, member.incarnation, ranges)
        if ranges:
            self.counted[ranges[0][0]].update(items)

    def decide_next(self) -> None:
        scripts = list(self.there.values())
        if not self.together:
            moving = [each for each in scripts if self.under_way(each)]
            orphans = [each for each in self.applying if each[0].state is MemberState.LOST]
            if moving and self.random.random() < 0.8:
                self.move_on(self.random.choice(moving))
            elif orphans:
                self.apply(*orphans[0])
            return
        if self.applying:  # a round is applied as one
            for each in list(self.applying):
                self.apply(*each)
            return
        for each in scripts:
            if each.staged and each.arrived is None:
                self.arrive(each)
        part = [each for each in scripts if not each.done or each.arrived]
        if part and all(each.arrived or each.waits for each in part):
            for each in part:
                if each.arrived:
                    self.stand(each)

    # ---- a schedule ----

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

    # ---- the account ----

    @property
    def whole(self) -> set[int]:
        """All that an epoch has."""
        return set(range(sum(self.lengths)))

    def check(self) -> None:
        """Each sample is in one decided step, or counts as skipped.

        Raises:
            AssertionError: one is in none, or in two, or was never there.
        """
        for each in list(self.applying):
            self.apply(*each)
        for number, counted in self.counted.items():
            account = self.server.accounts[number]
            twice = [item for item, count in counted.items() if count > 1]

            assert not twice, f"epoch {number}: in two decided steps: {twice}"
            assert set(counted) <= self.whole, number
            assert not account.leased, (number, account)
            self._check_account(number, account, self.whole - set(counted))

    def _check_account(self, number: int, account: Account, missing: set[int]) -> None:
        assert account.samples or self.breaks or not self.whole, (number, account)
        if account.samples:
            assert account.samples == (account.decided + account.skipped + account.left_out), (
                number,
                account,
            )
        if not (account.skipped or account.left_out or self.breaks):
            assert not missing, (number, account, missing)
        if self.kind not in ("batches", "memory") and account.samples:
            assert account.samples == len(self.whole), (number, account)
            assert len(missing) == account.skipped + account.left_out, (number, account)
        if self.every == 1 and not self.breaks and not self.drop_last:
            assert not account.skipped, (number, account)
        if not (self.together or self.drop_last):
            assert not account.left_out, (number, account)
