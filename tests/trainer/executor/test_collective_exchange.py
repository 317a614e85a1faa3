"""Programs without servers whose gradients travel as a strategy says: the collectives of their
runs, recorded outside of the code under test, and their values.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.collective_trainers import (
    GRAD,
    NCCL2,
    Trainer,
    batches,
    fine,
    joined,
    ports,
    together,
)
from tests.support.collectives import strategy_of
from tests.support.exchanges import of_one, recorded_backends

STEPS = 3
SIZES = [3, 24, 8, 64, 8, 48]  # gradients, in the order in which they leave


def trained(
    trainers: int, settings: dict[str, Any], **switches: Any
) -> tuple[list[Any], list[list[torch.Tensor]]]:
    """What was recorded of such a job's steps, and each trainer's parameters."""
    data, endpoints = batches(trainers, STEPS), ports(trainers)
    strategy = strategy_of(**switches)
    team = [Trainer(endpoints, rank, settings, strategy=strategy) for rank in range(trainers)]
    parallel = settings["mode"] == "nccl2"

    def play(rank: int) -> list[torch.Tensor]:
        place = (trainers, rank) if parallel else None
        return team[rank].train([row[rank] for row in data], place)

    with recorded_backends() as found:
        values = fine(together(trainers, play))
    return found, values


def sums(sizes: list[int], dtype: str = "float32", rings: int = 1) -> list[Any]:
    """The all-reduces of all steps, over rings in turn."""
    step = [("allreduce", size, dtype, 2, at % rings) for at, size in enumerate(sizes)]
    return step * STEPS


@pytest.mark.observes("fuse_all_reduce_ops", "fuse_grad_size_in_num", "nccl_comm_num")
@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, sums([sum(SIZES)])),
        ({"fuse_all_reduce_ops": False}, sums(SIZES)),
        (
            {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2},
            sums([27, 72, 56], rings=2),
        ),
    ],
)
def test_the_sums_of_a_run(switches: dict[str, Any], expected: list[Any]) -> None:
    """So many, of this size, over these rings; the values are those of a single node."""
    found, values = trained(2, GRAD, **switches)

    assert of_one(found) == expected
    alone = Trainer([], 0, {}).train(joined(batches(2, STEPS)))
    for ours, other, theirs in zip(*values, alone, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.observes("fp16_allreduce")
@pytest.mark.parametrize("settings", [GRAD, NCCL2])
def test_gradients_travel_as_float16(settings: dict[str, Any]) -> None:
    """Half the bytes; the same bits on both trainers, those of a single node but for rounding."""
    found, values = trained(2, settings, fp16_allreduce=True)

    assert of_one(found) == sums([sum(SIZES)], "float16")
    alone = Trainer([], 0, {}).train(joined(batches(2, STEPS)))
    for ours, other, theirs in zip(*values, alone, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


@pytest.mark.observes("sync_nccl_allreduce")
def test_each_sum_is_waited_for_before_the_next() -> None:
    """In backward, not at its end."""
    found, _ = trained(2, GRAD, sync_nccl_allreduce=True, fuse_grad_size_in_num=3)
    thread = next(at for at, each in found if each != "wait")
    mine = ["wait" if each == "wait" else "sum" for at, each in found if at == thread]
    begun = [at for at, each in enumerate(mine) if each == "sum"]

    assert len(begun) == 2 * STEPS and all(mine[at + 1] == "wait" for at in begun)


@pytest.mark.observes("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
def test_four_trainers_in_rows_of_two() -> None:
    """Each sum is reduced in both rows, added between their first trainers, and broadcast."""
    rows = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
    found, values = trained(4, GRAD, **rows)

    assert Counter(each[:4] for _, each in found if each != "wait") == {
        ("reduce", sum(SIZES), "float32", 2): 4 * STEPS,
        ("allreduce", sum(SIZES), "float32", 2): 2 * STEPS,
        ("broadcast", sum(SIZES), "float32", 2): 4 * STEPS,
    }
    assert all(torch.equal(mine, other) for mine, other in zip(values[0], values[3], strict=True))
