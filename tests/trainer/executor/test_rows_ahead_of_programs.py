"""Rows of a program's coming feeds that are looked up ahead of its runs: each run reads what it
would read without.

Real servers in this process; a thread a trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.matrix import crossed
from tests.support.table_programs import (
    ROWS,
    Batch,
    Net,
    Servers,
    Tables,
    adagrad,
    adam,
    batches,
    begin_again,
    sgd,
    step,
    transpiled,
    values,
)
from tests.support.threads import at_once
from tests.support.tiers import RARE
from tests.trainer.executor.test_table_programs_on_servers import Chained
from trainer import DistributedEmbedding, Executor, fleet
from trainer.samplers.read_ahead import AnnouncedBatches, ReadAhead, read_for
from transpiler import Program, capture, data, program_guard

Make = Callable[[nn.Module], torch.optim.Optimizer]
STEPS = 24
RULES: dict[str, tuple[type[nn.Module], Make]] = {
    "sgd": (Net, sgd),
    "momentum": (Net, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "adagrad": (Net, adagrad),
    "adam": (Tables, adam),  # torch has none for the weight of torch's own
}
MODES: dict[str, dict[str, Any]] = {
    "split at run time": {
        "sync_mode": False,
        "completely_not_async": True,
        "runtime_split_send_recv": True,
    },
    "half-async": {"sync_mode": False, "half_async": True, "max_merge_var_num": 1},
    "staleness": {"sync_mode": False, "staleness": 1, "send_queue_size": 1},
}


@functools.cache
def captured(number: int, kind: Any, make: Make) -> Any:
    """A trainer's model, its optimizer and its programs."""
    model = kind()
    optimizer = make(model)
    with program_guard(Program(()), Program(())):
        return model, optimizer, capture(model, step, optimizer, batches(1)[0])


def begun(number: int, kind: Any, make: Make) -> Any:
    """The same, with everything as it was before the first step."""
    model, optimizer, programs = captured(number, kind, make)
    new = kind()
    begin_again(model, new)
    optimizer.load_state_dict(make(new).state_dict())
    return model, *programs


class Counted:
    """Batches; the passes over them are counted."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.batches)


@dataclass
class Player:
    """One trainer of a job whose program runs."""

    model: nn.Module
    program: Program
    executor: Executor
    data: Sequence[Batch]
    depth: int

    def passes(self) -> None:
        """Two passes over a dataset."""
        dataset = [{"ids": ids, "y": y} for ids, y in self.data]
        for part in (dataset[: STEPS // 2], dataset[STEPS // 2 :]):
            counted = Counted(part)
            assert self.executor.train_from_dataset(self.program, counted) == len(part)
            assert counted.passes == 1

    def loop(self) -> None:
        """A loop that announces its feeds."""
        for number, feed in enumerate(self.data):
            first = 1 if number == 0 else number + self.depth
            for following in self.data[first : number + self.depth + 1] if self.depth else ():
                self.executor.prefetch(self.program, following)
            self.executor.run(self.program, feed)

    def metrics(self) -> dict[str, float]:
        return self.executor._runtimes[0].communicator.metrics()


@dataclass
class Played:
    values: dict[str, torch.Tensor]
    metrics: dict[str, float]


def play(
    endpoints: str,
    depth: int,
    trainers: int = 1,
    kind: type[nn.Module] = Net,
    make: Make = adagrad,
    how: Callable[[Player], None] = Player.passes,
    **fields: Any,
) -> Played:
    """The values that a job has learned, as trainer 0 reads them."""
    made = []
    for number in range(trainers):
        model, main, startup = begun(number, kind, make)
        program = transpiled(main, startup, endpoints, trainers, number, look_ahead=depth, **fields)
        made.append((number, model, program))

    def train(number: int, model: nn.Module, transpiler: Any) -> Played:
        data = batches(STEPS * trainers)[number::trainers]
        with Executor() as executor:
            executor.run(transpiler.get_startup_program())
            player = Player(model, transpiler.get_trainer_program(), executor, data, depth)
            how(player)
            executor.flush()
            metrics = player.metrics()
            return Played(values(model) if number == 0 else {}, metrics)

    return at_once(*(functools.partial(train, *each) for each in made))[0]  # type: ignore[no-any-return]


def assert_equal(found: Played, expected: Played) -> None:
    for name, value in expected.values.items():
        assert torch.equal(found.values[name], value), name


# ---- equal to the bit ----


def assert_equal_ahead(
    servers: Servers,
    count: int,
    trainers: int,
    depth: int,
    make: Make,
    kind: type[nn.Module] = Net,
    **fields: Any,
) -> None:
    """Passes and loops whose rows are looked up ahead have the values of those without, and look up
    as many rows.
    """
    expected = play(servers(count), 0, trainers, kind, make, **fields)
    for how in (Player.passes, Player.loop):
        found = play(servers(count), depth, trainers, kind, make, how, **fields)

        assert_equal(found, expected)
        looked_up = expected.metrics["rows_looked_up"]
        own, ahead = found.metrics["rows_looked_up"], found.metrics["rows_ahead"]
        assert own + ahead == looked_up and ahead > looked_up / 3
        if make is adagrad and (not fields or "completely_not_async" in fields):
            assert 0 < found.metrics["rows_awaited"] < ahead


@crossed("equalities", rule=tuple(RULES), trainers=(1, 2, 4), depth=(1, 2, 4), count=(1, 2))
def test_sync_programs_have_the_same_bits(
    servers: Servers, rule: str, trainers: int, depth: int, count: int
) -> None:
    """Two tables, a weight of torch's own, dense layers; a table that is looked up twice, bags with
    a padding, rows that steps change before they are read.
    """
    kind, make = RULES[rule]
    assert_equal_ahead(servers, count, trainers, depth, make, kind)


@pytest.mark.parametrize(
    ("trainers", "depth", "make", "mode"),
    [
        (2, 4, adagrad, "split at run time"),
        (1, 2, adagrad, "half-async"),
        (1, 2, adagrad, "staleness"),
        RARE(1, 4, sgd, "split at run time"),
    ],
)
def test_runs_read_the_same_rows(
    servers: Servers, trainers: int, depth: int, make: Make, mode: str
) -> None:
    """In the other modes that wait for others, and with a lookup op of each table."""
    assert_equal_ahead(servers, 2, trainers, depth, make, **MODES[mode])


@pytest.mark.parametrize("depth", [1, 3])
def test_async_runs_read_rows_as_they_came(servers: Servers, depth: int) -> None:
    """Each row as it was after one of the last ``look_ahead`` steps, and none is sent again."""

    def how(player: Player) -> None:
        lookup = next(op for op in player.program.main.ops if op.type == "merge_ids")
        history = [values(player.model)["user"]]
        for number, feed in enumerate(player.data):
            first = 1 if number == 0 else number + depth
            for following in player.data[first : number + depth + 1]:
                player.executor.prefetch(player.program, following)
            (read,) = player.executor.run(player.program, feed, [lookup.outputs[0]])
            for row, number_of in zip(read, feed[0][:, 0], strict=True):
                assert any(torch.equal(row, known[number_of]) for known in history[-1 - depth :])
            player.executor.flush()
            history.append(values(player.model)["user"])

    found = play(servers(2), depth, kind=Tables, make=sgd, how=how, sync_mode=False)
    assert found.metrics["rows_ahead"] > 0 and found.metrics["rows_refreshed"] == 0


def test_ids_that_come_from_rows_are_looked_up_by_the_run(servers: Servers) -> None:
    """The others of the program are looked up ahead."""
    expected = play(servers(2), 0, kind=Chained, make=sgd)
    found = play(servers(2), 2, kind=Chained, make=sgd)

    assert_equal(found, expected)
    own, ahead = found.metrics["rows_looked_up"], found.metrics["rows_ahead"]
    assert own + ahead == expected.metrics["rows_looked_up"]
    assert ahead > expected.metrics["rows_looked_up"] / 3 and own > STEPS


# ---- what happens between the runs ----


def announced_over(at: int, does: Callable[[Player], None]) -> Callable[[Player], None]:
    """As ``Player.loop``, with a call between the announcements of feeds and their runs."""

    def loop(player: Player) -> None:
        for number, feed in enumerate(player.data):
            if player.depth and number + 1 < len(player.data):
                player.executor.prefetch(player.program, player.data[number + 1])
            player.executor.run(player.program, feed)
            if number == at:
                does(player)

    return loop


def writes_rows(player: Player) -> None:
    """Other rows, by ``load_state_dict``."""
    states = player.model.state_dict()
    changed = {k: v + 1 if v.is_floating_point() else v for k, v in states.items()}
    player.model.load_state_dict(changed)


def test_rows_that_a_script_writes_between(servers: Servers) -> None:
    """``load_state_dict`` between an announcement and its run."""
    how = announced_over(9, writes_rows)
    expected = play(servers(2), 0, kind=Tables, how=how)
    found = play(servers(2), 1, kind=Tables, how=how)

    assert_equal(found, expected)
    assert found.metrics["rows_ahead"] > expected.metrics["rows_looked_up"] / 2


def test_a_checkpoint_is_loaded_between(servers: Servers, tmp_path: Path) -> None:
    """Its rows are read, not those that were looked up before."""
    played = []
    for depth in (0, 1):
        path = str(tmp_path / str(depth))

        def keeps(player: Player, path: str = path) -> None:
            player.executor.save(path, player.program)

        def returns(player: Player, path: str = path) -> None:
            player.executor.load(path, player.program)

        def how(player: Player, keeps: Any = keeps, returns: Any = returns) -> None:
            whole = player.data
            for part, does in ((whole[:10], keeps), (whole[10:], returns)):
                player.data = part
                announced_over(4, does)(player)

        played.append(play(servers(2), depth, how=how))

    assert_equal(played[1], played[0])
    assert played[1].metrics["rows_ahead"] > played[0].metrics["rows_looked_up"] / 2


def test_an_evaluation_between_takes_nothing(servers: Servers) -> None:
    """The clone for tests looks its own rows up, and the announced ones stay for their run."""

    looked_up: list[float] = []

    def evaluates(player: Player) -> None:
        test, before = player.program.clone(for_test=True), player.metrics()["rows_looked_up"]
        for feed in player.data[8:12]:
            player.executor.run(test, feed, ["loss"])
        looked_up.append(player.metrics()["rows_looked_up"] - before)

    how = announced_over(9, evaluates)
    expected = play(servers(2), 0, how=how)
    found = play(servers(2), 1, how=how)

    assert_equal(found, expected)
    assert looked_up[1] == looked_up[0] > 0


def test_a_pass_that_is_left_leaves_nothing(servers: Servers) -> None:
    """A feed that does not fit ends a pass in its own run; the next pass has the right rows."""

    def how(player: Player) -> None:
        good = [{"ids": ids, "y": y} for ids, y in player.data]
        with pytest.raises(ValueError, match="expected slots for the inputs ids, got the slots y"):
            player.executor.train_from_dataset(player.program, [*good[:9], {"y": good[9]["y"]}])
        assert player.executor._runtimes[0].communicator.step == 9
        player.executor.train_from_dataset(player.program, good[9:])

    assert_equal(play(servers(2), 2, how=how), play(servers(2), 0, how=how))


def test_the_feeds_of_one_run_are_known(servers: Servers) -> None:
    """Several steps in one run, by ``num_iteration_per_run``."""
    played = []
    for depth in (0, 2):
        model, main, startup = begun(0, Net, adagrad)
        strategy = fleet.DistributedStrategy()
        strategy.a_sync_configs = {"modes": {"*": "sync"}, "look_ahead": depth}
        strategy.execution_strategy = {"num_iteration_per_run": 6}
        made = transpiled(main, startup, servers(2), strategy=strategy)
        with Executor() as executor:
            executor.run(made.get_startup_program())
            program, feeds = made.get_trainer_program(), batches(STEPS)
            for begin in range(0, STEPS, 6):
                executor.run(program, feeds[begin : begin + 6])
            metrics = executor._runtimes[0].communicator.metrics()
            played.append(Played(values(model), metrics))

    assert_equal(played[1], played[0])
    assert played[1].metrics["rows_ahead"] > played[0].metrics["rows_looked_up"] / 2


# ---- passes ----


class Bags(nn.Module):
    """The mean of a bag's rows, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.EmbeddingBag(16, 4, mode="sum", sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """int64 [values], int64 [batch] -> logits [batch]."""
        found: torch.Tensor = self.out(self.rows(ids, offsets)).squeeze(1)
        return found


def bag_programs(model: nn.Module) -> Any:
    inputs = [data("ids", ["values"], "int64"), data("ids_offsets", [None], "int64")]
    inputs.append(data("label", [None], "float32"))

    def loss(model: nn.Module, ids: Any, ids_offsets: Any, label: Any) -> torch.Tensor:
        logits = model(ids, ids_offsets)
        return nn.functional.binary_cross_entropy_with_logits(logits, label)

    example = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2]), torch.tensor([0.0, 1.0])
    with program_guard(Program(()), Program(())):
        return capture(model, loss, adagrad(model), example, inputs=inputs)


def file_dataset(folder: Path) -> fleet.QueueDataset:
    """Twenty batches of four samples, with a slot that no input takes."""
    path = folder / "part-0"
    bags = [[(n * 7 + k) % 16 for k in range(1 + n % 3)] for n in range(80)]
    lines = [f"{len(bag)} {' '.join(map(str, bag))} 1 {n % 2} 1 9" for n, bag in enumerate(bags)]
    path.write_text("\n".join(lines))
    made = fleet.QueueDataset()
    slots = [fleet.Slot("ids", width=None), fleet.Slot("label", "float32"), fleet.Slot("unused")]
    made.init(batch_size=4, use_var=slots)
    made.set_filelist([str(path)])
    return made


@pytest.mark.parametrize("in_job", [False, True], ids=["without fleet", "in a job of fleet's"])
def test_a_dataset_of_files_is_read_ahead(servers: Servers, tmp_path: Path, in_job: bool) -> None:
    """With bags of any length; within the passes that ``fleet`` counts."""
    found = []
    if in_job:
        fleet.init()
    for depth in (0, 1, 3):
        model = Bags()
        main, startup = bag_programs(model)
        made = transpiled(main, startup, servers(2), look_ahead=depth)
        with Executor() as executor:
            executor.run(made.get_startup_program())
            program = made.get_trainer_program()
            assert executor.train_from_dataset(program, file_dataset(tmp_path)) == 20
            metrics = executor._runtimes[0].communicator.metrics()
        state = {name: each.clone() for name, each in model.state_dict().items()}
        found.append(Played(state, metrics))

    for each in found[1:]:
        assert_equal(each, found[0])
        assert each.metrics["rows_ahead"] > found[0].metrics["rows_looked_up"] / 2


class Noted:
    """Announcements, noted."""

    depth = 2

    def __init__(self) -> None:
        self.announced: list[int] = []

    def announce_batch(self, batch: int, source: object) -> None:
        self.announced.append(batch)

    def give(self, batch: int) -> None:
        pass

    def withdraw(self, source: object = None) -> None:
        pass


@pytest.mark.parametrize("begins", [True, False], ids=["a job's pass", "another's"])
def test_a_jobs_pass_counts_the_batches_that_are_given(begins: bool) -> None:
    """It reads ahead by itself: what it notes of a batch, such as a lease or a position, it notes
    when the program gets it.  Any other pass is read ahead from outside.
    """
    noted, given = Noted(), list[int]()
    ahead = ReadAhead(lambda: None) if begins else iter

    class Data:
        def __iter__(self) -> Iterator[int]:
            for each in ahead(iter(range(9))):
                given.append(each)
                yield each

    announced: AnnouncedBatches = noted
    seen, counts = [], []
    for each in read_for(announced, Data()):
        seen.append(each)
        counts.append(len(given))

    assert seen == list(range(9)) and noted.announced == list(range(4, 9))
    assert counts == list(range(1, 10)) if begins else counts[4] == 7


def test_a_pass_that_goes_on_is_not_read_ahead() -> None:
    """A job's pass over an iterator, which would lose what was read; a generator is not closed."""
    left = (each for each in range(9))
    ahead = ReadAhead(lambda: None, goes_on=True)

    class Data:
        def __iter__(self) -> Iterator[int]:
            return ahead(left)

    for each in read_for(Noted(), Data()):
        if each == 5:
            break

    assert list(left) == [6, 7, 8]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Those of all batches, one by one."""

    def __init__(self) -> None:
        pairs = (zip(ids, y, strict=True) for ids, y in batches(STEPS))
        self.samples = [{"ids": row, "y": label} for pair in pairs for row, label in pair]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def test_a_trainers_part_of_a_loader_is_read_ahead(servers: Servers) -> None:
    """``fleet.shard`` of a DataLoader that shuffles, in a job of fleet's."""

    def how(player: Player) -> None:
        part = fleet.shard(torch.utils.data.DataLoader(Samples(), batch_size=8, shuffle=True))
        for _ in range(2):
            assert player.executor.train_from_dataset(player.program, part) == STEPS

    fleet.init()
    torch.manual_seed(1)
    expected = play(servers(2), 0, how=how)
    torch.manual_seed(1)
    found = play(servers(2), 2, how=how)

    assert_equal(found, expected)
    assert found.metrics["rows_ahead"] > expected.metrics["rows_looked_up"] / 2


def test_an_iterator_is_not_read_ahead(servers: Servers) -> None:
    """It goes on where a pass was left."""

    def how(player: Player) -> None:
        good: list[Any] = [{"ids": ids, "y": y} for ids, y in player.data]
        batches = iter([*good[:9], {"y": good[9]["y"]}, *good[9:]])
        with pytest.raises(ValueError, match="expected slots for the inputs ids"):
            player.executor.train_from_dataset(player.program, batches)
        assert player.executor.train_from_dataset(player.program, batches) == STEPS - 9

    found = play(servers(1), 2, how=how)
    assert_equal(found, play(servers(1), 0, how=how))
    assert found.metrics["rows_ahead"] == 0


# ---- what cannot be ----


class Again(nn.Module):
    """One table; the ids of its last lookup come from its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = DistributedEmbedding(4, num_embeddings=ROWS)
        self.fc = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.emb(ids[:, 0])
        again = (rows.detach().sum(1) * 1000).long().abs() % ROWS
        out: torch.Tensor = self.fc(rows + self.emb(again))
        return out


def test_a_table_may_have_both_kinds_of_lookups(servers: Servers) -> None:
    """Those that follow from the feed are made ahead."""
    expected = play(servers(2), 0, kind=Again, make=sgd)
    found = play(servers(2), 1, kind=Again, make=sgd)

    assert_equal(found, expected)
    assert found.metrics["rows_ahead"] > 0


class Drawn(nn.Module):
    """Rows of ids that the model draws, or computes of its parameters."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = DistributedEmbedding(4, num_embeddings=ROWS)
        self.fc = nn.Linear(4, 2)
        self.way = way

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.way == "drawn":
            chosen = torch.randint_like(ids[:, 0], 0, ROWS)
        elif self.way == "in place":
            chosen = ids[:, 0].add_(1) % ROWS
        else:
            chosen = ids[:, 0] * self.fc.bias.detach().sum().long() % ROWS
        out: torch.Tensor = self.fc(self.emb(chosen))
        return out


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("drawn", "which are drawn at random, by aten.randint_like.low_dtype"),
        ("of a parameter", "which come from 'fc.bias', which steps change"),
        ("in place", "which come from 'ids', which aten.add_.Tensor changes"),
    ],
)
def test_ids_that_do_not_follow_from_the_feed_are_refused(way: str, why: str) -> None:
    """By the table's name, with the reason, when the program is transpiled."""
    model = Drawn(way)
    with program_guard(Program(()), Program(())):
        main, startup = capture(model, step, sgd(model), batches(1)[0])
    with pytest.raises(ValueError, match=f"got those of table 'emb', {why}: set look_ahead to 0"):
        transpiled(main, startup, "a:1", look_ahead=1)
    transpiled(main, startup, "a:1", look_ahead=0)


def test_prefetch_says_what_it_needs(servers: Servers) -> None:
    """A job that looks ahead, and a feed that fits; without servers it has no effect."""
    _, main, startup = begun(0, Tables, adagrad)
    feed = batches(1)[0]
    for depth in (0, 1):
        made = transpiled(main, startup, servers(1), look_ahead=depth)
        with Executor() as executor:
            executor.prefetch(main, feed)
            executor.run(made.get_startup_program())
            program = made.get_trainer_program()
            if depth:
                with pytest.raises(ValueError, match="feed: expected 2 tensors"):
                    executor.prefetch(program, feed[:1])
                executor.prefetch(program, feed)
                with pytest.raises(TypeError, match="prefetch: expected a Program, got str"):
                    executor.prefetch("main", feed)  # type: ignore[arg-type]
            else:
                with pytest.raises(ValueError, match=r'look_ahead"\] of 1 to 4 and a trainer'):
                    executor.prefetch(program, feed)
            executor.run(program, feed)
