"""How gradients travel between two trainers, by the switches of a strategy: the number, size,
dtype, order and groups of the collectives, recorded outside of the code under test.

The trainers are two processes, started once, which run a job on the digits for each case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import exchanges
from trainer import spawn

# processes that each test waits for: one pair for the whole file
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
Results = list[dict[str, Any]]  # by trainer, what each case has left
EACH = [10, 20480, 2048, 262144, 128, 262144, 2048, 131072]  # gradients, as backward has them
WHOLE = [sum(EACH[:6]), sum(EACH[6:])]  # 2.1 MB and, of the last ones, 0.5 MB
PAIRS = [sum(EACH[at : at + 2]) for at in range(0, 8, 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("exchanges")
    spawn(exchanges.keep, (str(path), list(exchanges.CASES)), nprocs=2, start_method="forkserver")
    return [torch.load(path / f"{rank}.pt", weights_only=True) for rank in range(2)]


def steps_of(results: Results, case: str) -> list[Any]:
    """The collectives of a step, which are the same in every step and on both trainers."""
    first: list[Any] = results[0][case]["steps"][0]
    for found in results:
        assert found[case]["steps"] == [first] * exchanges.STEPS
    return first


def sums(sizes: list[int], dtype: str = "float32", groups: int = 1) -> list[Any]:
    """All-reduces of so many elements, over groups in turn."""
    return [
        ("allreduce", size, dtype, [0, 1], number % groups) for number, size in enumerate(sizes)
    ]


@pytest.mark.observes(
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    "fuse_grad_size_in_num",
    "last_comm_group_size_MB",
)
def test_buckets_hold_what_the_strategy_says(results: Results) -> None:
    """One collective a bucket: by size, by number, and with the last ones apart; one collective a
    gradient without fusing.
    """
    assert steps_of(results, "none") == steps_of(results, "page size") == sums(WHOLE)
    small = [sum(EACH[:3]), *EACH[3:6], WHOLE[1]]
    assert steps_of(results, "size") == sums(small)
    assert steps_of(results, "last") == sums([sum(EACH[:4]), sum(EACH[4:])])
    number = [each for each in steps_of(results, "number") if each != "wait"]
    assert number == sums(PAIRS)
    assert steps_of(results, "each") == sums(EACH)


@pytest.mark.observes("fp16_allreduce")
def test_gradients_travel_as_float16(results: Results) -> None:
    """The sum over both trainers of half of each gradient, as float16, to the bit."""
    assert steps_of(results, "fp16") == sums(WHOLE, "float16")
    own, other = (found["fp16"]["alone"] for found in results)
    for arrived, one, two in zip(results[0]["fp16"]["first"], own, other, strict=True):
        assert torch.equal(arrived, ((one * 0.5).half() + (two * 0.5).half()).float())


@pytest.mark.observes("nccl_comm_num")
def test_buckets_take_the_groups_in_turn(results: Results) -> None:
    """Two groups of both trainers: buckets 0 and 2 in one, 1 and 3 in the other."""
    assert steps_of(results, "groups") == sums(PAIRS, groups=2)


@pytest.mark.observes("sync_nccl_allreduce")
def test_the_host_waits_right_away(results: Results) -> None:
    """For each sum before the next begins; without the switch at the end of backward."""
    begun = sums(PAIRS)

    assert steps_of(results, "number") == [*begun, *["wait"] * len(begun)]
    assert steps_of(results, "waits") == [each for one in begun for each in (one, "wait")]


@pytest.mark.observes("find_unused_parameters")
def test_a_parameter_may_be_left_out(results: Results) -> None:
    """Its six elements travel with the others as zeros, and it stays as it is."""
    assert steps_of(results, "unused") == sums([WHOLE[0] + 6, WHOLE[1]])
    torch.manual_seed(5)
    unused = exchanges.Net(unused=True).unused
    assert unused is not None
    for mine, kept in zip(results[0]["unused"]["values"][-2:], unused.parameters(), strict=True):
        assert torch.equal(mine, kept)


@pytest.mark.observes("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
@pytest.mark.parametrize("case", ["rows", "page rows", "two rows"])
def test_trainers_of_one_row_reduce_and_broadcast(results: Results, case: str) -> None:
    """Both are of one machine, or no more than asked: no sum between rows is left."""
    assert steps_of(results, case) == [
        (name, size, "float32", [0, 1], 0) for size in WHOLE for name in ("reduce", "broadcast")
    ]


def test_all_together(results: Results) -> None:
    """Rows, two groups, float16, at most four gradients at once, and waiting."""
    sizes = [sum(EACH[:4]), sum(EACH[4:6]), WHOLE[1]]

    assert [each for each in steps_of(results, "all") if each != "wait"] == [
        (name, size, "float16", [0, 1], number % 2)
        for number, size in enumerate(sizes)
        for name in ("reduce", "broadcast")
    ]


@pytest.mark.parametrize("case", exchanges.CASES)
def test_every_example_of_the_pages_trains(results: Results, case: str) -> None:
    """On the digits: both trainers have the same bits, those of the job without settings but for
    float16's rounding.
    """
    exact = "fp16_allreduce" not in exchanges.CASES[case]
    values = results[0][case]["values"]
    for mine, other in zip(values, results[1][case]["values"], strict=True):
        assert torch.equal(mine, other)
    for mine, plain in zip(values, results[0]["none"]["values"], strict=False):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0 if exact else 1e-4)
