"""The course of a loss scale over planted overflows."""

from __future__ import annotations

import random

import pytest
import torch

from transpiler.ir.loss_scale import LossScale, ScaleCourse

OVERFLOWS = [random.Random(5).random() < 0.2 for _ in range(200)]


def test_it_is_grad_scalers_where_every_overflow_counts() -> None:
    """With ``decr_every`` 1, over 200 steps, to the bit; also where it would grow to infinity."""
    for init, incr_ratio, decr_ratio in ((64.0, 2.0, 0.5), (1e36, 9.0, 0.3)):
        theirs = torch.amp.GradScaler("cpu", init, incr_ratio, decr_ratio, 3)
        mine = LossScale(ScaleCourse(init, True, 3, 1, incr_ratio, decr_ratio))
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        for overflow in OVERFLOWS:
            theirs.scale(parameter.sum() * (float("inf") if overflow else 0.0)).backward()
            theirs.step(optimizer)
            theirs.update()
            optimizer.zero_grad()
            mine.update(overflow)

            assert mine.value == theirs.get_scale()


@pytest.mark.parametrize("decr_every", [2, 3])
def test_it_shrinks_after_so_many_overflows_in_a_row(decr_every: int) -> None:
    """Against a reference written out here; a finite step begins the count again."""
    mine = LossScale(ScaleCourse(64.0, True, 4, decr_every, 3.0, 0.25))
    expected, run, good = 64.0, 0, 0
    for overflow in OVERFLOWS:
        if overflow:
            good, run = 0, run + 1
            if run == decr_every:
                expected, run = expected * 0.25, 0
        else:
            run, good = 0, good + 1
            if good == 4:
                expected, good = expected * 3.0, 0
        mine.update(overflow)

        assert mine.value == pytest.approx(expected, rel=1e-6)


def test_a_fixed_scale_stays() -> None:
    """Whatever overflows."""
    mine = LossScale(ScaleCourse(128.0, dynamic=False, decr_every=1))
    for overflow in OVERFLOWS:
        mine.update(overflow)

    assert mine.value == 128.0


def test_a_state_continues_the_course() -> None:
    """Counters included."""
    one, other = (LossScale(ScaleCourse(64.0, True, 3, 2)) for _ in range(2))
    for number, overflow in enumerate(OVERFLOWS):
        one.update(overflow)
        if number < 101:
            continue
        if number == 101:
            other.load(one.state())
        else:
            other.update(overflow)
        assert other.value == one.value
