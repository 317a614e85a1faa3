"""A forward program that is transpiled: a trainer evaluates it against the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.table_programs import Net, adagrad, batches, step, train, transpiled
from trainer import Executor
from transpiler import DistributeTranspiler, append_backward, capture
from transpiler.ir.graph import Role
from transpiler.program import Program

Servers = Callable[[int], str]
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async, split at run time": {"sync_mode": False, "runtime_split_send_recv": True},
}


def predict(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Another step than the training one, of the same module."""
    return {"probability": torch.softmax(model(ids), -1)}


def forward_of(model: torch.nn.Module) -> Program:
    model.eval()
    forward, _ = capture(model, predict, example=(batches(1)[0][0],))
    model.train()
    return forward


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_a_trainer_predicts_with_the_servers_values(servers: Servers, fields: Any) -> None:
    """Between steps it has the bits of the plain model; the steps that follow are unaffected."""
    data, ids = batches(6), batches(7, 5)[6][0]
    model, reference = Net(), Net()
    optimizer, plain = adagrad(model), adagrad(reference)
    main, startup = capture(model, step, optimizer, data[0])
    endpoints = servers(2)
    transpiler = transpiled(main, startup, endpoints, **fields)
    program = transpiler.get_trainer_program()
    transpiler.transpile(0, forward_of(model), endpoints, 1)
    evaluating = transpiler.get_trainer_program()
    again = transpiler.transpile(0, forward_of(model), endpoints, 1)

    assert again is None and transpiler.get_trainer_program() == evaluating
    assert evaluating.storage is program.storage
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for half in (data[:3], data[3:]):
            for fed in half:
                executor.run(program, fed)
            train(reference, plain, half)
            (got,) = executor.run(evaluating, (ids,), ["probability"])
            expected = predict(reference.eval(), ids)["probability"].detach()
            reference.train()
            assert torch.allclose(got, expected, rtol=1e-6, atol=0)


def test_what_a_forward_program_cannot_say() -> None:
    """It belongs to a job that is planned already, and changes nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    example = (torch.randn(4, 3),)

    def error(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).pow(2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main, startup = capture(model, error, optimizer, example)
    writing, _ = capture(model, error, example=example)
    other, _ = capture(torch.nn.Linear(3, 2), error, example=example)
    transpiler = DistributeTranspiler()
    with pytest.raises(ValueError, match="transpile the job's training program first"):
        transpiler.transpile(0, writing, "a:1")
    transpiler.transpile(0, main, "a:1,b:1", startup_program=startup)

    with pytest.raises(ValueError, match="changes 1.num_batches_tracked .*clone"):
        transpiler.transpile(0, writing, "a:1,b:1")
    with pytest.raises(ValueError, match="has weight float32.*expected it in the program that"):
        transpiler.transpile(0, other, "a:1,b:1")
    forward = writing.clone(for_test=True)
    with pytest.raises(ValueError, match="pservers: expected the job's"):
        transpiler.transpile(0, forward, "a:1")
    with pytest.raises(ValueError, match="trainers: expected the job's, 1, for a forward"):
        transpiler.transpile(0, forward, "a:1,b:1", 2)
    with pytest.raises(ValueError, match="expected no sync_mode, startup_program or strategy"):
        transpiler.transpile(0, forward, "a:1,b:1", startup_program=startup)
    transpiler.transpile(0, forward, "a:1,b:1")
    types = [op.type for op in transpiler.get_trainer_program().main.ops]
    assert types[:5] == ["recv"] * 4 + ["fetch_barrier"]
    (result,) = (variable.name for variable in forward.list_vars() if variable.role is Role.OUTPUT)
    with pytest.raises(ValueError, match="got one with gradients that nothing uses"):
        transpiler.transpile(0, append_backward(forward, result), "a:1,b:1")
