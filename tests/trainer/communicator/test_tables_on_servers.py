"""What jobs of several servers promise of tables: one trainer, real servers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pserver.job import job
from pserver.lane import tables
from tests.faults.faults import CallInjector, CallPoint, faulty_calls
from tests.support.table_trainers import DIM, Net, Servers, sgd
from trainer import CountFilterEntry, DistributedEmbedding, ProbabilityEntry, ShowClickEntry, fleet
from trainer.optimizer import DistributedOptimizer

# ---- admission, eviction, statistics ----


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
    for room, name in ((tables, "LockedTable"), (job, "Decisions")):
        timed = partial(getattr(room, name), clock=lambda: now[0])
        monkeypatch.setattr(room, name, timed)
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


def test_what_was_counted_is_the_same_on_other_servers(alone: Any, tmp_path: Path) -> None:
    """A checkpoint has the counts of all servers, and the job that loads it has them once."""
    model, optimizer = alone(2, entry=CountFilterEntry(2))
    push(model, optimizer, list(range(40)))
    push(model, optimizer, list(range(20)))
    saved = fleet.table_status()["emb"]
    fleet.save(str(tmp_path))
    model, optimizer = alone(3, entry=CountFilterEntry(2))
    push(model, optimizer, [50])
    fleet.load(str(tmp_path))

    kept = ("rows", "waiting", "lookups", "lookups_new", "pushes", "admitted", "refused")
    found = fleet.table_status()["emb"]
    assert (saved["admitted"], saved["refused"], saved["pushes"]) == (20, 40, 60)
    assert {key: found[key] for key in kept} == {key: saved[key] for key in kept}


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
        said = "called 'shared' and differ: seed 0 and 1 of 'one' and 'other'; those of one name"
        with pytest.raises(ValueError, match=said):
            fleet.distributed_optimizer(sgd(model))
    finally:
        fleet.finish()


def test_a_lookup_after_the_end_of_the_job_says_so(alone: Any) -> None:
    """The rows are on servers that this process has left: an error at once, not a wait."""
    model, optimizer = alone(1)
    push(model, optimizer, [1])
    fleet.finish()

    with pytest.raises(
        RuntimeError, match="has left the job: no lookup in table 'emb' after fleet"
    ):
        model.row(1)
