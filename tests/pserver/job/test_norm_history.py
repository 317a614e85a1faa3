"""What a history of norms takes for an outlier, what it learns, and when it begins anew."""

from __future__ import annotations

import math
import random

import pytest

from pserver.membership.watermark import RENEWED, WARM_UP, NormHistory


def warm(norms: list[float], factor: float = 100.0) -> NormHistory:
    history = NormHistory(factor)
    for norm in norms:
        history.learn(norm)
    return history


def noisy(level: float, count: int, seed: int = 0, width: float = 0.5) -> list[float]:
    source = random.Random(seed)
    return [level * math.exp(source.gauss(0.0, width)) for _ in range(count)]


def test_nothing_is_judged_before_the_warm_up_is_over() -> None:
    """Then a hundred times is far."""
    history = NormHistory(100.0)
    for _ in range(WARM_UP):
        assert not history.beyond(1e30)
        history.learn(1.0)
    assert history.beyond(1e30) and history.beyond(100.1) and not history.beyond(99.9)


@pytest.mark.parametrize("place", [0, 7, WARM_UP - 1])
def test_an_outlier_in_the_warm_up_does_not_count(place: int) -> None:
    """Wherever it is."""
    norms = noisy(3.0, WARM_UP)
    norms[place] = 1e9
    history = warm(norms)
    assert history.expected == pytest.approx(3.0, rel=0.5)
    assert history.beyond(3.0 * 300) and not history.beyond(3.0 * 30)


def test_a_noisy_variable_needs_a_larger_norm() -> None:
    """Six deviations, where these are more than the factor."""
    calm, wild = warm(noisy(1.0, 200, width=0.3)), warm(noisy(1.0, 200, width=2.0))
    assert calm.beyond(200.0) and not wild.beyond(200.0) and wild.beyond(1e9)


@pytest.mark.parametrize("factor", [2.0, 100.0, 1e6])
def test_the_history_follows_norms_that_grow_and_fall_slowly(factor: float) -> None:
    """A per cent a push, over twelve orders of magnitude and back."""
    history, norm = warm([1.0] * WARM_UP, factor), 1.0
    for rate in (1.01, 1 / 1.01):
        for _ in range(2800):
            norm *= rate
            assert not history.beyond(norm)
            history.learn(norm)
    assert history.expected == pytest.approx(norm, rel=0.25)
    assert history.beyond(norm * factor * 2)


def test_a_few_tiny_norms_do_not_blind_it() -> None:
    """What is left of a geo window, a batch of padding: they count for at most a step down."""
    history = warm([1.0] * 100)
    for _ in range(3):
        history.learn(1e-9)
    assert history.beyond(120.0)


def test_of_an_outlier_it_does_not_learn() -> None:
    """Nor of several, where pushes lie between them."""
    history = warm([1.0] * WARM_UP)
    for _ in range(RENEWED - 1):
        assert history.beyond(1e6)
        history.pass_over(1e6)
    assert history.expected == pytest.approx(1.0)
    history.learn(1.0)  # the row is broken
    for _ in range(RENEWED - 1):
        history.pass_over(1e6)
    assert history.beyond(1e6)
    history.interrupt()  # so it is by a push that does not count
    for _ in range(RENEWED - 1):
        history.pass_over(1e6)
    assert history.beyond(1e6)


def test_as_many_outliers_in_a_row_that_are_alike_become_the_history() -> None:
    """Norms have changed for good."""
    history = warm([1.0] * WARM_UP)
    norms = noisy(1e6, RENEWED)
    for norm in norms:
        assert history.beyond(norm)
        history.pass_over(norm)
    assert history.expected == pytest.approx(1e6, rel=0.5)
    assert not history.beyond(1e6) and history.beyond(1e9)


def test_outliers_that_grow_are_no_history() -> None:
    """A loss that diverges: each norm ten times the one before."""
    history = warm([1.0] * WARM_UP)
    for power in range(3, 60):
        assert history.beyond(10.0**power)
        history.pass_over(10.0**power)
    assert history.expected == pytest.approx(1.0)
