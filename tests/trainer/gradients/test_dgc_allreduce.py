"""Deep gradient compression among trainers without servers.

Two trainers are two processes, started once: ``dgc_jobs.py`` has what they do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.dgc_jobs import KEPT, batches, net, on_ranks, reference, sgd, strategy_of, train
from trainer import fleet, spawn

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.5},
    "nesterov": {"nesterov": True},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("dgc")
    spawn(on_ranks, (str(path),), nprocs=2, start_method="forkserver")
    return [torch.load(path / f"{rank}.pt", weights_only=True) for rank in range(2)]


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.processes
@pytest.mark.observes(
    "dgc", "dgc_configs.rampup_begin_step", "dgc_configs.rampup_step", "dgc_configs.sparsity"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_twenty_steps_in_all_reduce_equal_the_paper(
    results: list[dict[str, Any]], name: str
) -> None:
    """Equal to the same reference as towards servers, the same on both to the bit; each gathers the
    exact number of elements from the first step of the ramp on, and small tensors never.
    """
    expected = reference([batches(0), batches(1)], **OPTIONS[name])

    for found in results:
        close(found[name]["parameters"], expected)
        assert found[name]["counts"] == KEPT[3:]
    one, other = (found[name]["parameters"] for found in results)
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.processes
def test_an_overflow_on_one_trainer_is_a_step_of_none(results: list[dict[str, Any]]) -> None:
    """The other's velocity and residual are those before it."""
    data = [batches(number, 21) for number in range(2)]
    expected = reference([[*own[:6], *own[7:]] for own in data])

    for found in results:
        close(found["overflow"]["parameters"], expected)


def test_one_trainer_without_servers_trains_by_the_same_steps() -> None:
    """In a world of one."""
    fleet.init(is_collective=True, strategy=strategy_of())
    model = fleet.distributed_model(net())
    train(model, fleet.distributed_optimizer(sgd(model)), batches(0))
    fleet.finish()

    close(dict(model.state_dict()), reference([batches(0)]))


def test_buckets_of_a_backward_are_refused_beside_it() -> None:
    """Nothing leaves in a backward, so that what says how has no effect."""
    strategy = strategy_of()
    strategy.fuse_grad_size_in_MB = 8
    with pytest.raises(ValueError, match="fuse_grad_size_in_MB: excludes strategy.dgc, because"):
        fleet.init(is_collective=True, strategy=strategy)
