"""The mean of gradients over some trainers, before it is written to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradientMeans:
    """The result of one average.

    Attributes:
        parameters: those that may have gradients.
        counts: the number of trainers with a gradient, by parameter; the last element is the number
            of trainers with an overflow.
        means: by parameter; None: there is one trainer, and it has no gradient.
        trainers: the number of trainers in the mean.
    """

    parameters: Sequence[Tensor]
    counts: Sequence[float]
    means: Sequence[Tensor | None]
    trainers: int

    @property
    def overflow(self) -> bool:
        """Whether some trainer's step overflowed: no trainer takes the step."""
        return bool(self.counts[-1])

    def land(self) -> list[Tensor]:
        """Writes the means into ``.grad``.

        Returns:
            The parameters that some trainer has a gradient for.
        """
        found = list[Tensor]()
        for parameter, count, mean in zip(
            self.parameters, self.counts[:-1], self.means, strict=True
        ):
            if not count or mean is None:
                parameter.grad = None
                continue
            found.append(parameter)
            if parameter.grad is None:
                parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)
            elif parameter.grad is not mean:
                with torch.no_grad():
                    parameter.grad.copy_(mean)
        return found

    def plain(self) -> dict[str, Any]:
        """The means in a form that :func:`trainer.collective.object_bytes.to_bytes` can hold."""
        return {
            "counts": list(self.counts),
            "means": list(self.means),
            "trainers": self.trainers,
        }

    @classmethod
    def of(cls, plain: dict[str, Any], parameters: Sequence[Tensor]) -> GradientMeans:
        """The means from the form that :meth:`plain` gave on another trainer."""
        return cls(parameters, plain["counts"], plain["means"], plain["trainers"])
