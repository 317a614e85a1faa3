"""``state_dict()`` of an embedding on servers has its rows; ``load_state_dict`` puts them back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.service.server import Server
from pserver.wire_pb2 import Kind
from tests.faults.faults import Injector, Point, injected
from tests.support.eager_modes import joined
from tests.support.table_trainers import Net, Trainer
from tests.support.threads import at_once
from trainer import DistributedEmbedding, fleet
from trainer.embedding.local_rows import LocalRows
from trainer.senders import served_rows

ROWS, DIM = 20, 4
SYNC: dict[str, Any] = {"modes": {"*": "sync"}}
MODES: dict[str, dict[str, Any]] = {
    "sync": SYNC,
    "async": {},
    "one slot": {"send_queue_size": 1},
    "half-async": {"half_async": True, "max_merge_var_num": 1},
    "bounded staleness": {"staleness": 2},
    "geo": {"k_steps": 3},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.fixture
def endpoints() -> Iterator[str]:
    """Two servers."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(ServerConfig())) for _ in range(2)]
        yield ",".join(server.endpoint for server in servers)
        fleet.finish()


class Model(nn.Module):
    """A table, alone or made of torch's own embedding, and a dense layer."""

    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb = emb
        self.w = nn.Parameter(torch.ones(DIM))

    def rows(self) -> torch.Tensor:
        """All of them."""
        with torch.no_grad():
            return self.emb(torch.arange(ROWS)).clone()


def made() -> tuple[Model, Model]:
    """The same model twice: with a table, and in plain torch."""
    torch.manual_seed(2)
    plain = nn.Embedding(ROWS, DIM)
    return Model(DistributedEmbedding.from_module(plain)), Model(plain)


def train(model: Model, optimizer: Any, steps: int, seed: int) -> None:
    """Steps on batches in which no id comes twice, each of which has landed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randperm(ROWS, generator=generator)[:6]
        optimizer.zero_grad()
        (model.emb(ids) * model.w).square().sum().backward()
        optimizer.step()
        if hasattr(optimizer, "flush"):
            optimizer.flush()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_load_state_dict_of_an_embedding_on_servers_takes_effect(
    endpoints: str, rule: str, mode: str
) -> None:
    """Restored with the dense part, to the bit as in one process, and states of rows stay; with
    SGD it is plain torch's training.
    """
    mine, plain = made()
    alone = copy.deepcopy(mine)
    optimizer = joined(endpoints, mine, OPTIMIZERS[rule](mine), **MODES[mode])
    others = OPTIMIZERS[rule](alone), OPTIMIZERS[rule](plain)
    train(mine, optimizer, 3, 1)
    for model, other in zip((alone, plain), others, strict=True):
        train(model, other, 3, 1)
    best = copy.deepcopy(mine.state_dict())
    kept, kept_plain = copy.deepcopy(alone), copy.deepcopy(plain.state_dict())
    train(mine, optimizer, 4, 2)
    for model, other in zip((alone, plain), others, strict=True):
        train(model, other, 4, 2)
    assert not torch.equal(mine.rows(), kept.rows())

    mine.load_state_dict(best)
    assert isinstance(alone.emb.rows, LocalRows) and isinstance(kept.emb.rows, LocalRows)
    alone.emb.rows.assign(torch.arange(ROWS), kept.rows())  # values alone, as in torch
    alone.w.data.copy_(kept.w)
    plain.load_state_dict(kept_plain)
    assert torch.equal(mine.rows(), kept.rows())
    train(mine, optimizer, 4, 3)
    for model, other in zip((alone, plain), others, strict=True):
        train(model, other, 4, 3)

    assert torch.equal(mine.rows(), alone.rows()) and torch.equal(mine.w, alone.w)
    torch.testing.assert_close(mine.rows(), plain.rows())
    if rule == "sgd":
        assert torch.equal(mine.rows(), plain.rows())


@pytest.mark.parametrize("mode", MODES)
def test_a_state_dict_of_served_rows_is_one_of_rows_in_a_process(endpoints: str, mode: str) -> None:
    """The same keys and values; a process without servers loads it, and the servers what it
    saved.
    """
    mine, alone = Net(), Net()
    optimizer = joined(endpoints, mine, torch.optim.SGD(mine.parameters(), lr=1.0), **MODES[mode])
    other = torch.optim.SGD(alone.parameters(), lr=1.0)
    for model, each in ((mine, optimizer), (alone, other)):
        model.add([3, -7, 2**40], 1.0)
        each.step()
    served, local = mine.state_dict(), alone.state_dict()
    assert list(served) == list(local)
    order = local["emb.table.ids"].argsort()
    assert torch.equal(served["emb.table.ids"], local["emb.table.ids"][order])
    assert torch.equal(served["emb.table.values"], local["emb.table.values"][order])

    fresh = Net()
    fresh.load_state_dict(served)
    assert [fresh.row(id_) for id_ in (3, -7, 2**40, 5)] == [1.0, 1.0, 1.0, 0.0]
    mine.add([3, 5], 1.0)
    optimizer.step()
    optimizer.flush()
    assert [mine.row(id_) for id_ in (3, 5)] != [1.0, 0.0]
    mine.load_state_dict(local)
    assert [mine.row(id_) for id_ in (3, -7, 2**40, 5)] == [1.0, 1.0, 1.0, 0.0]


def test_states_of_rows_that_are_not_loaded_are_named(
    endpoints: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of rows that a process without servers has trained; once."""
    mine, alone = made()[0], made()[0]
    train(alone, torch.optim.Adagrad(alone.parameters(), lr=0.1), 2, 1)
    joined(endpoints, mine, torch.optim.Adagrad(mine.parameters(), lr=0.1), **SYNC)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            mine.load_state_dict(alone.state_dict())

    assert torch.equal(mine.rows(), alone.rows())
    assert caplog.text.count("those on servers stay; fleet.load loads both") == 1


def test_rows_that_are_left_out_are_never_left_out_silently(
    endpoints: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit and after the job: one warning names the files; loading such a state_dict is
    an error, or a warning where it is not strict.
    """
    mine = made()[0]
    joined(endpoints, mine, torch.optim.SGD(mine.parameters(), lr=0.1), **SYNC)
    monkeypatch.setattr(served_rows, "MAX_BYTES", ROWS * (8 + 4 * DIM) - 1)
    with caplog.at_level(logging.WARNING):
        state = [mine.state_dict() for _ in range(2)][0]
        assert not any("table" in key for key in state)
        assert caplog.text.count("more than 4 GiB: fleet.save and fleet.export") == 1
        with pytest.raises(RuntimeError, match=r"Missing key.*emb\.table\.ids"):
            mine.load_state_dict(state)
        mine.load_state_dict(state, strict=False)
    assert "none were given: fleet.save" in caplog.text
    monkeypatch.undo()
    fleet.finish()
    with caplog.at_level(logging.WARNING):
        assert not any("table" in key for key in mine.state_dict())
    assert "has left the job" in caplog.text


# ---- two trainers ----


@pytest.fixture
def pair(endpoints: str) -> Iterator[Callable[..., list[Trainer]]]:
    """``pair(**a_sync_configs)``: two trainers of one job."""
    trainers: list[Trainer] = []

    def make(**configs: Any) -> list[Trainer]:
        trainers.extend(
            at_once(
                *(
                    lambda number=number: Trainer(endpoints, number, 2, Net(), **configs)
                    for number in range(2)
                )
            )
        )
        return trainers

    yield make
    for trainer in trainers:
        with suppress(PServerError):  # where the job has failed
            trainer.job.communicator.leave()


def loaded(trainer: Trainer, state: Any, change: float) -> list[float]:
    """Loads, looks up, steps: the rows before and after."""
    trainer.model.load_state_dict(state)
    before = [trainer.model.row(id_) for id_ in (1, 2)]
    trainer.add([2], change)
    return [*before, *(trainer.model.row(id_) for id_ in (1, 2))]


def test_in_sync_what_all_trainers_load_takes_effect(pair: Any) -> None:
    """Each reads its rows at once, the servers have them with the step, as one process has."""
    trainers = pair(**SYNC)
    at_once(*(lambda t=t: t.add([1], 2.0) for t in trainers))
    states = [copy.deepcopy(trainer.model.state_dict()) for trainer in trainers]
    at_once(*(lambda t=t: t.add([1, 2], 4.0) for t in trainers))
    assert trainers[0].model.row(1) == 6.0

    found = at_once(
        *(lambda n=n: loaded(trainers[n], states[n], float(2 + 2 * n)) for n in range(2))
    )
    assert found == [[2.0, 0.0, 2.0, 3.0]] * 2
    assert [float(v[0]) for v in trainers[1].model.state_dict()["emb.table.values"]] == [2.0, 3.0]


@pytest.mark.parametrize("added", [(0.0, None), (None, 0.0), (0.0, 1.0)])
def test_in_sync_a_trainer_that_loads_otherwise_ends_the_job(
    pair: Any, added: tuple[float | None, float | None]
) -> None:
    """Or does not load: both are told the table."""
    trainers = pair(**SYNC)
    at_once(*(lambda t=t: t.add([1], 2.0) for t in trainers))
    state = copy.deepcopy(trainers[0].model.state_dict())

    def step(number: int) -> str:
        trainer, more = trainers[number], added[number]
        if more is not None:
            values = state["emb.table.values"] + more
            trainer.model.load_state_dict({**state, "emb.table.values": values})
        with pytest.raises(PServerError) as raised:
            trainer.add([1], 1.0)
        return str(raised.value)

    for said in at_once(*(lambda n=n: step(n) for n in range(2))):
        assert "loaded into table 'emb'" in said


def test_in_async_the_last_writer_wins(pair: Any) -> None:
    """The rows are the servers' at once, for everybody."""
    trainers = pair(send_queue_size=4)
    trainers[0].add([1], 2.0)
    trainers[0].optimizer.flush()
    state = trainers[0].model.state_dict()
    trainers[1].add([1, 2], 4.0)
    trainers[1].optimizer.flush()
    assert trainers[0].model.row(1) == 6.0
    trainers[1].model.load_state_dict(state)

    assert [t.model.row(id_) for t in trainers for id_ in (1, 2)] == [2.0, 0.0] * 2


def test_rows_in_a_cache_give_way_to_loaded_ones(endpoints: str) -> None:
    """A trainer that loads reads what it has loaded, in training too."""
    model = Net(cache_rows=100, cache_staleness=50)
    optimizer = joined(endpoints, model, torch.optim.SGD(model.parameters(), lr=1.0), **SYNC)
    state = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model.add([1], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(state)

    assert model.row(1) == 0.0


@pytest.mark.parametrize("mode", ["sync", "one slot"])
@pytest.mark.parametrize("action", ["reset", "duplicate", "late"])
def test_a_load_over_a_broken_stream_is_neither_lost_nor_doubled(
    endpoints: str, action: str, mode: str
) -> None:
    """The frame that ends it is lost with its connection, or comes twice."""
    model = Net()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    point = Point(action, "out", Kind.COMMIT, step=0, tables=True)
    with injected(Injector(points=[point])) as injector:
        optimizer = joined(endpoints, model, plain, **MODES[mode])
        model.add([1, 2], 1.0)
        optimizer.step()
        optimizer.flush()
        state = copy.deepcopy(model.state_dict())
        model.add([1, 2, 3], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not injector.done
        model.load_state_dict(state)
        assert sum(injector.done.values()) == 1

        model.add([1], 1.0)
        optimizer.step()
        optimizer.flush()
        assert [model.row(id_) for id_ in (1, 2, 3)] == [2.0, 1.0, 0.0]
        fleet.finish()
