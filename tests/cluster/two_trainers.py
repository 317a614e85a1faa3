"""One of two trainers, told by its test which scene to play next: a process that imports torch once
and takes part in many jobs.

It reads ``SCENE ENDPOINTS`` from its input and answers ``played SCENE: ok``, or ``played SCENE:
failed`` below a traceback.  What a scene asserts it computes by itself: each knows the data of
both, and trains the whole job alone, with plain torch.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from scene_data import Batch, adam, assert_equal, batches, loss, net, train, train_for_all
from torch import nn

from pserver.errors import Busy, FingerprintMismatch
from trainer import fleet
from trainer.job import job as current
from transpiler import DistributedStrategy

ME = int(os.environ["TRAINER_ID"])
DEADLINE = float(os.environ["PSERVER_HEARTBEAT_TIMEOUT"])


def join(
    endpoints: Sequence[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainers: int = 2,
    **options: Any,
) -> Any:
    number = ME if trainers == 2 else 0
    fleet.init(fleet.UserDefinedRoleMaker(number, worker_num=trainers, server_endpoints=endpoints))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(optimizer, **options)


def both(count: int = 6, seed: int = 1) -> list[list[Batch]]:
    return [
        list(pair) for pair in zip(batches(0, count, seed), batches(1, count, seed), strict=True)
    ]


# ---- scenes ----


def together(endpoints: Sequence[str]) -> None:
    """A job of both, to the bit what one node computes that averages the two gradients."""
    mine, reference = net(), net()
    train(mine, join(endpoints, mine, adam(mine)), batches(ME))
    train_for_all(reference, adam(reference), both())
    assert_equal(mine, reference)


def overflow(endpoints: Sequence[str]) -> None:
    """Trainer 1's gradient is infinite in step 2: nobody takes that step, and every other is
    taken.
    """
    mine, reference = net(), net()
    optimizer, scaler = (
        join(endpoints, mine, adam(mine)),
        torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    for number, (x, y) in enumerate(batches(ME)):
        before = copy.deepcopy(mine.state_dict())
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(mine(x), y)).backward()
        if number == 2 and ME == 1:
            mine[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        changed = any(
            not torch.equal(before[name], tensor) for name, tensor in mine.state_dict().items()
        )
        assert changed == (number != 2), number
    assert optimizer.steps == 5
    rounds = both()
    train_for_all(reference, adam(reference), rounds[:2] + rounds[3:])
    assert_equal(mine, reference)


class Warnings(logging.Handler):
    """What the process has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start_values(endpoints: Sequence[str]) -> None:
    """Seeds differ, yet all start from trainer 0's parameters, frozen parameters and buffers;
    trainer 1 is warned, once.
    """

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        model[0].bias.requires_grad_(False)
        model[1].running_mean.normal_()
        model[1].num_batches_tracked.fill_(seed)
        return model

    seen = Warnings()
    logging.getLogger().addHandler(seen)
    mine = make(seed=7 + ME)
    strides = [parameter.data_ptr() for parameter in mine.parameters()]
    join(
        endpoints, mine, torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=0.1)
    )
    logging.getLogger().removeHandler(seen)

    assert_equal(mine, make(seed=7))
    assert [parameter.data_ptr() for parameter in mine.parameters()] == strides
    warned = [line for line in seen.lines if "initial value" in line]
    assert len(warned) == ME and all("'0.weight'" in line for line in warned), seen.lines


def same_start_values(endpoints: Sequence[str]) -> None:
    """Seeds agree: nobody is warned."""
    seen = Warnings()
    logging.getLogger().addHandler(seen)
    mine = net()
    join(endpoints, mine, adam(mine))
    logging.getLogger().removeHandler(seen)
    assert not [line for line in seen.lines if "initial value" in line], seen.lines


def early_finish(endpoints: Sequence[str]) -> None:
    """Trainer 1 has three batches, trainer 0 six: the last three steps are those of trainer 0
    alone, divided by one.
    """
    mine, reference = net(), net()
    data = batches(ME)
    train(mine, join(endpoints, mine, adam(mine)), data[:3] if ME else data)
    rounds = both()
    train_for_all(
        reference,
        adam(reference),
        rounds[:3] if ME else rounds[:3] + [pair[:1] for pair in rounds[3:]],
    )
    assert_equal(mine, reference)


def long_evaluation(endpoints: Sequence[str]) -> None:
    """Trainer 0 computes, without a step, for longer than the deadline while trainer 1 waits in a
    step: slow, and not lost.
    """
    mine, reference = net(), net()
    optimizer = join(endpoints, mine, adam(mine))
    train(mine, optimizer, batches(ME)[:3])
    end, matrix = time.monotonic() + 1.5 * DEADLINE, torch.randn(200, 200)
    while ME == 0 and time.monotonic() < end:
        with torch.no_grad():
            mine(torch.randn(1000, 6))
            matrix = matrix @ matrix / 200
    train(mine, optimizer, batches(ME)[3:])
    train_for_all(reference, adam(reference), both())
    assert_equal(mine, reference)


def barrier(endpoints: Sequence[str]) -> None:
    """Whoever passes the barrier finds what the other did before it; three times."""
    mine = net()
    join(endpoints, mine, adam(mine))
    for number in range(3):
        if ME == number % 2:
            time.sleep(0.2)  # the other is at the barrier by then, or is not: both must work
        with open(f"arrived-{number}-{ME}", "w"):
            pass
        fleet.barrier_worker()
        assert os.path.exists(f"arrived-{number}-{1 - ME}")


def save(endpoints: Sequence[str]) -> None:
    """The first half of a job, saved."""
    mine = net()
    train(mine, join(endpoints, mine, adam(mine)), batches(ME)[:3])
    fleet.save("saved")


def resume(endpoints: Sequence[str]) -> None:
    """The second half, from the file, other initial values and settings notwithstanding: the whole
    job to the bit.
    """
    mine, reference = net(seed=50 + ME), net()
    optimizer = join(endpoints, mine, adam(mine, lr=0.5))
    assert fleet.load("saved") == 3
    train(mine, optimizer, batches(ME)[3:])
    whole = adam(reference)
    train_for_all(reference, whole, both())
    assert_equal(mine, reference)
    found, expected = optimizer.state_dict(), whole.state_dict()
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][index][key], value), (index, key)
    assert found["param_groups"][0]["lr"] == 0.01


def other_rate(endpoints: Sequence[str]) -> None:
    """Trainer 1 has another learning rate: it is told so, its model keeps its values; with the
    right one it takes part.
    """
    mine, reference = net(), net()
    if ME == 1:
        before = net(seed=9)
        other = copy.deepcopy(before)
        try:
            join(endpoints, other, adam(other, lr=0.02))
        except FingerprintMismatch as error:
            assert "group 0: lr: 0.02 (trainer 0 has 0.01)" in str(error), error
            assert_equal(other, before)
            fleet.finish()
        else:
            raise AssertionError("trainer 1 was let in")
    train(mine, join(endpoints, mine, adam(mine, lr=0.01)), batches(ME))
    train_for_all(reference, adam(reference), both())
    assert_equal(mine, reference)


def rate_moves_apart(endpoints: Sequence[str]) -> None:
    """In a sync job whose trainers' schedules differ both are told the group and the key."""
    mine = net()
    optimizer = join(endpoints, mine, adam(mine))
    train(mine, optimizer, batches(ME)[:2])
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + ME)
    try:
        train(mine, optimizer, batches(ME)[2:])
    except FingerprintMismatch as error:
        assert "'lr' of parameter group 0" in str(error) and "0.005" in str(error), error
        raise
    raise AssertionError("the step was taken")


def absent(endpoints: Sequence[str]) -> None:
    """A gradient that one trainer lacks counts as zero; one that all lack leaves the parameter and
    its step count alone.
    """
    mine, reference = net(), net()
    optimizer, plain = join(endpoints, mine, adam(mine)), adam(reference)
    for number, (x, y) in enumerate(batches(ME)):
        optimizer.zero_grad()
        F.cross_entropy(mine(x), y).backward()
        if ME == 1:
            mine[0].bias.grad = None
        if number % 2:
            mine[2].bias.grad = None
        optimizer.step()
    for number, pair in enumerate(both()):
        gradients = []
        for x, y in pair:
            reference.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            gradients.append(
                {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
            )
        for name, parameter in reference.named_parameters():
            parameter.grad = (gradients[0][name] + gradients[1][name]) * 0.5
        reference[0].bias.grad = gradients[0]["0.bias"] * 0.5
        if number % 2:
            reference[2].bias.grad = None
        plain.step()
    assert_equal(mine, reference)
    assert [int(state["step"]) for state in optimizer.state_dict()["state"].values()] == [
        6,
        6,
        6,
        3,
    ]


def apart(endpoints: Sequence[str]) -> None:
    """An async job: each trainer's steps count as they come, both learn, and the one who is done
    first leaves the other alone.
    """
    strategy = DistributedStrategy()
    strategy.a_sync = True
    mine, data = net(), [(x, (x[:, 0] > 0).long()) for x, _ in batches(ME, 150)]
    before = loss(mine, data)
    sgd = torch.optim.SGD(mine.parameters(), lr=0.05)
    train(mine, join(endpoints, mine, sgd, strategy=strategy), data[: 75 if ME else 150])
    fleet.finish()  # what is under way arrives
    assert loss(mine, data) < 0.8 * before


def hold(endpoints: Sequence[str]) -> None:
    """A job of one, that stays until the scene ``let_go``."""
    mine = net()
    train(mine, join(endpoints, mine, adam(mine), trainers=1), batches(0)[:2])


def let_go(endpoints: Sequence[str]) -> None:
    """Nobody has disturbed the job: it goes on where it was."""
    reference = net()
    job = current.present()
    assert job.optimizer is not None
    train(job.models[0], job.optimizer, batches(0)[2:])
    train(reference, adam(reference), batches(0))
    assert_equal(job.models[0], reference)


def second_job(endpoints: Sequence[str]) -> None:
    """A job for servers that have one: refused as busy, whether it is the same program or
    another.
    """
    for rate in (0.01, 0.02):
        mine = net()
        try:
            join(endpoints, mine, adam(mine, lr=rate), trainers=1)
        except Busy as error:
            assert any(endpoint in str(error) for endpoint in endpoints), error
            fleet.finish()
        else:
            raise AssertionError("the servers took a second job")


def alone(endpoints: Sequence[str]) -> None:
    """A job of one, whole."""
    mine, reference = net(), net()
    train(mine, join(endpoints, mine, adam(mine), trainers=1), batches(0))
    train(reference, adam(reference), batches(0))
    assert_equal(mine, reference)


SCENES: dict[str, Callable[[Sequence[str]], None]] = {
    scene.__name__: scene
    for scene in (
        *(
            together,
            overflow,
            start_values,
            same_start_values,
            early_finish,
            long_evaluation,
            barrier,
            save,
            resume,
            other_rate,
        ),
        *(rate_moves_apart, absent, apart, hold, let_go, second_job, alone),
    )
}


def fail(error: Exception) -> None:
    """What the end of a process would do after an exception."""
    job = current.end()
    if job is not None and job.optimizer is not None:
        job.optimizer.close(f"{type(error).__name__}: {error}")


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    for line in sys.stdin:
        scene, endpoints = line.split()
        try:
            SCENES[scene](endpoints.split(","))
            if scene != "hold":
                fleet.finish()
            print(f"played {scene}: ok", flush=True)
        except Exception as error:
            traceback.print_exc()
            fail(error)
            print(f"played {scene}: failed with {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
