"""Which rows a geo trainer asks for: those that others have changed, and those that it does not
know.

Real servers in this process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pserver.service import tensors
from pserver.table import changes
from tests.support.table_trainers import DIM, Net, Servers, Trainer
from trainer import Constant, CountFilterEntry, DistributedEmbedding, Uniform, fleet
from trainer.senders import kstep_rows
from transpiler.plan.plan import Plan

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


@pytest.fixture
def join(servers: Servers) -> Iterator[Callable[..., Trainer]]:
    """``join(servers, number, trainers, model=Net(), optimizer=..., ...)``: one trainer of a geo
    job; all leave at the end.
    """
    joined: list[Trainer] = []

    def made(
        count: int, number: int, trainers: int, model: Net | None = None, **configs: Any
    ) -> Trainer:
        optimizer = configs.pop("optimizer", OPTIMIZERS["sgd"])
        configs = {"k_steps": 2, **configs}
        own = model or Net()
        joined.append(Trainer(servers(count), number, trainers, own, optimizer, **configs))
        return joined[-1]

    yield made
    for trainer in joined:
        trainer.optimizer.close()
    fleet.finish()


def asked(trainer: Trainer) -> int:
    """The number of rows that it has asked for so far."""
    assert trainer.job.communicator is not None and trainer.job.communicator.lookups is not None
    return trainer.job.communicator.lookups.rows


def answered(trainer: Trainer) -> None:
    """Waits until all of its messages are answered, and takes the answers; no flush."""
    for lane in trainer.job.communicator.lanes:  # type: ignore[union-attr]
        lane.wait_for_replies()  # type: ignore[attr-defined]


def window(trainer: Trainer, ids: list[int], change: float = 1.0) -> None:
    """A whole window of two steps, answered."""
    for _ in range(2):
        trainer.add(ids, change)
    answered(trainer)


# ---- one trainer ----


@pytest.mark.observes("a_sync_configs.row_invalidation")
@pytest.mark.parametrize("servers_", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"num_embeddings": 40}], ids=["any id", "a range"])
def test_one_trainer_has_the_same_bits_and_asks_for_nothing(
    servers: Servers, optimizer: str, servers_: int, options: dict[str, int]
) -> None:
    """40 steps, k = 3, with and without: equal values; with it nothing is asked for after the
    first window.
    """
    found, counts = [], []
    for told in (True, False):
        model = Net(init=Uniform(-0.1, 0.1), seed=3, **options)
        configs = {"k_steps": 3, "row_invalidation": told}
        trainer = Trainer(servers(servers_), 0, 1, model, OPTIMIZERS[optimizer], **configs)
        ids = random.Random(1)
        for step in range(40):
            if step == 6:
                answered(trainer)
                before = asked(trainer)
            trainer.add([ids.randrange(40) for _ in range(6)], 0.5)
        counts.append(asked(trainer) - before)
        with torch.no_grad():
            found.append(trainer.model.emb(torch.arange(40)))
        trainer.optimizer.flush()
        lookups = trainer.job.communicator.lookups  # type: ignore[union-attr]
        assert lookups is not None
        found.append(lookups.pull("emb", torch.arange(40)))
        trainer.optimizer.close()
        fleet.finish()

    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert counts[0] == 0 < counts[1]


def test_a_flush_tells_what_others_have_changed(join: Callable[..., Trainer]) -> None:
    """Until then, without a message of its own; of rows that it does not know, too."""
    one, other = join(2, 0, 2), join(2, 1, 2)
    window(one, [1, 2])
    window(other, [2, 3])
    before = asked(one)
    assert one.model.row(2) == 1.0 and asked(one) == before  # it is not told yet
    one.optimizer.flush()
    # row 2: x = 1 + (z - y), where z has half of the other's change
    assert [one.model.row(each) for each in (1, 2, 3, 9)] == [1.0, 1.5, 0.5, 0.0]
    assert asked(one) == before + 2


# ---- several ----


def test_rows_that_others_have_changed_are_asked_for(join: Callable[..., Trainer]) -> None:
    """And no others: x moves by z - y, as worked out by hand; k = 2, each change is halved."""
    one, other = join(2, 0, 2), join(2, 1, 2)
    window(one, [1, 2])  # x = 1, y = z = 0.5
    window(other, [2, 3])  # row 2: x = y = z = 0.5, then x = 1.5: 0.5 leaves, y = z = 1
    before = asked(one)
    window(one, [1])  # is told of rows 2 and 3 with the answer; asks for nothing
    assert asked(one) == before
    assert one.model.row(1) == 2.0 and asked(one) == before
    assert one.model.row(2) == 1.5  # x = 1 + (z - y) = 1 + (1 - 0.5)
    assert asked(one) == before + 1
    assert one.model.row(3) == 0.5  # which it has not known
    assert asked(one) == before + 2
    assert one.model.row(9) == 0.0  # which nobody has changed
    assert one.model.row(2) == 1.5 and asked(one) == before + 2


def test_a_row_that_changes_on_is_asked_for_again(join: Callable[..., Trainer]) -> None:
    """Once after each answer that tells of it."""
    one, other = join(1, 0, 2), join(1, 1, 2)
    window(one, [1])
    for _ in range(3):
        window(other, [1])
        before = asked(one)
        window(one, [7])
        one.model.row(1)
        one.model.row(1)
        assert asked(one) == before + 1


class Worked:
    """Three trainers and their rows as the notes say, in plain numbers: x, y and z of each id."""

    def __init__(self, told: bool) -> None:
        self.told, self.z = told, dict[int, float]()
        self.x: list[dict[int, float]] = [{}, {}, {}]
        self.y: list[dict[int, float]] = [{}, {}, {}]
        self.stale: list[set[int]] = [set(), set(), set()]  # told, and not asked for since
        self.changed: list[set[int]] = [set(), set(), set()]  # by others, not told yet
        self.trained: list[list[int]] = [[], [], []]
        self.steps, self.messages = [0, 0, 0], [0, 0, 0]

    def step(self, trainer: int, ids: list[int]) -> None:
        x, y, z = self.x[trainer], self.y[trainer], self.z
        for each in ids:
            new = each not in y and not (self.told and self.messages[trainer])
            if new or each in self.stale[trainer]:
                x[each] = x.get(each, y.get(each, 0.0)) + z.get(each, 0.0) - y.get(each, 0.0)
                y[each] = z.get(each, 0.0)
                self.stale[trainer].discard(each)
            x[each] = x.get(each, 0.0) + 0.5
            y.setdefault(each, 0.0)
        self.trained[trainer] += ids
        self.steps[trainer] += 1
        if self.steps[trainer] % 2 == 0:
            self._end_window(trainer)

    def _end_window(self, trainer: int) -> None:
        x, y = self.x[trainer], self.y[trainer]
        for each in set(self.trained[trainer]):
            change = (x[each] - y[each]) / 3
            y[each] += change
            self.z[each] = self.z.get(each, 0.0) + change
            for other in {0, 1, 2} - {trainer}:
                self.changed[other].add(each)
        self.trained[trainer] = []
        self.messages[trainer] += 1
        self.stale[trainer] |= self.changed[trainer] if self.told else set(y)
        self.changed[trainer] = set()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_that_the_notes_work_out(
    join: Callable[..., Trainer], seed: int, told: bool
) -> None:
    """Three trainers in random turns on two servers, each message answered before the next turn:
    the servers have the z of numbers that are worked out beside them.
    """
    turns, worked = random.Random(seed), Worked(told)
    trainers = [join(2, number, 3, k_steps=2, row_invalidation=told) for number in range(3)]
    for _ in range(60):
        number = turns.randrange(3)
        ids = turns.sample(range(14), 3)
        trainers[number].add(ids, 1.0)
        answered(trainers[number])
        worked.step(number, ids)
    lookups = trainers[0].job.communicator.lookups  # type: ignore[union-attr]
    assert lookups is not None
    served = lookups.pull("emb", torch.arange(14))[:, 0]
    expected = torch.tensor([worked.z.get(each, 0.0) for each in range(14)])
    assert (served - expected).abs().max() <= 1e-5


# ---- what ends it ----


def test_where_too_much_has_changed_every_row_is_asked_for(
    join: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of before; from there on it is told again."""
    monkeypatch.setattr(changes.RowChanges.__init__, "__defaults__", (4, 2))
    one, other = join(1, 0, 2), join(1, 1, 2)
    window(one, [1, 2])
    window(other, [2, 3, 4, 5])
    window(one, [1])
    before = asked(one)
    assert [one.model.row(each) for each in (1, 2)] == [2.0, 1.5]
    assert asked(one) == before + 2
    window(one, [1])
    before = asked(one)
    window(one, [1, 2])
    assert asked(one) == before


class Two(Net):
    """Two tables, of the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.more = DistributedEmbedding(DIM, init=Constant(0.0))

    def add(self, ids: list[int], *change: Any, **statistics: Any) -> None:
        """See :class:`Net`."""
        super().add(ids, *change, **statistics)
        (-change[0] * self.more(torch.tensor(ids)).sum()).backward()


def test_an_answer_has_room_for_the_ids_of_some_tables(
    join: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others any row may have changed: an answer's header is bounded."""
    monkeypatch.setattr(tensors, "MOST_CHANGED", 3)
    one, other = join(1, 0, 2, Two()), join(1, 1, 2, Two())
    window(one, [1, 2])
    window(other, [2, 3])
    window(one, [1])
    before = asked(one)
    window(one, [1])
    assert asked(one) == before + 1  # of one table, not of both
    with torch.no_grad():
        rows = [
            table(torch.tensor([1, 2]))[:, 0].tolist() for table in (one.model.emb, one.model.more)
        ]
    assert rows[0] == rows[1]


def test_a_load_makes_every_row_be_asked_for(join: Callable[..., Trainer]) -> None:
    """By another trainer, which this one hears of with its next answer."""
    one, other = join(1, 0, 2), join(1, 1, 2)
    window(one, [1, 2])
    lookups = other.job.communicator.lookups  # type: ignore[union-attr]
    assert lookups is not None
    lookups.load_initial(0, "emb", torch.tensor([1, 9]), torch.full((2, 4), 8.0))
    window(one, [2])
    # row 1: x = 1 + (8 - 0.5); row 9 is not taken for one that nobody has changed
    assert [one.model.row(1), one.model.row(9)] == [8.5, 8.0]


def test_what_servers_refuse_is_asked_for(join: Callable[..., Trainer]) -> None:
    """After a message with a NaN this trainer's rows are as where all are asked for."""
    found = []
    for told in (True, False):
        one = join(1, 0, 1, row_invalidation=told)
        window(one, [1, 2])
        one.add([1], float("nan"))
        one.add([2], 1.0)
        answered(one)
        found.append([one.model.row(each) for each in (1, 2)])
        window(one, [1, 2])
        found.append([one.model.row(each) for each in (1, 2)])
        one.optimizer.close()
        fleet.finish()
    assert found[0] == found[2] == [1.0, 1.0] and found[1] == found[3]


@pytest.mark.parametrize(
    "options",
    [
        {"entry": CountFilterEntry(2)},
        {"capacity": 8},
        {"ttl": 60.0},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda options: next(iter(options)),
)
def test_tables_that_change_by_themselves_ask_in_every_window(
    join: Callable[..., Trainer], options: dict[str, Any]
) -> None:
    """Rows that are admitted, evicted, dropped or rounded on servers."""
    one = join(1, 0, 1, Net(**options))
    window(one, [1, 2])
    before = asked(one)
    window(one, [1, 2])
    assert asked(one) == before + 2


def test_the_switch_stands_in_the_fingerprint(join: Callable[..., Trainer]) -> None:
    """Trainers of one job agree on it: a plan without it has another fingerprint."""

    def manifest(told: bool) -> tuple[Plan, str]:
        one = join(1, 0, 1, row_invalidation=told)
        plan = one.job.communicator.plan  # type: ignore[union-attr]
        one.optimizer.close()
        fleet.finish()
        return plan, plan.fingerprint

    (on, one), (off, other) = manifest(True), manifest(False)
    assert on.lanes[0].row_invalidation and not off.lanes[0].row_invalidation
    assert one != other


def test_ids_of_others_are_kept_up_to_a_number(
    join: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more of them a row that this trainer does not know is asked for, whoever changed it."""
    monkeypatch.setattr(kstep_rows, "MOST_OTHERS", 3)
    one, other = join(1, 0, 2), join(1, 1, 2)
    window(one, [1])
    window(other, [2, 3])
    window(one, [1])
    before = asked(one)
    assert [one.model.row(each) for each in (2, 9)] == [0.5, 0.0]
    assert asked(one) == before + 1
    window(other, [4, 5, 6, 7])
    window(one, [1])
    assert [one.model.row(each) for each in (4, 8)] == [0.5, 0.0]
    assert asked(one) == before + 3
    window(other, [4])
    window(one, [1])
    assert one.model.row(4) == 1.25  # z = 0.5 + (2 - 0.5) / 2
