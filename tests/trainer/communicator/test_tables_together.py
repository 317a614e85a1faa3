"""What jobs of several trainers, or of several servers, promise of tables.

Real servers in this process, a thread a trainer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pserver.errors import Refused, Unreachable
from pserver.job import locked_table
from pserver.testing.rpc_faults import CallInjector, CallPoint, faulty_calls
from trainer import (
    Constant,
    CountFilterEntry,
    DistributedEmbedding,
    ProbabilityEntry,
    ShowClickEntry,
    fleet,
)
from trainer.embedding.conversion import moved
from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from transpiler import DistributedStrategy

Servers = Callable[[int], str]
DIM = 4
PATIENCE = 60.0


class Net(nn.Module):
    """One table, of zeros at first unless said otherwise, and one dense parameter of as many
    numbers as a row has.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(DIM, **{"init": Constant(0.0), **options})
        self.w = nn.Parameter(torch.zeros(DIM))

    def add(
        self, ids: list[int], change: float, dense: float | None = None, **statistics: Any
    ) -> None:
        """A backward after which a step of SGD(lr=1) adds ``change`` to every id's row, once for
        each time it is there.
        """
        loss = -change * self.emb(torch.tensor(ids, dtype=torch.int64), **statistics).sum()
        if dense is not None:
            loss = loss - dense * self.w.sum()
        loss.backward()

    def row(self, id_: int) -> float:
        """A row whose numbers are equal."""
        with torch.no_grad():
            row = self.emb(torch.tensor([id_]))[0]
        assert bool((row == row[0]).all())
        return float(row[0])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Trainer:
    """One of a job's trainers: what ``fleet`` does, for a process that has several."""

    def __init__(
        self,
        endpoints: str,
        number: int,
        trainers: int,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Any] = sgd,
        **configs: Any,
    ) -> None:
        strategy = None
        if configs:
            strategy = DistributedStrategy()
            strategy.a_sync, strategy.a_sync_configs = True, configs
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
        self.job = Job(role, strategy)
        self.model: Any = moved(model, ())
        self.job.models.append(self.model)
        names = {tensor: name for name, tensor in self.job.tensors().items()}
        tables = self.job.find_tables()
        self.optimizer = self.job.optimizer = DistributedOptimizer(
            optimizer(self.model), names, self.job.connect, tables=tables
        )

    def add(
        self, ids: list[int] | None, change: float, dense: float | None = None, **statistics: Any
    ) -> None:
        """A step; of no ids at all where they are None."""
        self.optimizer.zero_grad()
        if ids is not None:
            self.model.add(ids, change, dense, **statistics)
        self.optimizer.step()

    @property
    def bytes(self) -> dict[str, int]:
        """Of the table, on the wire."""
        assert self.job.communicator is not None
        return self.job.communicator.variable_bytes()["emb"]


@pytest.fixture
def join(servers: Servers) -> Iterator[Callable[..., Trainer]]:
    """``join(servers, number, trainers, model, ...)``: one trainer; all leave at the end."""
    joined: list[Trainer] = []

    def made(
        count: int,
        number: int = 0,
        trainers: int = 1,
        model: nn.Module | None = None,
        *rest: Any,
        **configs: Any,
    ) -> Trainer:
        joined.append(Trainer(servers(count), number, trainers, model or Net(), *rest, **configs))
        return joined[-1]

    yield made
    for trainer in joined:
        trainer.optimizer.close()
    fleet.finish()


def at_once(*plays: Callable[[], Any]) -> list[Any]:
    """What each returns, in threads of their own; or the first failure."""
    pool = ThreadPoolExecutor(len(plays))
    try:
        running: list[Future[Any]] = [pool.submit(_with_one_thread, play) for play in plays]
        done, _ = wait(running, PATIENCE, FIRST_EXCEPTION)
        for each in done:
            each.result()
        return [each.result(timeout=0) for each in running]
    finally:
        pool.shutdown(wait=False)


def _with_one_thread(play: Callable[[], Any]) -> Any:
    torch.set_num_threads(1)
    return play()


# ---- sync ----


class Plain(nn.Module):
    """Two lookups of one embedding, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.emb = nn.Embedding(30, 8)
        self.fc = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(torch.cat([self.emb(ids[:, 0]), self.emb(ids[:, 1])], 1))
        return out


def batches(count: int = 6, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, 30, (size, 2), generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    for ids, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(ids), y).backward()
        optimizer.step()


def run_together(endpoints: str, trainers: int) -> list[torch.Tensor]:
    """A job of several trainers, each with its part of every batch: all rows, and the dense layer,
    as trainer 0 has them.
    """
    size = 16 // trainers
    jobs = []
    for number in range(trainers):
        model = Plain()
        fleet.distribute_embedding(model.emb)
        jobs.append(Trainer(endpoints, number, trainers, model, adagrad))

    def play(number: int) -> None:
        part = slice(number * size, (number + 1) * size)
        train(
            jobs[number].model,
            jobs[number].optimizer,
            [(ids[part], y[part]) for ids, y in batches()],
        )

    at_once(*(partial(play, number) for number in range(trainers)))
    with torch.no_grad():
        found = [
            jobs[0].model.emb(torch.arange(30)),
            *(p.clone() for p in jobs[0].model.fc.parameters()),
        ]
    for each in jobs:
        each.optimizer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [2, 4])
def test_trainers_with_a_table_equal_the_concatenated_batch(
    servers: Servers, trainers: int
) -> None:
    """Sync: within 1e-6 of plain torch alone, touched rows and untouched ones; and a run repeats to
    the bit.
    """
    reference = Plain()
    train(reference, adagrad(reference), batches())

    found = run_together(servers(2), trainers)

    expected = [reference.emb.weight, *reference.fc.parameters()]
    assert (
        max(
            float((one - other).detach().abs().max())
            for one, other in zip(found, expected, strict=True)
        )
        <= 1e-6
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(found, run_together(servers(2), trainers), strict=True)
    )


def test_a_trainer_that_does_not_touch_the_table_counts_in_its_mean(join: Any) -> None:
    """Lookups on one trainer alone: its gradient is divided by both; on none: the table takes no
    step.
    """
    one, other = join(2, 0, 2), join(2, 1, 2)

    at_once(lambda: one.add([1, 2], 4.0, 2.0), lambda: other.add(None, 0.0))
    at_once(lambda: one.add(None, 0.0), lambda: other.add(None, 0.0))
    at_once(lambda: one.add([2], 8.0), lambda: other.add([2, 3], 2.0))

    assert [other.model.row(id_) for id_ in (1, 2, 3, 4)] == [2.0, 7.0, 1.0, 0.0]
    assert one.model.w.tolist() == [1.0] * DIM


def test_a_trainer_that_leaves_early_is_not_waited_for_and_not_counted(join: Any) -> None:
    """From then on the others' rows are divided by the number of the others."""
    one, other = join(2, 0, 2), join(2, 1, 2)

    at_once(lambda: one.add([1], 4.0), lambda: other.add([1], 2.0))
    other.optimizer.close()
    one.add([1, 5], 4.0)

    assert [one.model.row(1), one.model.row(5)] == [7.0, 4.0]


def test_an_overflow_skips_the_tables_step_too(join: Any) -> None:
    """GradScaler on one of two trainers finds a gradient that is not finite: no row moves, on no
    server; the next step counts.
    """
    jobs = [join(2, number, 2) for number in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in jobs]

    def play(number: int, change: float) -> None:
        trainer, scaler = jobs[number], scalers[number]
        trainer.optimizer.zero_grad()
        rows = trainer.model.emb(torch.tensor([3, 4]))
        scaler.scale(-change * rows.sum() - trainer.model.w.sum()).backward()
        scaler.step(trainer.optimizer)
        scaler.update()

    at_once(lambda: play(0, 2.0), lambda: play(1, float("inf")))
    assert [job.model.row(3) for job in jobs] == [0.0, 0.0]
    at_once(lambda: play(0, 2.0), lambda: play(1, 4.0))
    assert [job.model.row(3) for job in jobs] == [3.0, 3.0]
    assert jobs[0].optimizer.steps == 1


# ---- other modes ----


def test_a_table_in_async_beside_dense_parameters_in_sync(join: Any) -> None:
    """By name: of the table everybody's steps are summed as they come, of the rest the mean is
    taken, step by step.
    """
    modes = {"modes": {"emb": "async", "*": "sync"}, "send_queue_size": 1}
    one, other = join(2, 0, 2, None, **modes), join(2, 1, 2, None, **modes)

    for _ in range(3):
        at_once(lambda: one.add([1, 2], 2.0, 2.0), lambda: other.add([2], 4.0, 4.0))

    assert [one.model.row(1), one.model.row(2)] == [6.0, 18.0]
    assert one.model.w.tolist() == other.model.w.tolist() == [9.0] * DIM


def test_half_async_tables_take_the_mean_of_a_trainers_own_steps(join: Any) -> None:
    """Two steps leave as one message: a row that one of them touches moves by half of it; nobody
    waits for the other trainer.
    """
    half = {"half_async": True, "max_merge_var_num": 2}
    one, other = join(2, 0, 2, None, **half), join(2, 1, 2, None, **half)

    one.add([1, 2], 2.0)
    assert one.model.row(1) == 0.0  # nothing has left yet
    one.add([2], 4.0)
    other.add([2], 8.0)
    other.add([3], 8.0)

    assert [other.model.row(id_) for id_ in (1, 2, 3)] == [1.0, 7.0, 4.0]


def test_geo_adds_what_rows_changed_by_divided_by_the_trainers(join: Any) -> None:
    """Two trainers, k = 1, worked out by hand: x is a trainer's row, y what it takes for the
    server's, z the server's.
    """
    one, other = join(2, 0, 2, None, k_steps=1), join(2, 1, 2, None, k_steps=1)

    one.add([7], 2.0)  # x = 2, y = 0: 1 leaves; y = 1, z = 1
    one.optimizer.flush()
    other.add([7], 4.0)  # x = y = z = 1, then x = 5: 2 leaves; y = 3, z = 3
    other.optimizer.flush()
    assert one.model.row(7) == 4.0  # x = 2 + (z - y) = 2 + (3 - 1), y = 3
    one.add([7, 8], 2.0)  # x = 6: 1.5 leaves; z = 4.5; row 8: x = 2, z = 1
    one.optimizer.flush()

    assert [other.model.row(7), other.model.row(8)] == [6.5, 1.0]  # x = 5 + (4.5 - 3)
    assert one.job.communicator.lookups.pull("emb", torch.tensor([7, 8]))[:, 0].tolist() == [
        4.5,
        1.0,
    ]


@pytest.mark.slow
def test_no_trainer_runs_further_ahead_than_the_bound(join: Any) -> None:
    """Staleness 1: the second step waits for the other's first, and a lookup after it has that in
    it.
    """
    ahead, behind = join(1, 0, 2, None, staleness=1), join(1, 1, 2, None, staleness=1)
    first, read = threading.Event(), []

    def run() -> None:
        ahead.add([1], 1.0)
        first.set()
        ahead.add([1], 1.0)
        read.append(ahead.model.row(1))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        assert first.wait(PATIENCE)
        with pytest.raises(TimeoutError):
            running.result(timeout=0.3)
        behind.add([1], 8.0)
        running.result(timeout=PATIENCE)

    assert read == [10.0]


@pytest.mark.parametrize(
    "configs",
    [{"independent_recv_thread": True, "send_queue_size": 4}, {"runtime_split_send_recv": True}],
)
def test_other_keys_of_a_sync_configs_lose_no_row(join: Any, configs: dict[str, Any]) -> None:
    """A receiving thread, slices that are cut where they are sent: every step of two trainers is in
    the rows.
    """
    jobs = [join(2, number, 2, None, **configs) for number in range(2)]

    def play(job: Trainer) -> None:
        for step in range(6):
            job.add([step % 3, 9], 1.0, 1.0)
        job.optimizer.flush()

    at_once(*(partial(play, job) for job in jobs))
    jobs[0].optimizer.flush()

    assert [jobs[0].model.row(id_) for id_ in (0, 1, 2, 9)] == [4.0, 4.0, 4.0, 12.0]
    assert jobs[0].model.w.tolist() == [12.0] * DIM


# ---- what travels ----


def test_duplicate_ids_are_merged_before_they_travel(join: Any) -> None:
    """A batch of 120 ids of which 2 differ: two ids are asked for, two rows come, two gradients
    leave.
    """
    trainer = join(1, 0, 1)
    trainer.add([5] * 100 + [6] * 20, 1.0)

    assert trainer.bytes == {"bytes_out": 2 * 8 + 2 * (8 + 4 * DIM), "bytes_in": 2 * 4 * DIM}
    assert [trainer.model.row(5), trainer.model.row(6)] == [100.0, 20.0]
    assert trainer.job.communicator.metrics()["rows_looked_up"] == 4


def test_in_k_step_only_touched_rows_travel_both_ways(join: Any) -> None:
    """Of a table of many rows, those that one window touched: asked for once, brought once, their
    change sent once.
    """
    filler = join(1, 0, 1)
    filler.add(list(range(500)), 1.0)
    filler.optimizer.close()
    trainer = join(1, 0, 1, None, k_steps=4)
    for _ in range(4):
        trainer.add([1, 2, 3, 3], 1.0)
    trainer.optimizer.flush()

    assert trainer.bytes == {"bytes_out": 3 * 8 + 3 * (8 + 4 * DIM), "bytes_in": 3 * 4 * DIM}
    assert trainer.job.communicator.lookups.pull("emb", torch.tensor([1, 3, 4]))[:, 0].tolist() == [
        4.0,
        8.0,
        0.0,
    ]


# ---- admission, eviction, statistics ----


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_third_push_is_the_first_that_is_applied_whoever_pushes(join: Any, mode: str) -> None:
    """CountFilterEntry(3): one trainer's pushes and the other's count together; in sync a step of
    both is one push.
    """
    configs = {} if mode == "sync" else {"send_queue_size": 1}
    one, other = (
        join(2, number, 2, Net(entry=CountFilterEntry(3)), **configs) for number in range(2)
    )
    rows = []
    for step in range(4):
        pushing, resting = (one, other) if step % 2 == 0 else (other, one)
        if mode == "sync":
            at_once(partial(pushing.add, [4, 11], 2.0), partial(resting.add, None, 0.0))
        else:
            pushing.add([4, 11], 1.0)
        rows.append((one.model.row(4), other.model.row(11)))

    assert rows == [(0.0, 0.0), (0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]


def begun(endpoints: str, model: nn.Module) -> DistributedOptimizer:
    """The only trainer of a job, by the calls that scripts make."""
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(sgd(model))


def push(
    model: Net,
    optimizer: torch.optim.Optimizer,
    ids: list[int],
    change: float = 1.0,
    **statistics: Any,
) -> None:
    optimizer.zero_grad()
    model.add(ids, change, **statistics)
    optimizer.step()


@pytest.fixture
def alone(servers: Servers) -> Iterator[Callable[..., tuple[Net, DistributedOptimizer]]]:
    """``alone(servers, **options)``: a job of one trainer; the one before has left."""

    def made(count: int, **options: Any) -> tuple[Net, DistributedOptimizer]:
        fleet.finish()
        model = Net(**options)
        return model, begun(servers(count), model)

    yield made
    fleet.finish()


def test_probability_admits_the_same_ids_on_any_number_of_servers(alone: Any) -> None:
    """About half of them, and which ones depends on the seed and the id."""
    ids, found = list(range(200)), []
    for count, seed in ((1, 3), (3, 3), (1, 4)):
        model, optimizer = alone(count, entry=ProbabilityEntry(0.5), seed=seed)
        push(model, optimizer, ids)
        found.append(
            [
                id_
                for id_, row in zip(ids, model.emb(torch.tensor(ids))[:, 0].tolist(), strict=True)
                if row
            ]
        )
        assert fleet.table_status()["emb"]["admitted"] == len(found[-1])

    assert found[0] == found[1] != found[2]
    assert 60 < len(found[0]) < 140


def test_initial_values_are_the_same_on_any_number_of_servers(servers: Servers) -> None:
    """On 1, on 7, and in this process alone, whatever the order in which ids are asked for."""
    ids, found = torch.tensor([5, -3, 2**61, 0, 77, 123456789]), []
    for count in (1, 7):
        model = nn.Module()
        model.emb, model.w = DistributedEmbedding(8, seed=11), nn.Parameter(torch.zeros(1))
        begun(servers(count), model)
        with torch.no_grad():
            found.append(model.emb(ids))
            assert torch.equal(model.emb(ids.flip(0)).flip(0), found[-1])
        fleet.finish()

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], DistributedEmbedding(8, seed=11)(ids))


def test_shrink_removes_what_scores_too_low_on_every_server(alone: Any) -> None:
    """Shows and clicks travel with rows, and are summed over a batch; ``fleet.shrink`` says how
    many rows went.
    """
    entry = ShowClickEntry(
        "shows", "clicks", nonclk_coeff=0.1, click_coeff=1.0, decay=0.5, delete_threshold=1.0
    )
    model, optimizer = alone(2, entry=entry)
    shows, clicks = torch.tensor([4.0, 4.0, 10.0]), torch.tensor([2.0, 2.0, 0.0])
    # the even one is clicked twice, 4 of 8 times; the odd one never, 10 times
    for base in range(0, 40, 2):
        push(model, optimizer, [base, base, base + 1], shows=shows, clicks=clicks)

    assert fleet.shrink() == {"emb": 20}  # after decay: 0.1 * 2 + 2 stays, 0.1 * 5 goes
    assert [model.row(id_) for id_ in (0, 1, 38, 39)] == [2.0, 0.0, 2.0, 0.0]
    assert fleet.table_status()["emb"]["rows"] == fleet.table_status()["emb"]["shrunk"] == 20
    assert fleet.shrink(threshold=3.0) == {"emb": 20}


@pytest.mark.parametrize("action", ["unanswered", "twice"])
def test_days_pass_once_however_often_the_call_comes(alone: Any, action: str) -> None:
    """A lost reply to shrink is asked for again: shows and clicks fade once, and the rows that went
    are still said.
    """
    entry = ShowClickEntry(
        "shows", "clicks", nonclk_coeff=1.0, click_coeff=1.0, decay=0.5, delete_threshold=2.0
    )
    with faulty_calls(CallInjector([CallPoint(action, "Shrink")])) as injector:
        model, optimizer = alone(1, entry=entry)
        push(model, optimizer, [1, 2], shows=torch.tensor([6.0, 3.0]))

        assert fleet.shrink() == {"emb": 1}  # 3 stays, 1.5 goes; a second day would leave nothing
    assert [model.row(1), model.row(2)] == [1.0, 0.0]
    assert injector.done == {(action, "call", "Shrink"): 1}


def test_rows_outlive_their_time_by_the_servers_clock(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that nobody trains for longer than ``ttl`` reads as if it had never been, begins anew,
    and is counted.
    """
    now = [1000.0]
    real = locked_table.LockedTable
    monkeypatch.setattr(
        locked_table, "LockedTable", lambda *arguments: real(*arguments, clock=lambda: now[0])
    )
    model, optimizer = alone(2, ttl=60.0)
    push(model, optimizer, [1, 2, 3, 4])
    now[0] += 59.0
    push(model, optimizer, [1])
    now[0] += 2.0

    assert [model.row(1), model.row(2)] == [2.0, 0.0]
    push(model, optimizer, [2])
    assert model.row(2) == 1.0
    assert fleet.shrink() == {"emb": 2}
    assert fleet.table_status()["emb"]["rows"] == 2


def test_capacity_holds_over_all_servers(alone: Any) -> None:
    """The rows trained least recently make room; an evicted id begins anew; both are counted."""
    model, optimizer = alone(2, capacity=10)
    for id_ in range(40):
        push(model, optimizer, [id_])
    status = fleet.table_status()["emb"]
    rows = [model.row(id_) for id_ in range(40)]

    assert status["rows"] == sum(rows) <= 10
    assert (status["admitted"], status["evicted"]) == (40, 40 - status["rows"])
    # servers hold half each, of ids that are spread by a hash
    assert rows[39] == 1.0 and sum(rows[30:]) >= 8


@pytest.mark.slow
def test_table_status_counts_over_all_servers(alone: Any) -> None:
    """Rows, bytes, lookups, pushes, admissions and refusals, of every table."""
    model, optimizer = alone(3, entry=CountFilterEntry(2))
    push(model, optimizer, [1, 2, 3, 3])
    push(model, optimizer, [3, 4])
    status = fleet.table_status()["emb"]

    assert {
        key: status[key]
        for key in ("rows", "lookups", "pushes", "admitted", "refused", "waiting", "evicted")
    } == {
        "rows": 1,
        "lookups": 5,
        "pushes": 5,
        "admitted": 1,
        "refused": 4,
        "waiting": 3,
        "evicted": 0,
    }
    assert status["bytes_held"] > 0


def test_a_cached_row_is_never_older_than_its_bound(alone: Any) -> None:
    """In training a row lacks the last two steps at most, and servers are asked that seldom; an
    evaluation sees all.
    """
    model, optimizer = alone(2, cache_rows=8, cache_staleness=2)
    seen = []
    for _ in range(9):
        optimizer.zero_grad()
        rows = model.emb(torch.tensor([1, 2]))
        seen.append(float(rows[0, 0].detach()))
        (-rows.sum()).backward()
        optimizer.step()

    assert seen == [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0, 6.0]
    assert (model.emb.cache.hits, model.emb.cache.misses, fleet.metrics()["lookups"]) == (12, 6, 3)
    assert model.eval().row(1) == 9.0


# ---- bad input ----


def test_wrong_ids_are_refused_and_nothing_is_lost(alone: Any) -> None:
    """Out of range, below zero, floats: an error in words before anything leaves; the next step is
    as if nothing had been.
    """
    model, optimizer = alone(2, num_embeddings=10)
    push(model, optimizer, [1, 2])
    for ids, error, words in (
        (
            torch.tensor([1, 10]),
            ValueError,
            "table 'emb': ids: expected 0 to 9, got 10 at position 1",
        ),
        (torch.tensor([-1]), ValueError, "expected 0 to 9, got -1"),
        (torch.tensor([1.0]), TypeError, "ids: expected a tensor of int64, got torch.float32"),
    ):
        with pytest.raises(error, match=words):
            model.emb(ids)
    push(model, optimizer, [2])

    assert [model.row(1), model.row(2)] == [1.0, 2.0]


def test_a_server_refuses_an_id_that_its_table_does_not_have(join: Any) -> None:
    """Whoever asks without our module is told so, and no row changes."""
    asking = join(1, 0, 1, Net(num_embeddings=10))
    asking.add([3], 1.0)
    with pytest.raises(Refused, match="'emb': expected ids from 0 to 9, got 10"):
        asking.job.communicator.lookups.pull("emb", torch.tensor([3, 10]))


def test_a_batch_without_ids_is_a_step(alone: Any) -> None:
    """Zero rows come, no row changes, and the dense parameters take their step."""
    model, optimizer = alone(2)
    push(model, optimizer, [1])
    optimizer.zero_grad()
    rows = model.emb(torch.empty((0, 3), dtype=torch.int64))
    (rows.sum() - model.w.sum()).backward()
    optimizer.step()

    assert rows.shape == (0, 3, DIM)
    assert model.row(1) == 1.0 and model.w.tolist() == [1.0] * DIM


@pytest.mark.slow
def test_ten_million_ids_in_one_lookup(alone: Any) -> None:
    """Each row comes to the place of its id; the rows that differ travel."""
    model, optimizer = alone(2)
    push(model, optimizer, list(range(100)), 1.0)
    with torch.no_grad():
        rows = model.emb(torch.arange(10_000_000).remainder_(50_000))[:, 0]

    assert rows.shape == (10_000_000,) and int(rows.count_nonzero()) == 200 * 100
    assert bool((rows.view(-1, 50_000)[:, :100] == 1.0).all())
    assert fleet.metrics()["rows_looked_up"] == 100 + 50_000


def test_one_name_with_two_settings_is_refused(servers: Servers) -> None:
    """Two embeddings of one table's name share its rows, so they must agree; the message says in
    what they do not.
    """
    model = nn.Module()
    model.one, model.other = (
        DistributedEmbedding(4, name="shared"),
        DistributedEmbedding(4, name="shared", seed=1),
    )
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(",")))
    fleet.distributed_model(model)
    try:
        with pytest.raises(ValueError, match="two embeddings are called 'shared' and differ: seed"):
            fleet.distributed_optimizer(sgd(model))
    finally:
        fleet.finish()


def test_a_lookup_after_the_end_of_the_job_says_so(alone: Any) -> None:
    """The rows are on servers that this process has left: an error at once, not a wait."""
    model, optimizer = alone(1)
    push(model, optimizer, [1])
    fleet.finish()

    with pytest.raises(Unreachable, match="this trainer has closed the connection"):
        model.row(1)
