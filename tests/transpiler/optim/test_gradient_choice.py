"""Deep gradient compression, alone: the ramp, the choice of elements, and what is kept."""

from __future__ import annotations

import pytest
import torch

from transpiler.optim.dgc import Ramp, compress


def test_each_sparsity_holds_for_equally_many_steps() -> None:
    """As the strategy's page says: five of them and 100 steps, 20 each; then the last one."""
    ramp = Ramp(7, 100, (0.75, 0.9375, 0.984375, 0.996, 0.999))

    stages = [ramp.stage(step) for step in range(200)]

    assert stages[:7] == [None] * 7
    assert [stages[7 + 20 * i : 27 + 20 * i] for i in range(5)] == [[s] * 20 for s in ramp.sparsity]
    assert set(stages[107:]) == {0.999}


def test_more_sparsities_than_steps_leave_some_out() -> None:
    """The ramp still ends where it should."""
    assert [Ramp(0, 2, (0.5, 0.6, 0.7, 0.8)).stage(step) for step in range(4)] == [
        0.5,
        0.7,
        0.8,
        0.8,
    ]


@pytest.mark.parametrize(
    ("sparsity", "elements", "kept"),
    [
        (0.9, 1000, 100),
        (0.999, 1_000_000, 1000),
        (0.999, 16384, 16),
        (0.75, 16385, 4096),
        (0.0, 20, 20),
        (0.99999, 16384, 1),
    ],
)
def test_the_number_of_elements_is_the_written_one(
    sparsity: float, elements: int, kept: int
) -> None:
    """The whole part of (1 - sparsity) n, at least 1; not of what floats make of it."""
    assert Ramp(0, 1, (sparsity,)).sent_count(elements, 5) == kept


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
def test_twenty_steps_equal_the_paper(nesterov: bool) -> None:
    """Momentum correction, masking and the residual, written out; with the exact number in each
    step.
    """
    generator = torch.Generator().manual_seed(0)
    ramp = Ramp(2, 6, (0.5, 0.9, 0.99))
    velocity, residual = torch.zeros(2, 20, 50, dtype=torch.float64)
    u, v = torch.zeros(2, 1000, dtype=torch.float64)
    for step in range(20):
        gradient = torch.randn(20, 50, generator=generator, dtype=torch.float64)
        kept = ramp.sent_count(1000, step)
        made = compress(gradient, velocity, residual, kept, 0.9, nesterov)
        velocity, residual = made.velocity, made.residual

        u = 0.9 * u + gradient.flatten()
        moved = gradient.flatten() + 0.9 * u if nesterov else u.clone()
        if kept is None:
            sent = moved
        else:
            v = v + moved
            chosen = v.abs().argsort(descending=True)[:kept]
            sent = torch.zeros_like(v)
            sent[chosen] = v[chosen]
            u[chosen], v[chosen] = 0.0, 0.0
            assert made.dense().count_nonzero() == kept == len(made.values)
        for mine, theirs in ((made.dense(), sent), (velocity, u), (residual, v)):
            torch.testing.assert_close(mine.flatten(), theirs, rtol=0, atol=1e-12)


def test_nothing_is_lost() -> None:
    """Without momentum, what was sent and what waits are all gradients."""
    generator = torch.Generator().manual_seed(0)
    velocity, residual, total, sent = (torch.zeros(500) for _ in range(4))
    for _ in range(50):
        gradient = torch.randn(500, generator=generator)
        total += gradient
        made = compress(gradient, velocity, residual, 5, momentum=0.0)
        velocity, residual = made.velocity, made.residual
        sent += made.dense()

    torch.testing.assert_close(sent + residual, total)


def test_what_was_kept_is_not_changed() -> None:
    """A step that is refused leaves velocity and residual as they were."""
    before = torch.ones(6), torch.arange(6.0)
    compress(torch.ones(6), *before, 2, 0.5)

    assert torch.equal(before[0], torch.ones(6)) and torch.equal(before[1], torch.arange(6.0))


def test_gradients_of_any_strides_are_compressed() -> None:
    """Channels-last ones, too: positions are those of the shape."""
    gradient = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(2, 3, 4, 5)

    plain = compress(gradient, zeros, zeros, 7, 0.9).dense()
    last = compress(gradient.to(memory_format=torch.channels_last), zeros, zeros, 7, 0.9).dense()

    assert torch.equal(plain, last)
