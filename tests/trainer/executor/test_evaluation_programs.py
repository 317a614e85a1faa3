"""A trainer evaluates between its steps: against the servers' values and tables."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.table_programs import Net, adagrad, batches, step, train, transpiled
from trainer import Executor
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.verify.verify import verify

Servers = Callable[[int], str]

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False},
    "async, split at run time": {"sync_mode": False, "runtime_split_send_recv": True},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 2},
}


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_a_trainer_evaluates_against_servers_and_goes_on(servers: Servers, fields: Any) -> None:
    """Between steps the clone computes what the plain model computes, rows of servers included,
    also a weight of torch's own; the steps that follow are as if nothing had been evaluated.
    """
    data, (ids, y) = batches(6), batches(7, 5)[6]
    model, reference = Net(), Net()
    optimizer, plain = adagrad(model), adagrad(reference)
    main, startup = capture(model, step, optimizer, data[0])
    transpiler = transpiled(main, startup, servers(2), **fields)
    program = transpiler.get_trainer_program()
    clone = program.clone(for_test=True)

    assert clone.deployment is not None
    verify(clone, clone.deployment.plan)
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for half in (data[:3], data[3:]):
            for fed in half:
                executor.run(program, fed)
            train(reference, plain, half)
            (loss,) = executor.run(clone, (ids, y), ["loss"])
            assert torch.allclose(loss, step(reference, ids, y).detach(), rtol=1e-6, atol=0)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Dropout(0.3))
        self.out = nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.body(x))
        return out


def error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def test_what_another_trainer_has_sent_is_evaluated(servers: Servers) -> None:
    """In async mode a trainer that has not stepped evaluates with the steps of the other one."""
    endpoints, made = servers(2), []
    config = DistributeTranspilerConfig(min_block_size=16, sync_mode=False)
    fed = (torch.randn(6, 8), torch.randn(6, 4))
    for number in (0, 1):
        model = Dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        main, startup = capture(model, error, optimizer, fed)
        transpiler = DistributeTranspiler(config)
        transpiler.transpile(number, main, endpoints, 2, startup_program=startup)
        made.append((model, transpiler, Executor()))
    (idle, first, watching), (trained, second, training) = made
    watching.run(first.get_startup_program())
    training.run(second.get_startup_program())
    clone = first.get_trainer_program().clone(for_test=True)
    (before,) = watching.run(clone, fed, ["loss"])
    for _ in range(3):
        training.run(second.get_trainer_program(), fed)
    training.run(second.get_trainer_program().clone(for_test=True), fed)
    (after,) = watching.run(clone, fed, ["loss"])

    assert after < before
    for name, parameter in idle.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name
    leaving = threading.Thread(target=training.close)
    leaving.start()
    watching.close()
    leaving.join(60)
    assert not leaving.is_alive()
