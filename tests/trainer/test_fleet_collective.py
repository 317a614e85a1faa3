"""fleet without servers, in a world of one: the same calls, the model itself, and what has no
effect raises.

What several trainers do with it is in ``test_data_parallel.py`` and
``tests/cluster/test_collective.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import ranks
from trainer import DistributedEmbedding, fleet
from trainer.samplers.lockstep_batches import LockstepBatches
from transpiler import ClipGradByGlobalNorm, DistributedStrategy

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
devices = ["cpu", pytest.param("cuda:0", marks=cuda)]


def joined(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    fleet.init(is_collective=True)
    assert fleet.distributed_model(model) is model
    return fleet.distributed_optimizer(optimizer, **options)


def train(model: nn.Module, optimizer: Any, data: Any) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    for x, y in data:
        F.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.mark.parametrize("device", devices)
def test_alone_it_trains_as_plain_torch(device: str) -> None:
    """Clip and schedule included; on a GPU too, where a world of one proves streams, not
    communication.
    """
    model = ranks.net(2).to(device)
    reference = copy.deepcopy(model)
    optimizer = joined(
        model, torch.optim.Adam(model.parameters(), lr=0.01), grad_clip=ClipGradByGlobalNorm(0.1)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    theirs = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for x, y in fleet.shard(ranks.batches(6)):
        train(model, optimizer, [(x, y)])
        scheduler.step()
        F.mse_loss(reference(x.to(device)), y.to(device)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        theirs.step()

    for name, value in model.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6), name
    assert fleet.metrics() == {"steps": 6.0} and fleet.worker_num() == 1 and fleet.is_first_worker()
    assert fleet.transport() == ("gloo" if device == "cpu" else "nccl")


def test_a_mixed_precision_step_that_overflows_is_skipped() -> None:
    """GradScaler works with the optimizer that is returned: a gradient that is not finite changes
    nothing.
    """
    model = nn.Linear(2, 1)
    optimizer = joined(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert (
        equal(dict(model.state_dict()), dict(before))
        and scaler.get_scale() == 2.0
        and fleet.metrics() == {"steps": 0.0}
    )


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    """An average of the weights has a forward and a backward of its own; after finish() the model
    has, too.
    """
    model = ranks.plain_net(0)
    optimizer = joined(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = copy.deepcopy(model)
    x, y = ranks.batches(1)[0]
    train(model, optimizer, [(x, y)])
    average(x).sum().backward()
    train(model, optimizer, [(x, y)])
    fleet.finish()
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())

    assert average[0].weight.grad is not None and not hooks
    model(x).sum().backward()


def test_a_model_without_trainable_parameters_takes_part() -> None:
    """A frozen teacher beside the student needs no gradient to be registered."""
    teacher, student = nn.Linear(6, 4).requires_grad_(False), ranks.plain_net(1)
    fleet.init(is_collective=True)
    fleet.distributed_model(teacher)
    fleet.distributed_model(student)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(student.parameters(), lr=0.1))
    before = student[0].weight.clone()
    train(student, optimizer, [(x, teacher(x)) for x, _ in ranks.batches(1)])

    assert not torch.equal(student[0].weight, before)


def test_a_strategy_sets_the_buckets_and_unused_parameters() -> None:
    """fuse_grad_size_in_MB, last_comm_group_size_MB and find_unused_parameters are DataParallel's
    arguments.
    """
    strategy = DistributedStrategy()
    strategy.find_unused_parameters = True
    strategy.fuse_grad_size_in_MB = 1
    strategy.last_comm_group_size_MB = 0.25
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    fleet.init(is_collective=True, strategy=strategy)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, [(torch.ones(1, 2), torch.zeros(1, 2))] * 3)

    assert fleet.metrics() == {"steps": 3.0}


def changed(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (changed(qat=True), "strategy.qat: no job reads it in this version"),
        (
            changed(a_sync_configs={"k_steps": 4}),
            "strategy.a_sync_configs.k_steps: acts only in a job with parameter servers",
        ),
    ],
)
def test_a_switch_without_effect_raises_and_names_itself(
    strategy: DistributedStrategy, words: str
) -> None:
    """In init, and where the strategy is given later."""
    with pytest.raises(ValueError, match=words):
        fleet.init(is_collective=True, strategy=strategy)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=words):
        joined(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)


def elsewhere() -> None:
    joined(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def compressed() -> None:
    model = nn.Linear(2, 2)
    joined(model, torch.optim.SGD(model.parameters(), lr=0.1), compression={"*": "int8"})


def embedded() -> None:
    model = nn.Sequential(DistributedEmbedding(4, num_embeddings=10), nn.Linear(4, 2))
    joined(model, torch.optim.SGD(model.parameters(), lr=0.1))


def among_servers() -> None:
    fleet.init(
        fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=["a:1"]), is_collective=True
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (elsewhere, "is in no registered model"),
        (compressed, "compression: acts only in a job with parameter servers"),
        (embedded, "DistributedEmbedding: expected parameter servers"),
        (
            among_servers,
            "is_collective=True: expected no servers, got the role TRAINER with PSERVER_ENDPOINTS "
            "a:1",
        ),
    ],
)
def test_what_a_job_without_servers_cannot_do_is_refused(
    call: Callable[[], None], words: str
) -> None:
    """Each is named."""
    with pytest.raises(ValueError, match=words):
        call()


def test_it_saves_and_goes_on_as_with_servers(tmp_path: Path) -> None:
    """Parameters, buffers, the optimizer's state and the step; then to the bit as without the
    break.
    """
    reference = ranks.net(3)
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    train(reference, plain, ranks.batches(6))
    first, second = ranks.net(3), ranks.net(4)
    train(first, joined(first, torch.optim.Adam(first.parameters(), lr=0.01)), ranks.batches(6)[:3])
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()
    optimizer = joined(second, torch.optim.Adam(second.parameters(), lr=0.01))

    assert fleet.load(str(tmp_path / "saved")) == 3
    assert equal(train(second, optimizer, ranks.batches(6)[3:]), dict(reference.state_dict()))


def test_batches_have_the_length_of_this_trainers_part() -> None:
    """A progress display may ask for it; what has none says so."""
    assert len(LockstepBatches([1, 2, 3], 2, 0)) == 3
    with pytest.raises(TypeError):
        len(LockstepBatches(iter([1]), 2, 0))


def test_an_evaluation_needs_no_other_trainer() -> None:
    """A pass under ``no_grad`` goes to the end of this trainer's own batches."""
    with torch.no_grad():
        assert list(LockstepBatches([1, 2, 3], 2, 0)) == [1, 2, 3]
