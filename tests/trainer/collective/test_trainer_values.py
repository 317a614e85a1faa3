"""Sums, lists and objects of all trainers: three of one job with servers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.metric_trainers import TRAINERS, AllSay, three_trainers
from tests.support.table_trainers import Servers
from trainer import fleet
from trainer.collective.values import KINDS, TrainerValues

FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0, dtype=values.dtype),
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "prod": lambda values: values.prod(0, dtype=values.dtype),
}


@pytest.fixture(scope="module")
def all_say(servers: Servers) -> Iterator[AllSay]:
    with three_trainers(servers) as say:
        yield say


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8],
)
def test_a_reduction_is_that_of_all_values(all_say: AllSay, dtype: torch.dtype, op: str) -> None:
    """Equal on all trainers to the bit, and equal to the same reduction of the stacked values."""
    if op == "mean" and not dtype.is_floating_point:
        with pytest.raises(TypeError, match="has sum, max, min, prod, got op 'mean'"):
            all_say(lambda values: values.all_reduce(torch.ones(2, dtype=dtype), op))
        return
    generator = torch.Generator().manual_seed(5)
    stacked = torch.rand(TRAINERS, 5, 3, generator=generator).mul(5).to(dtype)
    found = all_say(lambda values: values.all_reduce(stacked[values.rank].t(), op))
    wide = stacked.double() if dtype.is_floating_point else stacked

    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].dtype == dtype and found[0].shape == (3, 5)
    torch.testing.assert_close(found[0].t(), FOLDS[op](wide).to(dtype))


def test_integers_are_exact(all_say: AllSay) -> None:
    """Beyond what a float64 holds; what the dtype cannot hold is said, not wrapped."""
    big = 2**61 + 1
    found = all_say(lambda values: values.all_reduce(torch.tensor(big)))
    assert [int(each) for each in found] == [3 * big] * 3

    with pytest.raises(OverflowError, match="a sum that int8 holds, got 300"):
        all_say(lambda values: values.all_reduce(torch.tensor([100, 1], dtype=torch.int8)))


def test_a_nan_of_one_is_a_nan(all_say: AllSay) -> None:
    """Where it is, in every reduction; any and all of booleans are max and min."""

    def say(values: TrainerValues) -> list[Tensor]:
        own = torch.tensor([1.0, torch.nan if values.rank == 1 else 2.0])
        flag = torch.tensor([True, values.rank == 1])
        return [values.all_reduce(own, op) for op in KINDS] + [
            values.all_reduce(flag, "max"),
            values.all_reduce(flag, "min"),
        ]

    for *reduced, anywhere, everywhere in all_say(say):
        assert [each.isnan().tolist() for each in reduced] == [[False, True]] * len(KINDS)
        assert anywhere.tolist() == [True, True] and everywhere.tolist() == [True, False]


def test_lists_have_parts_of_different_lengths(all_say: AllSay) -> None:
    """A trainer without a sample gives its part, too; what was given stays."""
    parts = [torch.arange(3.0).bfloat16(), torch.zeros(0).bfloat16(), torch.ones(5).bfloat16()]
    for found in all_say(lambda values: values.all_gather(parts[values.rank])):
        assert all(torch.equal(one, two) for one, two in zip(found, parts, strict=True))
        found[0].zero_()
    assert parts[0].tolist() == [0, 1, 2]
    scalars = all_say(lambda values: values.all_gather(torch.tensor(values.rank == 2)))
    assert [[bool(each) for each in found] for found in scalars] == [[False, False, True]] * 3


def test_objects_of_one_and_of_all(all_say: AllSay) -> None:
    """Equal everywhere; their own trainer keeps the object itself."""
    told: list[dict[str, Any]] = [
        {"rank": rank, "values": (rank * 0.1, torch.full((2,), rank))} for rank in range(TRAINERS)
    ]
    found = all_say(lambda values: values.broadcast_object(told[values.rank], 1))
    assert found[1] is told[1]
    assert all(repr(each) == repr(told[1]) for each in found)
    lists = all_say(lambda values: values.all_gather_object(np.full(values.rank, 7)))
    assert [[len(each) for each in found] for found in lists] == [[0, 1, 2]] * 3


def test_different_calls_are_told_apart(all_say: AllSay) -> None:
    """Shapes, dtypes, ops and calls: every trainer hears which trainer makes which; the next call
    is as good as any.
    """

    def differ(act: Callable[[TrainerValues], Any]) -> str:
        def say(values: TrainerValues) -> str:
            with pytest.raises(ValueError) as raised:
                act(values)
            return str(raised.value)

        found = all_say(say)
        assert len(set(found)) == 1
        return str(found[0])

    said = differ(lambda values: values.all_reduce(torch.zeros(2 + (values.rank == 2), 4)))
    assert said == (
        "expected the same call on all 3 trainers, got trainer 0: all_reduce(float32 [2, 4], "
        "'sum'); trainer 2: all_reduce(float32 [3, 4], 'sum')"
    )
    said = differ(lambda v: v.all_reduce(torch.zeros(2), "sum" if v.rank else "max"))
    assert "trainer 0: all_reduce(float32 [2], 'max'); trainer 1" in said
    said = differ(lambda v: v.all_gather(torch.zeros(2, 3 + v.rank)))
    assert "trainer 1: all_gather(float32 [2, 4])" in said
    said = differ(
        lambda v: (
            v.broadcast_object(1) if v.rank else v.all_reduce(torch.zeros(1, dtype=torch.int8))
        )
    )
    assert "got trainer 0: all_reduce(int8 [1], 'sum'); trainer 1: broadcast_object(src=0)" in said
    assert all_say(lambda values: float(values.all_reduce(torch.ones(())))) == [3.0] * 3


def test_alone_values_are_ones_own() -> None:
    """The same calls, and the same errors; results are copies."""
    fleet.init()
    value = torch.tensor([1.0, 2.0])
    total, (gathered,) = fleet.all_reduce(value, "mean"), fleet.all_gather(value)

    assert torch.equal(total, value) and torch.equal(gathered, value)
    total.zero_(), gathered.zero_()
    assert value.tolist() == [1.0, 2.0]
    assert fleet.broadcast_object({"a": 1}) == {"a": 1}
    assert fleet.all_gather_object([1]) == [[1]]
    with pytest.raises(ValueError, match="src: expected a trainer, 0 to 0, got 1"):
        fleet.broadcast_object(1, src=1)
    with pytest.raises(ValueError, match="expected one of sum, mean, max, min, prod, got 'avg'"):
        fleet.all_reduce(value, "avg")
    with pytest.raises(TypeError, match="all_reduce: expected a tensor, got float"):
        fleet.all_reduce(0.5)  # type: ignore[arg-type]


def test_before_the_servers_are_joined_the_call_says_so() -> None:
    """A sum over one trainer would be wrong without a word."""
    role = fleet.UserDefinedRoleMaker(1, worker_num=2, server_endpoints=["127.0.0.1:1"])
    fleet.init(role)
    with pytest.raises(RuntimeError, match="call fleet.distributed_optimizer first"):
        fleet.all_reduce(torch.ones(1))
