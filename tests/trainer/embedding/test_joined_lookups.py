"""Lookups of one forward go out together, and every lookup gets the rows of its own ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.devices import tables_on_a_device
from trainer import DistributedEmbedding, fleet
from trainer.embedding.joined_lookups import JoinedLookups
from trainer.embedding.rows import Arrived
from transpiler import DistributedStrategy


@pytest.fixture(autouse=True, params=["in main memory", "on a device"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Ids and rows are in main memory, or count as those of a GPU: nothing else differs."""
    if request.param == "on a device":
        tables_on_a_device(monkeypatch)
    return bool(request.param == "on a device")


DIM, TABLES, SIZE = 2, 3, 8


class Servers:
    """Tables whose rows tell their table, their id and the time; every request is kept."""

    def __init__(self) -> None:
        self.requests: list[dict[str, list[int]]] = []
        self.time = 0.0

    def rows(self, table: str, ids: Tensor) -> Tensor:
        return torch.stack(
            [ids.float() + 1000.0 * int(table), torch.full((len(ids),), self.time)], 1
        )

    def pull_all(self, asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.requests.append({table: ids.tolist() for table, ids in asked.items()})
        return {table: self.rows(table, ids) for table, ids in asked.items()}


class Source:
    """One of their tables."""

    def __init__(self, servers: Servers, table: str) -> None:
        self.servers, self.table = servers, table

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        return ids

    def pull(self, ids: Tensor, arrived: Arrived | None = None) -> Tensor:
        if arrived is not None and (rows := arrived.of(ids)) is not None:
            return rows
        return self.servers.pull_all({self.table: ids})[self.table]


class Model(nn.Module):
    """Looks its tables up as ``forward_of`` says."""

    def __init__(self, forward_of: Callable[..., list[Tensor]], **settings: Any) -> None:
        super().__init__()
        self.servers, self.forward_of = Servers(), forward_of
        self.tables = nn.ModuleList(
            DistributedEmbedding(DIM, name=str(number), **settings) for number in range(TABLES)
        )
        self.joined = JoinedLookups(self.servers.pull_all)
        for number, table in enumerate(self.tables):
            table.settings.known_as, table.joined = str(number), self.joined
            table.connect(Source(self.servers, str(number)))
        self.joined.watch(self)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return self.forward_of(self, *args, **kwargs)

    def check(self, *args: Any, expected: list[Tensor] | None = None, **kwargs: Any) -> int:
        """One forward on ids [batch, tables]; returns how many requests it took."""
        before = len(self.servers.requests)
        found = self(*args, **kwargs)
        wanted = list(args[0].T) if expected is None else expected
        for number, (rows, ids) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(rows[..., 0], ids.float() + 1000.0 * (number % TABLES))
        return len(self.servers.requests) - before


def columns(model: Model, x: Tensor) -> list[Tensor]:
    return [table(x[:, number]) for number, table in enumerate(model.tables)]


def batch(seed: int, size: int = SIZE, columns: int = TABLES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (size, columns), generator=generator)


WAYS: dict[str, tuple[Callable[..., list[Tensor]], Callable[[Tensor], dict[str, Any]]]] = {
    "columns": (columns, lambda ids: {"x": ids}),
    "columns of floats, as DeepCTR has them": (
        lambda model, x: [t(x[:, i + 1 : i + 2].long())[:, 0] for i, t in enumerate(model.tables)],
        lambda ids: {"x": torch.cat([torch.rand(len(ids), 1), ids.float()], 1)},
    ),
    "rows": (
        lambda model, x: [t(x[i]) for i, t in enumerate(model.tables)],
        lambda ids: {"x": ids.T},
    ),
    "tensors of their own": (
        lambda model, x: [t(x[f"slot {i}"]) for i, t in enumerate(model.tables)],
        lambda ids: {"x": {f"slot {i}": ids[:, i].to(torch.int32) for i in range(TABLES)}},
    ),
    "all in the middle": (
        lambda model, x: [t(x[:, i, :]).flatten(0, 1) for i, t in enumerate(model.tables)],
        lambda ids: {"x": ids.T.reshape(1, TABLES, -1)},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_after_one_forward_all_tables_take_one_request(way: str) -> None:
    """However a model finds its ids in what it is given; with batches of other sizes, too, and
    without gradients.
    """
    forward_of, given = WAYS[way]
    model = Model(forward_of)
    for step, size in enumerate((SIZE, SIZE, 5, SIZE)):
        ids = batch(step, size)
        requests = model.check(**given(ids), expected=list(ids.T))
        assert requests == (TABLES if step == 0 else 1), f"step {step}"
    model.eval()
    with torch.no_grad():
        assert model.check(**given(batch(9)), expected=list(batch(9).T)) == 1


def test_ids_that_no_input_has_are_looked_up_by_themselves() -> None:
    """One table's ids depend on the rows of another one; the others still go together."""

    def forward(model: Model, x: Tensor) -> list[Tensor]:
        first, second = model.tables[0](x[:, 0]), model.tables[1](x[:, 1])
        return [first, second, model.tables[2](first[:, 0].long() + 3)]

    model = Model(forward)
    for step in range(5):
        ids = batch(step)
        requests = model.check(ids, expected=[ids[:, 0], ids[:, 1], ids[:, 0] + 3])
        assert requests == (3 if step == 0 else 2)


@pytest.mark.parametrize("padding", [None, 3])
def test_tables_with_the_same_computed_ids_take_one_request(padding: int | None) -> None:
    """As the weights and the factors of a factorization machine: the second lookup follows the
    first, whatever the ids are.
    """

    def forward(model: Model, x: Tensor) -> list[Tensor]:
        ids = x[:, 0] * 7 % 50
        return [table(ids if number < 2 else ids + 1) for number, table in enumerate(model.tables)]

    def expected(x: Tensor) -> list[Tensor]:
        ids = x[:, 0] * 7 % 50
        return [ids, ids, ids + 1]

    model = Model(forward, **({} if padding is None else {"padding_idx": padding}))
    seeds = [n for n in range(20) if (padding or -1) not in torch.cat(expected(batch(n)))][:4]
    counts = [model.check(batch(seed), expected=expected(batch(seed))) for seed in seeds]
    assert counts == [3, 2, 2, 2]
    assert model.servers.requests[-2].keys() == {"0", "1"}


def test_a_follower_with_other_ids_is_found_out() -> None:
    """It reads the rows of its own ids, and follows no more until its ids are equal again."""

    def forward(model: Model, x: Tensor, more: int) -> list[Tensor]:
        ids = x[:, 0] * 7 % 50
        return [model.tables[0](ids), model.tables[1](ids + more)]

    model = Model(forward)
    counts = []
    for seed, more in enumerate((0, 0, 1, 1, 0, 0)):
        ids = batch(seed)[:, 0] * 7 % 50
        counts.append(model.check(batch(seed), more, expected=[ids, ids + more]))
    assert counts == [2, 1, 2, 2, 2, 1]


def test_a_follower_that_is_not_looked_up_is_not_asked_for_again() -> None:
    """Its rows came in vain once."""

    def forward(model: Model, x: Tensor, both: bool) -> list[Tensor]:
        ids = x[:, 0] * 7 % 50
        return [table(ids) for table in model.tables[: 2 if both else 1]]

    model = Model(forward)
    asked = []
    for seed, both in enumerate((True, True, False, False)):
        ids = batch(seed)[:, 0] * 7 % 50
        model.check(batch(seed), both, expected=[ids, ids][: 2 if both else 1])
        asked.append(sorted(model.servers.requests[-1]))
    assert asked == [["1"], ["0", "1"], ["0", "1"], ["0"]]


def test_a_coincidence_is_found_out() -> None:
    """Columns that were equal at first and differ later: each table gets the rows of its own ids,
    and soon in one request again.
    """
    model = Model(columns)
    same = torch.arange(SIZE)[:, None].expand(-1, TABLES)
    assert model.check(same) == TABLES
    assert model.check(same) == 1
    took = [model.check(batch(step)) for step in range(6)]
    assert max(took) <= TABLES and took[-3:] == [1, 1, 1]


def test_another_way_through_the_model_is_learned_anew() -> None:
    """Tables that a forward leaves out are asked for in vain once."""

    def forward(model: Model, x: Tensor, some: int) -> list[Tensor]:
        return columns(model, x)[:some] if some == TABLES else [model.tables[0](x[:, 0])]

    model = Model(forward)
    for step in range(2):
        model.check(batch(step), TABLES)
    for step in range(3):
        assert model.check(batch(step), 1, expected=[batch(step)[:, 0]]) == 1
    assert list(model.servers.requests[-1]) == ["0"]
    assert [model.check(batch(step), TABLES) for step in range(2)] == [TABLES, 1]


def test_a_table_that_is_looked_up_twice_asks_for_an_id_once() -> None:
    """Both lookups of it, in the one request of the forward."""

    def forward(model: Model, x: Tensor) -> list[Tensor]:
        return [*columns(model, x[:, :TABLES]), model.tables[0](x[:, TABLES])]

    model = Model(forward)
    for step in range(3):
        ids = batch(step, columns=TABLES + 1)
        requests = model.check(ids)
    assert requests == 1
    asked = model.servers.requests[-1]["0"]
    assert sorted(asked) == sorted({*ids[:, 0].tolist(), *ids[:, TABLES].tolist()})


def test_an_inner_module_that_is_given_the_ids_counts_too() -> None:
    """The outer one computes them; the inner one's forward has them as its input."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(columns)
            self.inner.joined.watch(self)

        def forward(self, x: Tensor) -> list[Tensor]:
            return self.inner(x * 3 % 7)

    outer = Outer()
    for step in range(3):
        before, ids = len(outer.inner.servers.requests), batch(step)
        for number, rows in enumerate(outer(ids)):
            assert torch.equal(rows[:, 0], ids[:, number] * 3 % 7 + 1000.0 * number)
    assert len(outer.inner.servers.requests) - before == 1


@pytest.mark.parametrize("pooling", [None, "sum"])
def test_padding_and_bags(pooling: str | None) -> None:
    """The padding's id is asked for nowhere, and reads zeros."""

    def forward(model: Model, x: Tensor) -> list[Tensor]:
        return [table(x[:, 2 * i : 2 * i + 2]) for i, table in enumerate(model.tables)]

    model = Model(forward, padding_idx=7, pooling=pooling)
    for step in range(3):
        ids = batch(step, columns=2 * TABLES)
        ids[step, :] = 7
        before = len(model.servers.requests)
        for number, rows in enumerate(model(ids)):
            own = ids[:, 2 * number : 2 * number + 2]
            each = torch.where(own == 7, 0.0, own.float() + 1000.0 * number)
            assert torch.equal(rows[..., 0], each if pooling is None else each.sum(1))
    assert len(model.servers.requests) - before == 1
    assert all(7 not in ids for ids in model.servers.requests[-1].values())


def test_cached_rows_are_not_asked_for() -> None:
    """With a cache in each table a request has the rows that no cache has, and no more."""
    model = Model(columns, cache_rows=100, cache_staleness=10)
    ids = batch(0)
    assert model.check(ids) == TABLES
    assert model.check(ids) == 0
    ids[0] += 100
    assert model.check(ids) == 1
    assert [len(asked) for asked in model.servers.requests[-1].values()] == [1] * TABLES


def test_a_step_in_between_drops_what_came_ahead() -> None:
    """Rows that may have changed are asked for again."""

    def forward(model: Model, x: Tensor, steps: bool) -> list[Tensor]:
        first = model.tables[0](x[:, 0])
        if steps:
            model.servers.time += 1
            model.tables[0].gradient()
        return [first, *columns(model, x)[1:]]

    model = Model(forward)
    for _ in range(3):
        model.check(batch(0), False)
    assert [rows[0, 1].item() for rows in model(batch(0), True)] == [0.0, 1.0, 1.0]


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    """What came ahead in it is not read later, by the same model or by a table alone."""

    def forward(model: Model, x: Tensor, ends: bool) -> list[Tensor]:
        rows = [model.tables[0](x[:, 0])]
        if ends:
            raise KeyboardInterrupt
        return rows + columns(model, x)[1:]

    model = Model(forward)
    for _ in range(2):
        model.check(batch(0), False)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0), True)
    model.servers.time = 1.0
    assert [rows[0, 1].item() for rows in model(batch(0), False)] == [1.0] * TABLES


def test_threads_have_forwards_of_their_own() -> None:
    """A second thread evaluates while the first is in the middle of a forward."""

    def forward(model: Model, x: Tensor, other: Tensor | None) -> list[Tensor]:
        first = model.tables[0](x[:, 0])
        if other is not None:
            thread = threading.Thread(target=lambda: model.check(other, None))
            thread.start()
            thread.join()
        return [first, *columns(model, x)[1:]]

    model = Model(forward)
    for step in range(4):
        model.check(batch(step), batch(step + 10))


def test_a_compiled_model_looks_the_same_rows_up() -> None:
    """torch.compile breaks its graph at the lookups, and at what watches them."""
    model = Model(columns)
    compiled = torch.compile(model, backend="eager")
    for step in range(3):
        ids, before = batch(step), len(model.servers.requests)
        for number, rows in enumerate(compiled(ids)):
            assert torch.equal(rows[:, 0], ids[:, number] + 1000.0 * number)
    assert len(model.servers.requests) - before == 1


# ---- on servers ----


class Slots(nn.Module):
    """Some tables, of several widths, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.ModuleList(nn.Embedding(50, 4) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Embedding(50, 1) for _ in range(4))
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([table(x[:, i].long()) for i, table in enumerate(self.wide)], 1)
        narrow = torch.cat([table(x[:, i].long()) for i, table in enumerate(self.narrow)], 1)
        return self.out(wide) + narrow.sum(1, keepdim=True)


@pytest.mark.parametrize("configs", [{}, {"k_steps": 2}], ids=["sync", "k-step"])
def test_training_is_as_without_and_takes_one_request_a_step(
    servers: Callable[[int], str], configs: dict[str, Any]
) -> None:
    """Eight tables on two servers: as plain torch to rounding, and a forward is one request."""
    plain, mine = Slots(), Slots()
    strategy = DistributedStrategy()
    strategy.a_sync = bool(configs)
    strategy.a_sync_configs = {"embeddings": ["*"], **configs}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(mine)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    requests = []
    for step in range(6):
        x = batch(step, 16, 4).float()
        for each, stepped in ((model, optimizer), (plain, reference)):
            stepped.zero_grad()
            each(x).square().mean().backward()
            stepped.step()
        requests.append(optimizer.communicator.lookups.lookups)
    counts = [later - before for before, later in zip(requests, requests[1:], strict=False)]
    assert requests[0] == 8 and max(counts) == 1
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x), atol=1e-5)
