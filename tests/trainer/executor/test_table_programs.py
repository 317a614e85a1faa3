"""Programs with sparse tables, run alone and against real servers in this process: against plain
torch in the same test.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainer.executor.executor
from pserver.config import ServerConfig
from pserver.service.server import Server
from trainer import DistributedEmbedding, Executor, Normal, ShowClickEntry, row_optimizers
from transpiler import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
)
from transpiler.program import Program

Servers = Callable[[int], str]
Batch = tuple[torch.Tensor, torch.Tensor]
ROWS, DIM = 30, 4


class Net(nn.Module):
    """One table that is looked up twice, one in bags with an optimizer of its own, a weight of
    torch's, a dense layer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = DistributedEmbedding(DIM, init=Normal(0, 0.5))
        self.bag = DistributedEmbedding(
            DIM,
            num_embeddings=ROWS,
            pooling="mean",
            padding_idx=0,
            seed=5,
            optimizer=row_optimizers.Adam(lr=0.05),
        )
        self.word = nn.Embedding(ROWS, 3, sparse=True)
        self.fc = nn.Linear(3 * DIM + 3, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [self.emb(ids[:, 0]), self.emb(ids[:, 1]), self.word(ids[:, 2]), self.bag(ids)]
        out: torch.Tensor = self.fc(torch.cat(rows, 1))
        return out


class Tables(nn.Module):
    """Nothing but tables: two that are looked up, of the same optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = DistributedEmbedding(DIM, num_embeddings=ROWS, seed=1)
        self.item = DistributedEmbedding(DIM, num_embeddings=ROWS, seed=2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        score = (self.user(ids[:, 0]) * self.item(ids[:, 1])).sum(1)
        return torch.stack([score, -score], 1)


def step(model: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), y)


def batches(count: int, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, ROWS, (size, 3), generator=generator),
            torch.randint(0, 2, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def begin_again(model: nn.Module, new: nn.Module) -> None:
    """What a new model has is this one's: also the rows, which may be servers'."""
    for mine, fresh in zip(model.modules(), new.modules(), strict=True):
        if isinstance(mine, DistributedEmbedding):
            mine.rows = fresh.rows
    model.load_state_dict(new.state_dict())


@functools.cache
def captured(kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer]) -> Any:
    """A model, its optimizer and its programs: capturing takes longer than all the rest."""
    model = kind()
    optimizer = make(model)
    return model, optimizer, capture(model, step, optimizer, batches(1)[0])


def begun(
    kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer] = adagrad
) -> Any:
    """The same, with everything as it was before the first step."""
    model, optimizer, programs = captured(kind, make)
    new = kind()
    begin_again(model, new)
    optimizer.load_state_dict(make(new).state_dict())
    return model, optimizer, *programs


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    clip: Any = None,
    gamma: float = 1.0,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for ids, y in data:
        optimizer.zero_grad()
        step(model, ids, y).backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        schedule.step()


def transpiled(
    main: Program,
    startup: Program | None,
    endpoints: str,
    trainers: int = 1,
    trainer: int = 0,
    **fields: Any,
) -> Any:
    config = DistributeTranspilerConfig()
    config.min_block_size = 8
    for name, value in fields.items():
        setattr(config, name, value)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(
        trainer, main, pservers=endpoints, trainers=trainers, startup_program=startup
    )
    return transpiler


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a model has learned, as its modules read it."""
    ids = torch.arange(ROWS)
    found = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "proxy" not in name
    }
    with torch.no_grad():
        for name, module in model.named_children():
            if isinstance(module, DistributedEmbedding):
                found[name] = module(ids if module.pooling is None else ids[1:, None])
    return found


def assert_close(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= tolerance, name


def run(
    transpiler: Any, data: Sequence[Batch], model: nn.Module, schedule: Any = None
) -> tuple[dict[str, torch.Tensor], float]:
    """What a trainer's program has learned, and how many pulls a step took."""
    program = transpiler.get_trainer_program()
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for batch in data:
            exe.run(program, feed=batch, fetch_list=["loss"])
            if schedule is not None:
                schedule.step()
        communicator = exe._runtimes[0].communicator
        communicator.flush()
        pulls = communicator.metrics()["lookups"] / len(data)
        found = values(model)
    return {
        **found,
        **{name: p.detach().clone() for name, p in model.named_parameters() if "proxy" not in name},
    }, pulls


# ---- alone ----


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "make", "tolerance"),
    [(Tables, sgd, 0.0), (Tables, adagrad, 0.0), (Net, adagrad, 1e-6)],
)
def test_a_captured_program_trains_the_models_own_rows(
    kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer], tolerance: float
) -> None:
    """Alone, with a schedule: every row of every table is that of the eager script, which goes on
    from there: to the bit, but for a weight of torch's, whose sparse gradients torch adds up one by
    one.  Capturing has changed nothing.
    """
    mine, reference, data = kind(), kind(), batches(6)
    before, optimizer = values(mine), make(mine)
    proxy = next(parameter for name, parameter in mine.named_parameters() if "proxy" in name)
    proxy.grad = waiting = torch.ones(())
    main, startup = capture(mine, step, optimizer, data[0])
    assert_close(values(mine), before, 0.0)
    assert proxy.grad is waiting
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    with Executor() as exe:
        exe.run(startup)
        for batch in data:
            exe.run(main, feed=batch)
            schedule.step()
    train(mine, optimizer, data[:1])
    train(reference, other := make(reference), data, gamma=0.8)
    train(reference, other, data[:1])

    assert_close(values(mine), values(reference), tolerance)


def test_a_gradient_of_rows_is_fetched_as_a_sparse_tensor() -> None:
    """Of a table with a range of ids: the rows that the step has touched, summed where an id came
    twice.
    """
    model, _, main, startup = begun(Tables)
    ids, y = torch.tensor([[1, 2, 0], [1, 3, 0]]), torch.tensor([0, 1])
    with Executor() as exe:
        exe.run(startup)
        (gradient,) = exe.run(main, feed=(ids, y), fetch_list=["user@GRAD"])
    weight = Tables().user(torch.arange(ROWS)).detach().requires_grad_()
    item = Tables().item(ids[:, 1]).detach()
    score = (F.embedding(ids[:, 0], weight) * item).sum(1)
    F.cross_entropy(torch.stack([score, -score], 1), y).backward()

    assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [[1]]
    assert torch.allclose(gradient.to_dense(), weight.grad)


def test_dense_adam_moves_every_row(servers: Servers) -> None:
    """Adam of the script's own is torch's dense one for a table as well, alone and on two
    servers.
    """
    data, found = batches(6), []
    for where in (None, servers(2)):
        model, _, main, startup = begun(Tables, adam)
        if where is None:
            with Executor() as exe:
                exe.run(startup)
                for batch in data:
                    exe.run(main, feed=batch)
            found.append(values(model))
        else:
            found.append(run(transpiled(main, startup, where), data, model)[0])
    plain = nn.ModuleDict({name: nn.Embedding(ROWS, DIM) for name in ("user", "item")})
    with torch.no_grad():
        for name, table in Tables().named_children():
            plain[name].weight.copy_(table(torch.arange(ROWS)))
    plain.forward = lambda ids: Tables.forward(_Both(plain), ids)
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.05), data)

    for each in found:
        assert_close(each, {name: module.weight.detach() for name, module in plain.items()}, 1e-6)


class _Both:
    def __init__(self, modules: nn.ModuleDict) -> None:
        self.user, self.item = modules["user"], modules["item"]


def test_a_loaded_program_has_tables_of_its_own(tmp_path: Path, servers: Servers) -> None:
    """Written to a file and read without the model: rows begin as they were, and train alike, alone
    and on servers.
    """
    reference, data = Tables(), batches(6)
    model, optimizer, main, _ = begun(Tables, sgd)
    train(model, optimizer, data[:1])
    train(reference, other := sgd(reference), data[:1])
    main.save(tmp_path / "main")
    expected = []
    for batch in data[1:]:
        expected.append(float(step(reference, *batch).detach()))
        train(reference, other, [batch])
    for where in (None, servers(2)):
        program = first = Program.load(tmp_path / "main")
        if where is not None:
            transpiler = transpiled(program, None, where)
            program, first = transpiler.get_trainer_program(), transpiler.get_startup_program()
        with Executor() as exe:
            if where is not None:
                exe.run(first)
            losses = [
                float(exe.run(program, feed=batch, fetch_list=["loss"])[0]) for batch in data[1:]
            ]

        assert losses == expected


def test_an_id_out_of_range_and_a_fetched_table_are_named(servers: Servers) -> None:
    """Each is a ValueError that says which table."""
    data = batches(1)
    _, _, main, startup = begun(Net)
    with Executor() as exe:
        exe.run(startup)
        with pytest.raises(ValueError, match="table 'word.weight': ids: expected 0 to 29, got 99"):
            exe.run(main, feed=(torch.full((2, 3), 99), torch.zeros(2, dtype=torch.int64)))
        with pytest.raises(ValueError, match="'emb' is a table"):
            exe.run(main, feed=data[0], fetch_list=["emb"])
        with pytest.raises(ValueError, match="'emb@GRAD' has rows for ids of any int64"):
            exe.run(main, feed=data[0], fetch_list=["emb@GRAD"])


# ---- with servers ----

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, split at run time": {
        "sync_mode": False,
        "completely_not_async": True,
        "runtime_split_send_recv": True,
    },
    "async": {"sync_mode": False},
    "async, split at run time": {"sync_mode": False, "runtime_split_send_recv": True},
    "half-async": {"sync_mode": False, "half_async": True},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 2},
}


@pytest.mark.slow
def test_every_mode_trains_tables_as_plain_torch_with_one_trainer(servers: Servers) -> None:
    """On one and on two servers, with a schedule; four lookups of three tables are three pulls a
    step; the trainer's weight of torch's own has its rows back when the Executor is closed.
    """
    data, reference = batches(6), Net()
    train(reference, adagrad(reference), data, gamma=0.8)
    for name, fields in MODES.items():
        for count in (1, 2) if name in ("sync", "geo") else (2,):
            model, optimizer, main, startup = begun(Net)
            transpiler = transpiled(main, startup, servers(count), **fields)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            found, pulls = run(transpiler, data, model, schedule)

            assert pulls == 3 if name != "geo" else pulls <= 3, name
            assert_close(found, values(reference), 1e-6)


@pytest.mark.parametrize(
    "fields", [{}, {"sync_mode": False}, {"sync_mode": False, "half_async": True}], ids=str
)
def test_a_model_of_nothing_but_tables_trains(servers: Servers, fields: dict[str, Any]) -> None:
    """No parameter is sent or received: a step ends all the same."""
    reference, data = Tables(), batches(5)
    model, _, main, startup = begun(Tables)
    found, _ = run(transpiled(main, startup, servers(2), **fields), data, model)
    train(reference, adagrad(reference), data)

    assert_close(found, values(reference), 0.0)


CLIPS: dict[str, tuple[Any, Callable[[nn.Module], Any]]] = {
    "value": (
        ClipGradByValue(0.01),
        lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    ),
    "norm": (
        ClipGradByNorm(0.05),
        lambda m: [torch.nn.utils.clip_grad_norm_([p], 0.05) for p in m.parameters()],
    ),
    "global norm": (
        ClipGradByGlobalNorm(0.1),
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    ),
}


class Clipped(nn.Module):
    """A table that is looked up twice, a dense layer."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.fc = nn.Linear(2 * DIM, 2)
        self.emb: nn.Module = DistributedEmbedding(DIM, num_embeddings=ROWS)
        if plain:
            weight = self.emb(torch.arange(ROWS)).detach()
            self.emb = nn.Embedding.from_pretrained(weight.clone(), freeze=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(torch.cat([self.emb(ids[:, 0]), self.emb(ids[:, 1])], 1))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_gradients_of_rows_are_clipped_with_the_others(servers: Servers, name: str) -> None:
    """Alone, on servers (sync), by the trainer (async): by value, by norm, by the norm of all, as
    torch clips an nn.Embedding.
    """
    clip, by_hand = CLIPS[name]
    data, reference = batches(5), Clipped(plain=True)
    train(reference, sgd(reference), data, by_hand)
    expected = {
        "fc.weight": reference.fc.weight,
        "fc.bias": reference.fc.bias,
        "emb": reference.emb.weight,
    }
    model = Clipped(plain=False)
    main, startup = capture(model, step, sgd(model), data[0], grad_clip=clip)
    for fields in (None, {}, {"sync_mode": False}):
        begin_again(model, Clipped(plain=False))
        if fields is None:
            with Executor() as exe:
                for batch in data:
                    exe.run(main, feed=batch)
            found = values(model)
        else:
            found, _ = run(transpiled(main, startup, servers(2), **fields), data, model)

        assert_close(found, expected, 2e-6)


@pytest.mark.slow
def test_two_trainers_in_sync_mode_equal_one_with_both_batches(servers: Servers) -> None:
    """Several tables on two servers, one with an optimizer of its own: the mean over trainers, to
    1e-6.
    """
    data, reference, endpoints = batches(5, 8), Net(), servers(2)
    train(reference, adagrad(reference), data)
    models = [Net(), Net()]
    found: dict[int, dict[str, torch.Tensor]] = {}
    transpilers = []
    for index, model in enumerate(models):
        main, startup = capture(model, step, adagrad(model), data[0])
        transpilers.append(transpiled(main, startup, endpoints, trainers=2, trainer=index))

    def half(index: int) -> None:
        parts = [(ids[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4]) for ids, y in data]
        found[index] = run(transpilers[index], parts, models[index])[0]

    threads = [threading.Thread(target=half, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(found) == [0, 1]
    for each in found.values():
        assert_close(each, values(reference), 1e-6)


def test_a_server_that_is_started_by_hand_begins_with_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script of the role PSERVER runs its two programs: rows of a weight, and those of settings
    alone, train as plain torch.
    """
    data, reference = batches(5), Net()
    train(reference, adagrad(reference), data)
    with Server(ServerConfig()) as other:  # a free port each
        endpoints = [other.endpoint]
    with Server(ServerConfig()) as other:
        endpoints.append(other.endpoint)
    model, _, main, startup = begun(Net)
    transpiler = transpiled(main, startup, ",".join(endpoints))
    given: list[tuple[ServerConfig, Program]] = []
    monkeypatch.setattr(
        trainer.executor.executor, "serve", lambda config, program: given.append((config, program))
    )
    for endpoint in endpoints:
        with Executor() as exe:
            exe.run(transpiler.get_startup_program(endpoint))
            exe.run(transpiler.get_pserver_program(endpoint))
    with Server(given[0][0], given[0][1]), Server(given[1][0], given[1][1]):
        found, _ = run(transpiler, data, model)

    assert_close(found, values(reference), 1e-6)


def test_statistics_travel_with_the_rows(servers: Servers) -> None:
    """A ShowClickEntry admits in a program what it admits in an eager script: ids with a click are
    trained, others are not.
    """

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = DistributedEmbedding(
                DIM, entry=ShowClickEntry("show", "click", threshold=1.0)
            )

        def forward(self, ids: torch.Tensor, click: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.emb(ids, click=click)
            return rows.square().mean()

    def loss(model: nn.Module, ids: torch.Tensor, click: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(ids, click)
        return out

    ids, click = torch.tensor([3, 4, 3, 7]), torch.tensor([0, 1, 0, 1])
    eager, alone, served = Shown(), Shown(), Shown()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss(eager, ids, click).backward()
        optimizer.step()
    found = []
    for model in (alone, served):
        main, startup = capture(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.5), (ids, click)
        )
        program, first = main, startup
        if model is served:
            transpiler = transpiled(main, startup, servers(2))
            program, first = transpiler.get_trainer_program(), transpiler.get_startup_program()
        with Executor() as exe, torch.no_grad():
            exe.run(first)
            for _ in range(2):
                exe.run(program, feed=(ids, click))
            found.append(model.emb(torch.arange(10)))
    with torch.no_grad():
        expected, untouched = eager.emb(torch.arange(10)), Shown().emb(torch.arange(10))

    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    assert [int(i) for i in (expected != untouched).any(1).nonzero()] == [4, 7]


def test_a_deployment_without_values_is_refused(servers: Servers) -> None:
    """A trainer program with tables that came without its storage says what to do."""
    data = batches(1)
    _, _, main, startup = begun(Tables)
    program = replace(transpiled(main, startup, servers(1)).get_trainer_program(), storage=None)
    with Executor() as exe, pytest.raises(ValueError, match="holds no values"):
        exe.run(program, feed=data[0])
