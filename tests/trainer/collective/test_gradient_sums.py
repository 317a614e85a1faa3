"""How gradients travel: the rules, without other trainers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trainer import DataParallel, fleet, init_parallel_env, new_group
from trainer.collective.all_reduce import as_sent
from trainer.collective.buckets import buckets
from trainer.collective.world import leave_parallel_env
from transpiler.plan.plan import row_or_all
from transpiler.strategy.exchange import GradientExchange

HALF = GradientExchange(dtype="float16")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    init_parallel_env()
    yield
    leave_parallel_env()


def test_only_gradients_of_more_than_16_bits_are_cast() -> None:
    """Others travel as they are, and all do without the switch."""
    for dtype in (torch.float32, torch.float64):
        assert as_sent(torch.ones(2, dtype=dtype), HALF).dtype == torch.float16
        assert as_sent(torch.ones(2, dtype=dtype), GradientExchange()).dtype == dtype
    for dtype in (torch.float16, torch.bfloat16):
        assert as_sent(torch.ones(2, dtype=dtype), HALF).dtype == dtype


def test_a_sum_in_float16_is_no_larger_than_its_parts_were() -> None:
    """Divided first, eight gradients of 60000 have the mean 60000; one of 70000 is infinite."""
    parts = [as_sent(torch.tensor([60000.0]) / 8, HALF) for _ in range(8)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part

    assert float(total) == pytest.approx(60000, rel=1e-3)
    assert torch.isinf(as_sent(torch.tensor([70000.0]), HALF)).all()


@pytest.mark.observes("fp16_allreduce")
def test_a_scaler_sees_what_overflows_between_trainers() -> None:
    """A gradient that is too large for float16 skips the step and lowers the scale; the next one is
    applied.
    """
    strategy = fleet.DistributedStrategy()
    strategy.fp16_allreduce = True
    fleet.init(is_collective=True, strategy=strategy)
    model = nn.Linear(1, 1, bias=False)
    fleet.distributed_model(model)
    before = model.weight.detach().clone()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    after = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        after.append(model.weight.detach().clone())

    assert torch.equal(after[0], before) and scaler.get_scale() == 2.0**15
    assert torch.equal(after[1], before - 0.5)
    fleet.finish()


@pytest.mark.parametrize(
    ("asked", "hosts", "expected"),
    [
        (0, ["a", "a"], 2),
        (1, ["a", "a", "a"], 3),
        (8, ["a", "b"], 2),
        (2, ["a", "a", "a", "a"], 2),
        (0, ["a", "a", "b", "b"], 2),
        (0, ["a"], 1),
    ],
)
def test_the_trainers_of_a_row(asked: int, hosts: list[str], expected: int) -> None:
    """As many as asked, or those of a machine; all where they are no more than that."""
    assert row_or_all(asked, hosts) == expected


def test_trainers_that_make_no_rows_are_refused() -> None:
    """Three on one machine and one on another; three of four in a row."""
    with pytest.raises(ValueError, match="the same number of trainers in a row on every host"):
        row_or_all(0, ["a", "a", "a", "b"])
    with pytest.raises(ValueError, match="expected a divisor"):
        row_or_all(3, ["a"] * 4)


def test_buckets_have_a_most_of_gradients() -> None:
    """Besides their bytes, which the last bucket has its own bound of."""
    tensors = [torch.empty(rows, 1024, device="meta") for rows in (64, 64, 64, 256, 8, 8)]
    dense = [False] * len(tensors)

    assert buckets(tensors, dense, 32, 32, 2)[0] == [[5, 4], [3, 2], [1, 0]]
    assert buckets(tensors, dense, 1, 32, 2)[0] == [[5, 4], [3], [2], [1, 0]]
    assert buckets(tensors, dense, 32, 0.3, 3)[0] == [[5, 4, 3], [2, 1], [0]]


def test_sparse_gradients_and_groups_are_refused_by_name() -> None:
    """Where gradients are cast or in rows they are dense; an exchange is between all trainers."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="fp16_allreduce: expected dense gradients.*'0.weight'"):
        DataParallel(model, exchange=HALF)
    with pytest.raises(ValueError, match="use_hierarchical_allreduce: expected dense"):
        DataParallel(model, exchange=GradientExchange(row=0))
    with pytest.raises(ValueError, match="expected no group beside it"):
        DataParallel(nn.Linear(2, 2), group=new_group([0]), exchange=HALF)
