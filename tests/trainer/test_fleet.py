"""The eager path: what a script may do with ``fleet``, one trainer against real servers in this
process.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, assert_same, batches, joined, net, train
from trainer import fleet
from transpiler import ClipGradByNorm, DistributedStrategy


def test_alone_the_same_script_trains_single_node_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a cluster's variables a process trains alone, on purpose and with one line."""
    mine, reference = net(), net()
    with caplog.at_level(logging.INFO):
        fleet.init()
        fleet.distributed_model(mine)
        optimizer = fleet.distributed_optimizer(
            torch.optim.Adam(mine.parameters()), grad_clip=ClipGradByNorm(0.1)
        )
    assert [
        record for record in caplog.records if "training alone" in record.message
    ].__len__() == 1
    train(mine, optimizer, batches(5))

    plain = torch.optim.Adam(reference.parameters())
    for x, y in batches(5):
        plain.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        for parameter in reference.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.1)
        plain.step()
    assert_same(mine.state_dict(), reference.state_dict())
    assert fleet.transport() == "local"


def test_dir_is_the_public_names() -> None:
    """So a notebook completes them, and no import of the module's own."""
    assert dir(fleet) == sorted(fleet.__all__)


def test_a_step_after_finish_raises(servers: Servers) -> None:
    """It does not wait for an answer that nobody will send."""
    model = net()
    optimizer = joined(servers(1), model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, batches(1))
    fleet.finish()
    with pytest.raises(RuntimeError, match="left the job"):
        train(model, optimizer, batches(1))


def test_parameters_are_no_optimizer(servers: Servers) -> None:
    """The error says what to give."""
    fleet.init()
    model = fleet.distributed_model(net())
    with pytest.raises(TypeError, match="expected an optimizer of torch, as .*, got generator"):
        fleet.distributed_optimizer(model.parameters())  # type: ignore[arg-type]  # on purpose


def test_what_is_no_module_is_no_model() -> None:
    """Nor is a class, which has lost its brackets."""
    fleet.init()
    for given, got in ((3, "got int"), (torch.nn.Linear, "got the class Linear")):
        with pytest.raises(TypeError, match=f"expected a module, as Net\\(\\), {got}"):
            fleet.distributed_model(given)  # type: ignore[call-overload]  # on purpose


def test_grad_clip_is_one_of_three_classes(servers: Servers) -> None:
    """A bare number is refused by name."""
    fleet.init()
    model = fleet.distributed_model(net())
    with pytest.raises(TypeError, match="ClipGradByNorm"):
        fleet.distributed_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            grad_clip=1.0,  # type: ignore[arg-type]
        )


def test_parameters_without_gradient_are_skipped(servers: Servers) -> None:
    """In some steps, or always (frozen): their values and the optimizer's count of their steps
    stay.
    """

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if number % 2:
                model[3].bias.grad = None
            optimizer.step()

    mine, reference = net(), net()
    for model in (mine, reference):
        model[0].weight.requires_grad_(False)
    optimizer = joined(servers(2), mine, torch.optim.Adam(mine.parameters(), lr=0.01))
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    run(mine, optimizer)
    run(reference, plain)

    assert_same(mine.state_dict(), reference.state_dict())
    assert_same(optimizer.state_dict(), plain.state_dict())


def test_accumulation_and_clipping_between_backward_and_step_count(servers: Servers) -> None:
    """What is applied is what ``p.grad`` holds at ``step()``."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = batches(8)
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            for x, y in (first, second):
                (F.cross_entropy(model(x), y) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    mine, reference = net(), net()
    run(mine, joined(servers(2), mine, torch.optim.Adam(mine.parameters(), lr=0.01)))
    run(reference, torch.optim.Adam(reference.parameters(), lr=0.01))

    assert_same(mine.state_dict(), reference.state_dict())


def test_step_takes_a_closure(servers: Servers) -> None:
    """``loss = optimizer.step(closure)``."""
    mine, reference = net(), net()
    x, y = batches(1)[0]
    losses = []
    for model, optimizer in (
        (mine, joined(servers(1), mine, torch.optim.SGD(mine.parameters(), lr=0.1))),
        (reference, torch.optim.SGD(reference.parameters(), lr=0.1)),
    ):

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append([optimizer.step(closure) for _ in range(3)])

    assert losses[0] == losses[1]
    assert_same(mine.state_dict(), reference.state_dict())


def test_grad_scaler_skips_overflows_and_unscales(servers: Servers) -> None:
    """GradScaler takes it for any optimizer: scaled gradients, an overflow in the middle, unscale_
    with clipping.
    """

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for number, (x, y) in enumerate(batches(8)):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if number == 3:
                model[0].weight.grad[0, 0] = float("inf")
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    scales: list[float] = []
    mine, reference = net(), net()
    run(mine, joined(servers(2), mine, torch.optim.Adam(mine.parameters(), lr=0.01)))
    run(reference, torch.optim.Adam(reference.parameters(), lr=0.01))

    assert scales[:8] == scales[8:]
    assert_same(mine.state_dict(), reference.state_dict())


def test_a_group_may_be_added_before_the_first_step_only(servers: Servers) -> None:
    """``add_param_group`` after that would change who holds what."""
    mine, reference = net(), net()
    optimizer = joined(servers(2), mine, torch.optim.SGD(mine[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": mine[3].parameters(), "lr": 0.01})
    plain = torch.optim.SGD(reference[0].parameters(), lr=0.1)
    plain.add_param_group({"params": reference[3].parameters(), "lr": 0.01})
    train(mine, optimizer, batches(3))
    train(reference, plain, batches(3))

    assert_same(mine.state_dict(), reference.state_dict())
    with pytest.raises(ValueError, match="before the first step.*from the start, frozen by"):
        optimizer.add_param_group({"params": mine[1].parameters()})


@pytest.mark.parametrize("kind", ["plain", "overlap", "async", "geo"])
def test_a_frozen_group_is_trained_from_when_it_is_unfrozen_on(servers: Servers, kind: str) -> None:
    """The way out of that: the group is there from the start.  What comes by other ways, or is
    cast, has a name in the error.
    """
    strategy = DistributedStrategy()
    strategy.a_sync = kind in ("async", "geo")
    strategy.a_sync_configs = {
        "plain": {},
        "overlap": {"overlap": True},
        "async": {"send_queue_size": 1},
        "geo": {"k_steps": 1},
    }[kind]
    mine, reference = net(), net()
    for model in (mine, reference):
        model[0].requires_grad_(False)
    fleet_optimizer = joined(
        servers(2), mine, torch.optim.SGD(mine.parameters(), lr=0.1), strategy=strategy
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for model, optimizer in ((mine, fleet_optimizer), (reference, plain)):
        train(model, optimizer, batches(2))
        model[0].requires_grad_(True)
        train(model, optimizer, batches(2))

    for found, expected in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    stranger = mine[0].weight = nn.Parameter(torch.ones_like(mine[0].weight))
    fleet_optimizer.param_groups[0]["params"].append(stranger)
    with pytest.raises(ValueError, match="parameter of shape .*in no group of the optimizer when"):
        train(mine, fleet_optimizer, batches(1))


def test_a_scheduler_made_for_the_inner_optimizer_moves_the_job(
    servers: Servers, recwarn: pytest.WarningsRecorder
) -> None:
    """Both optimizers share their groups, and no scheduler warns of a wrong order."""
    mine, reference = net(), net()
    inner, plain = (
        torch.optim.SGD(mine.parameters(), lr=0.1),
        torch.optim.SGD(reference.parameters(), lr=0.1),
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (inner, plain)]
    optimizer = joined(servers(1), mine, inner)
    for batch in batches(4):
        train(mine, optimizer, [batch])
        train(reference, plain, [batch])
        for schedule in schedules:
            schedule.step()

    assert_same(mine.state_dict(), reference.state_dict())
    assert not [warning for warning in recwarn.list if "lr_scheduler" in str(warning.message)]


def test_parameters_of_no_registered_model_are_refused(servers: Servers) -> None:
    """The error says which parameter, and the server keeps no trace."""
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(",")))
    fleet.distributed_model(net())
    with pytest.raises(ValueError, match="in no registered model"):
        fleet.distributed_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize(
    "cls", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam]
)
def test_what_cannot_be_sliced_raises_and_says_why(servers: Servers, cls: Any) -> None:
    """No optimizer trains silently as another, or not at all."""
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match=cls.__name__):
        joined(servers(1), model, cls(model.parameters()))


def test_a_strategys_unbuilt_switch_raises_and_names_itself() -> None:
    """A switch that is set and has no effect is a bug."""
    strategy = DistributedStrategy()
    strategy.qat = True
    with pytest.raises(ValueError, match="qat"):
        fleet.init(strategy=strategy)
    strategy = DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"runtime_split_send_recv": True}
    with pytest.raises(ValueError, match="runtime_split_send_recv"):
        fleet.init(strategy=strategy)


def test_sparse_gradients_are_refused_by_name(servers: Servers) -> None:
    """Dense servers take dense gradients."""
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = joined(servers(1), model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="weight.*sparse"):
        optimizer.step()


def test_the_order_of_calls_is_checked() -> None:
    """Every call before its turn says which one is missing."""
    with pytest.raises(RuntimeError, match=r"fleet\.init"):
        fleet.worker_num()
    fleet.init()
    with pytest.raises(RuntimeError, match="before"):
        fleet.init()
    with pytest.raises(RuntimeError, match="distributed_optimizer"):
        fleet.save("nowhere")
    assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (True, False, True)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (0, 1, 0)


def test_an_empty_parameter_passes(servers: Servers) -> None:
    """Zero elements are no special case."""
    model = nn.ParameterDict(
        {"none": nn.Parameter(torch.zeros(0, 3)), "one": nn.Parameter(torch.ones(2))}
    )
    optimizer = joined(servers(2), model, torch.optim.Adam(model.parameters(), lr=0.5))
    (model["none"].sum() + model["one"].sum()).backward()
    optimizer.step()

    assert torch.allclose(model["one"], torch.full((2,), 0.5))
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (0, 3)


def test_channels_last_and_transposed_parameters_train_as_they_are(servers: Servers) -> None:
    """Parameters that are not contiguous keep their strides and equal plain torch."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        model.extra = nn.Parameter(torch.randn(4, 6).t())
        return model

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(2, 3, 8, 8)).square().mean() + model.extra.square().sum()).backward()
            optimizer.step()

    mine, reference = make(), make()
    strides = [parameter.stride() for parameter in mine.parameters()]
    run(mine, joined(servers(2), mine, torch.optim.Adam(mine.parameters(), lr=0.01)))
    run(reference, torch.optim.Adam(reference.parameters(), lr=0.01))

    assert [parameter.stride() for parameter in mine.parameters()] == strides
    assert_same(mine.state_dict(), reference.state_dict())
