"""Local SGD: trainers step by themselves, with their own gradients, and average their parameters
where a schedule says so.

Gradients never travel.  An optimizer's state (momentum, Adam's moments) stays each trainer's own,
and so works for any optimizer.  Buffers, as batch norm's running statistics, become trainer 0's at
every average, as at every step of a job that averages gradients.

[Note: an average in between]  Between two averages every trainer has parameters of its own.  So a
checkpoint, an export, ``state_dict()`` and the end of the job begin with an average, in which every
trainer takes part.  It is an extra one: the schedule's next one comes when it would have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.collective.averaging_schedule import AdaptiveSchedule, Schedule
from trainer.collective.buckets import buckets
from trainer.collective.parallel_env import naming_trainers

Tensors = Callable[[], Sequence[Tensor]]


class LocalSgd:
    """One trainer's part in the averages.  The script's thread uses it.

    Args:
        schedule: after which steps.
        parameters: gives those that trainers step; the same, in the same order, everywhere.
        buffers: gives those that become trainer 0's.
        size: the most MB (2**20 bytes) of parameters that are averaged together.

    Attributes:
        same: whether all trainers have the same parameters.
    """

    def __init__(
        self, schedule: Schedule, parameters: Tensors, buffers: Tensors, size: float
    ) -> None:
        self._schedule = schedule
        self._parameters, self._buffers, self._size = parameters, buffers, size
        self.same = True

    def end_step(self, loss: Tensor | float | None, lr: float) -> None:
        """Follows each step of this trainer, also one that was skipped for an overflow.

        Args:
            loss: of the step; only an adaptive schedule needs it.
            lr: this trainer's learning rate.

        Raises:
            ValueError: an adaptive schedule needs a loss, and there is none.
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
        """Every parameter becomes the trainers' mean, every buffer trainer 0's value.

        Raises:
            PServerError: another trainer is lost.
        """
        parameters = self._parameters()
        order, _ = buckets(parameters, [False] * len(parameters), self._size, self._size)
        share = 1.0 / dist.get_world_size()
        with naming_trainers():
            for bucket in order:
                chosen = [parameters[number] for number in bucket]
                flat = torch.cat([each.reshape(-1) for each in chosen]).mul_(share)
                dist.all_reduce(flat)
                means = torch.split(flat, [each.numel() for each in chosen])
                for parameter, mean in zip(chosen, means, strict=True):
                    parameter.copy_(mean.view_as(parameter))
            for buffer in self._buffers():
                dist.broadcast(buffer, 0)
        self.same = True

    def restart(self, step: int) -> None:
        """Goes on after this many steps, with values that are the same everywhere."""
        self._schedule.restart(step)
        self.same = True
