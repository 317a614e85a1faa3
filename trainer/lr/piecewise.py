"""A rate for each stretch of steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


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
