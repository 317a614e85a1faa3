"""``strategy.amp`` at the steps of a job: equal to torch's own loop, and in step over trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.amp_jobs import amp_model, amp_strategy, course, expected_course
from tests.support.eager_jobs import Servers, assert_same, batches
from tests.support.seeded import seeded
from tests.support.standing_ranks import StandingRanks
from tests.support.table_trainers import Net, Trainer
from tests.support.threads import at_once
from trainer import fleet
from transpiler import ClipGradByGlobalNorm

MOVING = {"init_loss_scaling": 64.0, "incr_every_n_steps": 2}


def net() -> nn.Module:
    with seeded(3):
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def joined(kind: str, servers: Servers, strategy: Any, model: nn.Module, **options: Any) -> Any:
    """The optimizer of one trainer of a job of this kind."""
    role = None
    strategy.a_sync = False
    if kind == "servers":
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, is_collective=kind == "collective", strategy=strategy)
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), **options)


@pytest.mark.observes("amp", "amp_configs.init_loss_scaling")
@pytest.mark.parametrize("kind", ["servers", "alone", "collective"])
def test_one_trainer_trains_as_autocast_and_grad_scaler(servers: Servers, kind: str) -> None:
    """Float16 and bfloat16, with a planted overflow and a clipped norm: to the bit."""
    for bfloat in (False, True):
        configs: dict[str, Any] = {"decr_every_n_nan_or_inf": 1, **MOVING}
        configs = {"use_pure_bf16": True} if bfloat else configs
        mine, theirs = net(), net()
        optimizer = joined(kind, servers, amp_strategy(**configs), mine)
        plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", 64.0, growth_interval=2, enabled=not bfloat)
        for number, (x, y) in enumerate(batches(8)):
            factor = float("inf") if number in (2, 3) and not bfloat else 1.0
            optimizer.zero_grad()
            (F.cross_entropy(mine(x), y) * factor).backward()
            if number == 5:
                nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
            optimizer.step()
            plain.zero_grad()
            with torch.autocast("cpu", torch.bfloat16 if bfloat else torch.float16):
                outputs = theirs(x)
            scaler.scale(F.cross_entropy(outputs.float(), y) * factor).backward()
            scaler.unscale_(plain)
            if number == 5:
                nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            scaler.step(plain)
            scaler.update()

            assert optimizer.loss_scale == (1.0 if bfloat else scaler.get_scale()), number
        assert_same(dict(mine.state_dict()), dict(theirs.state_dict()))
        assert optimizer.steps == (8 if bfloat else 6)
        fleet.finish()


@pytest.mark.observes(
    "amp_configs.init_loss_scaling",
    "amp_configs.incr_every_n_steps",
    "amp_configs.decr_every_n_nan_or_inf",
    "amp_configs.incr_ratio",
    "amp_configs.decr_ratio",
    "amp_configs.use_dynamic_loss_scaling",
)
@pytest.mark.parametrize(
    ("configs", "scales"),
    [
        ({"decr_every_n_nan_or_inf": 1}, [64, 128, 64, 32, 32, 64, 64, 128]),
        ({}, [64, 128, 128, 64, 64, 128, 128, 256]),
        ({"incr_every_n_steps": 4}, [64, 64, 64, 32, 32, 32, 32, 64]),
        ({"incr_ratio": 4.0}, [64, 256, 256, 128, 128, 512, 512, 2048]),
        ({"decr_ratio": 0.25}, [64, 128, 128, 32, 32, 64, 64, 128]),
        ({"init_loss_scaling": 8.0}, [8, 16, 16, 8, 8, 16, 16, 32]),
        ({"use_dynamic_loss_scaling": False, "incr_every_n_steps": 1000}, [64] * 8),
    ],
)
def test_every_key_of_the_scale_acts(configs: dict[str, Any], scales: list[float]) -> None:
    """Overflows at steps 2 and 3; the gradients that autograd has inside have the scale."""
    model = nn.Linear(4, 2)
    optimizer = joined("alone", str, amp_strategy(**(MOVING | configs)), model)
    seen = []
    model.register_forward_pre_hook(lambda module, args: None)
    outputs: list[float] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            outputs.append(float(gradient.max()))
            return gradient

    original = type(model).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: Seen.apply(original(self, x)))
        seen = course(model, optimizer, {2, 3}, 8)
    assert seen == scales
    assert outputs[0] == (configs | {"init_loss_scaling": 64.0} | configs)["init_loss_scaling"]
    assert optimizer.steps == 6


# ---- several trainers ----

ON = ({1, 4, 9}, {4, 6, 7})  # the overflows of each trainer


class WithTable(Net):
    """A table, and a dense parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(torch.tensor([1, 2])) + self.w * x


def played(endpoints: str, make: Any, decr_every: int, configs: dict[str, Any]) -> list[Trainer]:
    """Two trainers that have trained, and left."""
    models = [amp_model(make(), decr_every_n_nan_or_inf=decr_every, **MOVING) for _ in range(2)]
    plays = [lambda n=n: Trainer(endpoints, n, 2, models[n], **configs) for n in range(2)]
    jobs: list[Trainer] = at_once(*plays)
    try:
        at_once(*(lambda n=n: _course(jobs[n], ON[n]) for n in range(2)))
    finally:
        at_once(*(job.optimizer.close for job in jobs))
    return jobs


def _course(job: Any, overflows: set[int]) -> None:
    job.scales = course(job.model, job.optimizer, overflows)


@pytest.mark.observes("amp", "amp_configs.decr_every_n_nan_or_inf")
@pytest.mark.parametrize("decr_every", [1, 2])
@pytest.mark.parametrize("kind", ["servers", "two lanes", "all-reduce", "table"])
def test_an_overflow_on_one_trainer_skips_the_step_on_all(
    servers: Servers, kind: str, decr_every: int
) -> None:
    """And lowers the scale on all, in step: the course of one process that has every overflow."""
    configs: dict[str, Any] = {
        "two lanes": {"modes": {"weight": "sync", "*": "async"}},
        "all-reduce": {"modes": {"weight": "collective", "*": "sync"}},
    }.get(kind, {"modes": {"*": "sync"}})
    make = WithTable if kind == "table" else lambda: nn.Linear(4, 2)
    jobs: list[Any] = played(servers(2), make, decr_every, configs)

    assert jobs[0].scales == jobs[1].scales == expected_course(ON[0] | ON[1], decr_every)
    assert jobs[0].optimizer.steps == jobs[1].optimizer.steps == 12 - len(ON[0] | ON[1])


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_where_steps_are_not_taken_together_each_trainer_has_its_own_scale(
    servers: Servers, mode: str
) -> None:
    """An overflow is the step of one trainer only."""
    configs: dict[str, Any] = {"modes": {"*": "async"}} if mode == "async" else {"k_steps": 2}
    jobs: list[Any] = played(servers(1), lambda: nn.Linear(4, 2), 1, configs)

    for job, overflows in zip(jobs, ON, strict=True):
        assert job.scales == expected_course(overflows, 1)


def course_on_ranks() -> None:
    """fleet without servers, on each rank."""
    import torch.distributed as dist

    rank = dist.get_rank()
    fleet.init(is_collective=True, strategy=amp_strategy(decr_every_n_nan_or_inf=2, **MOVING))
    model = fleet.distributed_model(nn.Linear(4, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scales = course(model, optimizer, ON[rank])

    assert scales == expected_course(ON[0] | ON[1], 2)
    assert optimizer.steps == 12 - len(ON[0] | ON[1])
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    fleet.finish()


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    """Two."""
    standing = StandingRanks(2)
    yield standing
    standing.close()


@pytest.mark.processes
@pytest.mark.observes("amp")
def test_scales_stay_in_step_without_servers(ranks: StandingRanks) -> None:
    """Trainers that average their gradients skip the same steps."""
    ranks.run(course_on_ranks)


# ---- files, and what does not go together ----


def test_the_scale_is_saved_and_loaded(tmp_path: Path) -> None:
    """With ``fleet.save``, and in the optimizer's ``state_dict``; counters included."""
    model = nn.Linear(4, 2)
    optimizer = joined("alone", str, amp_strategy(**MOVING), model)
    course(model, optimizer, {2}, 5)
    fleet.save(str(tmp_path / "saved"))
    state, scale = optimizer.state_dict(), optimizer.loss_scale
    expected = course(model, optimizer, {1, 2}, 6)
    fleet.finish()
    for loads in (
        lambda made: made.load_state_dict(state),
        lambda _: fleet.load(tmp_path / "saved"),
    ):
        again = nn.Linear(4, 2)
        made = joined("alone", str, amp_strategy(**MOVING), again)
        loads(made)
        assert made.loss_scale == scale > 64.0 and course(again, made, {1, 2}, 6) == expected
        fleet.finish()


def test_a_scaler_beside_it_raises() -> None:
    """Gradients would be scaled twice."""
    model = nn.Linear(4, 2)
    optimizer = joined("alone", str, amp_strategy(), model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(RuntimeError, match="leave the GradScaler out"):
        scaler.step(optimizer)


def test_gradients_that_leave_early_cannot_be_skipped(servers: Servers) -> None:
    """``overlap`` with float16 raises and names both; with bfloat16 it works."""
    strategy = amp_strategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"overlap": True}
    with pytest.raises(ValueError, match=r"overlap, strategy\.amp: .* leave overlap off"):
        joined("servers", servers, strategy, net())
    fleet.finish()
    strategy.amp_configs = {"use_pure_bf16": True}
    model = net()
    optimizer = joined("servers", servers, strategy, model)
    model(batches(1)[0][0]).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1


def test_a_clip_on_servers_sees_true_gradients(servers: Servers) -> None:
    """The merged gradient is clipped as one node would clip it."""
    mine, theirs = net(), net()
    clip = {"grad_clip": ClipGradByGlobalNorm(0.05)}
    optimizer = joined("servers", servers, amp_strategy(), mine, **clip)
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", 32768.0)
    for x, y in batches(3):
        optimizer.zero_grad()
        F.cross_entropy(mine(x), y).backward()
        optimizer.step()
        plain.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = theirs(x)
        scaler.scale(F.cross_entropy(outputs.float(), y)).backward()
        scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        scaler.step(plain)
        scaler.update()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ({"use_fp16_guard": False}, "use_fp16_guard: has no effect without use_pure_fp16=True"),
        (
            {"use_pure_bf16": True, "incr_ratio": 3.0},
            "incr_ratio: has no effect with use_pure_bf16",
        ),
        ({"use_pure_bf16": True, "use_pure_fp16": True}, "use_pure_fp16: .* set one of the two"),
        (
            {"use_dynamic_loss_scaling": False, "decr_ratio": 0.3},
            "decr_ratio: has no effect with use_dynamic_loss_scaling=False",
        ),
    ],
)
def test_a_key_that_another_makes_meaningless_raises(configs: dict[str, Any], said: str) -> None:
    """It is never accepted and ignored; nor is any key without ``amp``."""
    strategy = amp_strategy(**configs)
    with pytest.raises(ValueError, match=rf"strategy\.amp_configs\.{said}"):
        fleet.init(strategy=strategy)
    strategy.amp = False
    with pytest.raises(ValueError, match="has no effect without amp=True"):
        fleet.init(strategy=strategy)
