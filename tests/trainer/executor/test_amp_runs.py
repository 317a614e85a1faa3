"""Programs with ``strategy.amp``, run: equal to the eager job, and in step over trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import table_programs as tables
from tests.support.amp_jobs import amp_model, amp_strategy, expected_course
from tests.support.collective_trainers import fine, ports, together
from tests.support.eager_jobs import batches
from trainer import Executor, ParallelExecutor
from trainer.modules.loss_scaling import loss_scaling_of
from transpiler import (
    ClipGradByGlobalNorm,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
)

Servers = Callable[[int], str]
MOVING: dict[str, Any] = {"init_loss_scaling": 64.0, "incr_every_n_steps": 2}
ON = ({1, 4, 9}, {4, 6, 7})  # the overflows of each trainer
STEPS = 12


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def data(overflows: set[int], seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches; an input of these steps is infinite."""
    found = batches(STEPS, seed)
    for number in overflows:
        found[number][0][0, 0] = float("inf")
    return found


class Job:
    """A captured model, its optimizer, and a trainer's programs."""

    def __init__(
        self, rank: int, configs: dict[str, Any], mode: Any = None, clip: Any = None, **where: Any
    ) -> None:
        self.model = net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        pair = capture(self.model, step, self.optimizer, batches(1)[0], grad_clip=clip)
        strategy = amp_strategy(**configs)
        fields, strategy.a_sync = dict(mode or {}), False
        if "k_steps" in fields or fields.pop("a_sync", False):
            strategy.a_sync, strategy.a_sync_configs = True, fields
            fields = {}
        fields = {"min_block_size": 16, **fields} if "pservers" in where else fields
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(**fields))
        transpiler.transpile(rank, pair[0], startup_program=pair[1], strategy=strategy, **where)
        self.main = transpiler.get_trainer_program()
        self.startup = transpiler.get_startup_program()

    @property
    def scale(self) -> float:
        assert self.main.storage is not None
        return float(self.main.storage.tensors["loss_scaling"])

    def train(self, given: Any, place: tuple[int, int] | None = None) -> list[float]:
        """Runs the programs; the scale after each step."""
        torch.set_num_threads(1)
        scales = []
        with Executor() as executor:
            executor.run(self.startup)
            if place is not None:
                with ParallelExecutor(False, "loss", self.main, *place) as parallel:
                    for batch in given:
                        parallel.run(feed=batch)
                        scales.append(self.scale)
                return scales
            for batch in given:
                executor.run(self.main, feed=batch)
                scales.append(self.scale if "loss_scaling" in self.main.main.variables else 1.0)
        return scales


def eager(configs: dict[str, Any], given: Any, clip: float | None) -> tuple[nn.Module, list[float]]:
    """The same training without a program, by the eager machinery and torch's optimizer."""
    model = amp_model(net(), **configs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaling, scales = loss_scaling_of([model], optimizer.param_groups), []
    for x, y in given:
        optimizer.zero_grad()
        step(model, x, y).backward()
        overflow = any(not bool(p.grad.isfinite().all()) for p in model.parameters())
        if clip is not None and not overflow:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if not overflow:
            optimizer.step()
        if scaling is not None:
            scaling.update(overflow)
        scales.append(1.0 if scaling is None else scaling.scale)
    return model, scales


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "half-async": {"a_sync": True, "half_async": True},
    "async": {"a_sync": True, "send_queue_size": 1, "soft_wait_ms": 60_000},
    "geo": {"k_steps": 3},
}


@pytest.mark.observes("amp", "amp_configs.init_loss_scaling", "amp_configs.incr_every_n_steps")
@pytest.mark.parametrize("bfloat", [False, True], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODES)
def test_a_program_with_servers_trains_as_the_eager_job(
    servers: Servers, name: str, bfloat: bool
) -> None:
    """One trainer, overflows included, clipped where servers clip: to the bit, and the scale's
    course as well.
    """
    configs: dict[str, Any] = {"use_pure_bf16": True} if bfloat else MOVING
    clip = 0.5 if name == "sync" else None
    given = data(set() if bfloat else ON[0])
    limit = None if clip is None else ClipGradByGlobalNorm(clip)
    job = Job(0, configs, MODES[name], limit, pservers=servers(2), trainers=1)
    scales = job.train(given)
    expected, course = eager(configs, given, clip)

    assert scales == course
    for mine, theirs in zip(job.model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6 if clip else 0)


@pytest.mark.observes("amp", "amp_configs.decr_every_n_nan_or_inf")
@pytest.mark.parametrize("decr_every", [1, 2])
def test_an_overflow_on_one_trainer_skips_the_step_on_all(
    servers: Servers, decr_every: int
) -> None:
    """With servers in sync mode: the scales take one course, and parameters are equal."""
    configs = {**MOVING, "decr_every_n_nan_or_inf": decr_every}
    endpoints = servers(2)
    jobs = [Job(rank, configs, pservers=endpoints, trainers=2) for rank in range(2)]
    scales = fine(together(2, lambda rank: jobs[rank].train(data(ON[rank], rank))))

    assert scales[0] == scales[1] == expected_course(ON[0] | ON[1], decr_every)
    one, other = (list(job.model.parameters()) for job in jobs)
    assert all(map(torch.equal, one, other)) and all(bool(p.isfinite().all()) for p in one)


@pytest.mark.observes("amp")
@pytest.mark.parametrize("kind", ["grad_allreduce", "local_sgd", "nccl2"])
def test_without_servers_scales_stay_in_step_where_gradients_are_averaged(kind: str) -> None:
    """With local SGD each trainer has its own scale, and skips its own steps."""
    mode: dict[str, Any] = {"mode": "collective", "collective_mode": kind}
    mode = {"mode": "nccl2"} if kind == "nccl2" else mode
    endpoints = ports(2)
    jobs = [
        Job(
            rank,
            {**MOVING, "decr_every_n_nan_or_inf": 1},
            mode,
            trainers=",".join(endpoints),
            current_endpoint=endpoints[rank],
        )
        for rank in range(2)
    ]
    place = (lambda rank: (2, rank)) if kind == "nccl2" else (lambda rank: None)
    scales = fine(together(2, lambda rank: jobs[rank].train(data(ON[rank], rank), place(rank))))

    for rank in range(2):
        own = ON[rank] if kind == "local_sgd" else ON[0] | ON[1]
        assert scales[rank] == expected_course(own, 1)
    one, other = (list(job.model.parameters()) for job in jobs)
    assert all(map(torch.equal, one, other)) and all(bool(p.isfinite().all()) for p in one)


@pytest.mark.observes("amp")
@pytest.mark.parametrize("mode", [{}, {"k_steps": 2}], ids=["sync", "geo"])
def test_tables_of_a_program_train_with_a_loss_scale(
    servers: Servers, mode: dict[str, Any]
) -> None:
    """Their rows on servers are those that plain training gives, within what float16 rounds."""
    torch.manual_seed(0)
    model, reference = tables.Net(), tables.Net()
    reference.load_state_dict(model.state_dict())
    optimizer, plain = tables.adagrad(model), tables.adagrad(reference)
    given = tables.batches(5)
    pair = capture(model, tables.step, optimizer, given[0])
    strategy = amp_strategy(**MOVING)
    strategy.a_sync, strategy.a_sync_configs = bool(mode), mode
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, pair[0], servers(2), 1, startup_program=pair[1], strategy=strategy)
    main = transpiler.get_trainer_program()
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for batch in given:
            executor.run(main, feed=batch)
    for batch in given:
        plain.zero_grad()
        tables.step(reference, *batch).backward()
        plain.step()
    assert main.storage is not None and main.storage.tensors["loss_scaling"] == 256.0
    expected = reference.state_dict()
    for name in ("fc.weight", "fc.bias", "word.weight"):  # a table of torch's gets its rows back
        assert torch.allclose(model.state_dict()[name], expected[name], atol=5e-3), name
