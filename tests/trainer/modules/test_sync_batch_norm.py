"""sync_batch_norm: batch norm over all trainers' batches equals batch norm over their union."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pserver.errors import JobFailed
from tests.support import batch_norms
from tests.support.batch_norms import joint, net, strategy_of
from tests.support.collective_trainers import fine
from tests.support.eager_jobs import Servers
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once
from trainer import fleet, spawn
from trainer.modules.sync_batch_norm import Total, connect_batch_norms, synchronised
from transpiler import DistributedStrategy

Results = list[dict[str, Any]]
ON = strategy_of(sync_batch_norm=True)
SYNC = strategy_of(sync_batch_norm=True, a_sync=False)
MODULES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d, of sequences": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "cumulative": {"momentum": None},
    "without weights": {"affine": False},
    "without statistics": {"track_running_stats": False},
}


class Meeting:
    """Two threads that sum vectors, call by call."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._given: dict[int, Tensor] = {}

    def of(self, rank: int) -> Total:
        def total(vector: Tensor, seconds: float) -> Tensor:
            self._given[rank] = vector
            self._barrier.wait()
            found = self._given[0] + self._given[1]
            self._barrier.wait()
            return found

        return total


def both(act: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        running: list[Future[Any]] = [pool.submit(act, rank) for rank in range(2)]
        return [each.exception(30) or each.result() for each in running]


@pytest.mark.parametrize("sizes", [(4, 4), (6, 2), (1, 3), (0, 4)])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", MODULES)
def test_forward_backward_and_statistics_equal_those_of_the_joint_batch(
    kind: str, settings: str, sizes: tuple[int, int]
) -> None:
    """Batches of different sizes, one of a single sample and an empty one included, with a mean far
    from 0; over three forwards.
    """
    torch.manual_seed(1)
    make, extents = MODULES[kind]
    whole = make(3, **SETTINGS[settings])
    parts = [synchronised(copy.deepcopy(whole), ON) for _ in range(2)]
    meeting = Meeting()
    for rank, part in enumerate(parts):
        connect_batch_norms([part], meeting.of(rank), 2)
    for _ in range(3):
        x = torch.randn(sum(sizes), 3, *extents) * 2 + 5
        factors = torch.randn_like(x)
        inputs = [each.clone().requires_grad_() for each in x.split(list(sizes))]
        x.requires_grad_()

        def act(rank: int, inputs: Any = inputs, factors: Tensor = factors) -> Tensor:
            result: Tensor = parts[rank](inputs[rank])
            (result * factors.split(list(sizes))[rank]).sum().backward()
            return result

        results = fine(both(act))
        expected = whole(x)
        (expected * factors).sum().backward()
        close = {"rtol": 1e-6, "atol": 4e-6}
        torch.testing.assert_close(torch.cat(results), expected, **close)
        torch.testing.assert_close(torch.cat([each.grad for each in inputs]), x.grad, **close)
    for one, other, theirs in zip(*(each.parameters() for each in (*parts, whole)), strict=True):
        torch.testing.assert_close(one.grad + other.grad, theirs.grad, rtol=1e-6, atol=3e-5)
    for one, other, theirs in zip(*(each.buffers() for each in (*parts, whole)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, theirs, rtol=1e-6, atol=1e-6)


def test_a_module_stays_the_one_that_it_was_to_its_script() -> None:
    """Names, parameters, class, hooks; a bare one, one that two places share, and in eval() mode
    the same bits.
    """
    norm = nn.BatchNorm1d(3)
    seen: list[int] = []
    norm.register_forward_hook(lambda *_: seen.append(1))
    model = nn.Sequential(norm, nn.Linear(3, 3), norm)
    names, parameters = list(model.state_dict()), list(model.parameters())
    again = synchronised(model, ON)
    assert again is model and model[0] is model[2] and isinstance(model[0], nn.BatchNorm1d)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert synchronised(norm, ON).weight is norm.weight  # type: ignore[union-attr]
    x = torch.randn(4, 3)
    connect_batch_norms([model], lambda *_: 1 / 0, 2)  # type: ignore[arg-type,return-value]
    model.eval()
    expected = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert torch.equal(model[0](x), expected) and seen == [1]


def test_a_copy_and_a_file_have_no_other_trainers() -> None:
    """An average of the weights in train() mode needs nobody."""
    model = synchronised(net(0), ON)
    connect_batch_norms([model], lambda *_: 1 / 0, 2)  # type: ignore[arg-type,return-value]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.randn(4, 6)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, 6))


def test_under_autocast_it_takes_halves() -> None:
    """As torch's: the result has the input's dtype, the statistics 32 bits."""
    model = synchronised(nn.BatchNorm1d(3), ON)
    connect_batch_norms([model], lambda vector, _: vector * 2, 2)
    x = torch.randn(4, 3).bfloat16()

    assert model(x).dtype == torch.bfloat16 and model.running_mean.dtype == torch.float32


def test_one_value_in_all_raises_as_torch_does() -> None:
    """On every trainer."""
    parts, meeting = [synchronised(nn.BatchNorm1d(3), ON) for _ in range(2)], Meeting()
    for rank, part in enumerate(parts):
        connect_batch_norms([part], meeting.of(rank), 2)
    for error in both(lambda rank: parts[rank](torch.ones(1 - rank, 3))):
        assert isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def test_trainers_in_different_layers_are_told() -> None:
    """One calls the model once more: its sum meets another's, and both raise."""
    parts, meeting = [synchronised(net(0), ON) for _ in range(2)], Meeting()
    for rank, part in enumerate(parts):
        connect_batch_norms([part], meeting.of(rank), 2)

    def act(rank: int) -> None:
        result = parts[rank](torch.randn(4, 6))
        if rank:
            parts[rank](torch.randn(4, 6))
        else:
            result.sum().backward()

    errors = both(act)
    assert all(isinstance(each, JobFailed) for each in errors)
    assert "is in the backward of '1', and another one is in another batch norm" in str(errors[0])


# ---- refusals ----


class Own(nn.BatchNorm1d):
    """With a forward of its own."""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(Own(3)), "expected nn.BatchNorm1d, 2d or 3d, got '0', a Own"),
        (nn.Linear(2, 2), "expected an nn.BatchNorm1d, 2d or 3d in a registered model, got none"),
    ],
)
@pytest.mark.parametrize("collective", [True, False])
def test_a_model_without_such_a_module_is_refused(
    model: nn.Module, words: str, collective: bool
) -> None:
    """So is a class of the script's own, by name."""
    fleet.init(is_collective=collective, strategy=SYNC)
    with pytest.raises(ValueError, match=words):
        fleet.distributed_optimizer(
            torch.optim.SGD(fleet.distributed_model(model).parameters(), lr=0.1)
        )


@pytest.mark.parametrize(
    "configs", [{}, {"half_async": True}, {"k_steps": 4}, {"staleness": 2}], ids=str
)
def test_trainers_that_do_not_step_together_have_no_joint_batch(configs: dict[str, Any]) -> None:
    """In these modes fleet.init raises, and names what chose the mode."""
    strategy = strategy_of(sync_batch_norm=True, a_sync=True, a_sync_configs=configs)
    with pytest.raises(ValueError, match=r"strategy.sync_batch_norm: has no effect with .+ sync"):
        fleet.init(strategy=strategy)


def test_an_optimizers_strategy_comes_too_late() -> None:
    """And one that is async, beside a model that was made for sync."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(net(0))
    with pytest.raises(ValueError, match="give the strategy to fleet.init"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters()), strategy=ON)


# ---- trainers of a job ----


def alone(data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A single node on the joint batches."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    path = tmp_path_factory.mktemp("norms")
    spawn(batch_norms.keep, (str(path),), nprocs=2, start_method="forkserver")
    yield [torch.load(Path(path) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.processes
@pytest.mark.observes("sync_batch_norm")
def test_two_trainers_train_as_one_on_the_joint_batch(results: Results) -> None:
    """Running statistics included; with the mean gradients of DataParallel, without servers."""
    expected = alone(joint())
    for result in results:
        assert_close(result["trained"], expected)


@pytest.mark.processes
def test_one_trainer_may_evaluate_alone(results: Results) -> None:
    """In eval() mode, and the job goes on."""
    assert results[0]["evaluated"] and not results[1]["evaluated"]


@pytest.mark.processes
def test_a_forward_too_many_ends_in_an_error(results: Results) -> None:
    """Where the other trainer has gone on to backward, where it waits elsewhere, and where it has
    finished: no wait is endless.
    """
    assert "in another batch norm" in results[0]["in backward"]
    assert "trainer 0 has waited 1 s for a sum over all" in results[0]["in no batch norm"]
    assert "trainer 0 failed: TimedOut" in results[1]["in no batch norm"]
    assert "trainer 0 has left the job" in results[1]["after the end"]


@pytest.mark.processes
@pytest.mark.observes("sync_batch_norm")
def test_digits_are_learned_with_small_batches(results: Results) -> None:
    """Four samples a trainer: with the statistics of both the two have one model."""
    assert results[0]["digits"] == results[1]["digits"] > 0.8


MIXED: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "averaged by trainers": {"modes": {"0.*": "sync", "*": "collective"}},
    # each keeps its own, which are equal: trainer 0's would come late in the async lane
    "async beside": {"modes": {"0.*": "async", "*": "sync"}, "buffers": "own"},
}


@pytest.mark.observes("sync_batch_norm")
@pytest.mark.parametrize("kind", MIXED)
def test_trainers_of_servers_share_their_batches(servers: Servers, kind: str) -> None:
    """Running statistics are equal on both; where all parameters are updated together, everything
    equals the single node on the joint batch.
    """
    endpoints, expected = servers(2), alone(joint())
    models = [synchronised(net(0), ON) for _ in range(2)]  # here: a seed is of all threads

    def act(rank: int) -> dict[str, Tensor]:
        model = models[rank]
        mine = Trainer(endpoints, rank, 2, model, batch_norms.sgd, **MIXED[kind])
        for x, y in (batch_norms.half(rank, each) for each in joint()):
            mine.optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            mine.optimizer.step()
        found = {name: value.clone() for name, value in model.state_dict().items()}
        mine.job.finish()
        return found

    found = at_once(*(lambda rank=rank: act(rank) for rank in range(2)))
    if kind != "async beside":
        for each in found:
            assert_close(each, expected)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(found[0][name], found[1][name])


def test_a_mode_of_the_optimizers_strategy_is_checked_too(servers: Servers) -> None:
    """The model was made for trainers that step together."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    fleet.init(role, strategy=SYNC)
    model = fleet.distributed_model(net(0))
    with pytest.raises(ValueError, match="expected trainers that step together, .+ got mode async"):
        fleet.distributed_optimizer(
            torch.optim.SGD(model.parameters()), strategy=strategy_of(a_sync=True)
        )


def test_alone_it_is_plain_batch_norm() -> None:
    """To the bit: there is nobody to sum with."""
    strategy: DistributedStrategy = ON
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(net(0))
    optimizer = fleet.distributed_optimizer(batch_norms.sgd(model))
    for x, y in joint():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    expected = alone(joint())
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
