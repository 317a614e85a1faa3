"""What jobs of several trainers promise of tables.

Real servers in this process, a thread a trainer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pserver.errors import Refused
from tests.support.seeded import seeded
from tests.support.table_trainers import DIM, Net, Servers, Trainer
from tests.support.threads import PATIENCE, at_once
from trainer import CountFilterEntry, fleet


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


# ---- sync ----


class Plain(nn.Module):
    """Two lookups of one embedding, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
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
    one.optimizer.flush()  # is told of row 7
    assert one.model.row(7) == 4.0  # x = 2 + (z - y) = 2 + (3 - 1), y = 3
    one.add([7, 8], 2.0)  # x = 6: 1.5 leaves; z = 4.5; row 8: x = 2, z = 1
    one.optimizer.flush()

    other.optimizer.flush()
    assert [other.model.row(7), other.model.row(8)] == [6.5, 1.0]  # x = 5 + (4.5 - 3)
    assert one.job.communicator.lookups.pull("emb", torch.tensor([7, 8]))[:, 0].tolist() == [
        4.5,
        1.0,
    ]


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


# ---- admission, and an id that no table has ----


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


def test_a_server_refuses_an_id_that_its_table_does_not_have(join: Any) -> None:
    """Whoever asks without our module is told so, and no row changes."""
    asking = join(1, 0, 1, Net(num_embeddings=10))
    asking.add([3], 1.0)
    with pytest.raises(Refused, match="'emb': expected ids from 0 to 9, got 10"):
        asking.job.communicator.lookups.pull("emb", torch.tensor([3, 10]))
    with pytest.raises(Refused, match="'emb': expected ids"):  # which has ended its job
        asking.optimizer.close()
