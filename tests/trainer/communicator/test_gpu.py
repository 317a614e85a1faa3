"""Training on a GPU is training on the CPU within 1e-4: gradients and parameters cross between
device and host.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.devices import (
    Servers,
    adam,
    assert_near,
    batches,
    joined,
    loss_of,
    net,
    on_gpu,
    train,
)
from trainer import Executor, fleet
from transpiler import ClipGradByGlobalNorm, DistributedStrategy, DistributeTranspiler, capture

pytestmark = pytest.mark.usefixtures("finished")


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("count", [1, 2])
def test_the_eager_path_equals_the_cpu(servers: Servers, device: str, count: int) -> None:
    """Gradients leave the device, parameters come back to it: the model stays where it is and is
    trained.
    """
    model = net(device)
    places = [parameter.data_ptr() for parameter in model.parameters()]

    train(model, joined(servers(count), model), batches())

    assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert_near(model, train(reference := net(), adam(reference), batches()))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("mode", ["k_steps", "async"])
def test_the_other_modes_equal_the_cpu(servers: Servers, device: str, mode: str) -> None:
    """Values that arrive between steps cross too: one trainer that waits for its own result, or
    steps by itself.
    """
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 2} if mode == "k_steps" else {"send_queue_size": 1}
    model = net(device)

    train(model, joined(servers(2), model, strategy=strategy), batches())
    fleet.finish()

    assert_near(model, train(reference := net(), adam(reference), batches()))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_the_program_path_equals_the_cpu(servers: Servers, device: str) -> None:
    """``Executor(device)`` moves the module's tensors; feeds may be anywhere."""
    model, reference = net(), net()
    program, startup = capture(model, loss_of, adam(model), batches()[0])
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program, pservers=servers(2), trainers=1, startup_program=startup)
    with Executor(device) as exe:
        exe.run(transpiler.get_startup_program())
        losses = [
            exe.run(transpiler.get_trainer_program(), feed=batch, fetch_list=["loss"])[0]
            for batch in batches()
        ]

    assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
    assert all(loss.device == torch.device(device) for loss in losses)
    assert_near(model, train(reference, adam(reference), batches()))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_a_single_node_program_equals_the_cpu(device: str) -> None:
    """Without servers too, optimizer state included."""
    model, reference = net(), net()
    optimizer = adam(model)
    program, startup = capture(model, loss_of, optimizer, batches()[0])
    with Executor(device) as exe:
        exe.run(startup)
        for batch in batches():
            exe.run(program, feed=batch)

    assert_near(model, train(reference, adam(reference), batches()))
    assert all(
        state["exp_avg"].device == parameter.device for parameter, state in optimizer.state.items()
    )


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_a_program_moves_a_resumed_optimizers_state(servers: Servers, device: str) -> None:
    """An optimizer that has stepped on the CPU goes on elsewhere."""
    model, reference = net(), net()
    optimizer, plain = adam(model), adam(reference)
    train(model, optimizer, batches()[:3])
    train(reference, plain, batches()[:3])
    program, startup = capture(model, loss_of, optimizer, batches()[0])
    with Executor(device) as exe:
        exe.run(startup)
        for batch in batches()[3:]:
            exe.run(program, feed=batch)

    assert_near(model, train(reference, plain, batches()[3:]))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_state_dicts_are_on_the_models_device(servers: Servers, device: str) -> None:
    """As plain torch would have them; and both can be loaded again, into a job or into plain
    torch.
    """
    model = net(device)
    optimizer = joined(servers(2), model)
    train(model, optimizer, batches()[:5])
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for state in states[1]["state"].values():
        assert state["exp_avg"].device == state["exp_avg_sq"].device == torch.device(device)
        assert state["step"].device == torch.device("cpu")
    train(model, optimizer, batches()[5:])
    fleet.finish()

    for start in (lambda other: adam(other), lambda other: joined(servers(2), other)):
        again = net(device)
        resumed = start(again)
        again.load_state_dict(states[0])
        resumed.load_state_dict(copy.deepcopy(states[1]))
        assert_near(train(again, resumed, batches()[5:]), model)


@pytest.mark.parametrize("after", ["cpu", on_gpu])
@pytest.mark.parametrize("before", ["cpu", on_gpu])
def test_a_checkpoint_does_not_know_where_it_was_made(
    servers: Servers, tmp_path: Path, before: str, after: str
) -> None:
    """Saved on one device, loaded on another: by a job, and by a process alone."""
    model = net(before)
    train(model, joined(servers(2), model), batches()[:5])
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()
    reference = train(whole := net(), adam(whole), batches())

    again = net(after)
    optimizer = joined(servers(1), again)
    assert fleet.load(str(tmp_path / "saved")) == 5
    assert_near(train(again, optimizer, batches()[5:]), reference)
    fleet.finish()

    fleet.init()
    alone = fleet.distributed_model(net(after))
    optimizer = fleet.distributed_optimizer(adam(alone))
    assert fleet.load(str(tmp_path / "saved")) == 5
    assert_near(train(alone, optimizer, batches()[5:]), reference)


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_clipping_and_grad_scaler_equal_the_cpu(servers: Servers, device: str) -> None:
    """The global norm of device gradients; scaled gradients, an overflow, and none."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> nn.Module:
        scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=256.0)
        for number, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x.to(device), y.to(device))).backward()
            if number == 4:
                model[0].weight.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return model

    model, reference = net(device), net()
    run(model, joined(servers(2), model, grad_clip=ClipGradByGlobalNorm(0.5)), device)
    fleet.finish()
    fleet.init()
    fleet.distributed_model(reference)
    run(
        reference,
        fleet.distributed_optimizer(adam(reference), grad_clip=ClipGradByGlobalNorm(0.5)),
        "cpu",
    )

    assert_near(model, reference)


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_two_trainers_share_one_device(servers: Servers, device: str) -> None:
    """Two trainers' programs, each with half of every batch: what one node computes with the whole
    of it.
    """

    def make() -> nn.Module:  # without batch norm, whose statistics are each trainer's own
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))

    endpoints, whole, jobs = servers(2), batches(), []
    parts = [[(x[i::2], y[i::2]) for x, y in whole] for i in range(2)]
    for number in range(2):
        model = make()
        program, startup = capture(
            model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), parts[number][0]
        )
        transpiler = DistributeTranspiler()
        transpiler.transpile(
            number, program, pservers=endpoints, trainers=2, startup_program=startup
        )
        jobs.append((model, transpiler))

    def run(number: int) -> nn.Module:
        model, transpiler = jobs[number]
        with Executor(device) as exe:
            exe.run(transpiler.get_startup_program())
            for batch in parts[number]:
                exe.run(transpiler.get_trainer_program(), feed=batch)
        return model

    with ThreadPoolExecutor(2) as pool:
        models = [
            future.result(timeout=100)
            for future in [pool.submit(run, number) for number in range(2)]
        ]
    for model in models:
        assert_near(
            model,
            train(reference := make(), torch.optim.SGD(reference.parameters(), lr=0.1), whole),
        )
