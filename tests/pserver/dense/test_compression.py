"""Compressed gradients: sizes, errors, and that nothing is lost in the long run."""

from __future__ import annotations

import pytest
import torch

from pserver.dense.compression import (
    BLOCK,
    COMPRESSIONS,
    INDICES,
    VALUES,
    Compressor,
    decode,
    encode,
    layout,
    selected_layout,
)
from pserver.errors import CorruptFrame

LOSSY = [scheme for scheme in COMPRESSIONS if scheme not in ("", "sparse")]


@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (BLOCK,), (BLOCK + 1,), (7, 1000)])
@pytest.mark.parametrize("scheme", LOSSY)
def test_what_travels_has_the_layout_and_comes_back_within_rounding(
    scheme: str, shape: tuple[int, ...]
) -> None:
    """Every shape, the empty and the scalar ones too."""
    torch.manual_seed(0)
    gradient = torch.randn(shape)

    parts = encode("w", gradient, scheme)
    back = decode("w", parts, scheme, torch.empty_like(gradient))

    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == layout(
        "w", gradient, scheme
    )
    # of the largest element of a block for int8
    bound = {"bfloat16": 2**-8, "float16": 2**-10, "int8": 4.5 / 254}[scheme]
    assert not back.numel() or (back - gradient).abs().max() <= bound * max(
        1.0, float(gradient.abs().max())
    )


def test_int8_takes_a_quarter_of_the_bytes() -> None:
    """And a scale for each block."""
    gradient = torch.randn(100 * BLOCK)

    assert (
        sum(part.nbytes for part in encode("w", gradient, "int8").values())
        == gradient.nbytes // 4 + 100 * 4
    )


@pytest.mark.parametrize("scheme", LOSSY)
def test_error_feedback_loses_nothing_in_the_long_run(scheme: str) -> None:
    """The sum of what arrived stays within one rounding error of the sum of what was sent, however
    many steps.
    """
    torch.manual_seed(0)
    compressor, sent, arrived = Compressor(), torch.zeros(500), torch.zeros(500)
    for _ in range(300):
        gradient = torch.randn(500) * 0.01 + 0.001
        sent += gradient
        arrived += decode("w", compressor.encode("w", gradient, scheme), scheme, torch.empty(500))
        compressor.end(sent=True)

    assert (sent - arrived).abs().max() < 0.001


@pytest.mark.parametrize("scheme", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_become_finite(scheme: str, bad: float) -> None:
    """A diverging run is seen to diverge, and the trainer keeps no poison for later steps."""
    compressor = Compressor()
    gradient = torch.ones(10)
    gradient[3] = bad

    back = decode("w", compressor.encode("w", gradient, scheme), scheme, torch.empty(10))
    compressor.end(sent=True)
    later = decode("w", compressor.encode("w", torch.ones(10), scheme), scheme, torch.empty(10))

    assert not back.isfinite().all()
    assert later.isfinite().all()


@pytest.mark.parametrize("scheme", LOSSY)
def test_a_withdrawn_step_leaves_no_error_behind(scheme: str) -> None:
    """The same gradient is encoded alike once more."""
    torch.manual_seed(0)
    compressor = Compressor()
    for gradient in torch.randn(3, 50):
        first = compressor.encode("w", gradient, scheme)
        compressor.end(sent=False)
        again = compressor.encode("w", gradient, scheme)
        compressor.end(sent=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_zeros_stay_zeros() -> None:
    """A block without a largest element divides by nothing."""
    assert torch.equal(
        decode("w", encode("w", torch.zeros(5), "int8"), "int8", torch.ones(5)), torch.zeros(5)
    )


# ---- sparse ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (2,), (3,), (7, 1000)])
def test_sparse_gradients_come_back_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """However many elements are zero; never in more bytes than the gradient itself."""
    generator = torch.Generator().manual_seed(0)
    for zeros in (0.0, 0.3, 0.49, 0.51, 0.9, 0.999, 1.0):
        gradient = torch.randn(shape, generator=generator, dtype=dtype)
        gradient[torch.rand(shape, generator=generator) < zeros] = 0.0
        parts = Compressor().encode("w", gradient, "sparse")

        assert torch.equal(decode("w", parts, "sparse", torch.ones(shape, dtype=dtype)), gradient)
        assert sum(part.nbytes for part in parts.values()) <= gradient.nbytes
        for name, (kind, most) in selected_layout("w", gradient, "sparse").items():
            assert name not in parts or (parts[name].dtype, len(parts[name]) <= most) == (
                kind,
                True,
            )


def test_sparse_gradients_take_eight_bytes_an_element() -> None:
    """Of float32: 2 (1 - sparsity) of the whole gradient's bytes."""
    gradient = torch.zeros(100, 1000)
    gradient.view(-1)[::1000] = float("nan")

    parts = encode("w", gradient, "sparse")

    assert parts.keys() == {"w" + INDICES, "w" + VALUES}
    assert sum(part.nbytes for part in parts.values()) == 8 * 100 == gradient.nbytes * 2 // 1000


@pytest.mark.parametrize(
    ("indices", "values"),
    [([-1], 1), ([9], 1), ([2, 2], 2), ([3, 1], 2), ([0, -(2**31)], 2), ([2**31 - 1], 1), ([1], 2)],
)
def test_sparse_gradients_with_wrong_positions_are_refused(indices: list[int], values: int) -> None:
    """Outside the slice, twice, out of order, of another number: nothing is written."""
    out = torch.ones(9)
    parts = {
        "w" + INDICES: torch.tensor(indices, dtype=torch.int32),
        "w" + VALUES: torch.ones(values),
    }

    with pytest.raises(CorruptFrame, match="gradient of 'w': expected"):
        decode("w", parts, "sparse", out)
    assert torch.equal(out, torch.ones(9))
