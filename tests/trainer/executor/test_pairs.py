"""Pairs of a model and an optimizer: trained on servers, each is what plain torch makes of it.

Real servers in this process.  ``make test`` takes each model and each optimizer once or more,
``make check-pairs`` every pair, on one server and on three, eagerly and as a program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.matrix import crossed
from tests.support.models import EIGHT, Batch, Case
from tests.support.optimizers import OPTIMIZERS
from trainer import Executor, fleet
from transpiler import DistributeTranspiler, capture

STEPS = 3
Servers = Callable[[int], str]
Step = Callable[..., Any]
Trained = tuple[nn.Module, list[Tensor]]


def loss_of(result: Any) -> Tensor:
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def alone(model: nn.Module, step: Step, optimizer: Any, data: list[Batch]) -> list[Tensor]:
    """Trains by the ordinary loop; the losses."""
    losses = []
    for number, batch in enumerate(data):
        torch.manual_seed(number)
        loss = loss_of(step(model, *batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def eager(
    endpoints: str, model: nn.Module, step: Step, make: Any, data: list[Batch]
) -> list[Tensor]:
    """The same loop on servers."""
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    losses = alone(model, step, fleet.distributed_optimizer(make(model)), data)
    fleet.finish()
    return losses


def program(
    endpoints: str, model: nn.Module, step: Step, make: Any, data: list[Batch]
) -> list[Tensor]:
    """Captured, transpiled and run."""
    main, startup = capture(model, step, make(model), data[0])
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, pservers=endpoints, trainers=1, startup_program=startup)
    losses = []
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for number, batch in enumerate(data):
            torch.manual_seed(number)
            main = transpiler.get_trainer_program()
            losses += executor.run(main, feed=batch, fetch_list=["loss"])
    return losses


def trained_by(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    cls, options = OPTIMIZERS[name]
    return lambda model: cls([p for p in model.parameters() if p.requires_grad], **options)


@crossed("pairs", model=EIGHT, optimizer=OPTIMIZERS, servers_=[1, 3], path=[eager, program])
def test_every_model_trains_by_every_optimizer_as_with_plain_torch(
    servers: Servers, model: Callable[[], Case], optimizer: str, servers_: int, path: Any
) -> None:
    """Losses, parameters and buffers are equal to the bit after each of three steps."""
    torch.manual_seed(7)
    mine, step, _, batch = model()
    reference, data = copy.deepcopy(mine), [batch(size) for size in (4, 6, 3)]
    make = trained_by(optimizer)
    recurrent = any(isinstance(module, nn.RNNBase) for module in mine.modules())
    with torch.backends.mkldnn.flags(enabled=not recurrent):
        losses = path(servers(servers_), mine, step, make, data)
        expected = alone(reference, step, make(reference), data)

    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    for (name, tensor), other in zip(
        mine.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other), name
