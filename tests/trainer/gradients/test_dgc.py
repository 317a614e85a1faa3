"""Deep gradient compression towards servers: what travels, who applies momentum, and what training
makes of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.dgc_jobs import (
    KEPT,
    LARGE,
    RAMP,
    batches,
    close,
    net,
    reference,
    sgd,
    strategy_of,
    train,
)
from tests.support.eager_jobs import Servers
from tests.support.threads import at_once
from trainer import Constant, DistributedEmbedding, fleet
from trainer.job.job import Job
from transpiler import ClipGradByGlobalNorm, ClipGradByValue, DistributedStrategy


class Trainer:
    """One of a job's trainers, in a process that has several."""

    def __init__(
        self,
        endpoints: str,
        number: int,
        trainers: int,
        strategy: DistributedStrategy | None,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
        self.model = net() if model is None else model
        self.job = Job(role, strategy)
        self.job.models.append(self.model)
        clip = options.pop("grad_clip", None)
        self.optimizer = self.job.join(sgd(self.model, **options), grad_clip=clip)

    @property
    def sent(self) -> int:
        """Bytes of the large tensor's gradients so far."""
        assert self.job.communicator is not None
        return self.job.communicator.variable_bytes()[LARGE]["bytes_out"]

    def train(self, data: Any) -> list[int]:
        """The bytes of the large tensor's gradient in each step."""
        before = self.sent
        totals = train(self.model, self.optimizer, data, lambda: self.sent)
        return [now - then for now, then in zip(totals, [before, *totals], strict=False)]


def two(endpoints: str, strategy: DistributedStrategy | None, **options: Any) -> list[Trainer]:
    models = [net(), net(seed=4)]  # trainer 0's values count

    def join(number: int) -> Trainer:
        return Trainer(endpoints, number, 2, strategy, models[number], **options)

    return at_once(lambda: join(0), lambda: join(1))


def trained(endpoints: str, strategy: DistributedStrategy, **options: Any) -> Any:
    """Both trainers after 20 steps, with the bytes of each step."""
    both = two(endpoints, strategy, **options)
    bytes_ = at_once(*(lambda n=n: both[n].train(batches(n)) for n in range(2)))
    at_once(*(each.optimizer.finish for each in both))
    return both, bytes_


@pytest.mark.observes(
    "dgc",
    "dgc_configs.rampup_begin_step",
    "dgc_configs.rampup_step",
    "dgc_configs.sparsity",
)
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"clip": 0.5}], ids=str)
def test_twenty_steps_towards_servers_equal_the_paper(
    servers: Servers, options: dict[str, Any]
) -> None:
    """Two trainers and two servers, over which the tensor is cut: the parameters are those of a
    reference written out, on both trainers, and each step sends the exact number of elements.
    """
    given: dict[str, Any] = dict(options)
    if "clip" in given:
        given["grad_clip"] = ClipGradByGlobalNorm(given.pop("clip"))
    both, bytes_ = trained(servers(2), strategy_of(), **given)
    expected = reference([batches(0), batches(1)], **options)

    for each in both:
        close(each.model, expected)
    whole = 4 * KEPT[0]
    for sent in bytes_:
        assert sent == [whole] * 3 + [8 * kept for kept in KEPT[3:]]


@pytest.mark.observes("dgc")
def test_servers_step_large_tensors_by_plain_sgd(servers: Servers) -> None:
    """Momentum is the trainers': the plan's rule, the hyper-parameters of each step and the state
    on servers say so.  Small tensors keep theirs, and travel as they are.
    """
    trainer = Trainer(servers(1), 0, 1, strategy_of())
    plan = trainer.job.communicator.plan
    rules = {p.name: plan.groups[p.group] for p in plan.placements}
    trainer.train(batches(0, 2))
    hparams = trainer.optimizer.hparams()
    states = trainer.job.communicator.states()
    trainer.optimizer.finish()

    assert [rules[name].type for name in (LARGE, "0.bias", "2.weight")] == [
        "sgd",
        "momentum",
        "momentum",
    ]
    assert {p.name: p.compression for p in plan.placements if p.compression} == {LARGE: "sparse"}
    for values in (rules[LARGE].hparams, hparams[plan.placement(LARGE).group]):
        assert values == {"lr": 0.05, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    assert hparams[0]["momentum"] == 0.9
    assert "momentum_buffer" in states["2.weight"]
    assert "momentum_buffer" not in states.get(LARGE, {})


class WithTable(nn.Module):
    """A table of rows, and a large parameter behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = DistributedEmbedding(4, num_embeddings=20, init=Constant(0.5))
        self.large = nn.Linear(4, 4096)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.large(self.emb(ids)).sin().sum()


def test_tables_are_trained_as_without_it(servers: Servers) -> None:
    """Their update rules, which stand between the script's and those of large parameters, included:
    before the ramp all is as without dgc.
    """

    def trained(strategy: DistributedStrategy | None) -> list[torch.Tensor]:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
        fleet.init(role, strategy=strategy)
        model = fleet.distributed_model(WithTable())
        optimizer = fleet.distributed_optimizer(sgd(model, lr=0.01))
        for step in range(6):
            optimizer.zero_grad()
            model(torch.tensor([step, 3, 7])).backward()
            optimizer.step()
        with torch.no_grad():
            rows = model.emb(torch.arange(20)).clone()
        fleet.finish()
        return [rows, model.large.weight.detach(), model.large.bias.detach()]

    for one, other in zip(
        trained(strategy_of({"rampup_begin_step": 100})), trained(None), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.observes("dgc_configs.rampup_begin_step")
def test_before_the_ramp_it_is_momentum_sgd(servers: Servers) -> None:
    """To the bit with one trainer, schedule and decay included."""
    trainer = Trainer(servers(1), 0, 1, strategy_of({"rampup_begin_step": 100}))
    plain = net()
    for model, optimizer in ((trainer.model, trainer.optimizer), (plain, sgd(plain))):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        train(model, optimizer, batches(0, 8), schedule.step)
    trainer.optimizer.finish()

    for one, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_overflow_on_one_trainer_changes_nothing_on_the_others(servers: Servers) -> None:
    """The step is nobody's: velocity and residual of the other trainer are those before it, and
    what it sent in vain is not lost.
    """
    bad = 6  # of trainer 1; the ramp has begun
    both = two(servers(2), strategy_of())

    def play(number: int) -> None:
        own, scaler = both[number], torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(batches(number, 21)):
            own.optimizer.zero_grad()
            loss = F.cross_entropy(own.model(x), y)
            scaler.scale(loss * (float("inf") if (step, number) == (bad, 1) else 1.0)).backward()
            scaler.step(own.optimizer)
            scaler.update()

    at_once(lambda: play(0), lambda: play(1))
    at_once(*(each.optimizer.finish for each in both))
    data = [batches(number, 21) for number in range(2)]
    expected = reference([[*own[:bad], *own[bad + 1 :]] for own in data])

    assert both[0].optimizer.steps == 20
    for each in both:
        close(each.model, expected)


@pytest.mark.parametrize("configs", [{"send_queue_size": 1}, {"half_async": True}], ids=str)
def test_steps_are_as_sparse_where_trainers_do_not_wait(
    servers: Servers, configs: dict[str, Any]
) -> None:
    """In async and half-async mode; with one trainer that waits for each step it trains as in
    sync mode.
    """
    trainer = Trainer(servers(2), 0, 1, strategy_of(**configs))
    sent = trainer.train(batches(0))
    trainer.optimizer.finish()

    assert sent == [4 * KEPT[0]] * 3 + [8 * kept for kept in KEPT[3:]]
    close(trainer.model, reference([batches(0)]))


@pytest.mark.parametrize("with_servers", [True, False], ids=["servers", "alone"])
def test_a_resumed_job_goes_on_in_the_ramp(
    servers: Servers, tmp_path: Path, with_servers: bool
) -> None:
    """From the checkpoint's step, with nothing that waits: as if velocity and residual were lost
    there.
    """
    role = None
    if with_servers:
        endpoints = servers(1).split(",")
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints)
    data, models = batches(0), [net(), net(seed=5)]
    for model, part in zip(models, (data[:6], data[6:]), strict=True):
        fleet.init(role, strategy=strategy_of())
        fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(sgd(model))
        if model is models[1]:
            assert fleet.load(str(tmp_path / "saved")) == 6
        train(model, optimizer, part)
        if model is models[0]:
            fleet.save(str(tmp_path / "saved"))
        fleet.finish()

    whole = net()
    fleet.init(strategy=strategy_of())
    optimizer = fleet.distributed_optimizer(sgd(fleet.distributed_model(whole)))
    train(whole, optimizer, data[:6])
    optimizer.dgc.forget()
    train(whole, optimizer, data[6:])
    fleet.finish()

    close(models[1], dict(whole.named_parameters()))


@pytest.mark.observes(
    "dgc",
    "dgc_configs.rampup_begin_step",
    "dgc_configs.rampup_step",
    "dgc_configs.sparsity",
)
def test_a_process_alone_trains_as_one_trainer_of_a_job() -> None:
    """The same elements wait, though nothing is sent."""
    model = net()
    fleet.init(strategy=strategy_of())
    fleet.distributed_model(model)
    train(model, fleet.distributed_optimizer(sgd(model)), batches(0))
    fleet.finish()

    close(model, reference([batches(0)]))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.Adam(p), "expected torch.optim.SGD with a momentum above 0.*Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "got|momentum 0, dampening 0"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening 0.5"),
    ],
)
def test_other_optimizers_are_refused(optimizer: Any, words: str) -> None:
    """With what they are."""
    fleet.init(strategy=strategy_of())
    model = fleet.distributed_model(net())
    with pytest.raises(ValueError, match=words):
        fleet.distributed_optimizer(optimizer(model.parameters()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fp16_allreduce": True}, "strategy.fp16_allreduce: excludes strategy.dgc"),
        ({"localsgd": True}, "strategy.localsgd: excludes strategy.dgc"),
        ({"lars": True}, "strategy.lars: excludes strategy.dgc"),
        ({"a_sync_configs": {"dc_asgd": 0.5}}, "dc_asgd: excludes strategy.dgc"),
        ({"a_sync_configs": {"overlap": True}}, "overlap: excludes strategy.dgc"),
        ({"a_sync_configs": {"k_steps": 4}}, "strategy.dgc, .+: has no effect with k_steps=4"),
        (
            {"a_sync_configs": {"k_steps": 4, "modes": {"0.*": "async"}}},
            "strategy.dgc: expected the modes sync, async, half_async for all parameters",
        ),
        ({"dgc": False}, "dgc_configs.sparsity: has no effect without dgc=True"),
    ],
    ids=str,
)
def test_what_excludes_dgc_is_named(change: dict[str, Any], words: str) -> None:
    """Both settings, in one error."""
    strategy = strategy_of({"sparsity": [0.9]}, send_queue_size=16)
    strategy.a_sync = True
    for name, value in change.items():
        setattr(strategy, name, value)
    with pytest.raises(ValueError, match=words):
        fleet.init(strategy=strategy)


def test_clipping_by_value_and_compression_are_refused_beside_it() -> None:
    """What trainers cannot divide among themselves, and what says otherwise how gradients
    travel.
    """
    for options, words in (
        ({"grad_clip": ClipGradByValue(1.0)}, "expected grad_clip=ClipGradByNorm"),
        ({"compression": {"*": "int8"}}, "compression: excludes strategy.dgc"),
    ):
        fleet.init(strategy=strategy_of(RAMP))
        model = fleet.distributed_model(net())
        with pytest.raises(ValueError, match=words):
            fleet.distributed_optimizer(sgd(model), **options)
        fleet.finish()
