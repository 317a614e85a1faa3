"""Samples that servers deal out by leases, in jobs of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pserver.config import ServerConfig
from pserver.leases.epoch import Account
from pserver.service.server import Server
from pserver.wire_pb2 import StatusRequest
from tests.support.tiers import RARE
from trainer import fleet
from trainer.job.job import present
from transpiler import DistributedStrategy

SAMPLES = 22
Step = Callable[[torch.Tensor], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(ServerConfig(keep_failed_seconds=0.0)) as running:
        yield running


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    fleet.finish()


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(SAMPLES), 4, **options)  # type: ignore[arg-type]  # it has a length


class Pairs(Sampler[list[int]]):
    """A batch sampler of the script's own: unequal batches, in an order that it draws."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        while order:
            size = 1 + order[0] % 3
            yield order[:size]
            order = order[size:]


class Sized(Pairs):
    """The same, with a length, in the order of which every trainer has it whole."""

    def __len__(self) -> int:
        return SAMPLES


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


class Stream(IterableDataset[Any]):
    """Samples in an order that it draws; its workers share them."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        order = torch.arange(SAMPLES).tolist()
        return iter(order if info is None else order[info.id :: info.num_workers])


class Drawn(IterableDataset[Any]):
    """Samples in an order that it draws."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


class Whole(Dataset[Any]):
    """Each sample is a batch by itself."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


# data, whether its order differs from pass to pass, and what the lease table counts
KINDS: dict[str, tuple[Callable[[], Any], bool, int]] = {
    "weighted sampler": (
        lambda: loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)),
        True,
        SAMPLES,
    ),
    "sampler without a length": (lambda: loader(sampler=Endless()), True, 6),
    "batch sampler": (lambda: DataLoader(torch.arange(SAMPLES), batch_sampler=Sized()), True, 0),
    "batch sampler without a length": (
        lambda: DataLoader(torch.arange(SAMPLES), batch_sampler=Pairs()),
        True,
        0,
    ),
    "single samples": (lambda: DataLoader(Whole(), batch_size=None, shuffle=True), True, SAMPLES),
    "sampler of batches": (
        lambda: DataLoader(
            torch.arange(SAMPLES),
            batch_size=None,
            sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, False),
        ),
        True,
        6,
    ),
    "iterable data set": (lambda: DataLoader(Drawn(), 4), True, 6),
    "iterable data set with workers": (lambda: DataLoader(Stream(), 4, num_workers=2), False, 6),
    "list": (lambda: list(torch.arange(SAMPLES).split(4)), False, 6),
}


EACH_KIND = [
    pytest.param(kind, marks=pytest.mark.processes) if "workers" in kind else kind for kind in KINDS
]


def begin(server: Server | None, checkpoint: str | None = None, **settings: Any) -> Step:
    """A job of one trainer, or a process alone: what trains on a batch, with a step."""
    strategy = DistributedStrategy()
    for name, value in settings.items():
        setattr(strategy, name, value)
    role = None
    if server is not None:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[server.endpoint])
    every = None if checkpoint is None else 1e-6  # seconds: after each step
    fleet.init(role, strategy=strategy, checkpoint=checkpoint, every=every)
    model = fleet.distributed_model(nn.Linear(1, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x.float()[:, None]).mean().backward()
        optimizer.step()

    return step


def accounts(server: Server) -> dict[int, Account]:
    assert server.job.program is not None, "a job runs"
    return server.job.program.leases.accounts


MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "half_async": {"a_sync_configs": {"half_async": True}},
    "geo": {"a_sync_configs": {"k_steps": 4}},
    "sync": {"a_sync": False},
    "staleness": {"a_sync_configs": {"staleness": 1}},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_sample_is_in_one_decided_step(server: Server, mode: str) -> None:
    """Epoch by epoch."""
    step = begin(server, **MODES[mode])
    batches = fleet.shard(loader(shuffle=True), seed=3)
    for _ in range(2):
        seen = []
        for x in batches:
            step(x)
            seen += x.tolist()

        assert sorted(seen) == list(range(SAMPLES))
    for x in batches:  # the steps before are decided when a further pass has all its samples
        step(x)

    found = accounts(server)
    assert found[0] == found[1] == Account(SAMPLES, SAMPLES, 0, 0, over=True)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("kind", EACH_KIND)
def test_each_sample_of_any_data_is_in_one_decided_step(
    server: Server, kind: str, mode: str
) -> None:
    """Whatever has drawn the batches: it draws alike in every process, and is leased by number."""
    made, shuffled, counted = KINDS[kind]
    step = begin(server, **MODES[mode])
    batches = fleet.shard(made(), seed=3)
    orders, numbers = [], []
    for _ in range(2):
        orders.append([])
        for x in batches:
            step(x)
            orders[-1] += x.tolist()
        numbers.append(len(orders[-1]))
    for x in batches:
        step(x)

    found = accounts(server)
    assert [sorted(order) for order in orders] == [list(range(SAMPLES))] * 2
    assert (orders[0] != orders[1]) == shuffled
    for number in range(2):
        assert found[number].decided == found[number].samples
        assert not counted or found[number].samples == counted
        assert found[number].over and not found[number].skipped


@pytest.mark.parametrize("kind", EACH_KIND)
def test_data_that_is_left_in_the_middle_is_counted(server: Server, kind: str) -> None:
    """No trainer takes the rest of the pass; the next one has all again."""
    step = begin(server)
    batches = fleet.shard(KINDS[kind][0](), seed=3)
    for x in batches:
        step(x)
        break
    seen = []
    for x in batches:
        step(x)
        seen += x.tolist()

    assert sorted(seen) == list(range(SAMPLES))
    assert accounts(server)[0].over


def test_data_that_cannot_be_read_again_is_not_leased(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says what is lost with a trainer; who asks for leases is refused."""
    step = begin(server)
    for x in fleet.shard(iter(torch.arange(SAMPLES).split(4)), seed=3):
        step(x)

    assert "cannot be read again" in caplog.text
    assert accounts(server) == {}
    fleet.finish()
    begin(server, elastic=True)
    with pytest.raises(ValueError, match="iterated over again, got a"):
        next(iter(fleet.shard(iter(torch.arange(SAMPLES).split(4)), seed=3)))
    unordered = DataLoader(Stream(), 4, num_workers=2, in_order=False)
    with pytest.raises(ValueError, match="in_order=True, got False"):
        next(iter(fleet.shard(unordered, seed=3)))


def test_two_loaders_side_by_side_have_leases_of_their_own(server: Server) -> None:
    """A step counts the batches of both."""
    step = begin(server)
    first, second = fleet.shard(loader(), seed=3), fleet.shard(DataLoader(Stream(), 4), seed=3)
    for _ in range(2):
        for x, y in zip(first, second, strict=True):
            step(torch.cat([x, y]))
    for batches in first, second:
        next(iter(batches))

    found = accounts(server)
    assert [found[n].decided for n in range(4)] == [SAMPLES, 6, SAMPLES, 6]


@pytest.mark.observes("elastic")
def test_an_elastic_sync_job_has_the_order_of_one_that_is_not(server: Server) -> None:
    """Batch by batch; only the elastic one asks for leases."""
    orders, dealt = [], []
    for elastic in (False, True):
        stops = {"lost_trainer": "stop"}  # so that only the elastic one has leases
        step = begin(server, a_sync=False, a_sync_configs=stops, elastic=elastic)
        batches = fleet.shard(loader(shuffle=True), seed=3)
        order = []
        for _ in range(2):
            for x in batches:
                step(x)
                order.append(x.tolist())
        orders.append(order)
        dealt.append(sorted(accounts(server)))
        fleet.finish()

    assert orders[0] == orders[1]
    assert dealt == [[], [0, 1]]


def test_a_step_counts_all_batches_since_the_last_one(server: Server) -> None:
    """Those at the end without a step count as skipped, when the next pass begins."""
    step = begin(server)
    held = []
    batches = fleet.shard(loader(), seed=3)
    for x in batches:
        held.append(x)
        if len(held) == 4:
            step(torch.cat(held))
            held = []
    next(iter(batches))

    assert accounts(server)[0] == Account(SAMPLES, 16, 6, 0, over=True)


def test_status_shows_the_epochs_that_are_under_way(server: Server) -> None:
    """What is decided, leased, skipped and handed back; of the last one, where none is."""
    step = begin(server, a_sync=False, elastic=True)
    batches = fleet.shard(loader(), seed=3)
    for number, x in enumerate(batches, 1):
        step(x)
        if number == 2:
            (epoch,) = server.job.status(StatusRequest()).epochs
            told = fleet.epoch_status()
            break
    (over,) = server.job.status(StatusRequest()).epochs

    assert (epoch.number, epoch.unit, epoch.samples, epoch.over) == (0, "samples", SAMPLES, False)
    assert (epoch.decided, epoch.leased, epoch.skipped, epoch.handed_back) == (8, 14, 0, 0)
    assert (over.decided, over.leased, over.skipped, over.handed_back) == (8, 0, 14, 14)
    assert over.over
    assert told[0] | {"leased": 14, "decided": 8} == told[0] and told[0]["samples"] == SAMPLES


def test_a_step_behind_the_loop_has_its_last_batches(server: Server) -> None:
    """They are not skipped."""
    step = begin(server, a_sync=False)
    batches = fleet.shard(loader(), seed=3)
    held = [x for x in batches]
    step(torch.cat(held))

    assert accounts(server)[0] == Account(SAMPLES, SAMPLES, 0, 0, over=True)


def test_what_a_script_breaks_off_is_counted(server: Server) -> None:
    """It is skipped, as no other trainer is there to take it."""
    step = begin(server, a_sync=False)
    for x in fleet.shard(loader(), seed=3):
        step(x)
        break

    assert accounts(server)[0] == Account(SAMPLES, 4, 18, 0, over=True, handed_back=18)


def test_an_evaluation_is_not_leased(server: Server) -> None:
    """Without gradients each trainer has its part of the data, as in a job without leases."""
    begin(server)
    with torch.no_grad():
        seen = [n for x in fleet.shard(loader(), seed=3) for n in x.tolist()]

    assert sorted(seen) == list(range(SAMPLES))
    assert accounts(server) == {}


class Stopped(Exception):
    """The process is killed here."""


def goes_on(first: Server | None, second: Server, kind: str, mode: str, path: str) -> None:
    """A script that is killed in its second epoch trains on what no saved step had."""

    def script(server: Server | None, stop: int) -> list[list[int]]:
        step = begin(server, checkpoint=path, **MODES[mode])
        made = loader(shuffle=True) if kind == "samples" else KINDS[kind][0]()
        batches = fleet.shard(made, seed=3)
        trained, left = [list[int]() for _ in range(3)], stop
        for epoch in range(3):
            for x in batches:
                step(x)
                left -= 1
                if not left:
                    raise Stopped(trained)
                trained[epoch] += x.tolist()
        return trained

    with pytest.raises(Stopped) as stopped:
        # it saves when it asks for a batch: the last step is in no checkpoint
        script(first, 18 if kind == "batch sampler" else 9)
    present().optimizers[0].close("killed")
    fleet.finish()
    before, after = stopped.value.args[0], script(second, 0)

    both = [sorted(a + b) for a, b in zip(before, after, strict=True)]
    assert before[1] and not before[2] and not after[0]
    assert both == [list(range(SAMPLES))] * 3


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("samples", "async"),
        RARE("samples", "sync"),
        RARE("batch sampler", "async"),
        RARE("batch sampler", "sync"),
        RARE("iterable data set", "async"),
        ("iterable data set", "sync"),
    ],
)
def test_a_script_that_is_started_again_trains_on_the_rest(
    server: Server, mode: str, kind: str, tmp_path: Path
) -> None:
    """Of the epoch in which it was, in the same shuffle: what no saved step had."""
    goes_on(server, server, kind, mode, str(tmp_path))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("kind", ["samples", "iterable data set", RARE("batch sampler")])
def test_a_checkpoint_without_leases_says_what_is_left(
    server: Server, kind: str, mode: str, tmp_path: Path
) -> None:
    """A process that has trained alone goes on with servers, in the middle of an epoch; and these
    count what it had.
    """
    goes_on(None, server, kind, mode, str(tmp_path))

    found = accounts(server)[1]
    assert found.decided == found.samples and not found.skipped
