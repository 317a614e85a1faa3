"""Local SGD: trainers step by themselves, with their own gradients, and average their parameters by
a schedule.

Gradients never travel.  Each trainer keeps its own optimizer state (momentum, Adam's moments), so
any optimizer works.  Buffers, such as batch norm's running statistics, take trainer 0's values at
every average, as at every step of a job that averages gradients.

[Note: an average in between]  Between two averages every trainer has parameters of its own.  So a
checkpoint, an export, ``state_dict()`` and the end of the job begin with an average of all
trainers.  It is an extra one: the schedule does not change.

[Note: adaptive steps]  Early in training, rare averages make the most progress; near the end,
frequent ones make a smaller error (Wang and Joshi: Adaptive communication strategies to achieve the
best error-runtime trade-off in local-update SGD, 2018, arXiv 1810.08313).  So the number of local
steps falls with the square root of the loss, and grows again where the learning rate falls::

    k = ceil(sqrt(lr_0 * loss / (lr * loss_0) * init_k_steps)), between 1 and 16

``loss`` and ``lr`` are the trainers' means at the step that averages, ``loss_0`` and ``lr_0`` those
of the first step.  All trainers compute k from the same means, so all average at the same steps,
even if a scheduler uses a trainer's own loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.collective.all_reduce import all_reduce_over
from trainer.collective.buckets import buckets
from trainer.collective.world import naming_trainers
from transpiler.strategy.exchange import GradientExchange
from transpiler.strategy.strategy import DistributedStrategy

# ---- averaging schedule ----
#
# The steps at which trainers average their parameters: the rules of local SGD.


LEAST, MOST = 1, 16  # local steps of the adaptive rule

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Schedule:
    """Averages after every step up to and including ``begin_step``, and then ``k_steps`` after the
    last average.

    Attributes:
        k_steps: of the present window.
        begin_step: the last step up to which every step ends in an average.
        step: the number of steps counted.
        last: the step that ended in the last average of the rule.

    Example::

        schedule = Schedule(k_steps=2, begin_step=1)
        [schedule.count() for _ in range(5)]    # [True, False, True, False, True]
    """

    k_steps: int
    begin_step: int
    step: int = 0
    last: int = 0

    def count(self) -> bool:
        """Counts a step, and tells whether it ends in an average."""
        self.step += 1
        due = self.step <= self.begin_step or self.step - self.last >= self.k_steps
        if due:
            self.last = self.step
        return due

    def restart(self, step: int) -> None:
        """Continues after this many steps, with a window that begins there."""
        self.step = self.last = step


@dataclass(slots=True)
class AdaptiveSchedule(Schedule):
    """A schedule whose windows follow the loss.  See [Note: adaptive steps].

    ``k_steps`` is at first ``init_k_steps``.

    Attributes:
        first: the loss and the learning rate of the first step, means over the trainers.

    Example::

        schedule = AdaptiveSchedule(k_steps=4, begin_step=1)
        schedule.measure(loss=2.0, lr=0.1)    # of the first step: k is ceil(sqrt(4))
        schedule.measure(loss=0.5, lr=0.1)
        schedule.k_steps                      # 1
    """

    first: tuple[float, float] | None = None
    init_k_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.init_k_steps = self.k_steps

    def measure(self, loss: float, lr: float) -> None:
        """Takes in the trainers' mean loss and learning rate, and logs the resulting k.

        If the quotient is not a positive finite number, as with a loss of 0 or NaN, k stays.
        """
        loss_0, lr_0 = self.first = self.first or (loss, lr)
        below = lr * loss_0
        ratio = lr_0 * loss / below if below else math.nan
        before = self.k_steps
        if 0 < ratio < math.inf:
            steps = math.ceil(math.sqrt(ratio * self.init_k_steps))
            self.k_steps = min(max(steps, LEAST), MOST)
        log.info(
            "adaptive_localsgd, step %d: loss %g (first %g), lr %g (first %g), k %d, was %d",
            self.step,
            loss,
            loss_0,
            lr,
            lr_0,
            self.k_steps,
            before,
        )

    def restart(self, step: int) -> None:
        """Continues as :meth:`Schedule.restart` does; the next step counts as the first one."""
        Schedule.restart(self, step)
        self.first, self.k_steps = None, self.init_k_steps


def schedule_of(strategy: DistributedStrategy) -> Schedule | None:
    """The schedule by which trainers average with this strategy; None if each step averages
    gradients.
    """
    if strategy.localsgd:
        given = strategy.localsgd_configs
        return Schedule(given["k_steps"], given["begin_step"])
    if strategy.adaptive_localsgd:
        adaptive = strategy.adaptive_localsgd_configs
        return AdaptiveSchedule(adaptive["init_k_steps"], adaptive["begin_step"])
    return None


# ---- local sgd ----


Tensors = Callable[[], Sequence[Tensor]]


class LocalSgd:
    """One trainer's part in the averages.  The script's thread uses it.

    Args:
        schedule: of the averages.
        parameters: gives the parameters that trainers step; the same, in the same order,
            everywhere.
        buffers: gives the buffers that take trainer 0's values.
        size: the most MB (2**20 bytes) of parameters that are averaged together.

    Attributes:
        same: whether all trainers have equal parameters.
    """

    def __init__(
        self, schedule: Schedule, parameters: Tensors, buffers: Tensors, size: float
    ) -> None:
        self._schedule = schedule
        self._parameters, self._buffers, self._size = parameters, buffers, size
        self.same = True

    def end_step(self, loss: Tensor | float | None, lr: float) -> None:
        """Counts a step of this trainer, also one that was skipped for an overflow, and averages if
        due.

        Args:
            loss: of the step; only an adaptive schedule needs it.
            lr: this trainer's learning rate.

        Raises:
            ValueError: an adaptive schedule needs a loss, and none was given.
            PServerError: another trainer is lost.
        """
        due = self._schedule.count()
        self.same = False
        if isinstance(self._schedule, AdaptiveSchedule) and (due or self._schedule.first is None):
            self._measure(self._schedule, loss, lr)
        if due:
            self.average()

    def _measure(self, schedule: AdaptiveSchedule, loss: Tensor | float | None, lr: float) -> None:
        if loss is None:
            raise ValueError(
                f"adaptive_localsgd: expected the loss of step {schedule.step}, got none: call "
                "optimizer.step(loss=loss), or give optimizer.step a closure that returns it"
            )
        own = float(loss.detach() if isinstance(loss, Tensor) else loss)
        means = torch.tensor([own, lr], dtype=torch.float64) / dist.get_world_size()
        with naming_trainers():
            dist.all_reduce(means)
        schedule.measure(*means.tolist())

    @torch.no_grad()
    def average(self) -> None:
        """Sets every parameter to the trainers' mean, and every buffer to trainer 0's value.

        Raises:
            PServerError: another trainer is lost.
        """
        parameters = self._parameters()
        order, _ = buckets(parameters, [False] * len(parameters), self._size, self._size)
        with naming_trainers():
            if parameters:
                sums = all_reduce_over(None, GradientExchange(), parameters[0].device, "")
                sums.scale_and_sum(parameters, order, 1.0 / dist.get_world_size())
            for buffer in self._buffers():
                dist.broadcast(buffer, 0)
        self.same = True

    def restart(self, step: int) -> None:
        """Continues after this many steps, with values that are the same everywhere."""
        self._schedule.restart(step)
        self.same = True
