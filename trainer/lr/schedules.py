"""Rates that are a group's own rate times a function of the number of steps.

That number is ``last_epoch``, as torch calls it: 0 before the first ``step()``.
"""

from __future__ import annotations

import math
from abc import abstractmethod

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Decay(LRScheduler):
    """A factor of every group's initial rate, by the number of steps alone."""

    def get_lr(self) -> list[float | Tensor]:
        """The groups' rates for the next step."""
        factor = self._factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    @abstractmethod
    def _factor(self, step: int) -> float:
        """The factor after so many steps."""


class NoamLR(Decay):
    """Linear warm-up, then the inverse square root (Vaswani et al., 2017, section 5.3).

    For step n, counted from 1: ``lr * d_model**-0.5 * min(n**-0.5, n * warmup_steps**-1.5)``.

    Args:
        optimizer: whose groups' rates are the factors ``lr``; 1.0 is the paper's.
        d_model: the width of the model.
        warmup_steps: after which the rate is highest.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: a number is not above 0.
    """

    def __init__(
        self, optimizer: Optimizer, d_model: int, warmup_steps: int, last_epoch: int = -1
    ) -> None:
        _check_above_0(d_model=d_model, warmup_steps=warmup_steps)
        self.d_model, self.warmup_steps = d_model, warmup_steps
        super().__init__(optimizer, last_epoch)

    def _factor(self, step: int) -> float:
        n = step + 1
        return float(self.d_model**-0.5 * min(n**-0.5, n * self.warmup_steps**-1.5))


class NaturalExpLR(Decay):
    """``lr * exp(-decay_rate * n / decay_steps)`` after n steps.

    Args:
        decay_steps, decay_rate: see the formula.
        staircase: n / decay_steps is rounded down.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: ``decay_steps`` is not above 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        decay_steps: int,
        decay_rate: float,
        staircase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        _check_above_0(decay_steps=decay_steps)
        self.decay_steps, self.decay_rate, self.staircase = decay_steps, decay_rate, staircase
        super().__init__(optimizer, last_epoch)

    def _factor(self, step: int) -> float:
        return math.exp(-self.decay_rate * self._periods(step))

    def _periods(self, step: int) -> float:
        return step // self.decay_steps if self.staircase else step / self.decay_steps


class InverseTimeLR(NaturalExpLR):
    """``lr / (1 + decay_rate * n / decay_steps)`` after n steps.

    Args:
        decay_steps, decay_rate: see the formula.
        staircase: n / decay_steps is rounded down.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: ``decay_steps`` is not above 0.
    """

    def _factor(self, step: int) -> float:
        return 1.0 / (1.0 + self.decay_rate * self._periods(step))


class PolynomialDecayLR(LRScheduler):
    """From a group's rate to an end: ``(lr - end_lr) * (1 - n / decay_steps)**power + end_lr``
    after n steps.

    ``torch.optim.lr_scheduler.PolynomialLR`` is the same with ``end_lr=0`` and no cycle.

    Args:
        decay_steps: after which the rate is ``end_lr``, and stays there.
        end_lr: of every group.
        power: see the formula.
        cycle: ``decay_steps`` counts as its next multiple that is n or more, so that the rate rises
            again after each end, less every time.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: ``decay_steps`` or ``power`` is not above 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        decay_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        last_epoch: int = -1,
    ) -> None:
        _check_above_0(decay_steps=decay_steps, power=power)
        self.decay_steps, self.end_lr, self.power = decay_steps, end_lr, power
        self.cycle = cycle
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The groups' rates for the next step."""
        step, steps = self.last_epoch, self.decay_steps
        if self.cycle:
            steps *= max(1, math.ceil(step / steps))
        factor = (1.0 - min(step, steps) / steps) ** self.power
        return [(base - self.end_lr) * factor + self.end_lr for base in self.base_lrs]


def _check_above_0(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value!r}")
