"""Learning-rate schedules that torch lacks: decays, pieces, and a warm-up before another."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# ---- decays ----
#
# Rates that are a group's initial rate times a function of the number of steps.
#
# That number is ``last_epoch``, as torch calls it: 0 before the first ``step()``.


class Decay(LRScheduler):
    """A factor of every group's initial rate, by the number of steps alone."""

    def get_lr(self) -> list[float | Tensor]:
        """The groups' rates for the next step."""
        factor = self._factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    @abstractmethod
    def _factor(self, step: int) -> float:
        """The factor after this number of steps."""


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
    """A decay from a group's rate to an end: ``(lr - end_lr) * (1 - n / decay_steps)**power +
    end_lr`` after n steps.

    ``torch.optim.lr_scheduler.PolynomialLR`` is the same with ``end_lr=0`` and no cycle.

    Args:
        decay_steps: after which the rate is ``end_lr``, and stays there.
        end_lr: of every group.
        power: see the formula.
        cycle: ``decay_steps`` is replaced by its next multiple that is n or more, so that the rate
            rises again after each end, less every time.
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


# ---- piecewise ----
#
# A rate for each stretch of steps.


class PiecewiseLR(LRScheduler):
    """``values[0]`` for the first ``boundaries[0]`` steps, ``values[1]`` until step
    ``boundaries[1]``, and so on; the last value stays.

    Where each value is the one before times the same factor,
    ``torch.optim.lr_scheduler.MultiStepLR`` does it, group by group.

    Args:
        boundaries: numbers of steps, ascending.
        values: rates of every group, one more than there are boundaries.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: the boundaries do not ascend, or there are not as many values.

    Example::

        scheduler = PiecewiseLR(optimizer, [1000, 5000], [0.1, 0.05, 0.01])
    """

    def __init__(
        self,
        optimizer: Optimizer,
        boundaries: Sequence[int],
        values: Sequence[float],
        last_epoch: int = -1,
    ) -> None:
        self.boundaries, self.values = list(boundaries), list(values)
        if sorted(set(self.boundaries)) != self.boundaries:
            raise ValueError(f"boundaries: expected ascending numbers, got {self.boundaries}")
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"values: expected {len(self.boundaries) + 1}, one more than boundaries, got "
                f"{len(self.values)}"
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The groups' rates for the next step."""
        return [self.values[bisect_right(self.boundaries, self.last_epoch)] for _ in self.base_lrs]


# ---- warmup ----
#
# A warm-up before any other scheduler.


class WarmupLR(LRScheduler):
    """A linear warm-up to the first rate of another scheduler; then that one.

    After n steps of ``warmup_steps`` the rate is the first one of the other scheduler times
    ``start_factor + (1 - start_factor) * n / warmup_steps``; from there on each step is one of the
    other's, which has not moved until then.

    Args:
        scheduler: any of torch's or ours, ``ReduceLROnPlateau`` too, that has taken no step.  The
            script steps this one only, with the other's arguments.
        warmup_steps: their number.
        start_factor: of the first rate.

    Raises:
        TypeError: no scheduler.
        ValueError: it has taken a step; ``warmup_steps`` is below 1; ``start_factor`` is not from 0
            to 1.

    Example::

        scheduler = WarmupLR(CosineAnnealingLR(optimizer, T_max=9000), warmup_steps=1000)
    """

    def __init__(
        self, scheduler: LRScheduler, warmup_steps: int, start_factor: float = 0.0
    ) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler: expected a scheduler, got {type(scheduler).__name__}")
        if scheduler.last_epoch != 0:
            raise ValueError(
                f"scheduler: expected one that has taken no step, got {scheduler.last_epoch}"
            )
        if isinstance(warmup_steps, bool) or warmup_steps < 1:
            raise ValueError(f"warmup_steps: expected 1 or more, got {warmup_steps!r}")
        if not 0 <= start_factor <= 1:
            raise ValueError(f"start_factor: expected 0 to 1, got {start_factor!r}")
        # the base's constructor would step: this one has no rates of its own
        self.optimizer = scheduler.optimizer
        self._schedulers = [scheduler]  # as in torch's schedulers that hold others
        self.warmup_steps, self.start_factor = warmup_steps, start_factor
        self.last_epoch = 0
        self.first_lrs = [float(rate) for rate in scheduler.get_last_lr()]
        self._warm()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Takes one step: of the warm-up, or of the other scheduler with its arguments."""
        self.last_epoch += 1
        if self.last_epoch <= self.warmup_steps:
            self._warm()
            return
        self._schedulers[0].step(*args, **kwargs)
        self._last_lr = self._schedulers[0].get_last_lr()

    def _warm(self) -> None:
        part = min(self.last_epoch / self.warmup_steps, 1.0)
        factor = self.start_factor + (1.0 - self.start_factor) * part
        self._last_lr = [rate * factor for rate in self.first_lrs]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """The position, with the other scheduler's state."""
        return {
            "last_epoch": self.last_epoch,
            "first_lrs": list(self.first_lrs),
            "_last_lr": list(self._last_lr),
            "scheduler": self._schedulers[0].state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the result of :meth:`state_dict`; the rates are the optimizer's state."""
        self.last_epoch = state_dict["last_epoch"]
        self.first_lrs = list(state_dict["first_lrs"])
        self._last_lr = list(state_dict["_last_lr"])
        self._schedulers[0].load_state_dict(state_dict["scheduler"])
