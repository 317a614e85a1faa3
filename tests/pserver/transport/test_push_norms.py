"""How large a push is: of every dtype, of rows, and as it travels."""

from __future__ import annotations

import math

import pytest
import torch

from pserver.dense.compression import COMPRESSIONS, decode, encode, encoded_norm
from pserver.transport.arrays import MOST_ROWS, OutlierPush, PushNorm, described, l2_norm, listed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_that_of_the_values_in_64_bits(dtype: torch.dtype) -> None:
    """Also of values whose squares leave the range of their dtype."""
    torch.manual_seed(0)
    tensor = torch.randn(3000, 7).to(dtype)
    assert l2_norm(tensor) == pytest.approx(float(tensor.double().norm()), rel=1e-5)
    largest = torch.full((4,), torch.finfo(dtype).max / 8, dtype=dtype)
    assert l2_norm(largest) == pytest.approx(2 * float(largest[0]), rel=1e-2)
    assert l2_norm(torch.zeros(5, dtype=dtype)) == 0.0
    assert l2_norm(torch.empty(0, dtype=dtype)) == 0.0
    assert math.isnan(l2_norm(torch.tensor([1.0, float("nan")], dtype=dtype)))


@pytest.mark.parametrize("scheme", COMPRESSIONS)
@pytest.mark.parametrize("filled", [3, 5000])
def test_a_compressed_gradient_is_as_large_as_what_it_decodes_to(scheme: str, filled: int) -> None:
    """By every scheme, with few elements and with many."""
    torch.manual_seed(0)
    gradient = torch.zeros(5000)
    gradient[:filled] = torch.randn(filled) * torch.logspace(-3, 2, filled)
    parts = encode("w", gradient, scheme) if scheme else {"w": gradient}
    decoded = decode("w", parts, scheme, torch.empty(5000)) if scheme else gradient
    expected = float(decoded.double().norm())
    assert encoded_norm("w", parts, scheme) == pytest.approx(expected, rel=1e-5)


def test_more_rows_are_no_larger_push() -> None:
    """The root mean square over rows; the ids of the largest."""
    few = PushNorm.of_rows(torch.arange(10), torch.full((10, 4), 3.0))
    many = PushNorm.of_rows(torch.arange(10_000), torch.full((10_000, 4), 3.0))
    assert [few.norm, many.norm] == pytest.approx([6.0, 6.0])
    rows = torch.arange(20.0).unsqueeze(1)
    found = PushNorm.of_rows(torch.arange(20) * 10, rows)
    assert found.rows == tuple(range(190, 190 - 10 * MOST_ROWS, -10))
    assert PushNorm.of_rows(torch.empty(0, dtype=torch.int64), torch.empty(0, 4)) == PushNorm(0.0)
    assert found.scaled(0.5) == PushNorm(found.norm / 2, found.rows)


def test_what_is_said_of_outliers() -> None:
    """Trainer, step, variable, norm, history, rows; and that there are more."""
    emb = OutlierPush(1, 23, "emb", PushNorm(3e6, (42, 7)), 2.0)
    assert described([emb]) == (
        "step 23 of trainer 1 brings the norm 3e+06 of 'emb', 1.5e+06 times its history of 2 "
        "(rows 42, 7)"
    )
    others = [OutlierPush(1, 23, f"w{n}", PushNorm(1e3), 1.0) for n in range(4)]
    assert listed([emb, *others]).endswith("'w1', 1e+03 times its history of 1 and 2 more")
