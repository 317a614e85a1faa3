"""gradient_merge: k steps of an unchanged script make one update, wherever it trains."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.eager_jobs import Servers, batches
from tests.support.local_steps import counted
from tests.support.many_ranks import on_ranks
from tests.support.seeded import seeded
from tests.support.table_trainers import Net, Trainer
from tests.support.threads import at_once
from trainer import fleet
from transpiler import ClipGradByGlobalNorm, DistributedStrategy

Batch = tuple[Tensor, Tensor]


def strategy(k_steps: int = 2, fused: bool = False, **configs: Any) -> DistributedStrategy:
    """Sync mode, with gradient merge."""
    made = DistributedStrategy()
    made.a_sync, made.gradient_merge, made.fuse_grad_merge = False, True, fused
    made.gradient_merge_configs = {"k_steps": k_steps, **configs}
    return made


def net() -> nn.Module:
    with seeded(3):
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The last bias is not trained."""
    return torch.optim.SGD(list(model.parameters())[:-1], lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, data: list[Batch], factor: float = 1.0) -> list[Tensor]:
    """What the parameters are after these steps."""
    for x, y in data:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def joined(data: list[Batch], count: int) -> list[Batch]:
    """So many batches as one."""
    windows = [data[first : first + count] for first in range(0, len(data), count)]
    return [(torch.cat([x for x, _ in w]), torch.cat([y for _, y in w])) for w in windows]


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.observes(
    "gradient_merge", "gradient_merge_configs.k_steps", "gradient_merge_configs.avg"
)
@pytest.mark.parametrize(("avg", "factor"), [(True, 1.0), ("avg", 1.0), (False, 3.0), ("sum", 3.0)])
def test_alone_k_steps_equal_a_step_with_all_their_samples(avg: bool | str, factor: float) -> None:
    """The mean over the steps, clipped as one gradient; or their sum, k times as large."""
    data, clip = batches(6), ClipGradByGlobalNorm(0.1)
    fleet.init(strategy=strategy(3, avg=avg))
    model = fleet.distributed_model(net())
    mine = train(model, fleet.distributed_optimizer(adam(model), grad_clip=clip), data)
    steps = fleet.metrics()["steps"]
    fleet.finish()
    fleet.init()
    model = fleet.distributed_model(net())
    whole = fleet.distributed_optimizer(adam(model), grad_clip=clip)
    theirs = train(model, whole, joined(data, 3), factor)
    fleet.finish()

    assert close(mine, theirs) and steps == 2


def test_the_sums_are_those_of_plain_torch_to_the_bit() -> None:
    """Equal to backward passes that add to p.grad, which is the same order of sums."""
    data, model, plain = batches(4), net(), net()
    fleet.init(strategy=strategy(2, avg="sum"))
    mine = train(model, fleet.distributed_optimizer(adam(fleet.distributed_model(model))), data)
    fleet.finish()
    reference = adam(plain)
    for index, (x, y) in enumerate(data):
        F.cross_entropy(plain(x), y).backward()
        if index % 2:
            reference.step()
            reference.zero_grad()

    assert all(torch.equal(a, b) for a, b in zip(mine, plain.parameters(), strict=True))


@pytest.mark.observes("fuse_grad_merge")
def test_fused_sums_lie_in_one_buffer() -> None:
    """While the update runs, the gradients follow one another in memory."""
    seen: list[int] = []

    def watch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))

    for fused in (True, False):
        fleet.init(strategy=strategy(2, fused))
        model = fleet.distributed_model(net())
        inner = adam(model)
        inner.register_step_pre_hook(watch)
        train(model, fleet.distributed_optimizer(inner), batches(2))
        fleet.finish()
    assert seen == [1, 4]


@pytest.mark.observes("gradient_merge", "gradient_merge_configs.k_steps")
def test_servers_get_one_message_for_k_steps(servers: Servers) -> None:
    """Two trainers in sync mode, a dense parameter and a table: rows that different steps touch are
    merged too, and a k-th of the gradients' bytes travels.
    """
    plays: list[tuple[list[int], float]] = [([1, 2], 2.0), ([2, 3], 4.0), ([1], 6.0), ([7], 8.0)]
    endpoints = servers(2)

    def play(merged: int, number: int) -> tuple[list[float], Tensor, int, int]:
        given = strategy(merged) if merged > 1 else None
        trainer = Trainer(endpoints, number, 2, Net(), strategy=given)
        assert trainer.job.communicator is not None
        installed = trainer.job.communicator.variable_bytes()["w"]["bytes_out"]
        for ids, change in plays * 2:
            trainer.add(ids, change, dense=change)
        trainer.optimizer.flush()
        rows = [trainer.model.row(id_) for id_ in (1, 2, 3, 7)]
        sent = trainer.job.communicator.variable_bytes()["w"]["bytes_out"] - installed
        steps = trainer.optimizer.steps
        dense = trainer.model.w.detach().clone()
        trainer.job.finish()
        return rows, dense, sent, steps

    merged = at_once(*(partial(play, 4, number) for number in range(2)))
    single = at_once(*(partial(play, 1, number) for number in range(2)))

    for (rows, dense, sent, steps), (every, all_dense, all_sent, all_steps) in zip(
        merged, single, strict=True
    ):
        assert rows == [value / 4 for value in every] and torch.equal(dense, all_dense / 4)
        assert (steps, all_steps) == (2, 8) and all_sent == 4 * sent > 0


@pytest.mark.observes("gradient_merge_configs.k_steps")
@pytest.mark.parametrize(
    "configs", [{}, {"half_async": True}, {"k_steps": 1}, {"modes": {"*.weight": "collective"}}]
)
def test_every_mode_takes_merged_steps(configs: dict[str, Any], servers: Servers) -> None:
    """With one trainer whose steps wait for their results every mode equals the big batch."""
    asked = strategy(2)
    asked.a_sync, asked.a_sync_configs = True, {"soft_wait_ms": 10_000, **configs}
    if "half_async" in configs or "k_steps" in configs:
        asked.a_sync_configs = configs
    data = batches(8)
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    fleet.init(role, strategy=asked)
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(0, 8, 2):
        train(model, optimizer, data[step : step + 2])
        optimizer.flush()
    mine = [parameter.detach().clone() for parameter in model.parameters()]
    fleet.finish()
    plain = net()
    theirs = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), joined(data, 2))

    assert close(mine, theirs)


def test_an_overflow_in_a_window_makes_no_update() -> None:
    """The scale falls once, at the window's last step, and the next window updates."""
    fleet.init(strategy=strategy(2))
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler, scales, changed = torch.amp.GradScaler("cpu", init_scale=4.0), [], []
    for value in (float("inf"), 1.0, 1.0, 1.0):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(not torch.equal(before, model.weight))
    fleet.finish()

    assert scales == [4.0, 2.0, 2.0, 2.0] and changed == [False, False, False, True]


def test_steps_without_an_update_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A script that ends within a window loses nothing in silence."""
    fleet.init(strategy=strategy(3))
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(adam(model))
    train(model, optimizer, batches(5))
    with caplog.at_level(logging.WARNING):
        fleet.finish()

    assert "the last 2 steps have made no update, for one takes 3" in caplog.text


def test_a_load_leaves_out_what_was_merged_before_it(tmp_path: Path) -> None:
    """A script that goes back behind a loss that is no number begins a window there."""
    data = batches(5)
    fleet.init(strategy=strategy(2))
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model))
    train(model, optimizer, data[:2])
    fleet.save(str(tmp_path / "checkpoint"))
    train(model, optimizer, data[2:4])
    wanted = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, [(data[4][0] * float("nan"), data[4][1])])
    fleet.load(str(tmp_path / "checkpoint"))
    train(model, optimizer, data[2:4])
    fleet.finish()

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ({"gradient_merge": True}, "gradient_merge: has no effect without .*k_steps"),
        ({"gradient_merge_configs": {"k_steps": 2}}, "k_steps: has no effect without gradient_m"),
        ({"gradient_merge_configs": {"avg": "sum"}}, "avg: has no effect without gradient_merge"),
        ({"fuse_grad_merge": True}, "fuse_grad_merge: has no effect without gradient_merge=True"),
    ],
)
def test_what_says_nothing_is_refused(configs: dict[str, Any], said: str) -> None:
    """A switch without its steps, and keys without their switch."""
    made = DistributedStrategy()
    for name, value in configs.items():
        setattr(made, name, value)
    with pytest.raises(ValueError, match=said):
        fleet.init(strategy=made)


def test_gradients_that_leave_early_are_refused(servers: Servers) -> None:
    """With overlap each backward sends; both names are in the error."""
    made = strategy(2)
    made.a_sync, made.a_sync_configs = True, {"overlap": True}
    fleet.init(
        fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(",")),
        strategy=made,
    )
    model = fleet.distributed_model(net())
    with pytest.raises(ValueError, match="overlap with gradient_merge"):
        fleet.distributed_optimizer(adam(model))
    fleet.finish()


@pytest.mark.observes("gradient_merge", "fuse_grad_merge")
@on_ranks(2)
def test_trainers_share_the_sums_of_k_steps(rank: int, scratch: Path) -> None:
    """Without servers: equal to one trainer with all samples, and nothing travels in the steps
    between; fused, one all-reduce has all gradients.
    """
    data = batches(8)
    plain = net()
    theirs = train(plain, sgd(plain), joined(data, 4))
    sizes: list[int] = []
    for fused in (False, True):
        counts: list[int] = []
        fleet.init(is_collective=True, strategy=strategy(2, fused))
        model = fleet.distributed_model(net())
        optimizer = fleet.distributed_optimizer(sgd(model))
        with counted(sizes):
            for batch in data[rank::2]:
                sizes.clear()
                mine = train(model, optimizer, [batch])
                counts.append(sum(size > 100 for size in sizes))
        assert close(mine, theirs) and counts == [0, 1, 0, 1], (fused, counts)
        fleet.finish()


@on_ranks(2)
def test_an_overflow_on_one_trainer_is_everybodys(rank: int, scratch: Path) -> None:
    """Only trainer 1 sees it, in the first step of a window: both skip the update, and both scales
    fall at its last step.
    """
    fleet.init(is_collective=True, strategy=strategy(2))
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert overflows(model, optimizer, rank) == ([4.0, 2.0, 2.0, 2.0], [3])
    fleet.finish()


def test_an_overflow_on_one_trainer_is_everybodys_with_servers(servers: Servers) -> None:
    """The same by the answer to the merged step."""
    endpoints = servers(1)

    def play(number: int) -> tuple[list[float], list[int]]:
        model: Any = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(endpoints, number, 2, model, lambda _: sgd, strategy=strategy(2))
        found = overflows(model, trainer.optimizer, number)
        trainer.job.finish()
        return found

    assert (
        at_once(*(partial(play, number) for number in range(2)))
        == [([4.0, 2.0, 2.0, 2.0], [3])] * 2
    )


def overflows(model: Any, optimizer: Any, number: int) -> tuple[list[float], list[int]]:
    """The scale after each of four steps, the first of which overflows on trainer 1; and the steps
    that have changed the model.
    """
    scaler, scales, changed = torch.amp.GradScaler("cpu", init_scale=4.0), [], []
    for index in range(4):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        value = float("inf") if (index, number) == (0, 1) else 1.0
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if not torch.equal(before, model.weight):
            changed.append(index)
    return scales, changed
