"""Rows that are looked up ahead of their step: the same bits as without, in every lane that waits
for others; at most as many steps old as asked for in the others.

Real servers in this process.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from pserver.client.replies import Reply
from pserver.lane.tables import LockedTable
from pserver.table.gradient import RowGradient, RowsBefore
from tests.support import jobs
from tests.support.jobs import Eager, Mode, Script, Values
from tests.support.matrix import crossed
from tests.support.table_trainers import Net, Servers, Trainer
from tests.support.threads import at_once
from trainer import CountFilterEntry, DistributedEmbedding, Uniform, fleet
from trainer.samplers.read_ahead import ReadAhead
from trainer.senders import served_rows
from trainer.senders.look_ahead import LookAhead
from trainer.senders.served_rows import Lookups

RULES: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": jobs.sgd,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": jobs.adagrad,
    "adam": jobs.adam,  # moves rows that a step does not touch
}
SYNC = {"modes": {"*": "sync"}}


@dataclass
class Played:
    """The values and counters of a job's first trainer at its end."""

    values: Values
    metrics: dict[str, float]


def play(
    endpoints: str,
    depth: int,
    trainers: int,
    rule: str = "adagrad",
    between: Callable[[int, Eager], None] = lambda step, trainer: None,
    **configs: Any,
) -> Played:
    """A job whose batches are read ahead as ``fleet.shard`` does it.

    Args:
        between: called before each step.
    """
    script = Script("clicks", RULES[rule], steps=24)
    mode = Mode({"look_ahead": depth, **(configs or SYNC)})
    joined = at_once(
        *(lambda n=n: Eager(script, mode, endpoints, n, trainers) for n in range(trainers))
    )

    def train(trainer: Eager) -> None:
        batches = ReadAhead(trainer.job.look_ahead)(iter(script.data(trainer.number)))
        for step, batch in enumerate(batches, 1):
            between(step, trainer)
            trainer.step(batch)
        trainer.flush()

    at_once(*(lambda each=each: train(each) for each in joined))
    first = joined[0]
    played = Played(
        {**jobs.values(first.model), **jobs.rows(first.model)}, first.communicator.metrics()
    )
    at_once(*(each.leave for each in joined))
    return played


# ---- equal to the bit ----


@pytest.mark.observes("a_sync_configs.look_ahead")
@crossed("equalities", rule=tuple(RULES), trainers=(1, 2, 3, 4), depth=(1, 2, 3, 4), count=(1, 2))
def test_sync_steps_have_the_same_bits(
    servers: Servers, rule: str, trainers: int, depth: int, count: int
) -> None:
    """A table that is looked up twice, another one, and dense layers; rows that steps change before
    they are read.
    """
    expected = play(servers(count), 0, trainers, rule)
    found = play(servers(count), depth, trainers, rule)

    jobs.assert_equal(found.values, expected.values)
    looked_up = expected.metrics["rows_looked_up"]
    own, ahead = found.metrics["rows_looked_up"], found.metrics["rows_ahead"]
    assert own + ahead == looked_up and ahead > looked_up / 2
    if rule in ("sgd", "adagrad"):  # a row waits where the step before has changed it
        assert 0 < found.metrics["rows_awaited"] < ahead


@pytest.mark.parametrize(
    "configs",
    [
        {"half_async": True, "max_merge_var_num": 1},
        {"staleness": 2},
        {"dc_asgd": 0.5, "send_queue_size": 1},
    ],
    ids=["half-async", "staleness", "delay-compensated"],
)
def test_lanes_that_wait_refresh_too(servers: Servers, configs: dict[str, Any]) -> None:
    """One trainer, whose steps have landed before the next."""
    expected = play(servers(2), 0, 1, **configs)
    jobs.assert_equal(play(servers(2), 2, 1, **configs).values, expected.values)


# ---- what happens between lookup and step ----


def test_a_broken_stream_looks_up_again(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server keeps lookups for one stream: on the next one a refresh of them is unknown."""
    expected = play(servers(2), 0, 2)
    again: list[int] = []
    right = Lookups._look_up_again

    def noted(lookups: Lookups, *arguments: Any) -> int:
        again.append(1)
        return right(lookups, *arguments)

    monkeypatch.setattr(Lookups, "_look_up_again", noted)

    def breaks(step: int, trainer: Eager) -> None:
        if step in (9, 14):
            trainer.communicator.clients[step % 2].tables.renew()  # type: ignore[union-attr]

    found = play(servers(2), 2, 2, between=breaks)
    jobs.assert_equal(found.values, expected.values)
    assert again


def test_a_lookup_that_is_too_large_is_not_kept(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again, and nothing else changes."""
    expected = play(servers(1), 0, 1)
    monkeypatch.setattr("pserver.service.tables.KEPT_BYTES", 100)
    found = play(servers(1), 1, 1)
    jobs.assert_equal(found.values, expected.values)
    assert found.metrics["rows_awaited"] == found.metrics["rows_ahead"]


def test_rows_that_a_script_writes_between(servers: Servers) -> None:
    """``load_state_dict`` in the middle: announced rows are none any more."""

    def writes(step: int, trainer: Eager) -> None:
        if step == 12:
            states = trainer.model.state_dict()
            states = {k: v + 1 if v.is_floating_point() else v for k, v in states.items()}
            trainer.model.load_state_dict(states)

    expected = play(servers(2), 0, 1, between=writes)
    jobs.assert_equal(play(servers(2), 2, 1, between=writes).values, expected.values)


def test_a_checkpoint_is_loaded_between(servers: Servers, tmp_path: Path) -> None:
    """Rows are those of the checkpoint."""

    def loads(step: int, trainer: Eager) -> None:
        path = str(tmp_path / str(trainer.communicator.plan.lanes[0].look_ahead))
        if step == 8:
            trainer.save(path)
        if step == 16:
            trainer.load(path)

    expected = play(servers(2), 0, 1, between=loads)
    jobs.assert_equal(play(servers(2), 2, 1, between=loads).values, expected.values)


def test_an_evaluation_between_steps(servers: Servers) -> None:
    """Other ids of the same tables, with the batch of the next step given already."""
    seen: dict[int, list[torch.Tensor]] = {}

    def evaluates(depth: int) -> Callable[[int, Eager], None]:
        def between(step: int, trainer: Eager) -> None:
            if step % 5 == 0:
                with torch.no_grad():
                    x = jobs.batches("clicks", 1, seed=step)[0][0]
                    seen.setdefault(depth, []).append(trainer.model(x))

        return between

    expected = play(servers(1), 0, 1, between=evaluates(0))
    found = play(servers(1), 2, 1, between=evaluates(2))
    jobs.assert_equal(found.values, expected.values)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True))
    assert found.metrics["rows_ahead"] > found.metrics["rows_looked_up"]


def test_evaluations_leave_the_lookups_of_a_batch_as_they_are(servers: Servers) -> None:
    """Of any number of lookups without gradients, and before the forward of the batch too: one
    lookup ahead for each batch behind the first ones, and none twice.
    """
    known = set[int]()

    def between(step: int, trainer: Eager) -> None:
        if step < 20:
            with torch.no_grad():
                for x, *_ in jobs.batches("clicks", step % 7, seed=step):
                    trainer.model(x)
        elif (ahead := trainer.job.look_ahead()) is not None:
            known.add(len(ahead._parts))

    expected = play(servers(1), 0, 1)
    plain = play(servers(1), 2, 1)
    found = play(servers(1), 2, 1, between=between)
    jobs.assert_equal(found.values, expected.values)
    assert found.metrics["rows_ahead"] == plain.metrics["rows_ahead"] > 0
    assert known == {3}  # one of each table


@pytest.mark.parametrize(
    "options",
    [{"capacity": 12}, {"capacity": 12, "eviction": "lfu"}, {"entry": CountFilterEntry(2)}],
    ids=["lru", "lfu", "entry"],
)
@pytest.mark.parametrize("depth", [1, 4])
def test_tables_that_forget_rows(servers: Servers, options: dict[str, Any], depth: int) -> None:
    """Rows that are evicted, or not admitted yet, between lookup and step."""
    found = []
    for ahead in (0, depth):
        model = Net(init=Uniform(-1.0, 1.0), num_embeddings=40, **options)
        trainer = Trainer(servers(2), 0, 1, model, look_ahead=ahead, **SYNC)
        steps = [
            torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(n)).tolist()
            for n in range(30)
        ]
        look_ahead, read = trainer.job.look_ahead(), []
        for step, ids in enumerate(steps):
            if look_ahead is not None:
                begin = step + ahead if step else 1
                for later in steps[begin : step + ahead + 1]:
                    look_ahead.announce([(model.emb, torch.tensor(later))])
            trainer.optimizer.zero_grad()
            rows = model.emb(torch.tensor(ids))
            read.append(rows.detach().clone())
            (rows * rows).sum().mul(0.1).backward()
            trainer.optimizer.step()
        found.append(torch.cat(read))
        metrics = trainer.job.metrics()
        assert metrics.get("rows_ahead", 0) > 0 or not ahead
        trainer.optimizer.close()
        fleet.finish()
    assert torch.equal(found[0], found[1])


# ---- what a script does with its batches ----


@pytest.fixture
def alone(servers: Servers) -> Iterator[Callable[..., Trainer]]:
    """``alone(model, ...)``: the only trainer of a job with one batch ahead, on two servers."""
    there: list[Trainer] = []

    def made(model: nn.Module, **configs: Any) -> Trainer:
        configs = {"look_ahead": 1, **(configs or SYNC)}
        there.append(Trainer(servers(2), 0, 1, model, **configs))
        return there[-1]

    yield made
    for trainer in there:
        trainer.optimizer.close()
    fleet.finish()


def ahead_of(trainer: Trainer) -> LookAhead:
    found = trainer.job.look_ahead()
    assert found is not None
    return found


def arrived(look_ahead: LookAhead) -> None:
    """Waits until every lookup ahead that was asked for is answered."""
    for each in look_ahead._announced:
        if each.arrival is not None:
            each.arrival.result(timeout=30)


def test_ids_that_a_script_changes_in_place(alone: Callable[..., Trainer]) -> None:
    """The rows of the changed ids, although the announced tensor is the changed one."""
    trainer = alone(Net(init=Uniform(-1.0, 1.0)))
    ids = torch.arange(5)
    ahead_of(trainer).announce([(trainer.model.emb, ids)])
    arrived(ahead_of(trainer))
    ids += 10
    with torch.no_grad():
        rows = trainer.model.emb(ids)
        expected = trainer.model.emb(torch.arange(10, 15))
    assert torch.equal(rows, expected) and trainer.job.metrics()["rows_awaited"] == 0


def test_two_lookups_of_one_step_with_a_step_between(alone: Callable[..., Trainer]) -> None:
    """The second one reads what the step has changed; the first one's rows stay as they were."""
    trainer = alone(Net(init=Uniform(-1.0, 1.0)))
    emb = trainer.model.emb
    ahead_of(trainer).announce([(emb, torch.tensor([1, 2])), (emb, torch.tensor([2, 3]))])
    first = emb(torch.tensor([1, 2]))
    before = first.detach().clone()
    trainer.optimizer.zero_grad()
    (-first.sum()).backward(retain_graph=True)
    trainer.optimizer.step()  # adds 1 to rows 1 and 2
    second = emb(torch.tensor([2, 3])).detach()
    assert torch.equal(first.detach(), before)
    assert torch.equal(second[0], before[1] + 1)
    assert trainer.job.metrics()["rows_looked_up"] == 0


def test_ids_that_were_not_announced_ask_for_themselves(alone: Callable[..., Trainer]) -> None:
    """The announced lookup of the step after it is used all the same."""
    trainer = alone(Net(init=Uniform(-1.0, 1.0)))
    emb, look_ahead = trainer.model.emb, ahead_of(trainer)
    look_ahead.announce([(emb, torch.tensor([1, 2]))])
    look_ahead.announce([(emb, torch.tensor([5]))])
    with torch.no_grad():
        other, announced = emb(torch.tensor([2, 1])), emb(torch.tensor([5]))
        assert trainer.job.metrics()["rows_looked_up"] == 2
        assert torch.equal(other, emb(torch.tensor([2, 1])))
        assert torch.equal(announced, emb(torch.tensor([5])))


def test_more_than_was_asked_for_is_announced(alone: Callable[..., Trainer]) -> None:
    """The oldest announcements go; what stays is bounded, here and on the servers."""
    trainer = alone(Net(init=Uniform(-1.0, 1.0)), send_queue_size=4, look_ahead=2)
    for number in range(40):
        ahead_of(trainer).announce([(trainer.model.emb, torch.tensor([number]))])
    assert len(ahead_of(trainer)._announced) == 3
    with torch.no_grad():
        trainer.model.emb(torch.tensor([39]))
    assert trainer.job.metrics()["rows_looked_up"] == 0


def test_an_async_trainer_reads_rows_as_they_were(alone: Callable[..., Trainer]) -> None:
    """A step between lookup and forward shows in the next lookup."""
    trainer = alone(Net(), send_queue_size=1, look_ahead=1)
    look_ahead = ahead_of(trainer)
    look_ahead.announce([(trainer.model.emb, torch.tensor([4]))])
    arrived(look_ahead)
    trainer.add([4, 9], 1.0)  # which were not announced
    trainer.optimizer.flush()
    assert [trainer.model.row(4), trainer.model.row(4)] == [0.0, 1.0]


# ---- what a forward waits for ----


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("trainers", [1, 3])
def test_a_forward_waits_for_rows_of_the_step_before_alone(
    servers: Servers, trainers: int, depth: int
) -> None:
    """As many as the ids of both allow, whoever has taken that step."""
    steps, draw = 10, torch.Generator().manual_seed(trainers)
    ids = [
        [torch.randint(0, 60, (20,), generator=draw) for _ in range(steps)] for _ in range(trainers)
    ]
    joined = at_once(
        *(
            lambda n=n: Trainer(
                servers(2),
                n,
                trainers,
                Net(init=Uniform(-1.0, 1.0)),
                lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
                look_ahead=depth,
                **SYNC,
            )
            for n in range(trainers)
        )
    )

    def train(trainer: Trainer, own: list[torch.Tensor]) -> None:
        announced = 1
        for step in range(steps):
            while announced < min(steps, step + depth + 1):
                ahead_of(trainer).announce([(trainer.model.emb, own[announced])])
                announced += 1
            trainer.optimizer.zero_grad()
            trainer.model.emb(own[step]).square().sum().backward()
            trainer.optimizer.step()

    at_once(*(lambda n=n: train(joined[n], ids[n]) for n in range(trainers)))
    awaited = [trainer.job.metrics()["rows_awaited"] for trainer in joined]
    at_once(*(each.optimizer.close for each in joined))
    for own, count in zip(ids, awaited, strict=True):
        allowed = 0
        for step in range(1, steps):
            changed = torch.cat([each[step - 1] for each in ids])
            allowed += len(own[step][torch.isin(own[step], changed)].unique())
        assert 0 < count <= allowed


# ---- Ctrl-C, and threads ----


class Interrupted:
    """The wait for the answers of the script's thread to its next request ends with Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right, script = served_rows.first_of, threading.current_thread()
        self.waits = 0

        def first_of(replies: Sequence[Future[Reply]]) -> Reply:
            if threading.current_thread() is script:
                self.waits += 1
                if self.waits == 1:
                    raise KeyboardInterrupt
            return right(replies)

        monkeypatch.setattr(served_rows, "first_of", first_of)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lookup_that_ctrl_c_ends_has_no_part_in_the_next_one(
    alone: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """As a notebook goes on: the answers of the first come before the next one asks."""
    emb = alone(Net(init=Uniform(-1.0, 1.0)), look_ahead=depth, **SYNC).model.emb
    with torch.no_grad():
        expected = emb(torch.arange(1000, 3000))
        interrupted = Interrupted(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            emb(torch.arange(500))
        assert torch.equal(emb(torch.arange(1000, 3000)), expected)
    assert interrupted.waits == 2


def test_ctrl_c_keeps_no_turn() -> None:
    """Wherever a function of Python's returns, where signals are looked for; the error is kept, as
    a notebook keeps it, and with it the frames.
    """
    before, kept = sys.gettrace(), list[BaseException]()
    for count in itertools.count(1):
        lookups, left = Lookups([]), count

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            left -= event == "return"
            if not left:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            lookups.pull_all({})
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(before)
        following = threading.Thread(target=lookups.pull_all, args=({},), daemon=True)
        following.start()
        following.join(10.0)
        assert not following.is_alive(), f"it waits for a turn, after return {count}"
        if len(kept) < count:
            break
    assert len(kept) > 3


def test_a_refresh_that_ctrl_c_ends_is_not_taken_for_known(
    alone: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers have sent what has changed, and it was not taken in: it is looked up again."""
    trainer = alone(Net())
    emb, ids = trainer.model.emb, torch.arange(20)
    ahead_of(trainer).announce([(emb, ids)])
    arrived(ahead_of(trainer))
    monkeypatch.setattr(LookAhead, "closed", lambda *_: None)  # the forward asks
    trainer.add(list(range(10)), 1.0)
    interrupted = Interrupted(monkeypatch)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            emb(ids)
        assert emb(ids)[:, 0].tolist() == [1.0] * 10 + [0.0] * 10
    assert interrupted.waits == 2


def test_threads_that_evaluate_beside_the_steps(alone: Callable[..., Trainer]) -> None:
    """They may take announced rows; steps and batches are those of the script."""
    trainer = alone(Net(init=Uniform(-1.0, 1.0)), look_ahead=2, **SYNC)
    emb, look_ahead, over = trainer.model.emb, ahead_of(trainer), threading.Event()

    def evaluate() -> int:
        count = 0
        while not over.is_set():
            with torch.no_grad():
                emb(torch.tensor([count % 5]))
            count += 1
        return count

    def train() -> None:
        try:
            for step in range(200):
                for later in range(step, step + 3):
                    look_ahead.announce([(emb, torch.tensor([later % 5]))])
                trainer.add([step % 5], 1.0)
        finally:
            over.set()

    *counts, _ = at_once(evaluate, evaluate, train)
    assert all(counts)


def test_the_rest_of_a_step_is_for_the_thread_that_has_the_first(
    alone: Callable[..., Trainer],
) -> None:
    """Another one's rows may be of another moment; it asks for its own."""
    trainer = alone(Net(init=Uniform(-1.0, 1.0)))
    emb = trainer.model.emb
    ahead_of(trainer).announce([(emb, torch.tensor([1])), (emb, torch.tensor([2]))])
    with torch.no_grad():
        at_once(lambda: emb(torch.tensor([1])))
        assert trainer.job.metrics()["rows_looked_up"] == 0
        emb(torch.tensor([2]))
    assert trainer.job.metrics()["rows_looked_up"] == 1


def test_the_thread_ends_with_the_job(alone: Callable[..., Trainer]) -> None:
    """Also where lookups are asked for that nobody will read."""
    trainer = alone(Net(), look_ahead=4, **SYNC)
    for number in range(20):
        ahead_of(trainer).announce([(trainer.model.emb, torch.arange(number, number + 5000))])
        ahead_of(trainer).give(())
    thread = ahead_of(trainer)._worker._thread
    trainer.optimizer.close()
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


# ---- delay compensation ----


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_delays_are_those_of_what_a_forward_has_read(
    alone: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Of a row that every batch has: lookups of later steps come before a step's gradient, and are
    not what it was computed at.
    """
    then: list[float] = []
    right = LockedTable.read_before

    def noted(table: LockedTable, gradient: RowGradient, trainer: int) -> RowsBefore | None:
        before = right(table, gradient, trainer)
        assert before is not None and bool(before.known.all())
        then.extend(before.rows[gradient.ids == 1, 0].tolist())
        return before

    monkeypatch.setattr(LockedTable, "read_before", noted)
    trainer = alone(Net(), dc_asgd=0.5, send_queue_size=1, look_ahead=depth)
    emb, read = trainer.model.emb, list[float]()
    for step in range(8):
        for later in range(step + depth if step else 1, step + depth + 1) if depth else ():
            ahead_of(trainer).announce([(emb, torch.tensor([1, 40 + later]))])
        trainer.optimizer.zero_grad()
        rows = emb(torch.tensor([1, 40 + step]))
        read.append(float(rows[0, 0].detach()))
        (-rows.sum()).backward()
        trainer.optimizer.step()
        trainer.optimizer.flush()
    assert then == read == list(range(8))


# ---- fleet ----


class Summed(nn.Module):
    """Two tables, of two parts of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.users = DistributedEmbedding(4, init=Uniform(-1.0, 1.0))
        self.items = DistributedEmbedding(4, init=Uniform(-1.0, 1.0), num_embeddings=50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.users(x[:, :3]) * self.items(x[:, 3:5])[:, :1]).sum()


def trained(
    servers: Servers, loader: Callable[[], Any], depth: int, passes: int = 2, **configs: Any
) -> tuple[list[float], dict[str, float], list[float]]:
    """A script with ``fleet``: its losses, its metrics, and numbers that it draws in its steps."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"look_ahead": depth, **(configs or SYNC)}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy)
    try:
        torch.manual_seed(0)
        model = fleet.distributed_model(Summed())
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
        losses, drawn, data = [], [], fleet.shard(loader())
        for _ in range(passes):
            for (x,) in data:
                drawn.append(float(torch.rand(())))
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        return losses, fleet.metrics(), drawn
    finally:
        fleet.finish()


def numbers(count: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 50, (count * 4, 5), generator=generator)


def loader(**options: Any) -> Any:
    data = torch.utils.data.TensorDataset(numbers())
    return torch.utils.data.DataLoader(data, batch_size=4, **options)


@pytest.mark.parametrize(
    "made",
    [
        loader,
        lambda: loader(shuffle=True),
        lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
        lambda: [(part,) for part in numbers().split(4)],
        pytest.param(lambda: loader(num_workers=1), marks=pytest.mark.processes),
    ],
    ids=["in order", "shuffled", "a generator", "a list", "a worker"],
)
def test_a_loader_is_read_ahead(servers: Servers, made: Callable[[], Any]) -> None:
    """The same losses, to the bit, and the same random numbers of the script."""
    expected, _, drawn = trained(servers, made, 0)
    losses, metrics, own = trained(servers, made, 2)
    assert losses == expected and own == drawn
    assert metrics["rows_ahead"] > metrics["rows_looked_up"]


class Draws(torch.utils.data.Dataset[tuple[torch.Tensor]]):
    """Samples with noise of the script's own random numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (numbers()[index] + torch.randint(0, 2, (1,)) * 0,)


def test_a_loader_that_draws_is_not_read_ahead(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """The script's random numbers would be other ones: it is told so, once."""

    def made() -> Any:
        return torch.utils.data.DataLoader(Draws(), batch_size=4)

    expected, _, drawn = trained(servers, made, 0)
    losses, metrics, own = trained(servers, made, 1)
    assert losses == expected and own == drawn and metrics["rows_ahead"] == 0
    told = [each.message for each in caplog.records if "look_ahead" in each.message]
    assert len(told) == 1 and "draws the script's random numbers" in told[0]


class Reused:
    """Batches that are made in one memory."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        memory = torch.zeros(4, 5, dtype=torch.int64)
        for part in numbers().split(4):
            memory.copy_(part)
            yield (memory,)


def test_a_loader_that_reuses_its_memory_is_not_read_ahead(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """The next batch would take the place of the one that the script has: it is told so, once."""
    expected, _, _ = trained(servers, Reused, 0)
    losses, metrics, _ = trained(servers, Reused, 3)
    assert losses == expected and metrics["rows_ahead"] == 0
    told = [each.message for each in caplog.records if "look_ahead" in each.message]
    assert len(told) == 1 and "made in the memory of another" in told[0]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("made", [iter, lambda batches: (each for each in batches)])
def test_an_iterator_goes_on_where_a_loop_was_left(
    servers: Servers, made: Callable[[Any], Iterator[Any]], depth: int
) -> None:
    """Nothing that was read ahead is lost, and a generator is not closed."""
    batches = [(part,) for part in numbers().split(4)]
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"look_ahead": depth, **SYNC}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy)
    try:
        model = fleet.distributed_model(Summed())
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
        data, seen = fleet.shard(made(batches)), []
        for _ in range(4):
            for (x,) in itertools.islice(data, 5):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
                seen.append(x)
        assert torch.equal(torch.cat(seen), torch.cat([x for (x,) in batches]))
    finally:
        fleet.finish()


def test_prefetch_announces_the_ids_of_a_loop_of_its_own(servers: Servers) -> None:
    """By the table's name, or by its module."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"look_ahead": 1, **SYNC}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy)
    try:
        model = fleet.distributed_model(Summed())
        with pytest.raises(RuntimeError, match="call fleet.distributed_optimizer first"):
            fleet.prefetch({"users": torch.tensor([1])})
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
        parts = numbers().split(4)
        for x, following in itertools.zip_longest(parts, parts[1:]):
            if following is not None:
                fleet.prefetch({"users": following[:, :3], model.items: following[:, 3:5]})
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        first = len(parts[0][:, :3].unique()) + len(parts[0][:, 3:5].unique())
        assert fleet.metrics()["rows_looked_up"] == first
        with pytest.raises(ValueError, match="a dict of ids by the name of a table, .* got Tensor"):
            fleet.prefetch(torch.tensor([1]))
        with pytest.raises(ValueError, match="the name or the module of a table.* got 'others'"):
            fleet.prefetch({"others": torch.tensor([1])})
        with pytest.raises(ValueError, match="ids: expected 0 to 49, got 50 at position 1"):
            fleet.prefetch({"items": torch.tensor([1, 50])})
        with pytest.raises(TypeError, match="ids: expected a tensor of int64, got torch.float32"):
            fleet.prefetch({"items": torch.tensor([1.0])})
    finally:
        fleet.finish()


def test_prefetch_without_a_look_ahead_says_what_to_set(servers: Servers) -> None:
    """Nothing would be looked up ahead."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    fleet.init(role)
    try:
        model = fleet.distributed_model(nn.Sequential(DistributedEmbedding(4)))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match='look_ahead"\\] of 1 to 4, got 0'):
            fleet.prefetch(torch.tensor([1]))
    finally:
        fleet.finish()


def test_alone_prefetch_has_no_effect() -> None:
    """The rows are in the process."""
    fleet.init()
    try:
        fleet.prefetch(torch.tensor([1]))
    finally:
        fleet.finish()


# ---- settings ----


def test_cached_rows_are_not_looked_up_ahead(servers: Servers) -> None:
    """The two exclude each other, by name."""
    with pytest.raises(ValueError, match="cache_rows and look_ahead exclude each other"):
        Trainer(servers(1), 0, 1, Net(cache_rows=8), look_ahead=1)


def test_geo_tables_are_not_looked_up_ahead(servers: Servers) -> None:
    """A k-step trainer has copies of its rows."""
    with pytest.raises(ValueError, match="look_ahead"):
        Trainer(servers(1), 0, 1, Net(), k_steps=2, look_ahead=1)
