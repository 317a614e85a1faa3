"""The mean of trainers' gradients."""

from __future__ import annotations

import pytest
import torch

from pserver.dense.update import CHUNK, mean

HALVES = [torch.bfloat16, torch.float16]


def drawn(trainers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Longer than a chunk, with a part that all have in common, as gradients do."""
    source = torch.Generator().manual_seed(trainers)
    common = torch.randn(CHUNK + 7, generator=source)
    return [(common + torch.randn(CHUNK + 7, generator=source)).to(dtype) for _ in range(trainers)]


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("trainers", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_summed_in_float32_and_rounded_once(dtype: torch.dtype, trainers: int) -> None:
    """Nearer to the exact mean than a sum in their own dtype from three trainers on; with two, the
    same bits.
    """
    gradients = drawn(trainers, dtype)
    exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
    in_float = torch.stack([gradient.float() for gradient in gradients]).sum(0) * (1 / trainers)
    in_own = gradients[0].clone()
    for gradient in gradients[1:]:
        in_own.add_(gradient)
    in_own.mul_(1.0 / trainers)

    found = mean(gradients, trainers)

    assert found is gradients[0] and found.dtype == dtype
    assert error(found, exact) <= error(in_float.to(dtype), exact) * 1.001
    if trainers == 2:
        assert torch.equal(found, in_own)
    else:
        assert error(found, exact) < 0.75 * error(in_own, exact)


def test_a_sum_that_overflows_has_a_mean() -> None:
    """Of float16: 60000 and 60000 are 120000, which it cannot hold, and 60000 on average."""
    gradients = [torch.full((3,), 6e4, dtype=torch.float16) for _ in range(2)]
    assert mean(gradients, 2).tolist() == [6e4 // 32 * 32] * 3


def test_other_dtypes_are_summed_in_their_own() -> None:
    """In the order of the trainers, to the bit."""
    gradients = drawn(3, torch.float32)
    expected = ((gradients[0] + gradients[1]) + gradients[2]) * (1 / 3)
    assert torch.equal(mean(gradients, 3), expected)
